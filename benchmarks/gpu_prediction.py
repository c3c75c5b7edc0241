"""The step of models on one device: predicted from kernels that were timed one by one, measured, and torch.compile's.

    python -m benchmarks.gpu_figures prediction

Nothing is chosen on one device, so its plan is not refined by itself. Here its kernels and fused groups are timed as
refining does (`autoshard.refine.time_work`), and the plan is priced again by those times. A step is forward, backward
and a fused AdamW; both models take theirs in turn.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import Plan, autoshard
from autoshard.call_ends import output_layouts
from autoshard.demo import GPT, GPTConfig, batches
from autoshard.global_call import global_call
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.planning import canonical_capture
from autoshard.profiling.startup import startup_profile
from autoshard.refine.time_work import time_work
from autoshard.refine.timed_cases import TimedCandidate, cases_of
from benchmarks.step_time import Trainer, in_turns
from cost_model.mesh import MeshSpec

__all__ = ["MODELS", "Compared", "Workload", "compared"]

TIMING_SECONDS, SEARCH_SECONDS = 60.0, 60.0
WARMUP, STEPS = 5, 30


@dataclass(frozen=True)
class Workload:
    """batch: a call's arguments, by position."""

    text: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Compared:
    """Seconds of one step: by modelled prices, by timed ones, measured; and of torch.compile, measured beside it.

    kernels: how many were timed."""

    modelled: float
    predicted: float
    measured: float
    plain: float
    kernels: int

    def __str__(self) -> str:
        ms = lambda seconds: f"{1e3 * seconds:.2f} ms"
        return (
            f"predicted {ms(self.predicted)} by {self.kernels} timed kernels ({ms(self.modelled)} by modelled ones), "
            f"measured {ms(self.measured)}, ratio {self.predicted / self.measured:.3f}; "
            f"torch.compile {ms(self.plain)}, ratio {self.measured / self.plain:.3f}"
        )


def compared(mesh: DeviceMesh, workload: Workload, dtype: torch.dtype) -> Compared:
    """Of one model on the one device of `mesh`, in `dtype`, through Inductor."""
    device = mesh.device_type
    torch.manual_seed(0)
    call = tuple(t.to(device, dtype if t.is_floating_point() else None) for t in workload.batch())
    plain = workload.build().to(device, dtype)
    ours = copy.deepcopy(plain)
    modelled, predicted, kernels = _plans(mesh, plain, call)
    autoshard(ours, mesh, plan=predicted)
    trainers = {
        "plain": Trainer(torch.compile(plain), plain, call),
        "ours": Trainer(ours, ours, call),
    }
    in_turns(trainers, WARMUP, device)
    seconds = in_turns(trainers, STEPS, device)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return Compared(modelled.step_time, predicted.step_time, middle["ours"], middle["plain"], kernels)


def _plans(mesh: DeviceMesh, model: nn.Module, call: tuple[Tensor, ...]) -> tuple[Plan, Plan, int]:
    """By modelled prices, by timed ones, and how many kernels were timed."""
    spec = MeshSpec.of(mesh)
    given = global_call(call, {}, spec, None)
    captured = canonical_capture(model, given.args, given.kwargs, device=torch.device(mesh.device_type))
    layouts = CallLayouts(given.layouts, output_layouts(captured, spec, None))
    task = Task(
        captured, startup_profile(mesh), spec, layouts, {}, None, "inductor", time_limit=SEARCH_SECONDS
    )
    modelled = search_plan(task)
    cases = cases_of(TimedCandidate.of(modelled), task).untried(set())
    times = time_work(mesh, cases, TIMING_SECONDS)
    return modelled, search_plan(replace(task, timed=times)), len(times.kernels)


def _gpt() -> Workload:
    config = GPTConfig(context=1024, width=1024, heads=16, layers=8)
    return Workload(f"{config}, batch 8", lambda: GPT(config), lambda: batches(config, 8, 1)[0])


def _llama() -> Workload:
    return Workload(
        "two blocks of Llama-3-8B, 4096 tokens", _LlamaBlocks, lambda: (torch.randn(1, 4096, 4096),)
    )


def _resnet() -> Workload:
    images = lambda: (torch.randn(64, 3, 224, 224), torch.randint(1000, (64,)))
    return Workload("ResNet-50, batch 64 of 224 x 224", _ResNet50, images)


MODELS: Mapping[str, Callable[[], Workload]] = {"gpt": _gpt, "llama": _llama, "resnet": _resnet}


class _LlamaBlocks(nn.Module):
    """Two blocks and the last norm at the sizes of Llama-3-8B. float [batch, tokens, 4096] -> a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            vocab_size=8,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=2,
            max_position_embeddings=8192,
            use_cache=False,
        )
        self.blocks = LlamaModel(config)
        del self.blocks.embed_tokens

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(inputs_embeds=x).last_hidden_state.float().square().mean()


class _ResNet50(nn.Module):
    """Hugging Face's ResNet-50, random weights. images [n, 3, h, w], labels int64 [n] -> the cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification

        self.network = ResNetForImageClassification(ResNetConfig.from_dict({"num_labels": 1000}))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(images).logits, labels)
