"""Predictions held against published runs: benchmarks/published/*.csv, under the plans that were run by hand.

    python -m benchmarks.published                        # every row, and beside it the plan that autoshard finds
    python -m benchmarks.published --no-search            # only the plans run by hand
    python -m benchmarks.published --seconds 60           # for each search; 10 if it is not said
    python -m benchmarks.published --rows my.csv --layers 0 0     # of whole models, and not from two depths

The parameters are pinned as FSDP splits them; bfloat16 is gathered and float32 reduced. Micro-batches, and what is computed
again, are the row's: every micro-batch gathers and reduces. What was not compiled is priced so: each call of the model is
torch's own kernel. Beside the plan are costs that the runs had and no plan has (`beside`). Then what autoshard would
choose for the same model and batch, compiled, within the GPU's memory. Each run's peak is a whole plan's: parameters,
AdamW, activations, communicators; not what an allocator keeps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Profile, find_plan
from autoshard.plan.find_plan import canonical_capture, prices_of
from autoshard.plan.search_with_reserve import plan_reserve
from benchmarks.llama3 import LLAMAS, Llama3, selective
from benchmarks.mpt import MPT, SIZES, VOCABULARY
from benchmarks.published_rows import ROWS, Row, missing, profile_of, read_rows
from cost_model.compute import ComputePrices
from cost_model.errors import InfeasibleError
from cost_model.memory import parse_bytes
from passes.ir.joint import JointGraph, node_value
from passes.ir.op_traits import is_use
from passes.layout.assignment import Assignment, FactorSplit, NodeLayouts
from passes.layout.placements import placements_to_layout
from passes.micro_batches.cut_batch import cut_batch
from passes.plan.decide import decide_lowering
from passes.predict.predict_step import Prediction, predicted_step
from passes.search.find import find_assignment
from passes.search.graph_ends import boundary_of
from passes.states.compute_again import compute_again
from passes.states.cut_points import users_choice
from passes.strategies.prices import Prices
from passes.strategies.pricing import uncompiled_traffic

HOST_SECONDS = 6e-6
"""Of issuing one small kernel from Python. Assumed."""
GATHERED_PER_SECOND = 150e9
"""Elements, of whatever size: torch's gather and scatter took them one by one until 2025. [pytorch/pytorch issue
121389, torch 2.2: 8192 x 4096 in 0.224 ms, float32 in 0.259; issue 151612: 4096 x 5120 in 0.136 ms]"""


@dataclass(frozen=True)
class ByHand:
    """A step as it was run. seconds: of the plan; beside: of what is in no plan; nbytes: at its peak."""

    seconds: float
    beside: float
    nbytes: float

    @property
    def total(self) -> float:
        return self.seconds + self.beside

    def and_layers(self, deeper: ByHand, times: float) -> ByHand:
        """With `times` as much more as `deeper` has."""
        further = lambda here, there: here + times * (there - here)
        return ByHand(
            further(self.seconds, deeper.seconds),
            further(self.beside, deeper.beside),
            further(self.nbytes, deeper.nbytes),
        )


def beside(row: Row, layers: int, compute: ComputePrices) -> dict[str, float]:
    """Seconds of a micro-batch that the published runs spent on what is not in the model, by what on; none is known of
    torchtitan's. What stands in a block is run again with it.

    copies:    around attention, `flash_attn_fn` gathers q, k and v without padding and scatters the result into
               zeros, and the reverse backward: 8 gathers and scatters of an activation, 4 arrays of zeros (of the forward 4 and 1).
               [mosaicml/llm-foundry, llmfoundry/models/layers/attention.py; Dao-AILab/flash-attention,
               flash_attn/bert_padding.py]
    metrics:   two cross entropies of the logits in float32: cast, log-softmax. [llm-foundry, ComposerMPTCausalLM,
               `use_train_metrics`]
    padding:   before each of those three gathers some 12 kernels on the mask, of which the host reads two results,
               so that it is not ahead. [flash_attn/bert_padding.py, unpad_input]
    optimizer: DecoupledAdamW, parameter by parameter: 9 kernels, and the host reads the step number, so that
               nothing overlaps; before it a norm and a scaling of each gradient.
               [mosaicml/composer, composer/optim/decoupled_weight_decay.py; llm-foundry, yamls: gradient_clipping]
    """
    if row.model in LLAMAS:
        return {}
    again = int(row.checkpointing == "full")
    moved = row.tokens * SIZES[row.model][0]
    parameters = 6 * layers + 3
    return {
        "copies": layers
        * ((8 + 4 * again) * moved / GATHERED_PER_SECOND + compute.memory_seconds((4 + again) * moved * 2)),
        "metrics": 2 * compute.memory_seconds(row.tokens * VOCABULARY * (2 + 4 + 4 + 4)),
        "padding": (1 + again) * layers * 3 * 12 * HOST_SECONDS,
        "optimizer": parameters * 12 * HOST_SECONDS / row.accumulation,
    }


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
    prices = prices_of(profile, mesh, "inductor" if row.compiled else "eager")
    if not row.compiled:
        prices = replace(prices, traffic=uncompiled_traffic)
    shard = [Shard(0)]
    pins = {
        spec.name: placements_to_layout(shard, tuple(node_value(node).shape), mesh, what=spec.name)
        for spec, node in zip(joint.inputs, joint.placeholders, strict=True)
        if spec.kind == "param"
    }
    batch = placements_to_layout(shard, (row.micro_batch * row.gpus, row.sequence), mesh, what="tokens")
    # Micro-batches are cut from the whole batch, which is tokens alone.
    inputs = {0: batch, 1: batch} if row.accumulation == 1 else {}
    found = find_assignment(joint, prices, boundary_of(joint, parameters=pins, inputs=inputs, outputs={}))
    assignment = cast_first(joint, found.assignment)
    lowering, moved = decide_lowering(joint, assignment, prices)
    prediction = predicted_step(joint, assignment, lowering, prices)
    extra = sum(beside(row, layers or depth(row), prices.compute).values())
    sends = as_fsdp_sends(row, layers or depth(row), prediction, prices)
    steps = [step for way in moved.values() for step in way.steps if step.kind is not None]
    nbytes = prediction.peak.nbytes + plan_reserve(mesh, steps)
    return ByHand(prediction.seconds, row.accumulation * (extra + sends), nbytes)


def as_it_ran(row: Row, joint: JointGraph) -> JointGraph:
    """In the row's micro-batches, with what it computed again."""
    cut = cut_batch(joint, row.accumulation)
    inside = users_choice(cut)
    return compute_again(cut, selective(cut, inside) if row.checkpointing == "selective" else inside)


