"""Check the registered rule of one op call with the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes import ops  # noqa: F401  # pyright: ignore[reportUnusedImport]
from passes.rules.check.discover import wrong_claims
from passes.rules.check.trial import call_node
from passes.rules.core.rule import OpRule
from passes.rules.core.rule_registry import has_rule, rule_for

aten = torch.ops.aten


def check(op: Callable[..., Any], *args: Any, rtol: float = 1e-9, **kwargs: Any) -> OpRule:
    """Assert that the op has a rule and that it is right for this call; returns it."""
    assert has_rule(op), f"{op} has no rule"
    node = call_node(op, args, kwargs)
    rule = rule_for(node)
    error = first_error(node, rule, rtol)
    shapes = [list(a.shape) for a in args if isinstance(a, torch.Tensor)]
    assert error is None, f"{op} on {shapes}\n  {rule}\n  {error}"
    return rule


def first_error(node: fx.Node, rule: OpRule, rtol: float = 1e-9) -> str | None:
    """The first of them in words; None if all hold."""
    wrong = next(wrong_claims(node, rule, rtol), None)
    if wrong is None:
        return None
    picks = [c.factor or (f"linear {sorted(c.linear)}" if c.linear else "-") for c in wrong.chosen]
    return f"mesh {wrong.mesh}, choices {picks}: {wrong.problem}"


@dataclass(frozen=True)
class Draw:
    """Random small shapes and tensors; equal seeds draw the same."""

    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_random", random.Random(self.seed))
        object.__setattr__(self, "_torch", torch.Generator().manual_seed(self.seed))

    _random: random.Random = None  # type: ignore[assignment]
    _torch: torch.Generator = None  # type: ignore[assignment]

    def size(self, *choices: int) -> int:
        return self._random.choice(choices or (1, 2, 3, 4, 5))

    def sizes(self, count: int) -> list[int]:
        return [self.size() for _ in range(count)]

    def pick(self, *options: Any) -> Any:
        return self._random.choice(options)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(shape, generator=self._torch, dtype=dtype)

    def ints(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._torch)

    def bools(self, *shape: int) -> torch.Tensor:
        return self.ints(2, *shape) > 0
