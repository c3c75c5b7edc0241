"""A rule builder from a line of the notation."""

from __future__ import annotations

from passes.rules.core.notation import parse
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import Localize, OpRule

__all__ = ["spec"]


def spec(text: str, localize: Localize | None = None) -> Builder:
    """`text` in the notation of notation.py, for ops that always have the same operands."""
    notation = parse(text)

    def build(call: OpCall) -> OpRule:
        n = len(call.operands)
        return notation.bind(call.shapes[:n], call.shapes[n:], localize)

    return build
