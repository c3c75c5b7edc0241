"""One rank's forward or backward as events of a timeline: priced kernels, collectives and waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cost_model.groups import group_ranks, group_shape
from cost_model.timeline import Event
from passes.compile.bind_device import written_into
from passes.compile.fuse_eager import reduced_in_place
from passes.ir.joint import node_value
from passes.ir.op_traits import is_collective, is_view, storage_root
from passes.ops.collective_ops import exchange_rows
from passes.strategies.prices import Prices, local_seconds
from passes.strategies.traffic import OpTraffic, TrafficModel, eager_traffic

Axes = tuple[str, ...]
AxesOf = Callable[[str], Axes]
"""Name of a process group -> the mesh axes it is over."""

c10d = torch.ops._c10d_functional

COLLECTIVE_KINDS: Mapping[Any, str] = {
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_reduce.default: "all_reduce",
    c10d.all_to_all_single.default: "all_to_all",
    exchange_rows: "all_to_all",
}
"""Functional collective -> its name among the prices."""


@dataclass(frozen=True)
class PredictedCollective:
    """node: its name in the phase's graph; serves: the parameter or module it is for. nbytes: as
    `cost_model.collectives` counts. seconds: its price, alone. start, end: seconds into the step. exposed:
    by how much the step is longer for it. times: how often it runs, once for each piece of a batch; all else is of the
    first time. turn: as it is issued."""

    phase: str
    node: str
    serves: str
    kind: str
    axes: Axes
    nbytes: int
    seconds: float
    start: float = 0.0
    exposed: float = 0.0
    end: float = 0.0
    times: int = 1
    turn: tuple[int, ...] | None = None


@dataclass
class StepEvents:
    """Collects the events of a step, phase after phase, in the order in which the rank issues them.

    A kernel follows the one before it. A collective starts after all kernels issued before it: its
    operand is one of their results, and communication libraries wait for what the stream holds. A wait
    holds up the kernels behind it until its collective has ended. The copies that put a collective's
    parts in order are in its price; padding, cutting and casting for it are kernels like any other.

    Ranks come to a collective the later the longer they computed since they last met (`Prices.lateness`). Who waits
    for it stands for as long, but for what it computes itself in between.
    """

    prices: Prices
    axes_of: AxesOf
    events: list[Event] = field(default_factory=list)
    collectives: dict[int, PredictedCollective] = field(default_factory=dict)
    """By their positions among the events, without their times."""
    ends: list[tuple[str, int]] = field(default_factory=list)
    """(phase, number of events when it was complete)."""
    late: dict[int, int] = field(default_factory=dict)
    """Position of a collective -> of the wait for it, if that stands for late ranks: a computing event of as long."""
    kernels: list[tuple[int, str, str]] = field(default_factory=list)
    """(position, phase, node of the global graph or "") of what takes time."""
    flows: dict[fx.Node, OpTraffic] = field(default_factory=dict)
    """Of the ops priced."""
    _last_kernel: tuple[int, ...] = ()
    _computed: float = 0.0
    _met: float = 0.0
    """Seconds of computing in all, and of them when ranks last met: as a collective that was waited for was issued."""
    _issued_at: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Position of a collective -> seconds of computing when it was issued, and the ranks of its group."""

    def add_graph(self, module: fx.GraphModule, phase: str) -> None:
        """All of `module`, which runs in the order of its nodes.

        Its nodes' meta "phase" becomes `phase`, where they run: it decides what is stored for another
        program, and an op that the backward runs again still says "forward".
        """
        nodes = run_in_phase(module, phase)
        issued: dict[fx.Node, int] = {}
        paid = copies_of_collectives(module.graph)
        for node in nodes:
            if is_collective(node) and node.target in COLLECTIVE_KINDS:
                issued[node] = self._collective(node, phase)
            elif node.target is c10d.wait_tensor.default:
                (started,) = node.all_input_nodes
                self._wait(node.name, issued.get(started))
            elif node not in paid:
                flow = self.flows[node] = self.prices.traffic(node)
                seconds = local_seconds(node, flow, self.prices.compute)
                seconds *= copied_share(node, self.prices.traffic)
                if seconds > 0.0:
                    self._computed += seconds
                    self.kernels.append((len(self.events), phase, node.meta.get("of", "")))
                    self._kernel(node.name, seconds, ())
        self.ends.append((phase, len(self.events)))

    def add_kernel(self, name: str, seconds: float, phase: str) -> None:
        """A phase of one kernel."""
        self.kernels.append((len(self.events), phase, ""))
        self._kernel(name, seconds, ())
        self.ends.append((phase, len(self.events)))

    def _wait(self, name: str, collective: int | None) -> None:
        if collective is None:
            return self._kernel(name, 0.0, ())
        late = self._late_seconds(collective)
        if late > 0.0:
            self.late[collective] = len(self.events)
        self._kernel(name, late, (collective,))

    def _late_seconds(self, collective: int) -> float:
        """Seconds for which the wait for it stands as others come late."""
        lateness, (issued, ranks) = self.prices.lateness, self._issued_at[collective]
        if lateness is None:
            return 0.0
        late = lateness.after(issued - self._met, ranks) - (self._computed - issued)
        self._met = max(self._met, issued)
        return max(0.0, late)

    def _kernel(self, name: str, seconds: float, after: tuple[int, ...]) -> None:
        self._last_kernel = (len(self.events),)
        self.events.append(Event(name, "compute", seconds, after))

    def _collective(self, node: fx.Node, phase: str) -> int:
        axes = self.axes_of(str(node.args[-1]))
        kind, nbytes = collective_kind(node), collective_nbytes(node)
        if choice := node.meta.get("choice"):  # as it travels, which a program's own exchange does not know
            nbytes = choice.travelling(nbytes, group_ranks(group_shape(self.prices.mesh, axes)))
        seconds = self.prices.redistributor.collective_seconds(kind, axes, nbytes)
        serves = str(node.meta.get("serves", ""))
        self._issued_at[len(self.events)] = self._computed, self.prices.mesh.size(*axes)
        turn = node.meta.get("turn")
        collective = PredictedCollective(phase, node.name, serves, kind, axes, nbytes, seconds, turn=turn)
        self.collectives[len(self.events)] = collective
        hidden = self.prices.hidden_share(kind, axes)
        link = self.prices.redistributor.link(axes)
        self.events.append(Event(node.name, "comm", seconds, self._last_kernel, hidden, link))
        return len(self.events) - 1


