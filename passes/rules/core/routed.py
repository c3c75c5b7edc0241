"""Ops that work on rows of experts: a rank may have those of its own experts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from passes.ir.joint import result_index
from passes.ir.routing import BALANCED, Routing
from passes.layout.layout import ROUTED, nested_sizes
from passes.rules.core.rule import OpRule

EXPERTS = "g"
"""The factor that counts experts, as in the rules of products with them."""


@dataclass(frozen=True)
class RoutedRows:
    """What is known of an op that works on every row by itself, in the meta "rows" of its node.

    experts:  how many there are.
    operands: of which a row may count on the rank of its expert alone (`ROUTED`).
    pending:  how results are, where experts are split: `ROUTED`, or a sum; None: they have a dim of experts.
    routing:  how many rows each expert has.
    """

    experts: int
    operands: frozenset[int]
    pending: str | None
    routing: Routing = BALANCED

    def fullest(self, ways: Sequence[int]) -> float:
        """Of all rows those of the rank with the most, of ranks that share experts so many ways after each other."""
        return self.routing.share(nested_sizes(self.experts, tuple(ways)))


def rows_passed_on(node: fx.Node, count: int) -> dict[str, RoutedRows]:
    """The meta "rows" of what is one of `count` operands that have the value of `node`, if it has any."""
    rows = result_index(node)[0].meta.get("rows")
    return (
        {"rows": replace(rows, operands=frozenset(range(count)))} if rows and rows.pending == ROUTED else {}
    )


def with_experts(rule: OpRule, rows: RoutedRows) -> OpRule:
    """`rule`, by which experts may be split as well, over ranks that have their rows."""
    pending = {} if rows.pending is None else {EXPERTS: rows.pending}
    return replace(
        rule,
        sizes={**rule.sizes, EXPERTS: rows.experts},
        reductions={**rule.reductions, **pending},
        routed=dict.fromkeys(rows.operands, EXPERTS),
    )
