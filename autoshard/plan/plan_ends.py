"""What is laid out at the ends of a plan: pinned parameters, a call's tensors, pieces of other sizes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Placement

from autoshard.plan.judged import Judged
from cost_model.deadline import Deadline
from cost_model.errors import ShardingError, reject
from cost_model.mesh import MeshSpec
from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment, Layout
from passes.layout.placements import placements_to_layout
from passes.micro_batches.cut_batch import first_of_each_size, layouts_like
from passes.plan.decide import decide
from passes.plan.planned_graph import NodeRecord
from passes.search.find import Sought, find_assignment
from passes.search.search_terms import Boundary
from passes.states.compute_again import compute_again, copies_in

Constraints = Mapping[str, Sequence[Placement] | Mapping[str, Placement]]
"""Parameter name or shell pattern -> one placement per mesh axis, or {axis name: placement}."""


def resolve_pins(
    constraints: Constraints | None, parameters: Mapping[str, torch.Tensor], mesh: MeshSpec
) -> dict[str, Layout]:
    """Layout by parameter name for every parameter that a pattern of `constraints` matches.

    A tied parameter may be pinned by any of its names; `parameters` maps every name to its tensor.
    Later patterns override earlier ones. Raises ShardingError for a pattern that matches nothing,
    an axis the mesh does not have, a dim that does not exist, or a Partial pin.
    """
    pins: dict[str, Layout] = {}
    if constraints is not None and not isinstance(constraints, Mapping):
        raise reject("constraints", constraints, "{'layers.*.weight': [Shard(0)]}, or None")
    for pattern, placements in (constraints or {}).items():
        if not isinstance(pattern, str):
            raise reject(
                "a name in constraints", pattern, "a parameter's name, or a pattern such as 'layers.*'"
            )
        matched = [name for name in parameters if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise ShardingError(_no_match(pattern, parameters))
        for name in matched:
            what = f"parameter {name}" + ("" if name == pattern else f" (constraints[{pattern!r}])")
            pins[name] = pinned_layout(placements, tuple(parameters[name].shape), mesh, what)
            if pins[name].partial:
                raise ShardingError(
                    f"{what} is pinned Partial; a parameter is split or replicated\n  try: Shard or Replicate()"
                )
    return pins


def pinned_layout(placements: Any, shape: tuple[int, ...], mesh: MeshSpec, what: str) -> Layout:
    """The layout that a pin says of a tensor of this shape, `what` in errors. ShardingError if it says none."""
    ordered = _by_axis(placements, mesh, what) if isinstance(placements, Mapping) else placements
    if not isinstance(ordered, (list, tuple)):
        raise reject(f"the pin of {what}", ordered, "one placement per mesh axis, such as [Shard(0)]")
    return placements_to_layout(ordered, shape, mesh, what=what)


def _by_axis(placements: Mapping[str, Placement], mesh: MeshSpec, what: str) -> list[Placement]:
    from torch.distributed.tensor import Replicate

    for axis in placements:
        if axis not in mesh.names:
            raise ShardingError(
                f"{what} is pinned on mesh axis {axis!r}, which the mesh does not have\n"
                f"  try: one of its axes, {', '.join(map(repr, mesh.names))}"
            )
    return [placements.get(axis, Replicate()) for axis in mesh.names]


def _no_match(pattern: str, parameters: Mapping[str, torch.Tensor]) -> str:
    import difflib

    close = difflib.get_close_matches(pattern, list(parameters), n=3, cutoff=0.3) or list(parameters)[:3]
    return (
        f"constraints[{pattern!r}] matches no parameter of the model\n"
        f"  close names: {', '.join(close)}\n"
        "  try: a name from model.named_parameters(), or a pattern such as 'layers.*.weight'"
    )


def parameter_shapes(captured: Captured) -> dict[str, torch.Tensor]:
    """Every parameter name, tied ones included, to a tensor of its shape."""
    return {name: node.meta["val"] for name, node in _by_every_name(captured.joint, captured)}


def by_first_name(pins: Mapping[str, Layout], captured: Captured) -> dict[str, Layout]:
    """Pins by the name the graph knows; ShardingError if two names of one tied parameter disagree."""
    first = {alias: name for name, aliases in captured.aliases.items() for alias in aliases}
    resolved: dict[str, Layout] = {}
    for name, layout in pins.items():
        known = first.get(name, name)
        if resolved.get(known, layout) != layout:
            raise ShardingError(
                f"{name} and {known} are one tied parameter, pinned in two ways\n  try: pin it by one name"
            )
        resolved[known] = layout
    return resolved


def parameter_layouts(joint: JointGraph, assignment: Assignment, captured: Captured) -> dict[str, Layout]:
    """By every name that a parameter has."""
    return {name: assignment[node.name].results[0] for name, node in _by_every_name(joint, captured)}


def _by_every_name(joint: JointGraph, captured: Captured) -> Iterator[tuple[str, fx.Node]]:
    for node, spec in joint.given:
        if spec.kind == "param":
            yield from ((name, node) for name in (spec.name, *captured.aliases.get(spec.name, ())))


def output_layouts(joint: JointGraph, assignment: Assignment) -> dict[int, Layout | None]:
    """None where an output is no tensor."""
    layouts = result_layouts(joint.results, assignment)
    ends = zip(joint.outputs, layouts, strict=True)
    return {spec.index: layout for spec, layout in ends if spec.kind == "output"}


def result_layouts(results: Iterable[fx.Node | None], assignment: Assignment) -> list[Layout | None]:
    """Of every result of a graph, by position."""
    ends = iter(assignment["output"].operands)
    return [None if result is None else next(ends) for result in results]


@dataclass(frozen=True)
class CallLayouts:
    """How a call's tensors are laid out: by position, the layout of inputs that are not global and
    of outputs that are not; None leaves an output to the search. free: outputs that are left to it even where they
    get no gradient. state: outputs that are new values of inputs, whose layout they have, by its position: the
    search's, where `inputs` says none."""

    inputs: Mapping[int, Layout]
    outputs: Mapping[int, Layout | None]
    free: frozenset[int] = frozenset()
    state: Mapping[int, int] = field(default_factory=dict)

    def settled(self, found: Mapping[int, Layout | None]) -> CallLayouts:
        """With the layouts that were found for what is free."""
        free = {i: layout for i, layout in found.items() if i in self.free}
        return replace(self, outputs={**self.outputs, **free}, free=frozenset())


def pieces_of_other_sizes(
    joint: JointGraph, judged: Judged, boundary: Callable[[JointGraph], Boundary], deadline: Deadline
) -> tuple[tuple[NodeRecord, ...], ...]:
    """Per size of pieces besides the first's, in order, the plan of the step with one of that size.

    judged: of the first, whose ops that run again do so in all. Raises InfeasibleError where its ends do not fit, and
    OutOfTime.
    """
    if not joint.others:
        return ()
    found: list[tuple[NodeRecord, ...]] = []
    again = copies_in(joint)
    graphs = joint, *joint.others
    for place in sorted(set(first_of_each_size(graphs)))[1:]:
        graph = compute_again(graphs[place], again)
        like = layouts_like(judged.planned.layouts, graph)
        asked = Sought(graph, judged.prices, boundary(graph), narrowing=like)
        held = find_assignment(asked, deadline).assignment
        found.append(decide(graph, held, judged.prices).nodes)
    return tuple(found)
