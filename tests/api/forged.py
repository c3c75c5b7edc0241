"""Plans that are whole and wrong: what only running them can show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs
from torch import nn

from autoshard import Plan
from autoshard.planning import canonical_capture
from passes.plan.decide import chosen_steps
from passes.plan.planned_graph import Reshard
from passes.redistribution.redistribute import Redistributor
from passes.schedule.issue_order import issue_order
from tests.redistribution.layouts import link_prices


def forgotten_sum(model: nn.Module, plan: Plan, inputs: tuple[Any, ...], name: str, index: int) -> Plan:
    """`plan` with the pending sum of result `index` of node `name` read as if it were whole, and everything else made
    to fit: steps lead where they should, turns are in order."""
    joint, layouts = canonical_capture(model, inputs, {}).joint, dict(plan.planned.layouts)
    results = list(layouts[name].results)
    results[index] = structs.replace(results[index], partial=())
    layouts[name] = replace(layouts[name], results=tuple(results))
    moved = chosen_steps(joint, layouts, Redistributor(plan.mesh, link_prices(plan.mesh)))
    turns = issue_order(joint, layouts).turns
    records = [
        structs.replace(
            record,
            operands=tuple(
                structs.replace(
                    operand,
                    transfers=tuple(
                        Reshard.of(step, 0, 0.0)
                        for step in (moved[record.name, i].steps if (record.name, i) in moved else ())
                    ),
                    turn=turns.get((record.name, i)),
                )
                for i, operand in enumerate(record.operands)
            ),
            results=tuple(
                structs.replace(result, layout=layout)
                for result, layout in zip(record.results, layouts[record.name].results, strict=True)
            ),
        )
        for record in plan.records
    ]
    return Plan.from_json(replace(plan, records=tuple(records)).to_json())
