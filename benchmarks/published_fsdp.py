"""What FSDP did in published runs that a plan of the same layouts does otherwise, and what ran beside the model."""

from __future__ import annotations

import numpy as np
import torch
from torch import fx, nn

from benchmarks.llama3 import LLAMAS, Llama3
from benchmarks.mpt import MPT, SIZES, VOCABULARY
from benchmarks.published_rows import Row
from cost_model.compute import ComputePrices
from passes.ir.joint import JointGraph, node_value
from passes.ir.op_traits import is_collect, is_use
from passes.layout.layout import Assignment, FactorSplit, Layout, NodeLayouts
from passes.predict.prediction import MemoryWalk, Prediction
from passes.strategies.prices import Prices

__all__ = ["as_fsdp_holds", "as_fsdp_moves", "as_fsdp_sends", "beside", "model_of"]

HOST_SECONDS = 6e-6
"""Of issuing one small kernel from Python. Assumed."""
GATHERED_PER_SECOND = 150e9
"""Elements, of whatever size: torch's gather and scatter took them one by one until 2025. [pytorch/pytorch issue
121389, torch 2.2: 8192 x 4096 in 0.224 ms, float32 in 0.259; issue 151612: 4096 x 5120 in 0.136 ms]"""


def beside(row: Row, layers: int, compute: ComputePrices) -> dict[str, float]:
    """Seconds of a micro-batch that the published runs spent on what is not in the model, by what on; none is known of
    torchtitan's. What stands in a block is run again with it.

    copies:    around attention, `flash_attn_fn` gathers q, k and v without padding and scatters the result into
               zeros, and the reverse backward: 8 gathers and scatters of an activation, 4 arrays of zeros; of them
               4 and 1 in the forward.
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


def model_of(row: Row, layers: int | None = None) -> nn.Module:
    if row.model in LLAMAS:
        return Llama3(row.model, row.sequence, layers, row.float8)
    return MPT(row.model, row.sequence, layers, checkpointing=row.checkpointing == "full")


def as_fsdp_moves(joint: JointGraph, assignment: Assignment) -> dict[str, NodeLayouts]:
    """`assignment` with matrices cast before they are gathered, gathered in each micro-batch, and their gradients
    reduced in each, as FSDP does. Where it hides all the same, the search may cast after; and where it is cheaper,
    gather before all micro-batches and reduce after them."""
    changed = dict(assignment)
    for node in joint.graph.nodes:
        if is_collect(node) and node_value(node).ndim > 1:
            changed[node.name] = reduced(joint, assignment, node)
        if node.target is not torch.ops.aten._to_copy.default or node_value(node).ndim < 2:
            continue
        (source,) = node.all_input_nodes
        if source.op == "placeholder":
            changed[node.name] = rows_split(assignment[source.name].results[0])
            held = [n for n in node.users if is_use(n) and n.meta.get("runs") == "before"]
            changed.update((n.name, changed[node.name]) for n in held)
    return changed


def rows_split(layout: Layout) -> NodeLayouts:
    """Of an op that does each element by itself."""
    splits = tuple(FactorSplit(f"d{i}", axes) for i, axes in enumerate(layout.dims) if axes)
    return NodeLayouts((layout,), (layout,), splits)


def reduced(joint: JointGraph, assignment: Assignment, collect: fx.Node) -> NodeLayouts:
    """Of a gradient that the micro-batches add up: as it is, if it is split, and else as its parameter is."""
    found = assignment[collect.name]
    if any(found.results[0].dims):
        return found
    shape = node_value(collect).shape
    split = (assignment[node.name].results[0] for node in joint.trained if node_value(node).shape == shape)
    return rows_split(next(split))


def as_fsdp_sends(row: Row, layers: int, prediction: Prediction, prices: Prices) -> float:
    """Seconds of a micro-batch by which FSDP's communication is slower than the plan's (or faster, below 0), as far as
    the overlap does not hide it.

    FSDP gathers a block's parameters at once, in bfloat16, or float8, once a step if it keeps them (SHARD_GRAD_OP) and
    twice if not, and reduces its gradients at once, in float32; what is in no block, likewise, in bfloat16. The plan's
    buckets follow the prices, and it reduces in bfloat16.
    """
    gathers = 2 if row.sharding == "FULL_SHARD" else 1
    seconds = 0.0
    narrow = 1 if row.float8 else 2
    for units, count, gathered in ((layers, block_numbers(row), narrow), (1, other_numbers(row), 2)):
        gather, reduce = (
            prices.redistributor.collective_seconds(kind, ("dp",), count * itemsize)
            for kind, itemsize in (("all_gather", gathered), ("reduce_scatter", 4))
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


def as_fsdp_holds(walk: MemoryWalk, micro_batches: int) -> int:
    """Bytes at the peak. A plan in pieces casts the parameters' parts once, before all, and keeps them; and it adds
    what was reduced to the gradients at the end of a piece. FSDP casts when it gathers, and adds at once."""
    if micro_batches == 1:
        return walk.peak.nbytes
    nbytes = np.array(walk.by_kind.sum(axis=1))
    end = len(walk.steps) - 1
    for value in walk.values:
        cast = value.op == "_to_copy" and value.last >= end
        if value.kind == "moved" and (cast or value.op == "reduce_scatter"):
            nbytes[value.first : value.last + 1] -= value.nbytes
    return int(nbytes.max())
