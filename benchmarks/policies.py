"""What each policy of the search gains, and what it costs: problems planned with all policies, and without each.

    python -m benchmarks.policies                                # those that take seconds each
    python -m benchmarks.policies --problem gpt-4 pinned         # some of them
    python -m benchmarks.policies --problem llama-32 --policy stored turned
    python -m benchmarks.policies --large                        # all; an hour and more

A row for each problem: CPU seconds of one thread, step and gap of the default search; of the search that goes on while
there is something to try (`gap=0`); and without each policy. Steps as shares of the default's: above 1, the policy
pays there. A policy that no row needs goes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import Shard

from autoshard import InfeasibleError, MeshSpec, Plan, find_plan
from autoshard.demo import GPT, GPTConfig, batches
from benchmarks.rivals.cases import NETWORKS

NOTHING: Callable[..., Any] = lambda *_: iter(())
_LOOKS = "passes.search.agree._Search."
_RIVALS = "passes.search.rival_choices.RivalChoices."
POLICIES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing hides": lambda: mock.patch(_RIVALS + "unhidden", NOTHING),
    "starts alone": lambda: mock.patch(_RIVALS + "alone", NOTHING),
    "more awaited": lambda: mock.patch(_RIVALS + "awaited", NOTHING),
    "corrected": lambda: mock.patch(_LOOKS + "_corrected", lambda _: None),
    "stored alike": lambda: mock.patch(_LOOKS + "_stored", lambda _: None),
    "turned": lambda: mock.patch(_LOOKS + "_turn_to", lambda *_: None),
    "families": lambda: mock.patch("autoshard.plan.task.families_within", NOTHING),
    "alike first": lambda: mock.patch("passes.search.state_columns.LARGE", float("inf")),
    "corrected bytes": lambda: mock.patch("autoshard.plan.correcting._ROUNDS", 1),
    "without messages": lambda: mock.patch("autoshard.plan.search_with_states._WORTH", float("inf")),
}
"""Name -> a context without it."""


@dataclass(frozen=True)
class Problem:
    """make: model, arguments and keywords of a call. options: of `find_plan`. share: of the bytes that the plan without
    a limit needs, as the limit; None: none."""

    make: Callable[[], tuple[nn.Module, Any]]
    mesh: Mapping[str, int]
    options: Mapping[str, Any]
    device_type: str = "cpu"
    share: float | None = None

    def planned(self, **more: Any) -> Plan:
        """Raises InfeasibleError."""
        model, call = self.make()
        spec = MeshSpec(self.mesh, device_type=self.device_type)
        plan = find_plan(model, spec, call, **{**self.options, **more})
        assert isinstance(plan, Plan)
        return plan


def _gpt(layers: int) -> Problem:
    config = GPTConfig(context=64, width=64, heads=4, layers=layers)
    return Problem(lambda: (GPT(config), batches(config, 16, 1)[0]), {"dp": 2, "tp": 2}, {"profile": "cpu"})


def _network(name: str, layers: int, mesh: Mapping[str, int], share: float | None = None) -> Problem:
    network = NETWORKS[name]
    make = lambda: (
        network.build(layers, torch.bfloat16),
        ((), network.call(network.batch, network.sequence, torch.bfloat16)),
    )
    return Problem(make, mesh, {"profile": "h100"}, "cuda", share)


def _pinned(share: float | None = None) -> Problem:
    """Five small layers whose weights are stored split."""
    make = lambda: (
        nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5))),
        (torch.zeros(16, 32),),
    )
    options = {"profile": "cpu", "backend": "eager", "constraints": {"*": [Shard(0)]}}
    return Problem(make, {"ranks": 4}, options, share=share)


def _transformers(name: str, mesh: Mapping[str, int], share: float | None = None) -> Problem:
    """A small one of one layer, on CPUs."""

    def make() -> tuple[nn.Module, Any]:
        import transformers as hf

        tokens = torch.zeros(4, 16, dtype=torch.int64)
        if name == "gpt2":
            config: Any = hf.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=4)
            return hf.GPT2LMHeadModel(config), ((), {"input_ids": tokens, "labels": tokens})
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = hf.MixtralConfig(vocab_size=96, num_local_experts=4, use_cache=False, **sizes, **heads)
        return hf.MixtralForCausalLM(config), ((), {"input_ids": tokens, "labels": tokens})

    return Problem(make, mesh, {"profile": "cpu"}, share=share)


def _convolutions() -> Problem:
    model = lambda: nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
            for i in range(6)
        ),
        nn.Flatten(),
        nn.Linear(32 * 256, 10),
    )
    return Problem(lambda: (model(), (torch.zeros(16, 3, 16, 16),)), {"a": 4}, {"profile": "cpu"})


TP = {"dp": 32, "tp": 8}
SMALL: Mapping[str, Problem] = {
    "gpt-1": _gpt(1),
    "gpt-2": _gpt(2),
    "gpt-4": _gpt(4),
    "pinned": _pinned(),
    "pinned-70": _pinned(0.7),
    "gpt2": _transformers("gpt2", {"dp": 2, "tp": 2}),
    "gpt2-80": _transformers("gpt2", {"dp": 2, "tp": 2}, 0.8),
    "mixture": _transformers("mixtral", {"dp": 2, "tp": 2}),
    "convolutions": _convolutions(),
    "unet": _network("unet", 1, {"dp": 64}),
    "vit-large": _network("vit-large", 2, {"dp": 8, "tp": 8}),
    "gpt2-xl": _network("gpt2-xl", 2, {"dp": 64}),
    "llama-2": _network("llama-3-8b", 2, TP),
    "llama-2-60": _network("llama-3-8b", 2, TP, 0.6),
    "llama-4": _network("llama-3-8b", 4, {"dp": 256}),
}
LARGE: Mapping[str, Problem] = {
    "llama-8": _network("llama-3-8b", 8, TP),
    "llama-8-60": _network("llama-3-8b", 8, TP, 0.6),
    "llama-8-40": _network("llama-3-8b", 8, TP, 0.4),
    "llama-32": _network("llama-3-8b", 32, TP),
    "llama-32-60": _network("llama-3-8b", 32, TP, 0.6),
}
WITHIN = ("families", "alike first", "corrected bytes", "without messages")
"""Policies of searches within a limit."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    problems = {**SMALL, **LARGE}
    names = options.problem or [*SMALL, *(LARGE if options.large else ())]
    print(
        "| problem | policy | CPU s | step, ms | share of the step | gap |\n| --- | --- | ---: | ---: | ---: | ---: |"
    )
    for name in names:
        _rows(name, problems[name], options.policy or list(POLICIES))


