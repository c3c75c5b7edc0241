"""A random module with a mesh, prices and options: planned, verified, and what came of it."""

from __future__ import annotations

import json
import random
import re
import traceback
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard import MeshSpec, Plan, Profile, find_plan, verify
from autoshard.call_ends import as_inference
from cost_model.errors import AutoshardError
from tests.fuzz.programs import Program, drawn_program
from tests.profiles import dear_start, slow_compute

__all__ = ["ALONE", "FAULT", "OK", "REFUSED", "Case", "Outcome", "drawn_case", "examined"]

OK, ALONE, REFUSED, FAULT = "ok", "ok, no collective", "refused", "FAULT"
MESHES = (
    {"a": 2},
    {"a": 2},
    {"a": 3},
    {"a": 3},
    {"a": 4},
    {"a": 2, "b": 2},
    {"a": 2, "b": 2},
    {"a": 2, "b": 3},
)
PRICES = (*("slow",) * 4, *("slower",) * 3, *("dear",) * 2, "cpu")
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Case:
    """share: of the memory of a plan without a limit that is given. shards: dims of inputs, by position, that are
    split along the first mesh axis. staged: along the first axis."""

    number: int
    program: Program
    mesh: Mapping[str, int]
    prices: str = "slow"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pins: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict[str, tuple[Placement, ...]])
    share: float | None = None
    shards: Mapping[int, int] = field(default_factory=dict[int, int])
    twice: bool = False
    kept: bool = False

    def __str__(self) -> str:
        given = dict(self.options)
        given |= {"constraints": dict(self.pins)} if self.pins else {}
        given |= {"memory_limit": f"{self.share:.2f} of that without"} if self.share else {}
        given |= {"in_placements": dict(self.shards)} if self.shards else {}
        said = "".join(f", {name}={value!r}" for name, value in given.items())
        kept = ", saved" if self.kept else ""
        return f"{self.program.source()}\n# {self.number}: {dict(self.mesh)}, {self.prices}{said}{kept}"


@dataclass(frozen=True)
class Outcome:
    """reason: of a refusal or a fault, numbers and names left out. said: all of it."""

    state: str
    reason: str = ""
    said: str = ""


class FaultError(Exception):
    """What a plan came to is wrong."""


def profile(name: str) -> Profile:
    match name:
        case "slow":
            return slow_compute(1e3)
        case "slower":
            return slow_compute(1e5)
        case "dear":
            return dear_start(1e-4)
        case _:
            return Profile.named("cpu")


