"""A plan as JSON data and back: its schema, and what is said of a file that is none or is damaged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import astuple
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from autoshard.plan.plan_content import PlanContent, PlanOrigin, Raced, Rehearsed
from autoshard.plan.plan_memory import OUTLINE, AtPeak, MemoryTimeline
from cost_model.checked_arguments import checked_path
from cost_model.errors import PlanError
from cost_model.mesh import MeshSpec
from cost_model.text_files import MOST_BYTES, write_text
from passes.plan.record_json import (
    PRINTABLE,
    Count,
    LayoutData,
    NodeData,
    Text,
    layout_to_json,
    record_to_json,
    records_of,
)
from passes.predict.memory_kinds import KINDS, Kind
from passes.predict.memory_record import MemoryStep

__all__ = [
    "SCHEMA_VERSION",
    "PlanData",
    "plan_data",
    "plan_fields",
    "plan_head",
    "plan_to_json",
    "race_to_json",
    "rehearsed_to_json",
    "write_plan",
]

SCHEMA_VERSION = 5

_AGAIN = "\n  try: the file as it was saved, or find_plan(...) again"
_Index = Annotated[str, Meta(pattern=r"^(0|[1-9]\d{0,8})$")]


class MeshData(Struct, frozen=True, forbid_unknown_fields=True):
    """`MeshSpec`."""

    axes: dict[str, int]
    device: Literal["cpu", "cuda"]


class OriginData(Struct, frozen=True, forbid_unknown_fields=True):
    """`PlanOrigin`."""

    profile: Text
    profile_hash: Text
    nominal: bool
    graph_hash: Text
    autoshard: Text
    torch: Text
    timed: Text = ""
    optimizer: Text = ""


class RacedData(Struct, frozen=True, forbid_unknown_fields=True):
    """`Raced`."""

    name: Text
    words: Text
    predicted: Annotated[float, Meta(ge=0.0, le=1e30)]
    measured: Annotated[float, Meta(ge=0.0, le=1e30)]

    def raced(self) -> Raced:
        return Raced(**msgspec.structs.asdict(self))


class RehearsedData(Struct, frozen=True, forbid_unknown_fields=True):
    """`Rehearsed`."""

    modelled: Annotated[float, Meta(gt=0.0, le=1e30)]
    measured: Annotated[float, Meta(gt=0.0, le=1e30)]
    busy: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None

    def rehearsed(self) -> Rehearsed:
        return Rehearsed(**msgspec.structs.asdict(self))


class MemoryStepData(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`MemoryStep`, a list."""

    place: Count
    phase: Literal["forward", "backward"]
    node: Text
    by_kind: Annotated[tuple[Count, ...], Meta(min_length=len(KINDS), max_length=len(KINDS))]


