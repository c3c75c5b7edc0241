"""How often a model is captured for calls that differ in sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.global_call import GlobalCall
from autoshard.planning import canonical_capture
from autoshard.runtime.sized_calls import SizedCalls
from passes.capture import Captured

WIDTH = 8


class Unrolled(nn.Module):
    """A step for each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0]
        for now in x.unbind(1):
            h = (self.mix(h) + now).tanh()
        return h.square().sum()


def captures_of(
    model: nn.Module, calls: Sequence[Sequence[tuple[int, ...]]], ran: Callable[[], None] = lambda: None
) -> list[int]:
    """How often each call was captured, of these shapes; `ran` is what a call does besides."""
    sized = SizedCalls()
    captures: list[int] = []
    for shapes in calls:
        args = tuple(torch.ones(shape, dtype=torch.float64) for shape in shapes)
        made: list[None] = []

        def capture(args: Any = args, made: list[None] = made, **given: Any) -> Captured:
            made.append(None)
            return canonical_capture(model, args, {}, **given)

        sized.captured(model, GlobalCall(args, {}, {}, tuple(shapes)), capture)
        ran()
        captures.append(len(made))
    return captures


def test_what_is_unrolled_has_one_graph_for_each_length() -> None:
    """At each batch size the same."""
    sizes = [(8, 6), (4, 5), (4, 7), (4, 8), (4, 9), (6, 9), (10, 7), (9, 8), (5, 6), (7, 6)]
    captures = captures_of(Unrolled().double(), [((*size, 3),) for size in sizes])
    # Of a new length one with symbols and one without, to compare; the first call is compared with.
    assert captures == [1, 2, 2, 2, 2, 0, 0, 0, 1, 0]


class Continuing(nn.Module):
    """Two words attend to what was before them, each to those up to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        seen = torch.cat([past, self.mix(x)], 2)
        places = torch.arange(past.shape[2], seen.shape[2])
        return F.scaled_dot_product_attention(x, seen, seen, torch.arange(seen.shape[2]) <= places[:, None])


def test_a_mask_of_later_queries_is_one_for_all_lengths() -> None:
    """It is never the causal one, which begins with the first."""
    captures = captures_of(
        Continuing().double(), [((4, 1, 2, WIDTH), (4, 1, n, WIDTH)) for n in (5, 6, 7, 12)]
    )
    assert captures == [1, 1, 0, 0]


LOADED: dict[str, str] = {}


class Loading(nn.Module):
    """What the first call finds is kept for all others, as einops keeps its backends."""

    def forward(self, x: Tensor) -> Tensor:
        LOADED.setdefault("backend", "torch")
        return x.square().sum()


def test_a_cache_that_the_first_call_fills_is_no_other_kind_of_call() -> None:
    """The second is captured once more without symbols, as the first said something else."""
    LOADED.clear()
    captures = captures_of(
        Loading(), [((size, 3),) for size in (4, 5, 6, 9)], ran=lambda: LOADED.update(backend="torch")
    )
    assert captures == [1, 2, 0, 0]


class Telling(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x.square().sum(), f"{x.shape[0]} rows"


def test_a_call_that_tells_its_sizes_is_captured_once_with_symbols_and_once_without() -> None:
    assert captures_of(Telling(), [((size, 3),) for size in (4, 5)]) == [1, 2]
