"""A plan that was found, with another bound."""

from __future__ import annotations

from dataclasses import replace

from passes.search.find import Found
from passes.solver.solve import ROUNDING


def bounded(found: Found, bound: float) -> Found:
    """bound: seconds that none of those searched was counted below."""
    bound = min(bound, found.seconds)
    gap = (found.seconds - bound) / max(found.seconds, 1e-300)
    status = "optimal" if gap <= ROUNDING else "feasible"
    return replace(found, lower_bound=bound, gap=gap, status=status)
