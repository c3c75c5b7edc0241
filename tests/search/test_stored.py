"""Plans whose weights are all stored over the same axes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from autoshard import MeshSpec, Profile
from autoshard.plan.task import CallLayouts, Task
from autoshard.planning import canonical_capture
from passes.search.rival_choices import places_in, places_of, stored_alike
from passes.search.search_space import SearchSpace
from passes.search.strategy_space import SpaceBuilder
from passes.solver.solve import restricted, solve
from tests.solver.oracle import brute_force, chain, random_problem


class Scaled(nn.Linear):
    """8 x 6, with a bias of 6 and a scale of no dims."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(input)


def space_of(axes: dict[str, int]) -> SearchSpace:
    captured = canonical_capture(Scaled(), (torch.zeros(16, 8),), {}, device=torch.device("cpu"))
    call = CallLayouts({}, {})
    task = Task(captured, Profile.named("cpu"), MeshSpec(axes), call, {}, None, "eager", 60.0)
    return SpaceBuilder(task.joint, task.prices, task.boundary).built()


def axes_of(space: SearchSpace) -> list[dict[str, set[frozenset[str]]]]:
    """For every restriction: parameter -> the axes that its layouts are split over; reader -> those that split the
    operands that are weights."""

    def axes(node: int, place: int) -> frozenset[str]:
        strategy, name = space.strategies[node][place], space.names[node]
        if name in WEIGHTS:
            return frozenset(strategy.results[0].axes)
        read = {edge.operand: space.names[edge.producer] for edge in space.edges if edge.consumer == node}
        weights = [position for position, of in read.items() if position is not None and of in WEIGHTS]
        assert weights, name
        return frozenset().union(*(strategy.operands[position].axes for position in weights))

    return [
        {space.names[node]: {axes(node, place) for place in places} for node, places in allowed.items()}
        for allowed in stored_alike(space)
    ]


WEIGHTS = ("weight", "bias", "scale")
STORED = [frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")]


def test_every_set_of_axes_is_listed() -> None:
    """A scale cannot be split; what is no parameter may be as it likes."""
    found = axes_of(space_of({"a": 2, "b": 2}))
    weights = [{"weight": {axes}, "bias": {axes}, "scale": {frozenset()}} for axes in STORED]
    alone = [one for one in found if len(one) == 3]
    assert alone == [weights[0], weights[-1]]
    assert [{name: one[name] for name in weights[0]} for one in found if len(one) > 3] == weights


def test_readers_read_weights_whole() -> None:
    """The product, the sum, the scaling, and the backward of the scaling."""
    readers = [one for one in axes_of(space_of({"a": 2, "b": 2})) if len(one) > 3]
    for one in readers:
        read = {name: axes for name, axes in one.items() if name not in WEIGHTS}
        assert set(read) == {"contract", "add", "mul", "mul_1"}
        assert set.union(*read.values()) == {frozenset()}


def test_of_many_axes_there_are_two_ways() -> None:
    found = axes_of(space_of(dict.fromkeys("abcd", 2)))
    assert [one["weight"] for one in found] == [{frozenset()}] * 2 + [{frozenset("abcd")}] * 2


def test_where_no_weight_can_be_split_there_is_nothing_to_look_for() -> None:
    assert axes_of(space_of({"a": 1})) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_of_what_is_left_is_one_of_the_whole(seed: int) -> None:
    """Against all choices."""
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    allowed = {
        node: sorted(
            int(i) for i in rng.choice(len(costs), int(rng.integers(1, len(costs) + 1)), replace=False)
        )
        for node, costs in enumerate(problem.node_costs)
        if rng.random() < 0.5
    }
    left = restricted(problem, allowed)
    truth = brute_force(left)
    options = [allowed.get(node, range(len(costs))) for node, costs in enumerate(problem.node_costs)]
    within = [choice for choice in itertools.product(*options) if problem.fits(choice)]
    assert truth.cost == pytest.approx(min(map(problem.cost, within), default=np.inf))
    if np.isfinite(truth.cost):
        found = solve(left).choice
        choice = places_in(allowed, found)
        assert places_of(allowed, choice) == found
        assert problem.cost(choice) == pytest.approx(truth.cost) and choice in within


def test_layers_that_share_their_arrays_share_what_is_left_of_them() -> None:
    problem = chain(12, 4, 0, skip=3)
    allowed = {node: [0, 2] for node in range(0, 12, 2)} | {node: [1, 2, 3] for node in range(1, 12, 2)}
    left = restricted(problem, allowed)
    for whole, part in ((problem.node_costs, left.node_costs), (problem.edge_costs, left.edge_costs)):
        shapes = [(id(a), b.shape) for a, b in zip(whole, part, strict=True)]
        # Of equal arrays, equal rows and columns are kept wherever the shapes are equal.
        assert len({id(array) for array in part}) == len(set(shapes)) < len(part)
