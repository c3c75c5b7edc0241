"""Every public function with every wrong kind of argument: an error with a remedy, or it works; nothing changed."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import autoshard
from autoshard import AutoshardError, MeshSpec, Plan, Profile, find_plan, register_rule, verify
from autoshard.neighborhood import na1d
from passes.rules.core.rule_registry import USER_RULES
from tests.api.programs import device_mesh
from tests.profiles import slow_compute
from tests.ranks import RankPool

MESH = MeshSpec({"x": 2})
X = torch.linspace(-1, 1, 8).reshape(4, 2)

WRONG: dict[str, Any] = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "half": 0.5,
    "nan": math.nan,
    "infinity": math.inf,
    "thousands of digits": 10**5000,
    "empty text": "",
    "text": "nope",
    "zero character": "a\0b",
    "surrogate": "\udcff",
    "bytes": b"nope",
    "complex": 1j,
    "empty list": [],
    "list of None": [None],
    "list of text": ["nope"],
    "empty tuple": (),
    "nested": (((1,),),),
    "empty dict": {},
    "dict by name": {"nope": 1},
    "dict by number": {7: "nope"},
    "set": {1, 2},
    "object": object(),
    "class": dict,
    "function": len,
    "generator": iter([1]),
    "tensor": torch.zeros(3, 5),
    "array": np.zeros(2),
    "dtype": torch.int8,
    "device": torch.device("cpu"),
    "size": torch.Size([2]),
    "module": nn.Linear(3, 3),
    "placement": Shard(0),
    "far placement": [Shard(9)],
    "many placements": [Replicate()] * 5,
    "product": [Partial("product")],
    "path": Path("/nope/nope.json"),
    "mesh": MeshSpec({"y": 3}),
}


@dataclass(frozen=True)
class Case:
    """A call that works with `good`. fits: argument -> the wrong values that it takes, not tried, for time."""

    call: Callable[..., Any]
    good: Mapping[str, Any]
    fits: Mapping[str, tuple[str, ...]]

    def attempts(self, wrong: Mapping[str, Any] = WRONG) -> Iterator[tuple[str, dict[str, Any]]]:
        for argument in self.good:
            for name, value in wrong.items():
                if name not in self.fits.get(argument, ()):
                    yield f"{argument} = {name}", {**self.good, argument: value}


def complaint(case: Case, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with how a call fails; None if it works, or fails as it should."""
    try:
        case.call(**arguments)
    except AutoshardError as error:
        return None if "\n  try: " in str(error) else f"no remedy: {type(error).__name__}: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {str(error)[:100]}"
    return None


def complaints(cases: Mapping[str, Case], wrong: Mapping[str, Any] = WRONG) -> list[str]:
    found: list[str] = []
    for name, case in cases.items():
        for attempt, arguments in case.attempts(wrong):
            problem = complaint(case, arguments)
            if problem is not None:
                found.append(f"{name}({attempt}): {problem}")
    return found


def small() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def unchanged(model: nn.Module, before: Mapping[str, Any]) -> bool:
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return same and sorted(vars(model)) == sorted(vars(nn.Linear(2, 2)))


PLANNING = {
    "memory_limit": ("None",),
    "in_placements": ("None", "empty dict"),
    "out_placements": ("None", "empty dict"),
    "constraints": ("None", "empty dict"),
    "time_limit": ("half", "infinity"),
    "autocast": ("None",),
    "profile": ("None",),
    "example_inputs": ("generator",),
}


