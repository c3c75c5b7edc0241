"""The collectives on the edges of a plan's graph: their kinds, colours and totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import networkx as nx

from cost_model.memory import format_bytes
from passes.plan.graph_text import format_seconds

# Dark enough for white text on them, and told apart in the common forms of colour blindness.
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "all_gather": "#2563eb",
        "reduce_scatter": "#0f8a5f",
        "all_reduce": "#d92d20",
        "all_to_all": "#8b35d6",
        "halo_exchange": "#8b35d6",
        "halo_reduce": "#8b35d6",
        "reshard": "#8b35d6",
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
    """One collective of an edge. kind: "all_gather"; over axes: "dp", or "dp,tp"; text: "all_gather[dp](dim=0)".
    bucket: that it is merged into, as an edge names it ("0.3 1234 2e-05"), or "-"; seconds: what it adds to that."""

    kind: str
    axes: str
    text: str
    nbytes: int
    seconds: float
    bucket: str


def collectives(edge: Mapping[str, Any]) -> list[Moved]:
    """The collectives of an edge, in order."""
    if not edge["collective"]:
        return []
    names = ("each_kind", "each_axes", "collective", "each_nbytes", "each_seconds", "each_bucket")
    columns = zip(*(str(edge[name]).split("; ") for name in names), strict=True)
    return [Moved(kind, axes, text, int(n), float(s), bucket) for kind, axes, text, n, s, bucket in columns]


def price(moves: Sequence[Moved]) -> str:
    """Bytes and seconds of collectives. Of one in a bucket the time is the bucket's, which stands beside its bytes."""
    own = sum(moved.nbytes for moved in moves)
    counted = [(moved.nbytes, moved.seconds) for moved in moves if moved.bucket == "-"]
    for *_, bucket in dict.fromkeys((m.kind, m.axes, m.bucket) for m in moves if m.bucket != "-"):
        _, of_all, took = bucket.split()
        counted.append((int(of_all), float(took)))
    nbytes, seconds = sum(n for n, _ in counted), sum(s for _, s in counted)
    whole = "" if nbytes == own else f", with its bucket {format_bytes(nbytes)}"
    return f"{format_bytes(own)}{whole} {format_seconds(seconds)}"


def colour(kind: str) -> str:
    return COLOURS.get(kind, OTHER)


def totals(graph: nx.DiGraph) -> list[Total]:
    """One total per (kind, phase), forward first.

    What brings a gradient to the graph's end belongs to the phase that computed it.
    """
    found: dict[tuple[str, str], Total] = {}
    for source, reader, edge in graph.edges(data=True):
        end = source if graph.nodes[reader].get("kind") == "output" else reader
        phase = graph.nodes[end]["phase"]
        for moved in collectives(edge):
            kind = moved.kind
            old = found.get((phase, kind), Total(kind, phase, 0, 0, 0.0))
            new = Total(kind, phase, old.count + 1, old.nbytes + moved.nbytes, old.seconds + moved.seconds)
            found[phase, kind] = new
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != "forward", key[1]))]
