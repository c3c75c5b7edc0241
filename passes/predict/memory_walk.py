"""The bytes alive at every step of a rank's program: what it holds, of which kind, and when that is freed.

A program frees a value after its last reader (what is fused reads it as long as `last_runs` says); views share what
they view, and some ops the memory of another (`passes.predict.step_events`). What the forward saves lives until the
backward has read it, gradients until the update, parameters and the optimizer's states always. What a collective reads
lives until its wait, as it is in flight. Not counted: workspaces of kernels, but those in `passes.predict.workspaces`,
and what an allocator keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from torch import fx

from cost_model.memory import ADAMW, Optimizer
from passes.ir.joint import GraphInput, node_value, node_values, result_index
from passes.ir.op_traits import is_collective, is_view
from passes.ir.torch_dispatch import input_nodes
from passes.lower.phases import Backward, Phases
from passes.plan.describe import short_dtype
from passes.predict.prediction import START, Kind, LiveValue, MemoryWalk, kind_of_op, made_by
from passes.predict.step_events import in_place
from passes.predict.workspaces import NONE, Workspaces
from passes.strategies.traffic import OpTraffic, TrafficModel, last_runs

Flows = Mapping[fx.Node, OpTraffic]


def memory_walk(
    phases: Phases,
    traffic: TrafficModel,
    optimizer: Optimizer = ADAMW,
    workspaces: Workspaces = NONE,
    flows: Flows | None = None,
) -> MemoryWalk:
    """A step before the first op, and one per op of the forward and of the backward, in the order in which they run.

    phases: with meta "phase" where each op runs (`passes.predict.step_events` writes it). traffic: which values are
    stored. optimizer: its states of every parameter that gets a gradient. workspaces: of ops and collectives.
    flows: what `traffic` says of some ops, where that is known.
    """
    steps, values = program_values(phases, traffic, 1, workspaces=workspaces, flows=flows)
    ends = () if phases.backward is None else phases.backward.gradients
    # A part of a step says nothing of its inputs, which another part has made.
    placeholders = zip(placeholders_of(phases.forward), phases.inputs, strict=bool(phases.inputs))
    held = held_values(placeholders, {end.index for end in ends}, optimizer, len(steps))
    return MemoryWalk((START, *steps), (*held, *values))


def program_values(
    phases: Phases,
    traffic: TrafficModel,
    first: int,
    phase: str = "forward",
    *,
    workspaces: Workspaces = NONE,
    flows: Flows | None = None,
) -> tuple[list[tuple[str, str]], list[LiveValue]]:
    """Steps of a program that begins with step `first`, and what is alive in them, but for what the caller holds.

    phase: which its forward is said to be.
    """
    forward = _Phase(phases.forward, traffic, first, {}, frozenset(), workspaces, flows)
    steps = [(phase, node.name) for node in forward.ops]
    if phases.backward is None:
        return steps, list(forward.values({}))
    saved, tangents = _saved(phases, phases.backward), _tangents(phases.backward)
    outside = saved | {node: (node, 0) for node, _ in tangents}
    names = {node.name for node in forward.ops}
    backward = _Phase(phases.backward.module, traffic, first + len(steps), outside, names, workspaces, flows)
    steps += [("backward", node.name) for node in backward.ops]
    kept: dict[Owner, tuple[Kind, str]] = dict.fromkeys(saved.values(), ("kept", ""))
    given: Told = {(node, 0): ("inputs", name) for node, name in tangents}
    told = {**kept, **given, **dict(_gradients(phases.backward))}
    return steps, [*forward.values(kept), *backward.values(told)]


Owner = tuple[fx.Node, int]
"""Whose storage a value is: the op's or placeholder's, and which of its results."""
Told = Mapping[Owner, tuple[Kind, str]]
"""What is known of some values but not by the op that makes them: kind, and name or ""."""


def _owner(node: fx.Node) -> Owner:
    """Of a view what it views, of a wait its collective."""
    while True:
        producer, index = result_index(node)
        if producer is not node:
            return producer, index
        if is_view(node) or (is_collective(node) and any(is_collective(n) for n in input_nodes(node))):
            node = node.all_input_nodes[0]
        else:
            return node, 0


@dataclass
class _Phase:
    """What is alive in one graph, whose first op is step `first` of the program.

    outside: placeholder -> whose storage it is, of what lives from the begin of the phase on until it was read; other
    placeholders the caller holds. forward: names of ops that have run already.
    """

    module: fx.GraphModule
    traffic: TrafficModel
    first: int
    outside: Mapping[fx.Node, Owner]
    forward: Set[str]
    workspaces: Workspaces
    flows: Flows | None

    def __post_init__(self) -> None:
        module, traffic, first, known = self.module, self.traffic, self.first, self.flows or {}
        self.ops = [node for node in module.graph.nodes if node.op == "call_function"]
        self._place = {node: step for step, node in enumerate(self.ops, first)}
        self._flows = {node: known.get(node) or traffic(node) for node in self.ops}
        self._owners: dict[fx.Node, Owner] = {}
        self._end = first + len(self.ops) - 1
        self._shared = in_place(self.ops, traffic)
        reduced = self._shared.reduced
        self._last: dict[Owner, int] = {}
        runs = last_runs(self._place, self._flows.__getitem__)
        for step, node in enumerate(self.ops, first):
            for operand in input_nodes(node):
                self._read(operand, step - 1 if node in reduced else step, runs[node])
                # A wait: what was sent may be freed now.
                if is_collective(operand) and operand not in reduced:
                    for sent in input_nodes(operand):
                        self._read(sent, step)
        for node in module.graph.output_node().all_input_nodes:
            self._read(node, self._end)

    def values(self, told: Told) -> Iterator[LiveValue]:
        for owner in dict.fromkeys(self.outside.values()):
            kind, name = told[owner]
            yield live_value(owner, kind, name, self.first, self._last.get(owner, self._end))
        for step, node in enumerate(self.ops, self.first):
            if self._stored(node):
                begin = self._place[self._shared.begins.get(node, node)]
                for owner in _storages(node):
                    kind, name = told.get(owner) or (kind_of_op(node, self.forward), "")
                    yield live_value(owner, kind, name, begin, self._last.get(owner, step))
            yield from self._beside(node, step)

    def _beside(self, node: fx.Node, step: int) -> Iterator[LiveValue]:
        """What an op has for itself while it runs, and a collective until its wait."""
        found: list[tuple[Kind, int, int]] = [("working", self.workspaces.of_op(node), step)]
        waits = [self._place[user] for user in node.users if is_collective(user)]
        if is_collective(node) and waits:
            found.append(("moved", self.workspaces.of_message(node), max(waits)))
        for kind, nbytes, last in found:
            if nbytes:
                yield LiveValue(kind, *made_by(node), node.name, "u8", (nbytes,), nbytes, step, last)

    def _stored(self, node: fx.Node) -> bool:
        own = self._owner(node)[0] is node and node not in self._shared.written
        return own and (is_collective(node) or self._flows[node].writes)

    def _owner(self, node: fx.Node) -> Owner:
        found = self._owners.get(node)
        if found is None:
            found = self._owners[node] = _owner(node)
        return found

    def _read(self, node: fx.Node, step: int, runs: int = 0) -> None:
        """runs: until when, of what the phase was given: compilers write results over what it made itself."""
        owner = self._owner(node)
        if owner[0] in self.outside:
            owner, step = self.outside[owner[0]], max(step, runs)
        self._last[owner] = max(self._last.get(owner, step), step)


def _storages(node: fx.Node) -> Iterator[Owner]:
    return ((node, index) for index, value in enumerate(node_values(node)) if value is not None)


def held_values(
    placeholders: Iterable[tuple[fx.Node, GraphInput]], trained: Set[int], optimizer: Optimizer, last: int
) -> Iterator[LiveValue]:
    """To the end, what the caller holds: parameters, the optimizer's states of those at the places `trained`, and other
    inputs."""
    for i, (node, spec) in enumerate(placeholders):
        if spec.kind == "tangent":
            continue
        kind: Kind = "parameters" if spec.kind == "param" else "inputs"
        yield live_value((node, 0), kind, spec.name, 0, last)
        if kind == "parameters" and i in trained:
            yield from _states(node, spec.name, optimizer, last)


def _states(node: fx.Node, name: str, optimizer: Optimizer, last: int) -> Iterator[LiveValue]:
    """In the parameter's dtype, and besides."""
    for _ in range(optimizer.states):
        yield live_value((node, 0), "optimizer", name, 0, last)
    value = node_value(node)
    more = value.numel() * optimizer.element_nbytes
    if more:
        yield LiveValue("optimizer", name, "", node.name, "f32", (more // 4,), more, 0, last)


def _saved(phases: Phases, backward: Backward) -> dict[fx.Node, Owner]:
    """Placeholder of the backward -> what the forward made for it. None that are the caller's."""
    results = phases.forward.graph.output_node().args[0]
    places = placeholders_of(backward.module)[len(backward.passed) :]
    owners = (_owner(results[position]) for position in backward.saved)  # type: ignore[index, arg-type]
    return {
        place: owner for place, owner in zip(places, owners, strict=False) if owner[0].op != "placeholder"
    }


def _tangents(backward: Backward) -> list[tuple[fx.Node, str]]:
    places = placeholders_of(backward.module)[len(backward.passed) + len(backward.saved) :]
    return [(place, spec.name) for place, spec in zip(places, backward.tangents, strict=True)]


def _gradients(backward: Backward) -> Iterator[tuple[Owner, tuple[Kind, str]]]:
    results = backward.module.graph.output_node().args[0]
    for spec, node in zip(backward.gradients, results, strict=True):  # type: ignore[arg-type]
        if isinstance(node, fx.Node):
            yield _owner(node), ("gradients", spec.name)


def live_value(owner: Owner, kind: Kind, name: str, first: int, last: int) -> LiveValue:
    """name: what is told of it; "": as the op that makes it says."""
    node, index = owner
    made = made_by(node) if node.op == "call_function" else ("", "")
    value = node_values(node)[index]
    assert value is not None
    dtype, shape = short_dtype(value.dtype), tuple(value.shape)
    nbytes = value.numel() * value.element_size()
    said = (name, "") if name else made
    return LiveValue(kind, *said, node.name, dtype, shape, nbytes, first, last)


def placeholders_of(module: fx.GraphModule) -> list[fx.Node]:
    """In their order."""
    return list(module.graph.find_nodes(op="placeholder"))
