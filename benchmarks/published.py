"""Predictions held against published runs: benchmarks/published/mpt.csv, under the plan that was run by hand.

    python -m benchmarks.published                        # rows with one micro-batch and no checkpointing
    python -m benchmarks.published --accumulated          # and those of several micro-batches, as a check
    python -m benchmarks.published --rows my.csv --no-search
    python -m benchmarks.published --layers 2 4           # quickly: of models of 2 and of 4 layers, then in proportion

The parameters are pinned as FSDP splits them, the batch over all GPUs; bfloat16 is gathered and float32 reduced, as in
`amp_bf16`, mode DEFAULT. The runs were not compiled: each call of the model is torch's own
kernel. Beside the plan are costs that the runs had and no plan has (`beside`). Then what autoshard would choose for the
same model and batch, compiled, within the GPU's memory.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Profile, find_plan
from autoshard.plan.find_plan import canonical_capture, prices_of
from benchmarks.mpt import MPT, SIZES, VOCABULARY
from cost_model.compute import ComputePrices
from passes.ir.joint import JointGraph, node_value
from passes.layout.assignment import Assignment, FactorSplit, NodeLayouts
from passes.layout.placements import placements_to_layout
from passes.plan.decide import decide_lowering
from passes.predict.predict_step import Prediction, predicted_step
from passes.search.find import find_assignment
from passes.search.graph_ends import boundary_of
from passes.strategies.prices import Prices
from passes.strategies.pricing import uncompiled_traffic

ROWS = Path(__file__).parent / "published" / "mpt.csv"
PROFILES: Mapping[str, str] = {"h100_80gb": "h100", "a100_80gb": "a100", "a100_40gb": "a100"}
SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")
HOST_SECONDS = 6e-6
"""Of issuing one small kernel from Python. Assumed."""
GATHERED_PER_SECOND = 150e9
"""Elements, of whatever size: torch's gather and scatter took them one by one until 2025. [pytorch/pytorch issue
121389, torch 2.2: 8192 x 4096 in 0.224 ms, float32 in 0.259; issue 151612: 4096 x 5120 in 0.136 ms]"""


@dataclass(frozen=True)
class Row:
    """tokens_per_second: of one GPU. micro_batch: sequences of one GPU at once."""

    model: str
    sequence: int
    gpus: int
    gpu: str
    micro_batch: int
    accumulation: int
    sharding: str
    checkpointing: bool
    tokens_per_second: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.sequence}, {self.gpus} x {self.gpu}"

    @property
    def tokens(self) -> int:
        """Of one micro-batch of one GPU."""
        return self.micro_batch * self.sequence

    def missing(self) -> str | None:
        """Why no plan of ours is this run; None where one is."""
        if self.checkpointing:
            return "activation checkpointing: a plan does not compute whole blocks again"
        if self.model not in SIZES or self.gpu not in PROFILES or self.sharding not in SHARDED:
            return f"no model, profile or pins for {self.model}, {self.gpu}, {self.sharding}"
        if self.accumulation > 1:
            return "several micro-batches: a plan is of one forward and backward"
        return None


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                model=line["model"],
                sequence=int(line["sequence"]),
                gpus=int(line["gpus"]),
                gpu=line["gpu"],
                micro_batch=int(line["micro_batch_per_gpu"]),
                accumulation=int(line["grad_accumulation"]),
                sharding=line["sharding"],
                checkpointing=line["activation_checkpointing"] == "True",
                tokens_per_second=float(line["tokens_per_second_per_gpu"]),
            )
            for line in csv.DictReader(file)
        ]


def beside(row: Row, layers: int, compute: ComputePrices) -> dict[str, float]:
    """Seconds of a step that the published runs spent on what is not in the model, by what on.

    copies:    around attention, `flash_attn_fn` gathers q, k and v without padding and scatters the result into
               zeros, and the reverse backward: 8 gathers and scatters of an activation, 4 arrays of zeros.
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
    moved = row.tokens * SIZES[row.model][0]
    parameters = 6 * layers + 3
    return {
        "copies": layers * (8 * moved / GATHERED_PER_SECOND + compute.memory_seconds(4 * moved * 2)),
        "metrics": 2 * compute.memory_seconds(row.tokens * VOCABULARY * (2 + 4 + 4 + 4)),
        "padding": layers * 3 * 12 * HOST_SECONDS,
        "optimizer": parameters * 12 * HOST_SECONDS / row.accumulation,
    }


def hand_seconds(row: Row, profile: Profile, layers: Sequence[int] = ()) -> float:
    """Of a step as it was run; layers: from models of two depths, as steps are affine in it."""
    if not layers:
        return sum(by_hand(row, profile))
    few, more = layers
    (short, beside_few), (long, beside_more) = (by_hand(row, profile, depth) for depth in layers)
    each = (SIZES[row.model][1] - few) / (more - few)
    return short + beside_few + each * (long + beside_more - short - beside_few)


def by_hand(row: Row, profile: Profile, layers: int | None = None) -> tuple[float, float]:
    """Seconds of the plan that was run, and of what was beside it. layers: fewer than the model's."""
    mesh = MeshSpec({"dp": row.gpus}, device_type="cuda")
    joint = captured_joint(row, layers)
    prices = replace(prices_of(profile, mesh, "eager"), traffic=uncompiled_traffic)
    shard = [Shard(0)]
    pins = {
        spec.name: placements_to_layout(shard, tuple(node_value(node).shape), mesh, what=spec.name)
        for spec, node in zip(joint.inputs, joint.placeholders, strict=True)
        if spec.kind == "param"
    }
    batch = placements_to_layout(shard, (row.micro_batch * row.gpus, row.sequence), mesh, what="tokens")
    boundary = boundary_of(joint, parameters=pins, inputs={0: batch, 1: batch}, outputs={})
    found = find_assignment(joint, prices, boundary)
    assignment = cast_first(joint, found.assignment)
    lowering, _ = decide_lowering(joint, assignment, prices)
    prediction = predicted_step(joint, assignment, lowering, prices)
    depth = layers or SIZES[row.model][1]
    extra = sum(beside(row, depth, prices.compute).values())
    return prediction.seconds, extra + as_fsdp_sends(row, depth, prediction, prices)


