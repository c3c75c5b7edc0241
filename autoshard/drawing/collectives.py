"""The collectives on the edges of a plan's graph: their kinds, colours and totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import networkx as nx

__all__ = ["Moved", "Total", "collectives", "colour", "kind_of", "totals"]

# Dark enough for white text on them, and told apart in the common forms of colour blindness.
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "all_gather": "#2563eb",
        "reduce_scatter": "#0f8a5f",
        "all_reduce": "#d92d20",
        "all_to_all": "#8b35d6",
        "point_to_point": "#8b35d6",
    }
)
OTHER = "#b45309"


@dataclass(frozen=True)
class Total:
    """count collectives of one kind and phase; nbytes and seconds of all together."""

    kind: str
    phase: str
    count: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Moved:
    """One collective of an edge. text: "all_gather[dp](dim=0)"."""

    text: str
    nbytes: int
    seconds: float


def collectives(edge: Mapping[str, Any]) -> list[Moved]:
    """The collectives of an edge, in order. An edge without the prices of each counts all for the first."""
    texts = [text for text in str(edge.get("collective", "")).split("; ") if text]
    if not texts:
        return []
    rest = len(texts) - 1
    seconds = _numbers(edge.get("each_seconds")) or [float(edge["seconds"]), *[0.0] * rest]
    nbytes = _numbers(edge.get("each_nbytes")) or [float(edge["nbytes"]), *[0.0] * rest]
    return [Moved(t, round(n), s) for t, n, s in zip(texts, nbytes, seconds, strict=True)]


def _numbers(text: object) -> list[float]:
    return [float(part) for part in str(text or "").split("; ") if part]


def kind_of(text: str) -> str:
    """ "all_gather" of "all_gather[dp](dim=0)"."""
    return text.partition("[")[0].partition("(")[0]


def colour(text: str) -> str:
    return COLOURS.get(kind_of(text), OTHER)


def totals(graph: nx.DiGraph) -> list[Total]:
    """One total per (kind, phase), forward first.

    What brings a gradient to the graph's end belongs to the phase that computed it.
    """
    found: dict[tuple[str, str], Total] = {}
    for source, reader, edge in graph.edges(data=True):
        end = source if graph.nodes[reader].get("kind") == "output" else reader
        phase = graph.nodes[end]["phase"]
        for moved in collectives(edge):
            kind = kind_of(moved.text)
            old = found.get((phase, kind), Total(kind, phase, 0, 0, 0.0))
            new = Total(kind, phase, old.count + 1, old.nbytes + moved.nbytes, old.seconds + moved.seconds)
            found[phase, kind] = new
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != "forward", key[1]))]
