"""A batch in pieces, cut into stages: each piece's stages compute what the piece does, and pass as little."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_use
from passes.micro_batches.cut_batch import cut_batch
from passes.simulate.reference import graph_values, reference_inputs
from passes.stages.cut_costs import choose_cut, cut_costs
from passes.stages.graph_parts import graph_parts
from passes.stages.stage_graphs import stage_graphs
from tests.stages.stage_models import canonical
from tests.stages.whole_stages import staged_results

LAYERS = {"mlp": ("layers.2", "layers.4"), "gpt2": ("transformer.h.0", "transformer.h.1")}


def cut_of(joint: JointGraph, name: str) -> list[str]:
    forward = graph_parts(joint).forward
    return [next(n.name for n in forward if n.meta["module"].startswith(layer)) for layer in LAYERS[name]]


@pytest.mark.parametrize(("name", "count"), [("mlp", 3), ("gpt2", 2)])
def test_stages_of_every_piece_compute_what_the_piece_does(name: str, count: int) -> None:
    joint, values = canonical(name)
    known = {(spec.kind, spec.name): value for spec, value in zip(joint.inputs, values, strict=True)}
    batch = cut_batch(joint, count)
    for piece in (batch, *batch.others):
        given = [known[spec.kind, spec.name] for spec in piece.inputs]
        wanted, _ = graph_values(piece, given)
        graphs = stage_graphs(piece, cut_of(piece, name))
        for got, expected in zip(staged_results(piece, graphs, given), wanted, strict=True):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)  # type: ignore[arg-type]


def test_graphs_of_the_other_pieces_are_cut_alike() -> None:
    """Five rows in three pieces: 2, 2 and 1."""
    batch = cut_batch(canonical("mlp")[0], 3)
    for graph in stage_graphs(batch, cut_of(batch, "mlp")):
        stage = graph.joint
        assert stage.pieces == 3 and len(stage.others) == 2
        assert all(other.pieces == 3 and other.inputs == stage.inputs for other in stage.others)
        assert all(other.outputs == stage.outputs for other in stage.others)
        names = [[n.name for n in other.graph.nodes] for other in (stage, *stage.others)]
        assert names[0] == names[1] == names[2]
        rows = [c.shape[0] for c in graph.sent]
        assert rows == [2] * len(graph.sent)
        assert all("runs" in n.meta for n in stage.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_pieces_read_a_parameter_through_one_use_before_them(name: str) -> None:
    """It may be gathered once for all of them, as where there are no stages."""
    batch = cut_batch(canonical(name)[0], 2)
    known = {node.name for node in batch.graph.nodes}
    for graph in stage_graphs(batch, cut_of(batch, name)):
        stage = graph.joint
        for node in (node for node, spec in stage.given if spec.kind == "param"):
            uses = {user for user in node.users if user.op != "output"}
            assert [user.meta["runs"] for user in uses] in ([], ["before"]), node
            assert all(is_use(use) and use.name in known for use in uses)


class Narrow(nn.Module):
    """Two layers with as many values between them as a piece has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x)).square().sum()


def test_what_passes_is_alike_for_pieces_of_all_sizes() -> None:
    """The gradient that goes back is transposed: alike to what was sent in a piece of 2 rows, and not in one of 1."""
    joint = canonical_capture(Narrow(), (torch.randn(3, 8),), {}).joint
    batch = cut_batch(joint, 2)
    up = next(n.name for n in graph_parts(batch).forward if n.meta["module"] == "up")
    for graph in stage_graphs(batch, (up,)):
        stage, (other,) = graph.joint, graph.joint.others
        assert [n.name for n in stage.placeholders] == [n.name for n in other.placeholders]
        assert (stage.inputs, stage.outputs) == (other.inputs, other.outputs)


def test_pieces_pass_the_residual_stream_alone() -> None:
    """Not what pieces leave behind: outputs put side by side, parts of a tied weight's gradient."""
    batch = cut_batch(canonical("gpt2")[0], 2)
    graphs = stage_graphs(batch, cut_of(batch, "gpt2"))
    assert [[(c.shape, c.value, c.gradient) for c in graph.sent] for graph in graphs] == [
        [((1, 16, 32), True, True)],
        [((1, 16, 32), True, True)],
        [],
    ]
    tied = {"transformer.wte.weight": (0, 2)}
    assert [graph.summed for graph in graphs] == [tied, {}, tied]


class Penalised(nn.Module):
    """The loss punishes large weights, so that a weight's gradient has a part that is no piece's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean() + 0.01 * sum(p.square().sum() for p in self.parameters())


def test_penalties_of_weights_do_not_close_places() -> None:
    """Every stage has its own part of a gradient, so that between any two layers the call may be cut."""
    model, given = Penalised().double(), [torch.randn(5, 8, dtype=torch.float64)]
    joint = canonical_capture(model, tuple(given), {}).joint
    values = reference_inputs(joint, model, given, seed=2)
    known = {(spec.kind, spec.name): value for spec, value in zip(joint.inputs, values, strict=True)}
    batch = cut_batch(joint, 4)
    costs = cut_costs(batch, lambda n: 1.0)
    begins = {costs.parts.forward[place.position].meta["module"] for place in costs.places}
    assert {"layers.1", "layers.2"} <= begins
    cut = choose_cut(costs, 3, lambda n: 0.0).cut
    for piece in (batch, *batch.others):
        given = [known[spec.kind, spec.name] for spec in piece.inputs]
        wanted, _ = graph_values(piece, given)
        for got, expected in zip(staged_results(piece, stage_graphs(piece, cut), given), wanted, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