def captured_joint(row: Row, layers: int | None = None) -> JointGraph:
    model = MPT(row.model, row.sequence, layers)
    tokens = torch.zeros(row.micro_batch * row.gpus, row.sequence, dtype=torch.int64, device="meta")
    return canonical_capture(model, (tokens, tokens), {}).joint


def cast_first(joint: JointGraph, assignment: Assignment) -> dict[str, NodeLayouts]:
    """`assignment` with matrices cast before they are gathered, as FSDP does; where it hides all the same, the search
    may cast after."""
    changed = dict(assignment)
    for node in joint.graph.nodes:
        if node.target is not torch.ops.aten._to_copy.default or node_value(node).ndim < 2:
            continue
        (source,) = node.all_input_nodes
        if source.op == "placeholder":
            (layout,) = assignment[source.name].results
            splits = tuple(FactorSplit(f"d{i}", axes) for i, axes in enumerate(layout.dims) if axes)
            changed[node.name] = NodeLayouts((layout,), (layout,), splits)
    return changed


def as_fsdp_sends(row: Row, layers: int, prediction: Prediction, prices: Prices) -> float:
    """Seconds by which FSDP's communication is slower than the plan's (or faster, below 0), as far as the overlap does
    not hide it.

    FSDP gathers a block's parameters at once, in bfloat16, once a step if it keeps them (SHARD_GRAD_OP) and twice if
    not, and reduces its gradients at once, in float32; what is in no block, likewise. The plan's buckets follow the
    prices, and it reduces in bfloat16.
    """
    width = SIZES[row.model][0]
    gathers = 2 if row.sharding == "FULL_SHARD" else 1
    seconds = 0.0
    for units, count in ((layers, 12 * width**2), (1, (VOCABULARY + row.sequence) * width)):
        gather, reduce = (
            prices.redistributor.collective_seconds(kind, ("dp",), count * itemsize)
            for kind, itemsize in (("all_gather", 2), ("reduce_scatter", 4))
        )
        seconds += units * (gathers * gather + reduce)
    ours = sum(c.seconds for c in prediction.collectives if c.kind in ("all_gather", "reduce_scatter"))
    return (1 - prices.overlap_efficiency) * (seconds - ours)


def chosen(row: Row, profile: Profile) -> tuple[float, str]:
    """Seconds of the step that autoshard would choose, and its parameters' layouts in a word."""
    model = MPT(row.model, row.sequence)
    tokens = torch.zeros(row.micro_batch * row.gpus, row.sequence, dtype=torch.int64, device="meta")
    mesh = MeshSpec({"dp": row.gpus}, device_type="cuda")
    limit = row.gpu.split("_")[1].upper()
    plan = find_plan(model, mesh, (tokens, tokens), profile=profile, memory_limit=limit)
    whole = [not any(layout.dims) for name, layout in plan.parameter_layouts.items() if "weight" in name]
    return plan.step_time, f"{sum(whole)} of {len(whole)} weights whole"


def predictions(
    rows: Sequence[Row], accumulated: bool, search: bool, layers: Sequence[int] = ()
) -> Iterator[tuple[Row, float, str]]:
    """(row, predicted tokens a second of one GPU, what autoshard would choose)."""
    for row in rows:
        if row.missing() is not None and not (accumulated and runs_micro_batches(row)):
            continue
        profile = Profile.named(PROFILES[row.gpu])
        rate = row.tokens / hand_seconds(row, profile, layers)
        ours = ""
        if search and row.accumulation == 1:
            seconds, layouts = chosen(row, profile)
            ours = f"{row.tokens / seconds:,.0f} | {layouts}"
        yield row, rate, ours


def runs_micro_batches(row: Row) -> bool:
    """Several, each of which is one of our steps but for the optimizer: FSDP gathers and reduces in each."""
    return row.accumulation > 1 and replace(row, accumulation=1).missing() is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file like benchmarks/published/mpt.csv")
    parser.add_argument("--accumulated", action="store_true", help="also rows of several micro-batches")
    parser.add_argument("--no-search", action="store_true", help="only the plans run by hand")
    parser.add_argument("--layers", type=int, nargs=2, default=(), help="two depths to predict from")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows(arguments.rows)
    print("| model, sequence, GPUs | published | predicted | ratio | autoshard | its parameters |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    ratios: list[float] = []
    wanted = predictions(rows, arguments.accumulated, not arguments.no_search, arguments.layers)
    for row, rate, ours in wanted:
        ratio = rate / row.tokens_per_second
        note = f", {row.accumulation} micro-batches" if row.accumulation > 1 else ""
        if row.accumulation == 1:
            ratios.append(ratio)
        published = f"{row.tokens_per_second:,.0f} | {rate:,.0f} | {ratio:.3f}"
        print(f"| {row.name}{note} | {published} | {ours or ' | '} |", flush=True)
    if ratios:
        off = [abs(ratio - 1) for ratio in ratios]
        print(f"\n|predicted / published - 1|: median {statistics.median(off):.1%}, worst {max(off):.1%}")
    for reason, count in missing(rows).items():
        print(f"{count} rows not predicted: {reason}")


def missing(rows: Sequence[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        reason = row.missing()
        if reason is not None:
            found[reason] = found.get(reason, 0) + 1
    return found


if __name__ == "__main__":
    main()