def model_of(row: Row, layers: int | None = None) -> nn.Module:
    if row.model in LLAMAS:
        return Llama3(row.model, row.sequence, layers)
    return MPT(row.model, row.sequence, layers, checkpointing=row.checkpointing == "full")


def tokens_of(row: Row) -> torch.Tensor:
    """Of all GPUs, in a step."""
    sequences = row.micro_batch * row.gpus * row.accumulation
    return torch.zeros(sequences, row.sequence, dtype=torch.int64, device="meta")


def captured_joint(row: Row, layers: int | None = None) -> JointGraph:
    tokens = tokens_of(row)
    return canonical_capture(model_of(row, layers), (tokens, tokens), {}).joint


def cast_first(joint: JointGraph, assignment: Assignment) -> dict[str, NodeLayouts]:
    """`assignment` with matrices cast before they are gathered, and gathered in each micro-batch, as FSDP does; where it
    hides all the same, the search may cast after, or gather before all micro-batches."""
    changed = dict(assignment)
    for node in joint.graph.nodes:
        if node.target is not torch.ops.aten._to_copy.default or node_value(node).ndim < 2:
            continue
        (source,) = node.all_input_nodes
        if source.op == "placeholder":
            (layout,) = assignment[source.name].results
            splits = tuple(FactorSplit(f"d{i}", axes) for i, axes in enumerate(layout.dims) if axes)
            split = NodeLayouts((layout,), (layout,), splits)
            changed[node.name] = split
            held = [n for n in node.users if is_use(n) and n.meta.get("runs") == "before"]
            changed.update((n.name, split) for n in held)
    return changed


def as_fsdp_sends(row: Row, layers: int, prediction: Prediction, prices: Prices) -> float:
    """Seconds of a micro-batch by which FSDP's communication is slower than the plan's (or faster, below 0), as far as the
    overlap does not hide it.

    FSDP gathers a block's parameters at once, in bfloat16, once a step if it keeps them (SHARD_GRAD_OP) and twice if
    not, and reduces its gradients at once, in float32; what is in no block, likewise. The plan's buckets follow the
    prices, and it reduces in bfloat16.
    """
    gathers = 2 if row.sharding == "FULL_SHARD" else 1
    seconds = 0.0
    for units, count in ((layers, block_numbers(row)), (1, other_numbers(row))):
        gather, reduce = (
            prices.redistributor.collective_seconds(kind, ("dp",), count * itemsize)
            for kind, itemsize in (("all_gather", 2), ("reduce_scatter", 4))
        )
        seconds += units * (gathers * gather + reduce)
    ours = sum(c.seconds for c in prediction.collectives if c.kind in ("all_gather", "reduce_scatter"))
    return (1 - prices.overlap_efficiency) * (seconds - ours)


def block_numbers(row: Row) -> int:
    """Of the matrices of a block."""
    blocks = model_of(row, 1).get_submodule("blocks")
    return sum(p.numel() for p in blocks.parameters() if p.ndim > 1)


def other_numbers(row: Row) -> int:
    """Of the matrices in no block."""
    return sum(p.numel() for p in model_of(row, 1).parameters() if p.ndim > 1) - block_numbers(row)


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
    return f"{rate:,.0f}; {peak:.0f} GB, {len(plan.lowering.again)} ops again, gap {plan.gap:.0%}"


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
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), help="two depths to predict from")
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
