"""A rule builder from a line of the notation."""

from __future__ import annotations

from dataclasses import replace

from passes.rules.core.notation import parse
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import Localize, OpRule

__all__ = ["spec"]


def spec(text: str, localize: Localize | None = None) -> Builder:
    """`text` in the notation of notation.py, for ops that always have the same operands. Results that the op was told
    not to compute have no dims."""
    notation = parse(text)

    def build(call: OpCall) -> OpRule:
        n = len(call.operands)
        made = zip(notation.results, call.results, strict=True)
        there = replace(notation, results=tuple(() if result is None else term for term, result in made))
        return there.bind(call.shapes[:n], call.shapes[n:], localize)

    return build
