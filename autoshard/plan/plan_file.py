"""The file of a plan: its names, its schema, which is that of the plan itself, and what is said where it is damaged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from typing import Any, Literal, get_type_hints

import msgspec
from msgspec import Struct, structs

from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_memory import MemoryTimeline
from cost_model.errors import MOST_BYTES, PRINTABLE, PlanError, checked_path, write_text
from cost_model.mesh import MeshSpec

SCHEMA_VERSION = 5

_AGAIN = "\n  try: the file as it was saved, or find_plan(...) again"


class MeshData(Struct, frozen=True, forbid_unknown_fields=True):
    """`MeshSpec`."""

    axes: dict[str, int]
    device: Literal["cpu", "cuda"]


@dataclass(frozen=True)
class PlanFile:
    """How plans are written. held: fields of `PlanContent`, in order. names: of those that a file calls otherwise.
    optional: those with a default that a file leaves out."""

    held: Sequence[str]
    names: Mapping[str, str]
    optional: Collection[str]

    @cached_property
    def schema(self) -> type[Struct]:
        hints = get_type_hints(PlanContent, include_extras=True) | {"mesh": MeshData}
        defaults = {one.name: one.default for one in fields(PlanContent) if one.name in self.optional}
        typed = lambda name: (name, hints[name], defaults[name]) if name in defaults else (name, hints[name])
        held: list[Any] = [("schema_version", int), *map(typed, self.held)]
        return msgspec.defstruct("Plan", held, rename=self.names, kw_only=True, forbid_unknown_fields=True)

    def data(self, plan: PlanContent) -> dict[str, Any]:
        held = {name: getattr(plan, name) for name in self.held}
        if isinstance(memory := held.get("memory"), MemoryTimeline):
            held["memory"] = memory.outline()
        mesh = MeshData(dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)), plan.mesh.device_type)  # type: ignore[arg-type]
        return json_data(self.schema(**held | {"schema_version": SCHEMA_VERSION, "mesh": mesh}))

    def fields(self, data: Any, where: str) -> dict[str, Any]:
        """By name. PlanError, naming the first place of `data` that does not fit the schema."""
        if not isinstance(data, dict) or "schema_version" not in data:
            raise PlanError(f"{where} is no autoshard plan: it has no schema_version{_AGAIN}")
        if data["schema_version"] != SCHEMA_VERSION:
            raise PlanError(
                f"{where} has plan schema {str(data['schema_version'])[:20]}; this version reads {SCHEMA_VERSION}\n"
                "  try: find_plan(...) again and save the new plan"
            )
        try:
            read = msgspec.convert(data, self.schema, str_keys=True)
            mesh: MeshData = read.mesh  # type: ignore[attr-defined]
            return {name: getattr(read, name) for name in self.held} | {
                "mesh": MeshSpec(mesh.axes, mesh.device)
            }
        except ValueError as error:  # msgspec's own is one, and a ShardingError of the mesh
            said = (
                "a text in it is no UTF-8"
                if isinstance(error, UnicodeError)
                else str(error).partition("\n")[0]
            )
        except RecursionError:
            said = "nested too deep"
        raise PlanError(f"{where} is a damaged plan: {said}{_AGAIN}")


_IN_STAGES = (
    *("mesh", "origin", "axis", "schedule", "micro_batches", "cut", "inputs", "memory_limit", "reserve"),
    *("bound_of_cut", "race", "rehearsed", "parts"),
)
_OF_STAGES = ("axis", "schedule", "cut", "bound_of_cut", "parts")
_WHOLE = [one for one in fields(PlanContent) if one.name not in _OF_STAGES]

PLAN_FILE = PlanFile(
    [one.name for one in _WHOLE],
    {
        "cost": "cost_seconds",
        "lower_bound": "lower_bound_seconds",
        "step_time": "step_seconds",
        "peak_memory": "peak_memory_bytes",
        "memory_limit": "memory_limit_bytes",
        "reserve": "reserve_bytes",
        "parameter_layouts": "parameters",
        "moved_nbytes": "moved_bytes",
        "records": "nodes",
        "ran": "timeline",
    },
    {one.name for one in _WHOLE if one.default is not MISSING} - {"records"},
)
PIPELINE_FILE = PlanFile(
    _IN_STAGES,
    {"memory_limit": "memory_limit_bytes", "reserve": "reserve_bytes", "parts": "stages"},
    {"race", "rehearsed"},
)
"""Of a plan with stages, each of which has a plan of its own: `PipelinePlan.of` says the rest."""


def check_undamaged(where: str, problems: Iterator[str]) -> None:
    """PlanError with the first of the problems."""
    for problem in problems:
        raise PlanError(f"{where} is a damaged plan: {problem}{_AGAIN}")


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


def json_data(value: Any) -> Any:
    """A struct, and all that it holds, as `msgspec.convert` reads it."""
    if isinstance(value, Struct):
        written = {
            f.encode_name: getattr(value, f.name) for f in _fields(type(value)) if not _is_usual(value, f)
        }
        return json_data(list(written.values()) if value.__struct_config__.array_like else written)
    if isinstance(value, (tuple, list)):
        return [json_data(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): json_data(one) for key, one in value.items()}
    return value.to_json() if hasattr(value, "to_json") else value


_fields = cache(structs.fields)


def _is_usual(value: Struct, field: structs.FieldInfo) -> bool:
    """Whether a field has its default: () is also that of which nothing is said."""
    held = getattr(value, field.name)
    return held == field.default or (field.default == () and not any(held))
