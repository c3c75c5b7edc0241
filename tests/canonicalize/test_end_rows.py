"""Where rows of experts become rows of all."""

from __future__ import annotations

from passes.canonicalize import canonicalize
from passes.capture import capture
from tests.canonicalize.test_mark_rows import ROUTINGS, Layer, routed_call


def test_rows_end_in_sums() -> None:
    joint = canonicalize(capture(Layer().double(), routed_call(ROUTINGS["random"]()), {}).joint)
    marked = {node.name: node.meta["rows"] for node in joint.graph.nodes if "rows" in node.meta}
    ends = {name: rows.pending for name, rows in marked.items() if "_rows" in name}
    # tokens in the forward, their gradient, of two experts each; those of bias and weights in the backward
    assert ends == {"own_rows": "sum1", "own_rows_1": "sum1", "sum_rows": "sum2", "sum_rows_1": "sum2"}
