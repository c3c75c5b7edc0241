"""Figures of a stage add up to its predicted step; the bytes that a piece keeps are what its backward reads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import fx

from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import GraphInput, GraphOutput
from passes.lower.partition import RankGraph
from passes.lower.piecewise import pieces_of
from passes.lower.rank_program import RankProgram, rank_program
from passes.predict.predict_program import trained_by
from passes.predict.predict_step import predict_stage
from tests.plans.pipelines import PP, SQUARE, planned, stage_task


@pytest.mark.parametrize(("name", "mesh", "pieces"), [("mlp", PP, 1), ("mlp", SQUARE, 4), ("gpt2", PP, 2)])
def test_pieces_and_what_runs_once_are_the_step(name: str, mesh: MeshSpec, pieces: int) -> None:
    plan = planned(name, mesh, pieces, "gpipe")
    for stage, figures in zip(plan.stages, plan.scheduled.prices.stages, strict=True):
        once = figures.before + figures.after + figures.update
        assert pieces * (figures.forward + figures.backward) + once == pytest.approx(stage.step_time)
        assert figures.peak == stage.peak_memory
        assert 0 < figures.kept <= figures.peak and figures.held <= figures.peak
        assert figures.of_piece(pieces) == pytest.approx(stage.step_time / pieces)


def test_halves_are_the_backward() -> None:
    """Run op by op without a launch, both halves together take what the whole takes; the first stage sends nothing."""
    first, *others = planned("mlp", PP, 4, "gpipe").scheduled.prices.stages
    assert first.input == 0.0 and first.weight == pytest.approx(first.backward)
    for stage in others:
        assert stage.input > 0.0 and stage.input + stage.weight == pytest.approx(stage.backward, rel=1e-4)


def test_what_a_piece_keeps_is_what_its_backward_reads() -> None:
    """Of a stage on one rank: what the forward saves, and what it received."""
    task = stage_task("mlp")
    plan = planned("mlp", PP, 4, "gpipe")
    for number, graph in enumerate(plan.stage_graphs(task.joint)):
        stage, figures = plan.stages[number], plan.scheduled.prices.stages[number]
        mesh = stage.mesh
        program = rank_program(graph.joint, stage.planned, mesh, 0, simulated_groups(mesh))
        phases = pieces_of(program, 4).joined().piece.complete()
        assert phases.backward is not None
        *_, output = phases.forward.graph.nodes
        saved = {output.args[0][place] for place in phases.backward.saved}  # type: ignore[index]
        made = {node for node in saved if node.op != "placeholder"}
        nbytes = sum(node.meta["val"].numel() * 4 for node in made)
        received = sum(4 * math.prod(crossing.shape) for crossing in graph.received)
        assert figures.kept == nbytes + received
        again = predict_stage(
            graph.joint,
            stage.planned,
            replace(task, mesh=mesh, links=task.mesh).prices,
            {crossing.name for crossing in graph.received},
        )
        assert again == figures


def test_a_piece_whose_forward_reads_nothing_trains_nothing() -> None:
    """A stage between a value's and its reader's passes the gradient on: its piece has that alone, of no input."""
    ends = (GraphOutput("grad", "h"),)
    for inputs in ((GraphInput("tangent", "tangent", 0),), ()):
        graph = fx.Graph()
        made = graph.placeholder("tangent") if inputs else graph.call_function(torch.zeros, (3,))
        made.meta["val"] = torch.empty(3)
        graph.output((made,))
        program = RankProgram.of(RankGraph(fx.GraphModule({}, graph), {}), inputs, ends)
        assert trained_by(program) == {}
