"""A model of the zoo, how it is made, and what came of it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cost_model.errors import AutoshardError

Call = tuple[tuple[Any, ...], dict[str, Any]]
Made = tuple[nn.Module, Any]


HOLDS, ALONE, WRONG, NAMED, RAW, CRASH, LATE = (
    "holds", "no collective", "WRONG", "refused", "RAW", "CRASH", "LATE",
)  # fmt: skip
AS_ONE = "as one process"


@dataclass(frozen=True)
class Outcome:
    """split: share of parameters that are. moved: collectives by kind. whole_share: of a rank's computing, in ops that
    are not split; whole: the largest of them; unruled: ops without a rule. seconds: of CPU, to capture and plan. error:
    of values, relative. trained: what training on ranks came to."""

    name: str
    kind: str
    state: str
    note: str = ""
    split: float = 0.0
    moved: Mapping[str, int] = field(default_factory=dict[str, int])
    whole_share: float = 0.0
    whole: Sequence[str] = ()
    unruled: Sequence[str] = ()
    seconds: float = 0.0
    error: float = 0.0
    trained: str = ""


@dataclass(frozen=True)
class Row:
    """make: the module, and its arguments as a tuple, a dict of keyword arguments, or both, as `find_plan` takes them.
    dtype: of the floats of both."""

    name: str
    kind: str
    make: Callable[[], Made]
    dtype: torch.dtype = torch.float64

    def made(self, seed: int = 0) -> tuple[nn.Module, Call]:
        """The same in every process."""
        torch.manual_seed(seed)
        model, given = self.make()
        args, kwargs = given if _is_both(given) else ((), given) if isinstance(given, dict) else (given, {})
        cast = lambda value: pytree.tree_map(self._cast, value)
        return model.to(self.dtype), (cast(args), cast(kwargs))

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_both(given: Any) -> bool:
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[0], tuple)
        and isinstance(given[1], dict)
    )


def state_of(error: Exception) -> str:
    return NAMED if isinstance(error, AutoshardError) and "try: " in str(error) else RAW


def words_of(error: Exception) -> str:
    if os.environ.get("ZOO_TRACE"):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