def offline(model: nn.Module, plan: Plan) -> dict[str, Case]:
    planning = {
        "model": model,
        "mesh": MESH,
        "example_inputs": (X,),
        "profile": slow_compute(),
        "memory_limit": "1GB",
        "in_placements": [Replicate()],
        "out_placements": [Replicate()],
        "constraints": {},
        "backend": "eager",
        "time_limit": 60.0,
        "autocast": None,
    }
    q = torch.zeros(1, 4, 1, 2)
    attention = {
        "query": q,
        "key": q,
        "value": q,
        "kernel_size": 3,
        "dilation": 1,
        "is_causal": False,
        "scale": None,
    }
    return {
        "find_plan": Case(find_plan, planning, PLANNING),
        "verify": Case(
            verify,
            {"model": model, "plan": plan, "example_inputs": (X,), "seed": 0, "autocast": None},
            {"autocast": ("None",), "seed": ("zero",)},
        ),
        "MeshSpec": Case(MeshSpec, {"axes": {"x": 2}, "device_type": "cpu"}, {}),
        "Plan.load": Case(Plan.load, {"path": "nope"}, {}),
        "Plan.from_json": Case(Plan.from_json, {"data": plan.to_json()}, {}),
        "Plan.save": Case(plan.save, {"path": "/nope/plan.json"}, {"path": ("text",)}),
        "Plan.draw": Case(plan.draw, {"path": "plan.nope"}, {}),
        "Plan.explain": Case(plan.explain, {"node": "weight"}, {}),
        "Plan.diff": Case(plan.diff, {"other": plan}, {}),
        "Plan.why_not": Case(
            plan.why_not,
            {"parameter": "weight", "placements": [Replicate()]},
            {"placements": ("empty dict",)},
        ),
        "Plan.why_not of a node": Case(
            plan.why_not,
            {"parameter": "contract", "placements": [Replicate()]},
            {"placements": ("empty dict",)},
        ),
        "Plan.why_not of a family": Case(
            lambda parameter: plan.why_not(parameter), {"parameter": "FSDP"}, {}
        ),
        "Plan.explain with crossovers": Case(
            plan.explain, {"node": None, "crossovers": False}, {"node": ("None",), "crossovers": ("True",)}
        ),
        "Profile.load": Case(Profile.load, {"path_or_name": "h100"}, {}),
        "Profile.named": Case(Profile.named, {"name": "h100"}, {}),
        "Profile.from_json": Case(Profile.from_json, {"text": slow_compute().to_json(), "where": "here"}, {}),
        "Profile.save": Case(slow_compute().save, {"path": "/nope/profile.json"}, {"path": ("text",)}),
        "Profile.from_nccl_tests": Case(
            lambda path, base, rank_stride, busbw_limit: Profile.from_nccl_tests(
                path, base=base, rank_stride=rank_stride, busbw_limit=busbw_limit
            ),
            {"path": "/nope/file.txt", "base": "h100", "rank_stride": None, "busbw_limit": None},
            {},
        ),
        "report": Case(autoshard.report, {"model": model, "warmup": 0, "repeats": 1}, {}),
        "register_rule": Case(
            register_rule,
            {"op": "nope::nope", "rule": "b d -> b d", "linear": (), "localize": None, "trial": True},
            {},
        ),
        "discover_rule": Case(
            autoshard.discover_rule,
            {"op": torch.ops.aten.relu.default, "example_args": (X,), "example_kwargs": None},
            {},
        ),
        "ArrayDataset": Case(lambda x, y: autoshard.ArrayDataset(x, y), {"x": X, "y": X}, {}),
        "na1d": Case(na1d, attention, {}),
    }


def test_what_needs_no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(USER_RULES, "builders", {})
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = find_plan(model, MESH, (X,), profile=slow_compute(), backend="eager")
    states = random.getstate(), torch.get_rng_state()
    cases = offline(model, plan)
    assert sum(len(list(case.attempts())) for case in cases.values()) > 1200
    assert complaints(cases) == []
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    assert unchanged(model, before)


FEW = ("None", "minus one", "nan", "text", "dict by number", "tensor", "far placement")
"""Enough where every attempt is a round between the ranks."""


