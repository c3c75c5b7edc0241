"""Lines of random modules, by kind: each entry writes one that reads values of its scope. New ops go into the module of
their kind, new kinds here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tests.fuzz.effect_ops import again, cast, drawn, in_place, several, state
from tests.fuzz.layer_ops import (
    attention,
    complex,
    convolved,
    einsum,
    embedded,
    loss,
    matrix,
    norm,
    product,
    rare,
    routed,
)
from tests.fuzz.point_ops import BINARY, MASKS, UNARY
from tests.fuzz.scope import Scope, Written
from tests.fuzz.value_ops import centred, pairs, picked, reduced, rows, scanned, sliced, viewed

__all__ = ["KINDS"]

Op = Callable[[Scope], Written]


def _of(forms: Sequence[str]) -> Op:
    def write(s: Scope) -> str:
        a = s.f()
        return s.pick(*forms).format(a, s.like(a))

    return write


KINDS: Mapping[str, tuple[int, Op]] = {
    "pointwise": (4, lambda s: s.pick(*UNARY).format(s.f())),
    "two": (8, _of(BINARY)),
    "mask": (1, _of(MASKS)),
    "masked": (
        1,
        lambda s: f"{s.mask()}.double() * 0.5" if s.rng.random() < 0.5 else f"{s.mask()}.long()",
    ),
    "reduced": (4, reduced),
    "centred": (4, centred),
    "picked": (5, picked),
    "scanned": (3, scanned),
    "rows": (5, rows),
    "pairs": (2, pairs),
    "sliced": (4, sliced),
    "viewed": (6, viewed),
    "matrix": (3, matrix),
    "product": (8, product),
    "einsum": (3, einsum),
    "norm": (4, norm),
    "convolved": (4, convolved),
    "attention": (2, attention),
    "embedded": (2, embedded),
    "routed": (2, routed),
    "complex": (3, complex),
    "cast": (2, cast),
    "in place": (6, in_place),
    "state": (2, state),
    "loss": (2, loss),
    "drawn": (0, drawn),
    "again": (1, again),
    "rare": (8, rare),
    "several": (1, several),
}
"""How often, and what writes a line."""
