"""Ops that work on rows of experts: a rank may have those of its own experts alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes.layout.layout import ROUTED
from passes.rules.core.rule import OpRule

EXPERTS = "g"
"""The factor that counts experts, as in the rules of products with them."""


@dataclass(frozen=True)
class RoutedRows:
    """What is known of an op that works on every row by itself, in the meta "rows" of its node.

    experts:  how many there are.
    operands: of which rows of others' experts may be anything, since nothing but such ops and products makes them.
    results:  whether such rows of its results may be anything: nothing that matters reads them.
    """

    experts: int
    operands: frozenset[int]
    results: bool


def with_experts(rule: OpRule, rows: RoutedRows) -> OpRule:
    """`rule`, by which experts may be split as well."""
    routed = dict.fromkeys(rows.operands, EXPERTS)
    outcome = {**rule.reductions, EXPERTS: ROUTED} if rows.results else rule.reductions
    if EXPERTS not in rule.sizes:
        sizes = {**rule.sizes, EXPERTS: rows.experts}
        return replace(rule, sizes=sizes, reductions=outcome, routed=routed)
    summed = replace(rule, routed=routed)
    return replace(summed, others=(replace(summed, reductions=outcome),)) if rows.results else summed
