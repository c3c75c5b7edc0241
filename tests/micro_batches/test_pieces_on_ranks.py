"""Every rank's program of a batch in pieces, in lockstep: the numbers of the unsharded model and whole batch."""

from __future__ import annotations

import random

import pytest
import torch

from autoshard.plan.judged import judged, prices_of
from autoshard.profiling.startup import nominal_profile
from autoshard.runtime.sharding import shard_of
from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment, NodeLayouts
from passes.lower.piecewise import RankPieces, pieces_of
from passes.lower.rank_program import rank_program
from passes.micro_batches.cut_batch import cut_batch, first_of_each_size, layouts_like
from passes.search.find import Sought, find_assignment
from passes.search.search_terms import Narrowing, boundary_of
from passes.simulate.reference import graph_values
from tests.micro_batches.test_in_pieces import MODELS, model_and_values
from tests.verification.one_stage import simulate_pieces


class Chosen:
    """At a part of the nodes a random strategy."""

    def __init__(self, seed: str, share: float) -> None:
        self.draw, self.share = random.Random(seed), share

    def narrowing(self, joint: JointGraph) -> Narrowing:
        names = [node.name for node in joint.graph.nodes if node.op == "call_function"]
        picked = [name for name in names if self.draw.random() < self.share]
        return Narrowing(allowed=dict.fromkeys(picked, self.one))

    def one(self, strategies: list[NodeLayouts]) -> list[int]:
        return [self.draw.randrange(len(strategies))]


def pieces_on_ranks(
    graphs: tuple[JointGraph, ...], mesh: MeshSpec, chosen: Chosen
) -> tuple[Assignment, list[list[RankPieces]]]:
    prices = prices_of(nominal_profile("cpu"), mesh, "eager")
    first: Assignment | None = None
    found: list[list[RankPieces]] = []
    by_size: dict[int, Assignment] = {}
    for graph, size in zip(graphs, first_of_each_size(graphs), strict=True):
        if size not in by_size:
            narrowing = chosen.narrowing(graph) if first is None else layouts_like(first, graph)
            boundary = boundary_of(graph, parameters={}, inputs={}, outputs={})
            by_size[size] = find_assignment(Sought(graph, prices, boundary, narrowing=narrowing)).assignment
        assignment = by_size[size]
        planned = judged(graph, assignment, prices).planned
        ranks = range(mesh.device_count)
        programs = [rank_program(graph, planned, mesh, r, simulated_groups(mesh)) for r in ranks]
        found.append([pieces_of(program, graph.pieces).joined() for program in programs])
        first = first or assignment
    assert first is not None
    return first, found


def compare(
    joint: JointGraph,
    values: list[torch.Tensor],
    wanted: list[torch.Tensor | None],
    mesh: MeshSpec,
    first: Assignment,
    pieces: list[list[RankPieces]],
) -> None:
    """Every rank's results with its part of `wanted`, from its parts of `values`."""
    held = [first[node.name].results[0] for node in joint.placeholders]
    inputs = [
        [shard_of(value, layout, mesh, rank).contiguous() for value, layout in zip(values, held, strict=True)]
        for rank in range(mesh.device_count)
    ]
    found = simulate_pieces(joint, pieces, inputs, mesh)
    layouts = iter(first["output"].operands)
    for place, whole in enumerate(wanted):
        layout = None if whole is None else next(layouts)
        for rank, results in enumerate(found):
            one = results[place]
            assert (one is None) == (whole is None)
            if one is not None and whole is not None and layout is not None:
                part = shard_of(whole, layout, mesh, rank)
                assert torch.allclose(one, part, rtol=1e-11, atol=1e-12), (joint.outputs[place], rank)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("axes", "batch", "count"),
    [({"dp": 2}, 8, 2), ({"dp": 3}, 8, 5), ({"dp": 2, "tp": 2}, 8, 4), ({"dp": 2, "tp": 2}, 7, 3)],
    ids=lambda value: str(value).replace(" ", ""),
)
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_the_numbers_of_the_unsharded_model(
    name: str, axes: dict[str, int], batch: int, count: int, share: float
) -> None:
    joint, values = model_and_values(name, batch)
    for place, spec in enumerate(joint.inputs):
        if spec.kind == "tangent" and joint.inputs[place].index > 0:
            values[place] = torch.zeros_like(values[place])
    wanted, _ = graph_values(joint, values)
    mesh = MeshSpec(axes)
    cut = cut_batch(joint, count)
    first, pieces = pieces_on_ranks((cut, *cut.others), mesh, Chosen(f"{name} {axes} {count}", share))
    compare(joint, values, wanted, mesh, first, pieces)
