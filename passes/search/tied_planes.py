"""The best choice within a memory limit of those in which equal layers choose alike, and mixes of such choices.

As `CuttingPlanes`, with prices of memory instead of rows; every problem is solved with one node for all that are alike
(`passes.solver.alike`), so a deep model takes as long as one of a few layers. Where some layers have to be unlike
others for the best use of a limit, the best mix of all choices is taken in the end. What is bounded are such choices
alone.
"""

from __future__ import annotations

from passes.search.cost_kinds import CostKinds
from passes.search.overlapped import CuttingPlanes
from passes.solver.alike import Ties
from passes.solver.problem import Infeasible, Problem, Solution
from passes.solver.solve import solve

MIX_SHARE, MIX_SECONDS = 0.2, 10.0
"""Share of the time left, and seconds at most, for the mix."""


class TiedPlanes(CuttingPlanes):
    def __init__(
        self, problem: Problem, kinds: CostKinds, ties: Ties, deadline: float, relative_gap: float
    ) -> None:
        super().__init__(problem, kinds, deadline, rows_inside=False, relative_gap=relative_gap)
        self.ties = ties

    def run(self) -> None:
        """Raises Infeasible if no choice fits, tied or not, or none was found."""
        super().run()
        choices = list(dict.fromkeys(self.found))
        self._offer_mix(choices, min(MIX_SECONDS, MIX_SHARE * self._left()))
        if not self.choice:
            raise Infeasible("time")

    def _solved(self, inner: Problem, gap: float) -> Solution:
        found = solve(self.ties.problem(inner), time_limit=self._left(), relative_gap=gap)
        choice = self.ties.expanded(found.choice)
        return Solution(choice, found.cost, found.lower_bound, found.gap, found.status)

    def _mix(self) -> None:
        """Once, at the end."""

    def _with_rows(self) -> None:
        """What fits at no price may fit as a mix."""