def run_in_phase(module: fx.GraphModule, phase: str) -> list[fx.Node]:
    """The ops of a graph that runs in that phase, in whatever they were written: their meta "phase" says so then."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    for node in nodes:
        node.meta["phase"] = phase
    return nodes


_REORDERED = ("all_gather", "reduce_scatter", "all_to_all")


def copies_of_collectives(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Copies that are part of a collective's price (`cost_model.measure.collective_work` times them with
    it) -> that collective: those that lowering emits to lay out the parts sent, or those received."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.clone.default and "turn" in node.meta:
            collective = _received(node) or _sent(node)
            if collective is not None and COLLECTIVE_KINDS[collective.target] in _REORDERED:
                found[node] = collective
    return found


def _received(copy: fx.Node) -> fx.Node | None:
    """The collective whose result, looked at through views, is copied."""
    root = storage_root(copy.all_input_nodes[0])
    if root.target is not c10d.wait_tensor.default or root.meta.get("turn") != copy.meta["turn"]:
        return None
    started = root.all_input_nodes[0]
    return started if started.target in COLLECTIVE_KINDS else None


def _sent(copy: fx.Node) -> fx.Node | None:
    """The collective whose operand, looked at through views, the copy is."""
    node = copy
    while len(node.users) == 1:
        (node,) = node.users
        if is_collective(node) and node.target in COLLECTIVE_KINDS:
            return node if node.meta.get("turn") == copy.meta["turn"] else None
        if not is_view(node):
            return None
    return None


def collective_kind(node: fx.Node) -> str:
    """By which the collective that `node` starts is priced: messages of any sizes are exchanged flat."""
    kind = COLLECTIVE_KINDS[node.target]
    flat = node.all_input_nodes[0].meta["val"].ndim == 1
    return "point_to_point" if kind == "all_to_all" and flat else kind


def collective_nbytes(node: fx.Node) -> int:
    """Bytes that price the collective that `node` starts: its larger end, of this rank."""
    operand = node.all_input_nodes[0]
    values = (operand.meta["val"], node.meta["val"])
    return max(value.numel() * value.element_size() for value in values)


@dataclass(frozen=True)
class InPlace:
    """written: ops whose results are parts of a bucket from the start. begins: bucket -> the first of them, for which
    it is made. reduced: collectives whose result takes their operand's memory."""

    written: Set[fx.Node] = frozenset()
    begins: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    reduced: Set[fx.Node] = frozenset()


def in_place(ops: Sequence[fx.Node], traffic: TrafficModel) -> InPlace:
    """Of a graph's ops in their order. A compiler's own plans of memory are not known."""
    if traffic is not eager_traffic:
        return InPlace()
    place = {node: i for i, node in enumerate(ops)}
    buckets = {node: written.values() for node in ops if (written := written_into(node))}
    return InPlace(
        frozenset(made for written in buckets.values() for made in written),
        {bucket: min(written, key=place.__getitem__) for bucket, written in buckets.items()},
        frozenset(node for node in ops if reduced_in_place(node)),
    )


def copied_share(node: fx.Node, traffic: TrafficModel) -> float:
    """Of what `node` moves if it fills a bucket: what is not computed there. Of other ops 1."""
    if traffic is not eager_traffic:
        return 1.0
    written = sum(node_value(made).numel() for made in written_into(node).values())
    return 1.0 - written / node_value(node).numel() if written else 1.0