def drawn_case(number: int) -> Case:
    """The same for the same number."""
    rng = random.Random(f"case {number}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = drawn_program(number)
        model, inputs = program.made()
    mesh = rng.choice(MESHES)
    case = Case(number, program, mesh, rng.choice(PRICES), twice=rng.random() < 0.04, kept=rng.random() < 0.1)
    options: dict[str, Any] = {"backend": rng.choice(("eager", "eager", "inductor"))}
    options["optimizer"] = rng.choice(("adamw", "sgd"))
    if rng.random() < 0.1:
        options["inference"] = True
    elif rng.random() < 0.08 and len(mesh) == 1:
        options |= {"stages": "a", "micro_batches": rng.choice((2, 4))}
    elif rng.random() < 0.15:
        options["micro_batches"] = 2
    if rng.random() < 0.1:
        options["recompute"] = "user"
    if rng.random() < 0.1:
        options["out_placements"] = "keep"
    case = replace(case, options=options)
    if rng.random() < 0.3 and "stages" not in options:
        case = replace(case, pins=_pins(rng, model, mesh))
    if rng.random() < 0.04 and "stages" not in options:
        case = replace(case, share=rng.uniform(0.4, 1.0))
    if rng.random() < 0.15 and "stages" not in options:
        case = replace(case, shards=_shards(rng, inputs, mesh["a"]))
    return case


def _pins(rng: random.Random, model: nn.Module, mesh: Mapping[str, int]) -> dict[str, tuple[Placement, ...]]:
    named = [(name, value) for name, value in model.named_parameters() if value.ndim]
    chosen = rng.sample(named, min(len(named), rng.randint(1, 2)))
    choices = lambda value: (Replicate(), *(Shard(d) for d in range(value.ndim)))
    return {name: tuple(rng.choice(choices(value)) for _ in mesh) for name, value in chosen}


def _shards(rng: random.Random, inputs: tuple[Tensor, ...], ranks: int) -> dict[int, int]:
    found = {}
    for place, value in enumerate(inputs):
        dims = [d for d, size in enumerate(value.shape) if size % ranks == 0]
        if dims and rng.random() < 0.8:
            found[place] = rng.choice(dims)
    return found


def examined(case: Case) -> Outcome:
    """What came of it. Nothing is raised but what ends the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            moved = _held(case)
        except FaultError as error:
            return Outcome(FAULT, _plain(str(error)), str(error))
        except AutoshardError as error:
            said = str(error)
            if "cannot be run: " in said:
                return Outcome(FAULT, f"the search's own: {_plain(said)}", said)
            if "\n  try: " not in said:
                return Outcome(FAULT, f"no remedy: {_plain(said)}", said)
            return Outcome(REFUSED, f"{type(error).__name__}: {_plain(said)}", said)
        except Exception as error:
            said = "".join(traceback.format_exception(error)[-9:])
            return Outcome(FAULT, f"{type(error).__name__}: {_plain(str(error))}", said)
    return Outcome(OK if moved else ALONE)


def _plain(text: str) -> str:
    first = next((line for line in text.splitlines() if line.strip()), "")
    first = re.sub(r"[\w./]*<fuzz -?\d+>[:\d]*", "HERE", first)
    first = re.sub(r"'[^']*'|\[[\d, ]*\]|\([\d, ]*\)", "_", first)
    return re.sub(r"\b[\w.]*\d[\w.]*\b", "_", first)[:160]


def _held(case: Case) -> int:
    """Plans and verifies; collectives of the plan. Raises FaultError for what is wrong."""
    model, inputs = case.program.made()
    plan = _planned(case, model, inputs, None)
    if case.share is not None:
        limit = int(plan.peak_memory * case.share)
        plan = _planned(case, model, inputs, limit)
        if plan.peak_memory > limit:
            raise FaultError(f"over its limit: {plan.peak_memory} of {limit} bytes")
    if case.twice:
        again = _planned(case, model, inputs, None if case.share is None else limit)
        if plan.status == again.status == "optimal" and plan.fingerprint != again.fingerprint:
            raise FaultError(f"another plan at the second time: {plan.diff(again)}")
    if case.kept:
        plan = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    with as_inference(model) if case.options.get("inference") else nullcontext():
        report = verify(model, plan, inputs)
    if not report.ok:
        raise FaultError(f"WRONG {report}")
    return len(plan.collective_axes)


def _planned(case: Case, model: nn.Module, inputs: tuple[Tensor, ...], limit: int | None) -> Plan:
    mesh = MeshSpec(case.mesh)
    given: dict[str, Any] = dict(case.options)
    if case.pins:
        given["constraints"] = case.pins
    if case.shards:
        placed = [case.shards.get(place) for place in range(len(inputs))]
        rest = [Replicate()] * (len(case.mesh) - 1)
        given["in_placements"] = tuple(None if d is None else [Shard(d), *rest] for d in placed)
        inputs = tuple(
            x if d is None else x.chunk(case.mesh["a"], d)[0].clone()
            for x, d in zip(inputs, placed, strict=True)
        )
    options = {
        "profile": profile(case.prices),
        "time_limit": LIMIT_SECONDS,
        "gap": 0.05,
        "memory_limit": limit,
    }
    return find_plan(model, mesh, inputs, **options, **given)
