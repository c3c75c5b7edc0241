"""torch's schedule classes run stages of ours, over gloo: the sums over all pieces are those of the whole graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.runtime.pipeline_program import torch_schedule
from autoshard.runtime.pipeline_stage import PipelineStage, run_pieces, run_pieces_forward
from passes.simulate.reference import graph_values
from passes.stages.pipeline_orders import ORDERS
from passes.stages.stage_graph import Crossing
from passes.stages.stage_graphs import stage_graphs
from tests.ranks import RankPool
from tests.stages.stage_models import canonical, random_cut
from tests.stages.staged_programs import GraphPrograms

CPU = torch.device("cpu")


class ByHand:
    """y = x w on stage 0; the loss is the sum of (y v)^2 on stage 1. Forward and backward are written out."""

    def __init__(self, stage: int, pieces: Sequence[Tensor], weight: Tensor) -> None:
        self.stage, self.pieces, self.weight = stage, pieces, weight
        self.gradient, self.loss = torch.zeros_like(weight), torch.zeros((), dtype=weight.dtype)
        self.kept: dict[int, tuple[Tensor, ...]] = {}
        self.done: list[str] = []

    def forward(self, piece: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        self.done.append(f"F{piece}")
        (x,) = received or (self.pieces[piece],)
        y = x @ self.weight
        self.kept[piece] = (x, y)
        if self.stage == 0:
            return [y]
        self.loss += y.square().sum()
        return []

    def backward(self, piece: int, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        self.done.append(f"B{piece}")
        x, y = self.kept.pop(piece)
        (dy,) = returned or (2 * y,)
        self.gradient += x.T @ dy
        return [dy @ self.weight.T] if self.stage else []

    def backward_input(self, piece: int, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        raise NotImplementedError

    def backward_weight(self, piece: int) -> None:
        raise NotImplementedError


def by_hand(rank: int, name: str, pieces: int, steps: int) -> tuple[Tensor, Tensor, list[str]]:
    x, w, v = hand_values(pieces)
    programs = ByHand(rank, list(x), (w, v)[rank])
    passing = (Crossing("y", 0, 0, (2, 4), torch.float64, gradient=True),)
    stage = PipelineStage(
        programs, [passing if rank else ()] * pieces, [() if rank else passing] * pieces, rank, 2, CPU
    )
    schedule = torch_schedule(name, [stage], pieces)
    for _ in range(steps):
        programs.done.clear()
        run_pieces(schedule, pieces)
    return programs.loss, programs.gradient, programs.done


def hand_values(pieces: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64)
    return draw(pieces, 2, 3), draw(3, 4), draw(4, 5)


@pytest.mark.parametrize(
    ("name", "first"), [("gpipe", "F0 F1 F2 F3 B0 B1 B2 B3"), ("1f1b", "F0 F1 B0 F2 B1 F3 B2 B3")]
)
def test_programs_by_hand_run_by_torchs_schedules(ranks: RankPool, name: str, first: str) -> None:
    (_, dw, done), (loss, dv, _) = ranks.run(by_hand, name, 4, 2, world=2)
    x, w, v = hand_values(4)
    for weight in (w, v):
        weight.requires_grad_()
    wanted = 2 * (x @ w @ v).square().sum()
    wanted.backward()
    torch.testing.assert_close((loss, dw, dv), (wanted.detach(), w.grad, v.grad), rtol=1e-12, atol=1e-12)
    assert done == first.split()


def in_turn(rank: int, name: str, pieces: int) -> tuple[list[str], Tensor]:
    """A step, an evaluation, a step: what was done in the evaluation; the loss of all."""
    x, w, v = hand_values(pieces)
    programs = ByHand(rank, list(x), (w, v)[rank])
    passing = (Crossing("y", 0, 0, (2, 4), torch.float64, gradient=True),)
    stage = PipelineStage(
        programs, [passing if rank else ()] * pieces, [() if rank else passing] * pieces, rank, 2, CPU
    )
    schedule = torch_schedule(name, [stage], pieces)
    run_pieces(schedule, pieces)
    programs.done.clear()
    run_pieces_forward(schedule, pieces)
    done = list(programs.done)
    run_pieces(schedule, pieces)
    return done, programs.loss


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_an_evaluation_runs_forward_alone(ranks: RankPool, name: str) -> None:
    (done, _), (_, loss) = ranks.run(in_turn, name, 3, world=2)
    x, w, v = hand_values(3)
    assert done == ["F0", "F1", "F2"]
    torch.testing.assert_close(loss, 3 * (x @ w @ v).square().sum())


def staged(rank: int, model: str, name: str, local: int, pieces: int) -> list[tuple[tuple[str, str], Tensor]]:
    """This rank's sums: of outputs and gradients."""
    world = dist.get_world_size()
    joint, _ = canonical(model)
    graphs = stage_graphs(joint, random_cut(joint, world * local, 11))
    values = piece_values(model, pieces)
    own = [GraphPrograms(graph, values) for graph in graphs if graph.stage % world == rank]
    stages = [
        PipelineStage(
            p, [p.graph.received] * pieces, [p.graph.sent] * pieces, p.graph.stage, p.graph.stages, CPU
        )
        for p in own
    ]
    run_pieces(torch_schedule(name, stages, pieces), pieces)
    return [item for programs in own for item in programs.results.items()]


def piece_values(model: str, pieces: int) -> list[dict[tuple[str, str], Tensor]]:
    """Of each piece: the same parameters; of the call what is no whole number, and tangents, other numbers."""
    joint, values = canonical(model)
    found: list[dict[tuple[str, str], Tensor]] = []
    for piece in range(pieces):
        scaled = lambda kind, x, n=piece: (
            x * (1 + n) if kind in ("input", "tangent") and x.is_floating_point() else x
        )
        found.append({(s.kind, s.name): scaled(s.kind, x) for s, x in zip(joint.inputs, values, strict=True)})
    return found


@pytest.mark.parametrize(
    ("model", "name", "world", "local"),
    [
        ("mlp", "gpipe", 2, 1),
        ("mlp", "1f1b", 4, 1),
        ("mlp", "interleaved", 2, 2),
        ("mlp", "zero_bubble", 2, 2),
        ("gpt2", "1f1b", 2, 1),
        ("gpt2", "zero_bubble", 4, 1),
        ("t5", "interleaved", 2, 2),
        ("unet", "zero_bubble", 2, 1),
    ],
)
def test_graphs_cut_into_stages_run_by_torchs_schedules(
    ranks: RankPool, model: str, name: str, world: int, local: int
) -> None:
    pieces = 4
    joint, _ = canonical(model)
    found: dict[tuple[str, str], Tensor] = {}
    for key, value in (
        item for rank in ranks.run(staged, model, name, local, pieces, world=world) for item in rank
    ):
        found[key] = found[key] + value if key in found else value
    wanted: dict[tuple[str, str], Tensor] = {}
    for values in piece_values(model, pieces):
        results, _ = graph_values(joint, [values[spec.kind, spec.name] for spec in joint.inputs])
        for spec, value in zip(joint.outputs, results, strict=True):
            if value is not None:
                key = (spec.kind, spec.name)
                wanted[key] = wanted[key] + value if key in wanted else value
    assert found.keys() == wanted.keys() and name in ORDERS
    for key, value in wanted.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-11, atol=1e-12, msg=lambda text, k=key: f"{k}: {text}"
        )
