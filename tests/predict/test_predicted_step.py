"""Steps whose transfers run in another order are those of programs that are made anew."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment
from passes.lower.rank_program import rank_program
from passes.plan.decide import decide
from passes.plan.planned_graph import NodeRecord, PlannedGraph
from passes.predict import predict_step
from passes.predict.predict_step import Orders, StepInOrders, predicted_step
from passes.strategies.prices import Prices
from passes.strategies.traffic import eager_traffic, fused_traffic
from tests.predict.test_predict import round_prices
from tests.schedule.planned import joint_of, random_assignment

MESH = MeshSpec({"a": 2, "b": 2})
ROOMS = (float("inf"), 0.0, 300.0, 3000.0)
"""Bytes that transfers may hold at once."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(self.norm(x))) + x
        return x.square().mean()


def case(seed: int, eager: bool) -> tuple[JointGraph, Assignment, Prices]:
    joint = joint_of(Net(), torch.randn(8, 16))
    prices = round_prices(MESH, 0.7)
    assignment = random_assignment(joint, MESH, random.Random(seed))
    return joint, assignment, replace(prices, traffic=eager_traffic if eager else fused_traffic)


def lowerings(joint: JointGraph, assignment: Assignment, prices: Prices) -> list[PlannedGraph]:
    return [decide(joint, assignment, prices.holding(room)) for room in ROOMS]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_steps_are_those_of_new_programs(seed: int, eager: bool) -> None:
    joint, assignment, prices = case(seed, eager)
    steps = StepInOrders(joint)
    for planned in lowerings(joint, assignment, prices):
        found = steps.predicted(planned, prices)
        wanted = predicted_step(joint, planned, prices)
        assert (found.seconds, found.phases, found.collectives) == (
            wanted.seconds,
            wanted.phases,
            wanted.collectives,
        )
        assert found.memory is not None and wanted.memory is not None
        assert found.memory.values == wanted.memory.values


@pytest.mark.parametrize("seed", range(8))
def test_programs_are_the_same_to_the_letter(seed: int) -> None:
    joint, assignment, prices = case(seed, eager=True)
    groups, texts = simulated_groups(MESH), set[str]()
    found = lowerings(joint, assignment, prices)
    ready = Orders(joint, found[0], MESH, 0, groups, joined=False)
    for planned in (*found, found[0]):
        assert ready.has(planned)
        text = ready.program(planned).text()
        assert text == rank_program(joint, planned, MESH, 0, groups).text()
        texts.add(text)
    assert len(texts) > 1


@pytest.mark.slow
def test_a_program_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, assignment, prices = case(0, eager=False)
    made: list[PlannedGraph] = []

    class Made(Exception):
        pass

    def counted(joint: JointGraph, planned: PlannedGraph, *rest: object) -> object:
        made.append(planned)
        if planned.interiors:  # of a factor that no op has
            raise Made
        return rank_program(joint, planned, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(predict_step, "rank_program", counted)
    steps = StepInOrders(joint)
    found = lowerings(joint, assignment, prices)
    for planned in found:
        steps.predicted(planned, prices)
    ranks = len(made)
    assert made == [found[0]] * ranks
    with pytest.raises(Made):
        steps.predicted(PlannedGraph(tuple(map(_in_parts, found[0].nodes))), prices)
    assert len(made) == ranks + 1


def _in_parts(node: NodeRecord) -> NodeRecord:
    return structs.replace(node, interior="no such factor")
