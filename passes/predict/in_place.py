"""What of a rank's program is computed, or reduced, in memory that another value has: of programs that run op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import fx

from passes.compile.bind_device import written_into
from passes.compile.fuse_eager import reduced_in_place
from passes.ir.joint import node_value
from passes.strategies.traffic import TrafficModel, eager_traffic


@dataclass(frozen=True)
class InPlace:
    """written: ops whose results are parts of a bucket from the start. begins: bucket -> the first of them, for which
    it is made. reduced: collectives whose result takes their operand's memory."""

    written: Set[fx.Node] = frozenset()
    begins: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    reduced: Set[fx.Node] = frozenset()


def in_place(ops: Sequence[fx.Node], traffic: TrafficModel) -> InPlace:
    """Of a graph's ops in their order. A compiler's own plans of memory are not known."""
    if traffic is not eager_traffic:
        return InPlace()
    place = {node: i for i, node in enumerate(ops)}
    buckets = {node: written.values() for node in ops if (written := written_into(node))}
    return InPlace(
        frozenset(made for written in buckets.values() for made in written),
        {bucket: min(written, key=place.__getitem__) for bucket, written in buckets.items()},
        frozenset(node for node in ops if reduced_in_place(node)),
    )


def copied_share(node: fx.Node, traffic: TrafficModel) -> float:
    """Of what `node` moves if it fills a bucket: what is not computed there. Of other ops 1."""
    if traffic is not eager_traffic:
        return 1.0
    written = sum(node_value(made).numel() for made in written_into(node).values())
    return 1.0 - written / node_value(node).numel() if written else 1.0
