"""Fold repeated layers: of a run of identical ones only the first is drawn, and says how many."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

import networkx as nx

SHORTEST_RUN = 3


def fold_repeats(graph: nx.DiGraph) -> nx.DiGraph:
    """Replace every run of at least `SHORTEST_RUN` identical layers by its first.

        layers.0, layers.1, ..., layers.31          ->  layers.0, layers.1-30, layers.31

    Layers are modules that differ in one number of their path. Two are identical if they hold the
    same ops in the same order with the same layouts and the same collectives. The nodes of the
    layer that is kept get `repeat`, the length of the run, and a module that names the whole run.
    Values passed from one layer of a run to another are not drawn. A run whose folding would make
    the graph cyclic is left as it is.
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
    ordered = sorted(layers, key=lambda path: (path[:-1], int(path[-1])))
    signatures = {path: _signature(graph, layers[path]) for path in ordered}
    neighbours = itertools.groupby(enumerate(ordered), key=lambda item: _run_key(*item, signatures))
    for _, members in neighbours:
        run = [layers[path] for _, path in members]
        if len(run) >= SHORTEST_RUN:
            yield run


def _run_key(
    position: int, path: tuple[str, ...], signatures: dict[tuple[str, ...], Hashable]
) -> tuple[Hashable, ...]:
    # Consecutive numbers have a constant difference to their position.
    return path[:-1], int(path[-1]) - position, signatures[path]


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
    folded = nx.DiGraph(**graph.graph)
    for node, data in graph.nodes(data=True):
        if node not in kept:
            folded.add_node(node, **data)
        elif kept[node] == node:
            path = _path(graph, node)
            path[depth] = "-".join(names)
            repeat = len(run) * data.get("repeat", 1)
            folded.add_node(node, **{**data, "module": ".".join(path), "repeat": repeat})
    for source, reader, data in graph.edges(data=True):
        inside = source in layer_of and reader in layer_of
        if inside and layer_of[source] != layer_of[reader]:
            continue
        ends = kept.get(source, source), kept.get(reader, reader)
        if not folded.has_edge(*ends):
            folded.add_edge(*ends, **data)
    return folded
