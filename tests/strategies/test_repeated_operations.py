"""Causal attention by a part of the queries has the keys that they see: the search counts those of the last part."""

from __future__ import annotations

from typing import Any

import torch

from cost_model.mesh import MeshSpec
from passes.rules.check.trial import call_node
from passes.rules.core.rule_registry import rule_for
from passes.strategies.prices import strategy_seconds
from passes.strategies.strategies import enumerate_strategies
from passes.strategies.traffic import eager_traffic

MESH = MeshSpec({"a": 4})
SHAPE = (8, 16, 64, 128)
WHOLE = 4.0 * 8 * 16 * 64 * 64 * 128
"""Operations of two products of 64 x 64 x 128, 2 each, for 8 x 16 heads."""


class Operations:
    """Prices by which an operation takes a second."""

    timed = None

    def work_seconds(self, work: Any, key: object) -> float:
        return work.flops


def operations(is_causal: bool) -> dict[str, float]:
    """Of the rank that has most; "" for the whole op on every rank, else by the factor that the mesh splits."""
    q, k, v = (torch.empty(SHAPE) for _ in range(3))
    node = call_node(torch.ops.autoshard.attention.default, (q, k, v, None, is_causal, 0.1))
    rule, shapes = rule_for(node), [SHAPE] * 3
    given = enumerate_strategies(rule, shapes, [SHAPE, SHAPE[:3]], MESH)
    seconds = strategy_seconds(node, rule, given, eager_traffic(node), MESH, Operations())  # type: ignore[arg-type]
    return {",".join(s.factor for s in one.splits): value for one, value in zip(given, seconds, strict=True)}


def test_the_last_quarter_of_causal_queries_sees_7_of_16_pairs() -> None:
    """Of squares of 16 x 16: three and a half, of eight."""
    found = operations(is_causal=True)
    assert (found[""], found["h"], found["s"]) == (WHOLE / 2, WHOLE / 8, WHOLE / 2 * 7 / 16)


def test_queries_that_see_all_keys_have_a_quarter() -> None:
    found = operations(is_causal=False)
    assert (found[""], found["h"], found["s"]) == (WHOLE, WHOLE / 4, WHOLE / 4)
