"""Small random graphs, and the least seconds of all their states and layouts by brute force."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import torch
from torch import nn

from autoshard import MeshSpec
from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture
from cost_model.profile import Profile
from passes.ir.joint import JointGraph
from passes.search.agree import first_overlaps
from passes.search.offered import LimitedBuilder
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import SearchSpace
from passes.search.search_terms import Boundary, boundary_of
from passes.solver.problem import Infeasible, Solution
from passes.states.compute_again import compute_again
from passes.states.offers import candidates, places
from passes.strategies.prices import Prices

__all__ = ["SmallGraph", "graph_of", "least_seconds", "small_graph", "within"]

MESH = MeshSpec({"dp": 2})


class RandomNet(nn.Module):
    """Two to four lines, each of which reads earlier values."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.width = rng.choice([4, 8, 16])
        self.lines = [(rng.choice("lgtms"), rng.random(), rng.random()) for _ in range(rng.randint(1, 4))]
        self.first = nn.Linear(self.width, self.width, bias=rng.random() < 0.5)
        self.weights = nn.ModuleList(nn.Linear(self.width, self.width, bias=False) for _ in self.lines)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.first(x)]
        for (kind, one, other), weight in zip(self.lines, self.weights, strict=True):
            a, b = made[int(one * len(made))], made[int(other * len(made))]
            if kind == "l":
                made.append(weight(a))
            elif kind == "g":
                made.append(nn.functional.gelu(a))
            elif kind == "t":
                made.append(torch.tanh(a))
            elif kind == "m":
                made.append(a * b)
            else:
                made.append(torch.softmax(a, -1))
        return (made[-1] * made[len(made) // 2]).sum()


@dataclass(frozen=True)
class SmallGraph:
    joint: JointGraph
    prices: Prices
    boundary: Boundary

    @property
    def names(self) -> list[str]:
        """Of the ops that may be computed again."""
        return [node.name for node in candidates(self.joint, places(self.joint))]

    def space(self, again: tuple[str, ...]) -> SearchSpace:
        graph = compute_again(self.joint, again)
        return LimitedBuilder(graph, self.prices, self.boundary).built(2**60)

    def spaces(self) -> list[SearchSpace]:
        """Of every subset of `names`."""
        counts = range(len(self.names) + 1)
        return [self.space(again) for count in counts for again in itertools.combinations(self.names, count)]


def graph_of(model: nn.Module, x: torch.Tensor) -> SmallGraph:
    joint = canonical_capture(model, (x,), {}).joint
    boundary = boundary_of(joint, parameters={}, inputs={}, outputs={})
    return SmallGraph(joint, prices_of(Profile.named("cpu"), MESH), boundary)


def small_graph(seed: int, most: int) -> SmallGraph:
    """The first random one of a seed with at most so many ops that may be computed again, and one at least."""
    rng = random.Random(seed)
    while True:
        torch.manual_seed(seed)
        model = RandomNet(rng).double()
        graph = graph_of(model, torch.randn(rng.choice([16, 48, 96]), model.width, dtype=torch.float64))
        if 1 <= len(graph.names) <= most:
            return graph


def within(space: SearchSpace, prices: Prices, room: int) -> Solution:
    """The best layouts of a graph within `room` bytes. Raises Infeasible."""
    kinds = space.kinds(first_overlaps(prices.overlap_efficiency))
    return solve_overlapped(replace(space.problem, limit=room), kinds)


def least_seconds(spaces: list[SearchSpace], prices: Prices, room: int) -> float:
    """Of all subsets, with the best layouts of each, within `room` bytes; inf if nothing fits."""
    found = math.inf
    for space in spaces:
        try:
            found = min(found, within(space, prices, room).cost)
        except Infeasible:
            continue
    return found
