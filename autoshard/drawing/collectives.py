"""The collectives on the edges of a plan's graph: their kinds, colours and totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import networkx as nx

__all__ = ["Total", "colour", "kind_of", "split_collectives", "totals"]

# Dark enough for white text on them, and told apart in the common forms of colour blindness.
COLOURS: Mapping[str, str] = MappingProxyType(
    {"all_gather": "#2563eb", "reduce_scatter": "#0f8a5f", "all_reduce": "#d92d20", "all_to_all": "#8b35d6"}
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


def split_collectives(edge: Mapping[str, Any]) -> list[str]:
    """["all_gather[dp](dim=0)", ...] of an edge's `collective`; [] if it has none."""
    return [text for text in str(edge.get("collective", "")).split("; ") if text]


def kind_of(text: str) -> str:
    """ "all_gather" of "all_gather[dp](dim=0)"."""
    return text.partition("[")[0].partition("(")[0]


def colour(text: str) -> str:
    return COLOURS.get(kind_of(text), OTHER)


def totals(graph: nx.DiGraph) -> list[Total]:
    """One total per (kind, phase), forward first. An edge's bytes and seconds count for its first kind.

    What brings a gradient to the graph's end belongs to the phase that computed it.
    """
    found: dict[tuple[str, str], Total] = {}
    for source, reader, edge in graph.edges(data=True):
        texts = split_collectives(edge)
        end = source if graph.nodes[reader].get("kind") == "output" else reader
        phase = graph.nodes[end]["phase"]
        for position, text in enumerate(texts):
            key = (phase, kind_of(text))
            old = found.get(key, Total(key[1], phase, 0, 0, 0.0))
            nbytes, seconds = (edge["nbytes"], edge["seconds"]) if position == 0 else (0, 0.0)
            found[key] = Total(old.kind, phase, old.count + 1, old.nbytes + nbytes, old.seconds + seconds)
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != "forward", key[1]))]
