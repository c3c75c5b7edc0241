"""The backward of a stage as two programs: what the stage before waits for, and the gradients of parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from torch import fx

from passes.ir.joint import ancestors, result_index
from passes.lower.phases import Backward, extract


@dataclass(frozen=True)
class BackwardHalves:
    """input:  takes what the backward takes; returns the gradients `first`, and after them what the other half reads.
    weight: takes of the backward's inputs those at `given`, and after them what `input` returned for it; returns the
            gradients `second`.
    first, second: positions among the backward's gradients.
    """

    input: fx.GraphModule
    weight: fx.GraphModule
    first: tuple[int, ...]
    second: tuple[int, ...]
    given: tuple[int, ...]


def split_backward(backward: Backward, received: Collection[str]) -> BackwardHalves:
    """received: names of the gradients that are sent to the stage before. No op runs in both halves.

    The first half of the first stage is empty. What the second half reads of the first is kept between them; results of
    the first may be among that.
    """
    nodes: list[fx.Node] = list(backward.module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    results = cast(tuple[fx.Node | None, ...], nodes[-1].args[0])
    places = range(len(results))
    first = tuple(i for i in places if backward.gradients[i].name in received)
    second = tuple(i for i in places if i not in first)
    early = ancestors(n for i in first if (n := results[i]) is not None)
    # Of an op with several results these are kept, and not the tuple.
    early |= {n for n in nodes if result_index(n)[0] is not n and result_index(n)[0] in early}
    ops = [n for n in nodes if n.op == "call_function"]
    soon, late = [n for n in ops if n in early], [n for n in ops if n not in early]
    read = {n for op in late for n in op.all_input_nodes} | {results[i] for i in second}
    kept = [n for n in soon if n in read]
    given = [i for i, n in enumerate(inputs) if n in read]
    return BackwardHalves(
        extract(inputs, soon, [*(results[i] for i in first), *kept]),
        extract([*(inputs[i] for i in given), *kept], late, [results[i] for i in second]),
        first,
        second,
        tuple(given),
    )
