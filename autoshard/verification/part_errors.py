"""What ranks hold of values, and how far that is from what they should hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.plan.plan import Plan
from autoshard.runtime.sharding import shard_of
from cost_model.mesh import MeshSpec
from passes.canonicalize.mark_rows import regions
from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.layout.layout import ROUTED, Layout, nested_spans
from passes.lower.partition import RankGraph
from passes.rules.check.trial import spread
from passes.simulate.reference import changed_share, widened

CANCELLED = 1e-3
"""A value below this share of what it is computed from or belongs with is rounding left by a
cancellation (the gradient of an attention key's bias is 0 in exact arithmetic): its error is counted
relative to that share."""


def largest(values: Iterable[torch.Tensor | None]) -> float:
    """Largest finite magnitude among floating point tensors; 0 if there is none."""
    found = 0.0
    for value in values:
        if isinstance(value, torch.Tensor) and _is_real_or_complex(value) and value.numel():
            found = max(found, float(widened(value.detach()).abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return found


def piece_error(
    pieces: Sequence[torch.Tensor | None],
    expected: torch.Tensor,
    layout: Layout,
    mesh: MeshSpec,
    rank: int,
    floor: float,
    ids: tuple[torch.Tensor, int] | None = None,
) -> float:
    """Relative error of one rank's shard, its pending reductions done first.

    pieces: of every rank. floor: the least scale that an error is relative to. inf for another shape. ids: the expert
    of each row, and how many there are, where a row counts on the rank of its expert alone.
    """
    if any(halo is not None and halo.summed for halo in layout.halos):
        got, part = _summed(pieces, expected, layout, mesh, rank)
    else:
        axes = [axis for axis, op in layout.partial if op != ROUTED]
        got = _reduced([pieces[r] for r in mesh.group(rank, axes)], layout)
        part = shard_of(expected, layout, mesh, rank)
        if ids is not None and got.shape == part.shape:
            got = torch.where(_counts(ids, layout, part, mesh, rank), got, part)
    if got.shape != part.shape:
        return float("inf")
    return relative_error(got, part, max(largest([expected]), floor))


def _counts(
    ids: tuple[torch.Tensor, int], layout: Layout, part: torch.Tensor, mesh: MeshSpec, rank: int
) -> torch.Tensor:
    """Which rows of a rank's part are of its own experts."""
    (experts, count), n = ids, ids[0].ndim
    axes = [axis for axis in mesh.names if (axis, ROUTED) in layout.partial]
    lo, hi = nested_spans(count, tuple(map(mesh.size, axes)))[mesh.linear_index(rank, axes)]
    own = shard_of(experts, Layout(layout.dims[:n], (), layout.sizes[:n], layout.halos[:n]), mesh, rank)
    return ((own >= lo) & (own < hi)).reshape(*own.shape, *[1] * (part.ndim - n))


def _summed(
    pieces: Sequence[torch.Tensor | None], expected: torch.Tensor, layout: Layout, mesh: MeshSpec, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of all summands of a halo along its dims, and the sum that they should have."""

    dims = range(expected.ndim)
    along = [d for d in dims if layout.halos[d] is not None]
    part = expected
    for d in dims:
        if d not in along:
            lo, hi = layout.interval(expected.shape, mesh, d, rank)
            part = part.narrow(d, lo, hi - lo)
    total = torch.zeros_like(part)
    held = [axis for d in along for axis in layout.dims[d]]
    for r in mesh.group(rank, [*held, *(axis for axis, _ in layout.partial)]):
        piece = pieces[r]
        if piece is not None and piece.numel():
            spans = [layout.interval(expected.shape, mesh, d, r) for d in dims]
            total += spread(piece, along, spans, expected.shape)
    return total, part


def _reduced(pieces: Sequence[torch.Tensor | None], layout: Layout) -> torch.Tensor:
    present = [piece for piece in pieces if piece is not None]
    if len(present) == 1:
        return present[0]
    how = next(op for _, op in layout.partial if op != ROUTED)[:3]
    operation = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[how]
    total = present[0]
    for piece in present[1:]:
        total = operation(total, piece)
    return total


def _is_real_or_complex(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def relative_error(got: torch.Tensor, part: torch.Tensor, scale: float) -> float:
    """Largest |got - part| over `scale` (1 if that is 0); inf where NaN or inf, or whole numbers, differ."""
    if got.numel() == 0:
        return 0.0
    if scale == float("inf"):  # rounding alone decides what it is
        return 0.0
    if not _is_real_or_complex(got):
        return 0.0 if torch.equal(got, part) else float("inf")
    same = (got == part) | (got.isnan() & part.isnan())
    if bool(same.all()):
        return 0.0
    difference = torch.where(same, 0.0, (widened(got) - widened(part)).abs())
    if not bool(difference.isfinite().all()):
        return float("inf")
    return float(difference.max()) / (scale or 1.0)


@dataclass(frozen=True)
class Divergence:
    """The first node whose sharded value differs. error: largest |difference| / largest |value|; of floats of 8 bits
    the share of numbers that differ."""

    node: str
    op: str
    error: float
    module: str
    source: str

    def __str__(self) -> str:
        where = " ".join(part for part in (self.module, self.source) if part)
        return f"{self.node} = {self.op} ({where or 'unknown source'}): relative error {self.error:.3g}"


@dataclass(eq=False)
class Watcher:
    """Collects every rank's value of every global node and notes where they differ. _shares: of nodes in floats of 8
    bits, of how many numbers that may."""

    _joint: JointGraph
    _plan: Plan
    _expected: Mapping[str, torch.Tensor]
    _least: Mapping[str, float]
    _shares: Mapping[str, float]

    def __post_init__(self) -> None:
        self._order = [node for node in self._joint.graph.nodes if node.op == "call_function"]
        self._globals: list[dict[str, list[str]]] = []
        self._pieces: dict[str, dict[int, torch.Tensor]] = {}
        self._errors: dict[str, float] = {}
        self._operands = {node.name: [o.name for o in tensor_operands(node)] for node in self._order}
        self._layouts = {node.name: _layout(self._plan, node) for node in self._order if _is_single(node)}
        self._ids = {
            node.name: (region.ids.name, region.experts)
            for region in regions(self._joint.graph)
            for node in region.rows
        }

    def attach(self, graphs: Sequence[RankGraph]) -> None:
        for graph in graphs:
            names: dict[str, list[str]] = {}
            for global_name, local_name in graph.values.items():
                if global_name in self._layouts:
                    names.setdefault(local_name, []).append(global_name)
            self._globals.append(names)

    def __call__(self, rank: int, node: fx.Node, value: Any) -> None:
        for name in self._globals[rank].get(node.name, ()):
            pieces = self._pieces.setdefault(name, {})
            pieces[rank] = value
            if len(pieces) == len(self._globals):
                self._finish(name, self._pieces.pop(name))

    def _finish(self, name: str, pieces: Mapping[int, torch.Tensor]) -> None:
        expected = self._expected.get(name)
        if expected is None:
            return
        ordered = [pieces[rank] for rank in range(len(pieces))]
        mesh, layout = self._plan.mesh, self._layouts[name]
        if name in self._shares:
            parts = (shard_of(expected, layout, mesh, rank) for rank in range(len(ordered)))
            self._errors[name] = max(changed_share(*pair) for pair in zip(ordered, parts, strict=True))
            return
        cancelled = CANCELLED * largest(self._expected.get(operand) for operand in self._operands[name])
        floor = max(cancelled, self._least.get(name, 0.0))
        ids = None
        if any(op == ROUTED for _, op in layout.partial):
            node, count = self._ids[name]
            ids = self._expected[node], count
        self._errors[name] = max(
            piece_error(ordered, expected, layout, mesh, rank, floor, ids) for rank in range(len(ordered))
        )

    def first(self, limit: float) -> Divergence | None:
        for node in self._order:
            error = self._errors.get(node.name, 0.0)
            if error > self._shares.get(node.name, limit):
                meta = node.meta
                return Divergence(
                    node.name, str(node.target), error, meta.get("module", ""), meta.get("source", "")
                )
        return None


def _is_single(node: fx.Node) -> bool:
    return not isinstance(node.meta["val"], (tuple, list))


def _layout(plan: Plan, node: fx.Node) -> Layout:
    producer, index = result_index(node)
    return plan.planned.layouts[producer.name].results[index]