def on_ranks(rank: int) -> tuple[list[str], bool]:
    model, mesh = small(), device_mesh((("x", 1),))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = autoshard.ArrayDataset(X, X)
    placed = [Shard(0)]
    cases = {
        "autoshard": Case(
            autoshard.autoshard,
            {
                "model": model,
                "mesh": mesh,
                # A later argument is wrong too, so that nothing is made parallel where this one fits.
                "example_inputs": (X[:, :1],),
                "profile": slow_compute(),
                "memory_limit": None,
                "in_placements": None,
                "out_placements": None,
                "constraints": None,
                "plan": None,
                "backend": "eager",
                "time_limit": 60.0,
                "race": None,
            },
            {"example_inputs": ("None",), "profile": ("None",)},
        ),
        "data_loader": Case(
            autoshard.data_loader,
            {
                "dataset": data,
                "mesh": mesh,
                "placements": placed,
                "batch_size": 4,
                "sizes": None,
                "shuffle": False,
                "seed": 0,
                "drop_last": False,
                "collate_fn": torch.utils.data.default_collate,
                "num_workers": 0,
                "nope": 0,
            },
            {},
        ),
        "scatter": Case(
            autoshard.scatter,
            {"tensor": X, "mesh": mesh, "placements": placed, "sizes": None, "source": 0},
            {},
        ),
        "gather": Case(
            autoshard.gather,
            {"local": X, "mesh": mesh, "placements": placed, "target": None, "device": None},
            {},
        ),
        "weighted_mean": Case(autoshard.weighted_mean, {"value": 1.0, "weight": 1, "mesh": mesh}, {}),
        "halo_exchange": Case(
            autoshard.halo_exchange,
            {"x": X, "mesh": mesh, "halo": {0: (1, 1)}, "sizes": None, "periodic": ()},
            {},
        ),
        "Profile.measure": Case(
            lambda **given: Profile.measure(**given),
            {"mesh": mesh, "time_budget": 0.1, "largest_nbytes": 1},
            {"largest_nbytes": ("None",)},
        ),
    }
    return complaints(cases, {name: WRONG[name] for name in FEW}), unchanged(model, before)


def test_what_runs_on_ranks(ranks: RankPool) -> None:
    for found, same in ranks.run(on_ranks, world=1):
        assert found == [] and same


@dataclass(frozen=True)
class Layered:
    """Models and calls that are wrong in themselves."""

    model: Callable[[], nn.Module]
    args: tuple[Any, ...]
    message: str


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)
        self.value = value

    def forward(self, x: Tensor) -> Any:
        self.up(x)
        return self.value


@pytest.mark.parametrize(
    "case",
    [
        Layered(lambda: nn.Linear(2, 2), (torch.ones(4, 2, dtype=torch.int64),), "int64"),
        Layered(lambda: nn.Linear(2, 2), (X.double(),), "float64"),
        Layered(
            lambda: nn.Conv1d(2, 2, 1), (torch.ones(1, 2, 4, dtype=torch.int32),), "cannot capture Conv1d"
        ),
        Layered(lambda: nn.Linear(2, 2), (X[:, :1],), "cannot capture Linear"),
        Layered(lambda: nn.Linear(2, 2), (), "cannot capture Linear"),
        Layered(lambda: Returns(None), (X,), "returns no tensor"),
        Layered(lambda: Returns(3), (X,), "returns no tensor"),
        Layered(lambda: torch.jit.script(nn.Linear(2, 2)), (X,), "model is a TorchScript module"),
        Layered(lambda: nn.Sequential(torch.jit.script(nn.ReLU())), (X,), "0 is a TorchScript module"),
        Layered(lambda: torch.compile(nn.Linear(2, 2), backend="eager"), (X,), "what torch.compile returned"),
    ],
    ids=lambda case: case.message,
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_calls_that_the_model_does_not_take(case: Layered) -> None:
    with pytest.raises(AutoshardError) as caught:
        find_plan(case.model(), MESH, case.args, profile=slow_compute(), backend="eager")
    assert case.message in str(caught.value) and "\n  try: " in str(caught.value)


def test_placements_by_unknown_names() -> None:
    for argument, known in (("in_placements", "'args[0]'"), ("out_placements", "'output 0'")):
        with pytest.raises(AutoshardError, match=f"{argument} names 'nope'") as caught:
            find_plan(
                small(),
                MESH,
                (X,),
                profile=slow_compute(),
                backend="eager",
                **{argument: {"nope": [Shard(0)]}},
            )
        assert known in str(caught.value)


def test_profiles_for_other_devices_and_prices_are_refused() -> None:
    with pytest.raises(AutoshardError, match="mesh is one of 'nope' devices"):
        find_plan(small(), MeshSpec({"x": 2}, "nope"), (X,))
    good = slow_compute()
    with pytest.raises(AutoshardError, match="overlap_efficiency"):
        dataclasses.replace(good, overlap_efficiency=1.5)
