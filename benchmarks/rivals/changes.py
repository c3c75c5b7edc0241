"""Random changes of a plan, one layer at a time: a node gets another layout, the rest of its layer follows.

All other layers keep their layouts, the ways between them are chosen anew. How much the search believes to hide is
drawn as well.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment
from passes.search.agree import AWAITED
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import SearchSpace
from passes.search.step_kinds import PhaseOverlap
from passes.solver.problem import Infeasible
from passes.solver.solve import restricted

__all__ = ["Change", "changes", "choice_of", "layers_of"]

EFFICIENCIES = (0.0, 0.25, 0.5, 0.7, 1.0)
SECONDS = 10.0
"""For the search of one layer."""
TRIES = 10
"""Draws per change that is asked for, before there seem to be no more."""


@dataclass(frozen=True)
class Change:
    """layer: its path in the model; node: what got another layout, and which."""

    layer: str
    node: str
    layout: str
    assignment: Assignment

    def __str__(self) -> str:
        return f"{self.node} of {self.layer or 'the root'} as {self.layout}"


def changes(
    joint: JointGraph, space: SearchSpace, found: Assignment, count: int, seed: int = 0
) -> Iterator[Change]:
    """Up to `count` different plans, each of which differs from `found` in one layer."""
    generator = random.Random(seed)
    base = choice_of(space, found)
    layers = layers_of(joint, space)
    seen = {base}
    for _ in range(TRIES * count):
        layer = generator.choice(sorted(layers))
        drawn = _drawn(space, base, layers[layer], generator)
        if drawn is None:
            continue
        node, place = drawn
        choice = _followed(space, base, layers[layer], node, place, generator)
        if choice is not None and choice not in seen:
            seen.add(choice)
            text = ", ".join(map(str, space.strategies[node][place].results))
            yield Change(layer, space.names[node], text, space.assignment(choice))
            if len(seen) > count:
                return


def choice_of(space: SearchSpace, found: Assignment) -> tuple[int, ...]:
    """The strategies of `space` that `found` has."""
    slots = [slot for slot in space.output_slots if slot is not None]
    ends = dict(zip(slots, found["output"].operands, strict=True))
    choice: list[int] = []
    for node, (name, options) in enumerate(zip(space.names, space.strategies, strict=True)):
        if name in found:
            choice.append(options.index(found[name]))
        else:
            choice.append([option.results[0] for option in options].index(ends[node]))
    return tuple(choice)


def layers_of(joint: JointGraph, space: SearchSpace) -> dict[str, tuple[int, ...]]:
    """Path of a layer, `model.layers.3`, or of a module outside of layers -> its search nodes, parameters and backward
    included."""
    parameters = {
        node.name: spec.name.rpartition(".")[0] for node, spec in joint.given if spec.kind == "param"
    }
    paths = {
        node.name: node.meta.get("module", "") for node in joint.graph.nodes if node.op == "call_function"
    }
    found: defaultdict[str, list[int]] = defaultdict(list)
    for node, name in enumerate(space.names):
        path = parameters.get(name, paths.get(name))
        if path is not None:
            layer = re.match(r"(.*?\.\d+)(\.|$)", path)
            found[layer[1] if layer else path].append(node)
    return {layer: tuple(nodes) for layer, nodes in found.items()}


def _drawn(
    space: SearchSpace, base: Sequence[int], layer: Sequence[int], generator: random.Random
) -> tuple[int, int] | None:
    """A node of the layer, as often a parameter as an op, and another strategy that it can have."""
    parameters = [node for node in layer if not space.strategies[node][0].operands]
    ops = [node for node in layer if space.strategies[node][0].operands]
    node = generator.choice(generator.choice([group for group in (parameters, ops) if group]))
    costs = space.problem.node_costs[node]
    others = [place for place in range(len(costs)) if place != base[node] and np.isfinite(costs[place])]
    return (node, generator.choice(others)) if others else None


def _followed(
    space: SearchSpace,
    base: Sequence[int],
    layer: Sequence[int],
    node: int,
    place: int,
    generator: random.Random,
) -> tuple[int, ...] | None:
    """The cheapest choice with that strategy of `node` and all but the layer as in `base`; None if there is none."""
    efficiency = generator.choice(EFFICIENCIES)
    overlaps = PhaseOverlap(efficiency), PhaseOverlap(efficiency, generator.choice((0.0, AWAITED)))
    free = frozenset(layer) - {node}
    allowed = {i: (base[i],) for i in range(len(base)) if i not in free}
    allowed[node] = (place,)
    try:
        solution = solve_overlapped(
            restricted(space.problem, allowed), space.kinds(overlaps), time_limit=SECONDS
        )
    except Infeasible:
        return None
    return tuple(allowed[i][0] if i in allowed else chosen for i, chosen in enumerate(solution.choice))
