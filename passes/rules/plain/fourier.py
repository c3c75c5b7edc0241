"""Fourier transforms: the transformed dims whole, all others shared."""

from __future__ import annotations

from dataclasses import replace

from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.reductions import along

__all__ = ["transform"]

_SHARED = along("dim")


@empty_safe
def transform(call: OpCall) -> OpRule:
    """... -> ...; those in `dim` whole, with another length in the result where half a spectrum stands for all.

    Linear: also from complex to real numbers, where other ops would lose a part of every summand.
    """
    return replace(_SHARED(call), linear=(frozenset({0}),))
