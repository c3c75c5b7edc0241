"""Searches among fewer strategies: models small enough for a test are seldom worth splitting in space."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from passes.layout.layout import NodeLayouts
from passes.rules.core.rule import OpRule
from passes.strategies.strategies import enumerate_strategies

__all__ = ["Keep", "restricted"]

Keep = Callable[[OpRule, Sequence[Sequence[int]], NodeLayouts], bool]
"""(the rule, the shapes of operands and results, a strategy) -> whether searches may use it."""


@contextmanager
def restricted(keep: Keep) -> Generator[None]:
    """Searches inside see, of every op, the strategies that `keep` keeps; all if it keeps none."""

    def enumerated(
        rule: OpRule, operands: Any, results: Any, *rest: Any, **options: Any
    ) -> tuple[NodeLayouts, ...]:
        every = enumerate_strategies(rule, operands, results, *rest, **options)
        shapes = (*operands, *results)
        return tuple(strategy for strategy in every if keep(rule, shapes, strategy)) or every

    with mock.patch("passes.search.strategy_space.enumerate_strategies", enumerated):
        yield
