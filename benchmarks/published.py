"""Predictions held against published runs: benchmarks/published/*.csv, under the plans that were run by hand.

    python -m benchmarks.published                        # every row, and beside it the plan that autoshard finds
    python -m benchmarks.published --no-search            # only the plans run by hand
    python -m benchmarks.published --seconds 60           # for each search; 10 if it is not said
    python -m benchmarks.published --rows my.csv --layers 0 0     # of whole models, and not from two depths

The parameters are pinned as FSDP splits them; bfloat16 is gathered and float32 reduced. Micro-batches, and what is
computed again, are the row's: every micro-batch gathers and reduces. What was not compiled is priced so: each call of
the model is torch's own kernel. Beside the plan are costs that the runs had and no plan has (`beside`). Then what
autoshard would choose for the same model and batch, compiled, in the GPU's memory. A peak is the plan's: parameters,
gradients, AdamW, activations, communicators; not what an allocator keeps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Profile, find_plan
from autoshard.plan.judged import plan_reserve, prices_of
from autoshard.planning import canonical_capture
from benchmarks.llama3 import LLAMAS, selective
from benchmarks.mpt import SIZES
from benchmarks.published_fsdp import as_fsdp_holds, as_fsdp_moves, as_fsdp_sends, beside, model_of
from benchmarks.published_rows import ROWS, Row, missing, profile_of, read_rows
from cost_model.errors import InfeasibleError
from cost_model.memory import parse_bytes
from passes.ir.joint import JointGraph, node_value
from passes.layout.placements import placements_to_layout
from passes.micro_batches.cut_batch import cut_batch
from passes.plan.decide import decide
from passes.predict.predict_step import predicted_step
from passes.search.find import Sought, find_assignment
from passes.search.search_terms import boundary_of
from passes.states.compute_again import compute_again
from passes.states.offers import users_choice

DEPTHS = (3, 5)
"""Of models of equal layers, from which a step of all of them follows."""


@dataclass(frozen=True)
class ByHand:
    """A step as it was run. seconds: of the plan; beside: of what is in no plan; peak: bytes of tensors; reserve: bytes
    beside them, of communicators, which do not grow with depth."""

    seconds: float
    beside: float
    peak: float
    reserve: float

    @property
    def nbytes(self) -> float:
        return self.peak + self.reserve

    @property
    def total(self) -> float:
        return self.seconds + self.beside

    def and_layers(self, deeper: ByHand, times: float) -> ByHand:
        """With `times` as much more as `deeper` has."""
        further = lambda here, there: here + times * (there - here)
        return ByHand(
            further(self.seconds, deeper.seconds),
            further(self.beside, deeper.beside),
            further(self.peak, deeper.peak),
            max(self.reserve, deeper.reserve),
        )


def hand_step(row: Row, profile: Profile, layers: Sequence[int] = ()) -> ByHand:
    """As it was run; layers: from models of two depths, as steps and their peaks are affine in it."""
    if not any(layers):
        return by_hand(row, profile)
    few, more = layers
    return by_hand(row, profile, few).and_layers(
        by_hand(row, profile, more), (depth(row) - few) / (more - few)
    )


def depth(row: Row) -> int:
    return {**SIZES, **LLAMAS}[row.model][1]


def by_hand(row: Row, profile: Profile, layers: int | None = None) -> ByHand:
    """layers: fewer than the model's."""
    mesh = MeshSpec({"dp": row.gpus}, device_type="cuda")
    joint = as_it_ran(row, captured_joint(row, layers))
    prices = prices_of(profile, mesh, "inductor" if row.compiled else "uncompiled")
    shard = [Shard(0)]
    pins = {
        spec.name: placements_to_layout(shard, tuple(node_value(node).shape), mesh, what=spec.name)
        for node, spec in joint.given
        if spec.kind == "param"
    }
    batch = placements_to_layout(shard, (row.micro_batch * row.gpus, row.sequence), mesh, what="tokens")
    # Micro-batches are cut from the whole batch, which is tokens alone.
    inputs = {0: batch, 1: batch} if row.accumulation == 1 else {}
    found = find_assignment(
        Sought(joint, prices, boundary_of(joint, parameters=pins, inputs=inputs, outputs={}))
    )
    assignment = as_fsdp_moves(joint, found.assignment)
    planned = decide(joint, assignment, prices)
    prediction = predicted_step(joint, planned, prices)
    extra = sum(beside(row, layers or depth(row), prices.compute).values())
    sends = as_fsdp_sends(row, layers or depth(row), prediction, prices)
    assert prediction.memory is not None
    peak = as_fsdp_holds(prediction.memory, row.accumulation)
    reserve = plan_reserve(mesh, planned.collectives)
    return ByHand(prediction.seconds, row.accumulation * (extra + sends), peak, reserve)