class AtPeakData(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`AtPeak`, a list."""

    kind: Kind
    name: Text
    op: Text
    value: Text
    count: Annotated[int, Meta(ge=1, le=2**40)]
    nbytes: Count


class MemoryData(Struct, frozen=True, forbid_unknown_fields=True):
    """`MemoryTimeline`, its outline."""

    count: Annotated[int, Meta(ge=1, le=2**40)]
    steps: Annotated[tuple[MemoryStepData, ...], Meta(min_length=1, max_length=OUTLINE)]
    at_peak: tuple[AtPeakData, ...]

    def timeline(self) -> MemoryTimeline:
        steps = tuple(MemoryStep(*msgspec.structs.astuple(step)) for step in self.steps)
        rows = tuple(AtPeak(*msgspec.structs.astuple(row)) for row in self.at_peak)
        return MemoryTimeline(steps, self.count, rows)


class PlanData(Struct, frozen=True, forbid_unknown_fields=True):
    """`Plan`: all that a file holds."""

    schema_version: int
    mesh: MeshData
    origin: OriginData
    cost_seconds: float
    lower_bound_seconds: float
    status: Literal["optimal", "feasible"]
    step_seconds: float
    peak_memory_bytes: Count
    peak_node: Text
    memory_limit_bytes: Count | None
    reserve_bytes: Count
    parameters: dict[Text, LayoutData]
    inputs: dict[_Index, LayoutData]
    outputs: dict[_Index, LayoutData | None]
    fallbacks: tuple[Text, ...]
    nodes: Annotated[tuple[NodeData, ...], Meta(max_length=10_000_000)]
    joined_axes: tuple[tuple[Text, ...], ...] = ()
    moved_bytes: Count | None = None
    race: tuple[RacedData, ...] = ()
    rehearsed: RehearsedData | None = None
    memory: MemoryData | None = None
    micro_batches: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    head_pieces: Annotated[int, Meta(ge=1, le=1_000)] = 1
    other_sizes: tuple[Annotated[tuple[NodeData, ...], Meta(max_length=10_000_000)], ...] = ()

    def mesh_spec(self) -> MeshSpec:
        return MeshSpec(self.mesh.axes, self.mesh.device)


def plan_data(data: Any, where: str) -> PlanData:
    """`data` by the schema. PlanError, naming the first place that does not fit it."""
    if not isinstance(data, dict) or "schema_version" not in data:
        raise PlanError(f"{where} is no autoshard plan: it has no schema_version{_AGAIN}")
    if data["schema_version"] != SCHEMA_VERSION:
        raise PlanError(
            f"{where} has plan schema {str(data['schema_version'])[:20]}; this version reads {SCHEMA_VERSION}\n"
            "  try: find_plan(...) again and save the new plan"
        )
    try:
        return msgspec.convert(data, PlanData)
    except msgspec.ValidationError as error:
        raise damaged(where, str(error)) from None
    except RecursionError:
        raise damaged(where, "nested too deep") from None
    except UnicodeEncodeError:
        raise damaged(where, "a text in it is no UTF-8") from None


def plan_fields(data: PlanData) -> dict[str, Any]:
    """Of the `PlanContent` that a file holds. ValueError for layouts or a mesh that cannot be."""
    return {
        "mesh": data.mesh_spec(),
        "cost": data.cost_seconds,
        "lower_bound": data.lower_bound_seconds,
        "status": data.status,
        "step_time": data.step_seconds,
        "peak_memory": data.peak_memory_bytes,
        "peak_node": data.peak_node,
        "memory_limit": data.memory_limit_bytes,
        "reserve": data.reserve_bytes,
        "records": records_of(data.nodes),
        "parameter_layouts": {name: layout.layout() for name, layout in data.parameters.items()},
        "inputs": {int(i): layout.layout() for i, layout in data.inputs.items()},
        "outputs": {
            int(i): None if layout is None else layout.layout() for i, layout in data.outputs.items()
        },
        "fallbacks": data.fallbacks,
        "origin": PlanOrigin(**msgspec.structs.asdict(data.origin)),
        "joined_axes": data.joined_axes,
        "moved_nbytes": data.moved_bytes,
        "race": tuple(one.raced() for one in data.race),
        "rehearsed": None if data.rehearsed is None else data.rehearsed.rehearsed(),
        "memory": None if data.memory is None else data.memory.timeline(),
        "micro_batches": data.micro_batches,
        "head_pieces": data.head_pieces,
        "other_sizes": tuple(map(records_of, data.other_sizes)),
    }


def damaged(where: str, problem: str) -> PlanError:
    return PlanError(f"{where} is a damaged plan: {problem}{_AGAIN}")


def write_plan(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """PlanError where no file can be written, or `load` could not read it."""
    target, text = checked_path(path, "path", PlanError), json.dumps(data, indent=1) + "\n"
    for plan in [stage["plan"] for stage in data.get("stages", ())] or [data]:
        for name in (*plan["parameters"], *(node["module"] for node in plan["nodes"])):
            if not re.search(PRINTABLE, name):
                raise PlanError(
                    f"cannot write plan {str(target)!r}: "
                    f"the model's name {name!r} has characters that cannot be printed\n"
                    "  try: names of letters, digits and _ for modules and parameters"
                )
    if len(text) > MOST_BYTES:
        raise PlanError(
            f"cannot write plan {str(target)!r}: "
            f"it has {len(text) >> 20} MiB, and no more than {MOST_BYTES >> 20} are read\n"
            "  try: the Plan itself as `plan`, or fewer micro_batches"
        )
    write_text(target, text, "plan", PlanError)


def plan_head(mesh: MeshSpec, origin: PlanOrigin) -> dict[str, Any]:
    """With what the file of any plan begins."""
    return {
        "schema_version": SCHEMA_VERSION,
        "mesh": {"axes": dict(zip(mesh.names, mesh.sizes, strict=True)), "device": mesh.device_type},
        # What is usual is left out, here and below: files of unrefined plans stay as they were.
        "origin": {
            name: value for name, value in vars(origin).items() if value or name not in ("timed", "optimizer")
        },
    }


def race_to_json(race: Sequence[Raced]) -> dict[str, Any]:
    """Nothing of a plan that was not raced."""
    return {"race": [dict(vars(one)) for one in race]} if race else {}


def rehearsed_to_json(rehearsed: Rehearsed | None) -> dict[str, Any]:
    """Nothing of a plan that was not rehearsed."""
    if rehearsed is None:
        return {}
    return {"rehearsed": {name: value for name, value in vars(rehearsed).items() if value is not None}}


def plan_to_json(plan: PlanContent) -> dict[str, Any]:
    return {
        **plan_head(plan.mesh, plan.origin),
        "cost_seconds": plan.cost,
        "lower_bound_seconds": plan.lower_bound,
        "status": plan.status,
        "step_seconds": plan.step_time,
        "peak_memory_bytes": plan.peak_memory,
        "peak_node": plan.peak_node,
        "memory_limit_bytes": plan.memory_limit,
        "reserve_bytes": plan.reserve,
        "parameters": {name: layout_to_json(layout) for name, layout in plan.parameter_layouts.items()},
        "inputs": {str(i): layout_to_json(layout) for i, layout in plan.inputs.items()},
        "outputs": {
            str(i): None if layout is None else layout_to_json(layout) for i, layout in plan.outputs.items()
        },
        "fallbacks": list(plan.fallbacks),
        # Only where there are any: plans of other meshes stay as they were.
        **({"joined_axes": [list(run) for run in plan.joined_axes]} if plan.joined_axes else {}),
        **({} if plan.moved_nbytes is None else {"moved_bytes": plan.moved_nbytes}),
        **race_to_json(plan.race),
        **rehearsed_to_json(plan.rehearsed),
        **({} if plan.memory is None else {"memory": _memory_to_json(plan.memory.outline())}),
        **({"micro_batches": plan.micro_batches} if plan.micro_batches > 1 else {}),
        **({"head_pieces": plan.head_pieces} if plan.head_pieces > 1 else {}),
        "nodes": [record_to_json(record) for record in plan.records],
        **(
            {"other_sizes": [[record_to_json(record) for record in one] for one in plan.other_sizes]}
            if plan.other_sizes
            else {}
        ),
    }


def _memory_to_json(memory: MemoryTimeline) -> dict[str, Any]:
    return {
        "count": memory.count,
        "steps": [[step.place, step.phase, step.node, list(step.by_kind)] for step in memory.steps],
        "at_peak": [list(astuple(row)) for row in memory.at_peak],
    }