def _rows(name: str, problem: Problem, policies: Sequence[str]) -> None:
    limit: dict[str, Any] = {}
    if problem.share is not None:
        free = problem.planned()
        limit["memory_limit"] = int(problem.share * (free.peak_memory + free.reserve))
    step = _row(name, "all", problem, nullcontext(), 0.0, limit)
    _row(name, "gap=0", problem, nullcontext(), step, {**limit, "gap": 0.0})
    for policy in policies:
        if problem.share is not None or policy not in WITHIN:
            _row(name, f"without {policy}", problem, POLICIES[policy](), step, limit)


def _row(
    name: str,
    policy: str,
    problem: Problem,
    context: AbstractContextManager[Any],
    step: float,
    more: Mapping[str, Any],
) -> float:
    """The step of the plan, 0 where there is none. step: of the default's."""
    begun = time.process_time()
    with context:
        try:
            plan = problem.planned(**more)
        except InfeasibleError:
            print(f"| {name} | {policy} | {time.process_time() - begun:.1f} | none fits | | |", flush=True)
            return 0.0
    taken = time.process_time() - begun
    share = f"{plan.step_time / step:.4f}" if step else ""
    print(
        f"| {name} | {policy} | {taken:.1f} | {1e3 * plan.step_time:.4g} | {share} | {plan.gap:.2%} |",
        flush=True,
    )
    return plan.step_time


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--problem", nargs="*", choices=[*SMALL, *LARGE], help="default: the small ones")
    parser.add_argument("--policy", nargs="*", choices=list(POLICIES), help="default: all")
    parser.add_argument("--large", action="store_true", help="the large problems too")
    return parser


if __name__ == "__main__":
    main()
