"""Whole models whose space is split, trained by real processes: `python -m tests.spatial.whole --help`.

Ten steps on 4 gloo ranks against one process. A search on models this small prefers batch and channels, so the
plans may be searched among those only in which windows (convolution, pooling) split what `Case.split` says.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autoshard import MeshSpec, Plan, find_plan
from passes.layout.layout import NodeLayouts
from passes.rules.core.rule import OpRule
from tests.profiles import slow_compute
from tests.ranks import RankPool
from tests.spatial.restricted import Keep, restricted
from tests.spatial.trained import AXES, MODELS, STEPS, Errors, Trained, alone, compared, on_rank, seeded

SPLITS: Mapping[str, Sequence[frozenset[str]] | None] = {
    "searched": None,
    "rows": (frozenset({"y0"}),),
    "rows x columns": (frozenset({"y0"}), frozenset({"y1"})),
    "batch x rows": (frozenset({"n", "b0"}), frozenset({"y0"})),
}
"""name -> what each axis of the mesh splits at every op with a window: the batch, or a dim of space."""
CASES = ((1, "rows"), (1, "rows x columns"), (4, "rows"), (4, "batch x rows"), (1, "searched"))


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    split: str
    dtype: torch.dtype
    backend: str
    optimizer: str
    rate: float

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2, 2) if " x " in self.split else (4,)

    @property
    def training(self) -> tuple[str, int, torch.dtype, str, float]:
        return self.model, self.batch, self.dtype, self.optimizer, self.rate


@dataclass(frozen=True)
class Outcome:
    """rounding: of one process against itself, all weights a rounding away. halos: operands that are read with a halo.
    planning: CPU seconds of the search. training, alone: seconds on the clock of ten steps, on ranks and alone.
    """

    errors: Errors
    rounding: Errors
    halos: int
    exchanges: int
    planning: float
    training: float
    alone: float


def splits(wanted: Sequence[frozenset[str]] | None) -> Keep:
    """Of ops with a window, the strategies whose i-th axis splits a factor of wanted[i]; None: all."""

    def keep(rule: OpRule, shapes: Sequence[Sequence[int]], strategy: NodeLayouts) -> bool:
        if wanted is None or not any(factor.startswith("y") for factor in rule.splittable):
            return True
        named = {axis: s.factor for s in strategy.splits for axis in s.axes}
        return all(named.get(axis) in factors for axis, factors in zip(AXES, wanted, strict=False))

    return keep


def planned(case: Case) -> Plan:
    model, x = seeded(case.model, case.batch, case.dtype)
    mesh = MeshSpec(dict(zip(AXES, case.sizes, strict=False)))
    with restricted(splits(SPLITS[case.split])):
        return find_plan(model, mesh, (x,), profile=slow_compute(), backend=case.backend)


def run(case: Case, ranks: RankPool, folder: Path) -> Outcome:
    file, wanted = _alone(case, folder, 0.0)
    _, nudged = _alone(case, folder, torch.finfo(case.dtype).eps)
    began = time.process_time()
    plan = planned(case)
    planning = time.process_time() - began
    plan.save(folder / "plan.json")
    options = {"plan": str(folder / "plan.json"), "backend": case.backend}
    found = ranks.run(on_rank, *case.training, case.sizes, options, str(file), world=4, timeout_seconds=900)
    halos = sum(layout.has_halo for layouts in plan.planned.layouts.values() for layout in layouts.operands)
    exchanges = sum(
        transfer.step.text().startswith("halo_")
        for r in plan.records
        for o in r.operands
        for transfer in o.transfers
    )
    errors = max((errors for errors, _ in found), key=lambda e: (e.losses, e.parameters))
    training = max(seconds for _, seconds in found)
    return Outcome(errors, compared(wanted, nudged), halos, exchanges, planning, training, wanted.seconds)


def _alone(case: Case, folder: Path, nudge: float) -> tuple[Path, Trained]:
    """The run of one process and its file, made once."""
    file = folder / f"{'-'.join(map(str, (*case.training, nudge)))}.pt"
    if not file.exists():
        torch.save(alone(*case.training, nudge=nudge), file)
    return file, torch.load(file, weights_only=False)


def row(case: Case, got: Outcome) -> str:
    mesh = "x".join(map(str, case.sizes))
    cells = [case.model, f"{mesh}, {case.split}", case.batch, _text(got.errors), _text(got.rounding)]
    cells += [got.halos, got.exchanges, f"{got.planning:.1f}"]
    return f"| {' | '.join(map(str, cells))} | {got.training:.1f} | {got.alone:.1f} |"


def _text(errors: Errors) -> str:
    return f"{errors.losses:.1e} / {errors.parameters:.1e} / {errors.buffers:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=(*MODELS, []), help="default: all")
    parser.add_argument("--split", choices=tuple(SPLITS), help="default: all")
    parser.add_argument("--batch", type=int, choices=(1, 4), help="default: both")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--backend", default="eager")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps = f"{STEPS} steps of {given.optimizer} at {given.rate}"
    print(f"{steps}, {given.dtype}, {given.backend}, torch {torch.__version__}\n")
    print(
        "Errors: of losses / parameters / buffers.\n\n| model | mesh | batch | error | alone, nudged |",
        end="",
    )
    print(" operands with a halo | exchanges | planning s | 4 ranks s | alone s |")
    print("| --- " * 10 + "|", flush=True)
    with RankPool() as ranks, tempfile.TemporaryDirectory() as folder:
        for model in given.models or MODELS:
            for batch, split in CASES:
                if given.split in (None, split) and given.batch in (None, batch):
                    dtype = getattr(torch, given.dtype)
                    case = Case(model, batch, split, dtype, given.backend, given.optimizer, given.rate)
                    print(row(case, run(case, ranks, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
