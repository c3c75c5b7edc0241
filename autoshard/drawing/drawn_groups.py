"""What a drawing shows of a plan's graph: repeated layers folded, ops grouped by module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx

from autoshard.plan.plan_memory import runs


def fold_repeats(graph: nx.DiGraph) -> nx.DiGraph:
    """Replace every run of at least `SHORTEST_RUN` identical layers by its first.

        layers.0, layers.1, ..., layers.31          ->  layers.0, layers.1-30, layers.31

    Layers are modules that differ in one number of their path. Two are identical if they hold the
    same ops in the same order with the same layouts and the same collectives. The nodes of the
    layer that is kept get `repeat`, the length of the run, and a module that names the whole run.
    Values passed from one layer of a run to another are not drawn. A run whose folding would make
    the graph cyclic is left as it is. `twins` of a node are all that it stands for, layer by layer.
    """
    for depth in range(1 + max((len(_path(graph, node)) for node in graph), default=0)):
        for run in _runs(graph, depth):
            folded = _fold(graph, run, depth)
            graph = folded if nx.is_directed_acyclic_graph(folded) else graph
    return graph


def _path(graph: nx.DiGraph, node: str) -> list[str]:
    return str(graph.nodes[node].get("module", "")).split(".")


def _runs(graph: nx.DiGraph, depth: int) -> Iterator[list[list[str]]]:
    """Runs of identical layers whose number stands at `depth` of the path; a layer is its nodes."""
    layers: dict[tuple[str, ...], list[str]] = {}
    for node in graph:
        path = _path(graph, node)
        if len(path) > depth and path[depth].isdecimal():
            layers.setdefault(tuple(path[: depth + 1]), []).append(node)
    alike: dict[Hashable, dict[int, list[str]]] = {}
    for path, nodes in layers.items():
        alike.setdefault((path[:-1], _signature(graph, nodes)), {})[int(path[-1])] = nodes
    for numbered in alike.values():
        for first, last in runs(sorted(numbered)):
            if last - first >= 2:
                yield [numbered[number] for number in range(first, last + 1)]


def _signature(graph: nx.DiGraph, nodes: Sequence[str]) -> Hashable:
    place = {node: index for index, node in enumerate(nodes)}
    return tuple(
        (
            data["phase"],
            data["kind"],
            data["layout"],
            data["label"] if data["kind"] == "op" else data["label"].rpartition(".")[2],
            tuple(
                (place.get(source, -1), edge["collective"], edge["layout"])
                for source, _, edge in graph.in_edges(node, data=True)
            ),
        )
        for node, data in ((node, graph.nodes[node]) for node in nodes)
    )


def _fold(graph: nx.DiGraph, run: list[list[str]], depth: int) -> nx.DiGraph:
    kept = {twin: first for layer in run for first, twin in zip(run[0], layer, strict=True)}
    layer_of = {node: index for index, layer in enumerate(run) for node in layer}
    names = [_path(graph, layer[0])[depth] for layer in (run[0], run[-1])]
    twins: dict[str, list[str]] = {first: [] for first in run[0]}
    for twin, first in kept.items():
        twins[first] += graph.nodes[twin].get("twins", [twin])
    folded = nx.DiGraph(**graph.graph)
    for node, data in graph.nodes(data=True):
        if node not in kept:
            folded.add_node(node, **data)
        elif kept[node] == node:
            path = _path(graph, node)
            path[depth] = "-".join(names)
            repeat = len(run) * data.get("repeat", 1)
            more = {"module": ".".join(path), "repeat": repeat, "twins": twins[node]}
            folded.add_node(node, **{**data, **more})
    for source, reader, data in graph.edges(data=True):
        inside = source in layer_of and reader in layer_of
        if inside and layer_of[source] != layer_of[reader]:
            continue
        ends = kept.get(source, source), kept.get(reader, reader)
        if not folded.has_edge(*ends):
            folded.add_edge(*ends, **data)
    return folded


# Placeholders drawn as boxes of their own, all tangents as one; the others are lines in the box of their first reader.
OWN_BOX = frozenset({"input", "tangent"})
TANGENTS = "gradients of the outputs"  # key of their group: no module's path has spaces


@dataclass
class Group:
    """One box. key: what forward and backward of a module have in common; members: ops in order;
    holds: parameters and other placeholders that a member is the first to read."""

    index: int
    key: str
    phase: str
    members: list[str] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Grouping:
    """groups by index; `of` says which group a node is in. The groups form an acyclic graph."""

    groups: list[Group]
    of: dict[str, int]

    def edges(self, graph: nx.DiGraph) -> list[tuple[int, int]]:
        """(from, to) of groups between which a value passes, without repeats."""
        pairs = (
            (self.of[source], self.of[reader])
            for source, reader in graph.edges
            if source in self.of and reader in self.of
        )
        return list(dict.fromkeys((a, b) for a, b in pairs if a != b))


def group_by_module(graph: nx.DiGraph, most_ops: int = 48, most_groups: int = 200) -> Grouping:
    """One group per op if there are at most `most_ops`; else per module, at the greatest depth of
    module paths that gives at most `most_groups` (or depth 1, whatever it gives)."""
    place = {node: index for index, node in enumerate(graph)}
    order = list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
    ops = [node for node in order if graph.nodes[node]["kind"] not in ("param", "buffer", "output")]
    if len(ops) <= most_ops:
        return _group(graph, order, lambda node: node)
    deepest = max(str(graph.nodes[node]["module"]).count(".") + 1 for node in order)
    grouping = _group(graph, order, _module_at(graph, deepest))
    for depth in range(deepest - 1, 0, -1):
        if len(grouping.groups) <= most_groups:
            break
        grouping = _group(graph, order, _module_at(graph, depth))
    return grouping


def _module_at(graph: nx.DiGraph, depth: int) -> Callable[[str], str]:
    return lambda node: ".".join(str(graph.nodes[node]["module"]).split(".")[:depth])


def _group(graph: nx.DiGraph, order: list[str], key_of: Callable[[str], str]) -> Grouping:
    """Walk the nodes in order; each joins the latest group of its key and phase unless that would
    make the groups cyclic, and then begins a new one."""
    builder = _Builder(graph)
    for node in order:
        data = graph.nodes[node]
        if data["kind"] == "tangent":
            builder.place(node, TANGENTS, data["phase"])
        elif data["kind"] in OWN_BOX:
            builder.open(node, data["label"], data["phase"])
        elif data["kind"] == "output" or not (graph.pred[node] or data["kind"] == "op"):
            continue  # drawn inside the boxes that it is read or computed in
        else:
            builder.place(node, key_of(node), data["phase"])
    for node in order:
        if node not in builder.of and graph.nodes[node]["kind"] != "output":
            readers = [builder.of[reader] for reader in graph.succ[node] if reader in builder.of]
            if readers:
                builder.groups[min(readers)].holds.append(node)
    return Grouping(builder.groups, builder.of)


class _Builder:
    """Groups under construction, with the set of each one's ancestors as a bit mask."""

    def __init__(self, graph: nx.DiGraph) -> None:
        self.graph = graph
        self.groups: list[Group] = []
        self.of: dict[str, int] = {}
        self._above: list[int] = []
        self._latest: dict[tuple[str, str], int] = {}

    def open(self, node: str, key: str, phase: str) -> None:
        index = len(self.groups)
        self.groups.append(Group(index, key, phase, [node]))
        self._above.append(0)
        self.of[node] = index

    def place(self, node: str, key: str, phase: str) -> None:
        sources = {self.of[source] for source in self.graph.pred[node] if source in self.of}
        index = self._latest.get((key, phase))
        # Joining closes a cycle exactly if a source outside the group is below the group.
        if index is None or any(s != index and self._above[s] >> index & 1 for s in sources):
            self.open(node, key, phase)
            index = self._latest[key, phase] = self.of[node]
        else:
            self.groups[index].members.append(node)
            self.of[node] = index
        self._add_above(index, sources - {index})

    def _add_above(self, index: int, sources: set[int]) -> None:
        new = 0
        for source in sources:
            new |= self._above[source] | 1 << source
        if new & ~self._above[index]:
            self._above[index] |= new
            for other, above in enumerate(self._above):
                if above >> index & 1:
                    self._above[other] |= self._above[index]