def as_it_ran(row: Row, joint: JointGraph) -> JointGraph:
    """In the row's micro-batches, with what it computed again."""
    cut = cut_batch(joint, row.accumulation)
    inside = users_choice(cut)
    return compute_again(cut, selective(cut, inside) if row.checkpointing == "selective" else inside)


def tokens_of(row: Row) -> torch.Tensor:
    """Of all GPUs, in a step."""
    sequences = row.micro_batch * row.gpus * row.accumulation
    return torch.zeros(sequences, row.sequence, dtype=torch.int64, device="meta")


def captured_joint(row: Row, layers: int | None = None) -> JointGraph:
    tokens = tokens_of(row)
    return canonical_capture(model_of(row, layers), (tokens, tokens), {}).joint


def chosen(row: Row, profile: Profile, seconds: float) -> str:
    """Tokens a second of the plan that autoshard finds in `seconds`, and in a word how."""
    tokens = tokens_of(row)
    model = model_of(replace(row, checkpointing="none") if row.model in SIZES else row)
    mesh = MeshSpec({"dp": row.gpus}, device_type="cuda")
    try:
        plan = find_plan(
            model,
            mesh,
            (tokens, tokens),
            profile=profile,
            memory_limit=row.memory_limit,
            micro_batches=row.accumulation,
            time_limit=seconds,
        )
    except InfeasibleError as error:
        late = "time_limit" in str(error)
        return f"not found in {seconds:.0f} s" if late else f"does not fit: {str(error).splitlines()[0]}"
    rate = row.tokens * row.accumulation / plan.step_time
    peak = (plan.peak_memory + plan.reserve) / 1e9
    return f"{rate:,.0f}; {peak:.0f} GB, {len(plan.planned.again)} ops again, gap {plan.gap:.0%}"


def lines(rows: Sequence[Row], seconds: float | None, layers: Sequence[int]) -> Iterator[tuple[str, float]]:
    """(a line of the table, predicted over published) of every row that a plan is; seconds: for autoshard's own."""
    for row in rows:
        if row.missing() is not None:
            continue
        profile = profile_of(row)
        step = hand_step(row, profile, layers)
        rate = row.tokens * row.accumulation / step.total
        ratio = rate / row.tokens_per_second
        fits = "fits" if step.nbytes <= parse_bytes(row.memory_limit) else "**too large**"
        held = "" if row.memory_gib is None else f" ({row.memory_gib * 2**30 / 1e9:.1f} published)"
        ours = "" if seconds is None else chosen(row, profile, seconds)
        cells = (
            row.name,
            row.ran,
            f"{row.tokens_per_second:,.0f}",
            f"{rate:,.0f}",
            f"{ratio:.3f}",
            f"{step.nbytes / 1e9:.1f} GB{held}, {fits}",
            ours,
        )
        yield f"| {' | '.join(cells)} |", ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--rows", type=Path, nargs="+", default=ROWS, help="files like those in benchmarks/published"
    )
    parser.add_argument("--no-search", action="store_true", help="only the plans run by hand")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each search of a plan")
    parser.add_argument("--layers", type=int, nargs=2, default=DEPTHS, help="two depths to predict from")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for path in arguments.rows for row in read_rows(path)]
    print("| model, sequence, GPUs | as it ran | published | predicted | ratio | peak | autoshard |")
    print("| --- | --- | ---: | ---: | ---: | --- | --- |")
    ratios: list[float] = []
    for line, ratio in lines(rows, None if arguments.no_search else arguments.seconds, arguments.layers):
        ratios.append(ratio)
        print(line, flush=True)
    if ratios:
        off = [abs(ratio - 1) for ratio in ratios]
        print(f"\n|predicted / published - 1|: median {statistics.median(off):.1%}, worst {max(off):.1%}")
    for reason, count in missing(rows).items():
        print(f"{count} rows not predicted: {reason}")


if __name__ == "__main__":
    main()
