"""Are the transfers of a plan whole? Steps that lead where they should, and turns that a rank can keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cost_model.mesh import MeshSpec
from passes.layout.joined_axes import JoinedAxes
from passes.layout.layout import Layout
from passes.plan.records import NodeRecord, OperandRecord, ResultRecord
from passes.plan.transfers import Turn
from passes.redistribution.steps import Step
from passes.redistribution.universe import step_problems

__all__ = ["Ways", "turn_problems"]

_FIRST: Turn = (-1, 0)


@dataclass(frozen=True)
class Ways:
    """Ways from layout to layout on a mesh, axes `joined` moved together; layers repeat, so each is looked at once."""

    mesh: MeshSpec
    joined: JoinedAxes
    seen: dict[tuple[Layout, Layout, tuple[Step, ...], tuple[int, ...]], tuple[str, ...]] = field(
        default_factory=dict
    )

    def problems(self, operand: OperandRecord, value: ResultRecord) -> Sequence[str]:
        """What is wrong with the transfers of `operand`, which reads `value`; both layouts fit the mesh."""
        steps = tuple(transfer.step for transfer in operand.transfers)
        if bool(steps) != (operand.turn is not None):
            return [f"it reads {operand.source} through {len(steps)} steps, with turn {operand.turn}"]
        unknown = [axis for step in steps for axis in step.axes if axis not in self.mesh.names]
        if unknown:
            return [f"the mesh has no axis {unknown[0]!r}"]
        key = (value.layout, operand.layout, steps, value.shape)
        if key not in self.seen:
            self.seen[key] = tuple(step_problems(*key, self.mesh, self.joined))
        return self.seen[key]


def turn_problems(records: Sequence[NodeRecord]) -> Iterator[str]:
    """Transfers that communicate, with a turn that is not after those of all transfers that their operand is computed
    from: the members of a bucket, too, may not wait for one another. What a rank cuts from its own part waits in no
    turn."""
    latest: dict[str, Turn] = {}
    for record in records:
        mine = _FIRST
        for operand in record.operands:
            before = latest[operand.source]
            if operand.turn is not None and operand.turn <= before and _communicates(operand):
                yield (
                    f"node {record.name}: it reads {operand.source} in turn {operand.turn}, and that is computed from "
                    f"what comes in turn {before}"
                )
            mine = max(mine, before, operand.turn or _FIRST)
        latest[record.name] = mine


def _communicates(operand: OperandRecord) -> bool:
    return any(transfer.step.kind for transfer in operand.transfers)
