"""The numerical oracle of op rules: everything a rule claims, run on simulated ranks, must equal the op.

It knows no rules. It takes an op call and a rule, and tries every combination of one choice per mesh
axis (a factor, a linear set with random summands, or nothing) on meshes of 2, 3 and 2 x 2 ranks.
With small dims that gives uneven shards, and ranks that hold nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from passes.rules.check.trial import Choice, Trial, choices
from passes.rules.core.rule import OpRule

__all__ = ["MESHES", "WrongClaim", "first_error", "wrong_claims"]

MESHES = ((2,), (3,), (2, 2))


@dataclass(frozen=True)
class WrongClaim:
    """What of a rule does not hold, and how that shows. raised: the op, or its part on a rank, raised an error."""

    trial: Trial
    problem: str
    raised: bool

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.trial.mesh

    @property
    def chosen(self) -> tuple[Choice, ...]:
        return self.trial.chosen


def wrong_claims(
    node: fx.Node, rule: OpRule, rtol: float = 1e-9, *, atol: float | None = None, most: int | None = None
) -> Iterator[WrongClaim]:
    """The claims of `rule` that are wrong for the call `node` (of `call_node`). most: to try on a mesh."""
    for mesh in MESHES:
        for chosen in itertools.islice(choices(rule, len(mesh)), most):
            trial = Trial(node, rule, mesh, chosen, rtol=rtol, atol=atol)
            try:
                problem, raised = trial.mismatch(), False
            except Exception as error:  # of the op, whatever it is
                problem, raised = f"{type(error).__name__}: {error}", True
            if problem is not None:
                yield WrongClaim(trial, problem, raised)


def first_error(node: fx.Node, rule: OpRule, rtol: float = 1e-9) -> str | None:
    """The first of them in words; None if all hold."""
    wrong = next(wrong_claims(node, rule, rtol), None)
    if wrong is None:
        return None
    picks = [c.factor or (f"linear {sorted(c.linear)}" if c.linear else "-") for c in wrong.chosen]
    return f"mesh {wrong.mesh}, choices {picks}: {wrong.problem}"
