"""The numerical oracle of op rules: everything a rule claims, run on simulated ranks, must equal the op.

It knows no rules. It takes an op call and a rule, and tries every combination of one choice per mesh
axis (a factor, a linear set with random summands, or nothing) on meshes of 2, 3 and 2 x 2 ranks.
With small dims that gives uneven shards, and ranks that hold nothing.
"""

from __future__ import annotations

from torch import fx

from passes.rules.check.trial import Trial, choices
from passes.rules.core.rule import OpRule

MESHES = ((2,), (3,), (2, 2))


def first_error(node: fx.Node, rule: OpRule, rtol: float = 1e-9) -> str | None:
    """The first claim of `rule` that is wrong for the call `node` (of `call_node`); None if all hold."""
    for mesh in MESHES:
        for chosen in choices(rule, len(mesh)):
            problem = _attempt(Trial(node, rule, mesh, chosen, rtol=rtol))
            if problem is not None:
                picks = [c.factor or (f"linear {sorted(c.linear)}" if c.linear else "-") for c in chosen]
                return f"mesh {mesh}, choices {picks}: {problem}"
    return None


def _attempt(trial: Trial) -> str | None:
    try:
        return trial.mismatch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
