"""A plan in a line: which parameters lie how, parameters of repeated layers together."""

from __future__ import annotations

import re

from autoshard import PipelinePlan, Plan

__all__ = ["plan_steps", "plan_text"]


def plan_steps(plan: Plan | PipelinePlan) -> dict[str, float]:
    """Seconds of a step as predicted, and as modelled before the plan was rehearsed."""
    modelled = plan.step_time if plan.rehearsed is None else plan.rehearsed.modelled
    return {"predicted": plan.step_time, "modelled": modelled}


def plan_text(plan: Plan) -> str:
    """'layers.*.up.weight S0S0; layers.*.up.bias R R': placements in the order of the mesh axes."""
    groups: dict[str, dict[str, list[int]]] = {}
    for name, placements in plan.parameters.items():
        text = " ".join(_short(placement) for placement in placements)
        groups.setdefault(text, {}).setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(1)
    parts = [f"{layout}: {', '.join(sorted(names))}" for layout, names in sorted(groups.items())]
    kinds: dict[str, int] = {}
    for collective in plan.collectives:
        kinds[collective.kind] = kinds.get(collective.kind, 0) + 1
    moved = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no collectives"
    return "; ".join([*parts, moved])


def _short(placement: object) -> str:
    dim = getattr(placement, "dim", None)
    return "R" if dim is None else f"S({dim})"
