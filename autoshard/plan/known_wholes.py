"""The fastest plans of graphs, memory aside, that are planned again within limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import fx

from autoshard.plan.judged import Judged
from autoshard.plan.plan_ends import result_layouts
from cost_model.mesh import MeshSpec
from passes.search.find import Found
from passes.search.graph_ends import Boundary
from passes.search.narrowing import Narrowing


@dataclass(frozen=True)
class WholeTask:
    """What the fastest plan, memory aside, is of, where profile and backend are one. How many pieces are in flight does
    not matter. graph: the same object. way: of collectives, by number."""

    graph: fx.Graph
    again: tuple[str, ...]
    mesh: MeshSpec
    boundary: Boundary
    narrowing: Narrowing
    way: int

    def is_met_by(self, other: WholeTask, found: Found) -> bool:
        """Whether this is `other` with more layouts fixed, and `found`, the plan of that, has them."""
        if replace(other, boundary=self.boundary) != self or other.boundary.tied != self.boundary.tied:
            return False
        own, others = self.boundary, other.boundary
        if not (
            others.inputs.items() <= own.inputs.items() and others.outputs.items() <= own.outputs.items()
        ):
            return False
        placeholders = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        outputs = result_layouts(self.graph.output_node().args[0], found.assignment)  # type: ignore[arg-type]
        return all(
            found.assignment[placeholders[i]].results[0] in layouts for i, layouts in own.inputs.items()
        ) and all(outputs[i] in layouts for i, layouts in own.outputs.items())


@dataclass
class KnownWholes:
    """Of one search of stages: a stage is planned as if memory were no matter, and again for each schedule whose pieces
    in flight do not fit beside it. Both begin with the same search."""

    _known: list[tuple[WholeTask, Found, dict[int, Judged]]] = field(default_factory=list)

    def found(self, task: WholeTask, judged: dict[int, Judged], search: Callable[[], Found]) -> Found:
        """The plan of `task`, searched once. judged: of plans, by `id` of their assignment; those of this one, and of
        its rivals, are added where they are missing."""
        for one, found, own in self._known:
            if one == task or task.is_met_by(one, found):
                judged.update(own)
                return found
        found = search()
        own = {id(one.assignment): judged[id(one.assignment)] for one in (found, *found.rivals)}
        self._known.append((task, found, own))
        return found
