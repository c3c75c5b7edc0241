"""A stage is a joint graph like any other: split over a mesh in any layouts, it computes the same."""

from __future__ import annotations

import random

import pytest
import torch

from cost_model.mesh import MeshSpec
from passes.ir.joint import tensor_operands
from passes.schedule.overlap import Overlap
from passes.simulate.reference import graph_values
from passes.stages.stage_graphs import stage_graphs
from tests.redistribution.layouts import cut
from tests.schedule.planned import lowered, random_assignment, run_phases, shards
from tests.stages.stage_models import canonical, random_cut


@pytest.mark.parametrize("sizes", [{"a": 3}, {"a": 2, "b": 2}])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "unet"])
def test_stages_in_any_layouts_compute_the_same(name: str, sizes: dict[str, int]) -> None:
    joint, _ = canonical(name)
    mesh = MeshSpec(sizes)
    for graph in stage_graphs(joint, random_cut(joint, 3, 4)):
        stage, draw = graph.joint, random.Random(graph.stage)
        values = [_values(n.meta["val"], draw.random()) for n in stage.placeholders]
        assignment = random_assignment(stage, mesh, draw)
        parts = shards(stage, assignment, mesh, values)
        found = run_phases(stage, lowered(stage, assignment, mesh), parts, mesh, Overlap())
        wanted, _ = graph_values(stage, values)
        whole = [value for value in wanted if value is not None]
        layouts = assignment[stage.output_node.name].operands
        assert len(whole) == len(tensor_operands(stage.output_node)) == len(layouts)
        for rank, results in enumerate(found):
            there = [x for x in results if x is not None]
            for got, value, layout in zip(there, whole, layouts, strict=True):
                mine = cut(value, [layout.interval(value.shape, mesh, d, rank) for d in range(value.ndim)])
                torch.testing.assert_close(got, mine, rtol=1e-6, atol=1e-9, equal_nan=True)


def _values(like: torch.Tensor, seed: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(1e6 * seed))
    if not like.is_floating_point():
        return torch.randint(0, 2, like.shape, generator=generator).to(like.dtype)
    return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.dtype) + 0.5
