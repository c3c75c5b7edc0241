"""Random layouts, and the shards of a global tensor under one: the oracle of these tests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from cost_model.mesh import MeshSpec, simulated_groups
from passes.layout.layout import Layout
from passes.redistribution.lower_redistribute import emit
from passes.redistribution.steps import Redistribution
from passes.simulate.lockstep import simulate


@dataclass(frozen=True)
class LinkPrices:
    """Latency a rank and bytes over the slowest axis's bandwidth: prices that never fall."""

    mesh: MeshSpec
    bytes_per_second: Mapping[str, float]
    latency: float = 1e-6

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        n = self.mesh.size(*axes)
        factor = 2.0 if kind == "all_reduce" else 1.0
        slowest = min(self.bytes_per_second[axis] for axis in axes)
        return n * self.latency + factor * (n - 1) / n * nbytes / slowest


def link_prices(mesh: MeshSpec) -> LinkPrices:
    return LinkPrices(mesh, {axis: 1e9 * (i + 1) for i, axis in enumerate(mesh.names)})


@dataclass(frozen=True)
class StartPrices:
    """A second to start a collective, and next to nothing a byte: the fewest collectives win."""

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        return 1.0 + 1e-9 * nbytes * (2 if kind == "all_reduce" else 1)


def random_sizes(rng: random.Random, length: int, parts: int) -> list[int]:
    cuts = sorted(rng.randint(0, length) for _ in range(parts - 1))
    return [hi - lo for lo, hi in zip([0, *cuts], [*cuts, length], strict=True)]


def random_layout(
    rng: random.Random, shape: Sequence[int], mesh: MeshSpec, ops: Sequence[str], explicit: float
) -> Layout:
    """Each axis splits a random dim, is partial with one of `ops`, or neither."""
    dims: list[list[str]] = [[] for _ in shape]
    partial: list[tuple[str, str]] = []
    op = rng.choice(ops)
    for axis in rng.sample(mesh.names, len(mesh.names)):
        where = rng.randint(-2, len(shape) - 1)
        if where >= 0:
            dims[where].append(axis)
        elif where == -1:
            partial.append((axis, op))
    sizes = [
        random_sizes(rng, length, mesh.size(*axes)) if axes and rng.random() < explicit else None
        for length, axes in zip(shape, dims, strict=True)
    ]
    return Layout.of(shape, mesh, dims, partial, sizes)


def creatable(src: Layout, dst: Layout) -> Layout:
    """`dst` without the partial axes that cannot be made of `src`, and without mixing reductions."""
    only_sums = all(op == "sum" for _, op in src.partial)
    kept = tuple(p for p in dst.partial if p in src.partial or (only_sums and p[1] == "sum"))
    return Layout(dst.dims, kept, dst.sizes)


def parts_of(value: Tensor, layout: Layout, mesh: MeshSpec, rng: random.Random) -> list[Tensor]:
    """One local tensor a rank. Partial axes hold random values that reduce to `value`."""
    terms: dict[tuple[int, ...], Tensor] = {(): value}
    for axis, op in layout.partial:
        terms = {
            (*where, i): term
            for where, whole in terms.items()
            for i, term in enumerate(_terms(whole, op, mesh.size(axis), rng))
        }
    parts: list[Tensor] = []
    for rank in range(mesh.device_count):
        home = mesh.coordinate(rank)
        spans = [layout.interval(value.shape, mesh, d, rank) for d in range(value.ndim)]
        parts.append(cut(terms[tuple(home[axis] for axis, _ in layout.partial)], spans))
    return parts


def _terms(whole: Tensor, op: str, count: int, rng: random.Random) -> list[Tensor]:
    """`count` random integer-valued tensors that reduce to `whole`."""
    generator = torch.Generator().manual_seed(rng.randint(0, 10**6))
    noise = [torch.randint(-5, 6, whole.shape, generator=generator).to(whole.dtype) for _ in range(count - 1)]
    if op == "sum":
        terms = [*noise, whole - sum(noise)]
    else:
        terms = [*(whole - n.abs() if op == "max" else whole + n.abs() for n in noise), whole]
    rng.shuffle(terms)
    return terms


def cut(value: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """What lies in `spans`, positions modulo the dim's length."""
    for dim, (lo, hi) in enumerate(spans):
        value = value.index_select(dim, torch.arange(lo, hi) % max(1, value.shape[dim]))
    return value.contiguous()


def totals(locals_: Sequence[Tensor], layout: Layout, mesh: MeshSpec) -> list[Tensor]:
    """Each rank's values with the partial axes reduced, computed without the code under test."""
    values = list(locals_)
    for axis, op in layout.partial:
        reduced: list[Tensor] = []
        for rank in range(mesh.device_count):
            group = torch.stack([values[r] for r in mesh.group(rank, (axis,))])
            reduced.append(group.sum(0) if op == "sum" else group.amax(0) if op == "max" else group.amin(0))
        values = reduced
    return values


def rank_graph(
    local: Tensor, plan: Redistribution, shape: Sequence[int], mesh: MeshSpec, rank: int
) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = local.to("meta")
    graph.output(
        (emit(graph, x, plan.steps, shape, mesh, rank, simulated_groups(mesh), {"phase": "forward"}),)
    )
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def run_plan(
    plan: Redistribution, locals_: Sequence[Tensor], shape: Sequence[int], mesh: MeshSpec
) -> list[Tensor]:
    graphs = [rank_graph(local, plan, shape, mesh, rank) for rank, local in enumerate(locals_)]
    return [out[0] for out in simulate(graphs, [[x] for x in locals_], mesh)]
