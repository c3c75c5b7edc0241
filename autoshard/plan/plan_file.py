"""The file of a plan: its names, its schema, which is that of the plan itself, and what is said where it is damaged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_type_hints

import msgspec
from msgspec import Struct

from autoshard.plan.plan_content import PipelineContent, PlanContent
from autoshard.plan.plan_memory import MemoryTimeline
from cost_model.checked_arguments import MOST_BYTES, PRINTABLE, checked_path, write_text
from cost_model.errors import PlanError
from cost_model.mesh import MeshSpec
from passes.plan.json_data import json_data

SCHEMA_VERSION = 5

_AGAIN = "\n  try: the file as it was saved, or find_plan(...) again"


class MeshData(Struct, frozen=True, forbid_unknown_fields=True):
    """`MeshSpec`."""

    axes: dict[str, int]
    device: Literal["cpu", "cuda"]


@dataclass(frozen=True)
class PlanFile:
    """How plans of the fields of `content` are written. names: of fields that a file calls otherwise."""

    content: type
    names: Mapping[str, str]

    @cached_property
    def schema(self) -> type[Struct]:
        hints = get_type_hints(self.content, include_extras=True) | {"mesh": MeshData}
        held = [("schema_version", int)] + [
            (one.name, hints[one.name], *(() if one.default is MISSING else (one.default,)))
            for one in fields(self.content)
        ]
        return msgspec.defstruct(
            self.content.__name__, held, rename=self.names, kw_only=True, forbid_unknown_fields=True
        )

    def data(self, plan: Any) -> dict[str, Any]:
        held = {one.name: getattr(plan, one.name) for one in fields(self.content)}
        if isinstance(memory := held.get("memory"), MemoryTimeline):
            held["memory"] = memory.outline()
        mesh = MeshData(dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)), plan.mesh.device_type)
        return json_data(self.schema(**held | {"schema_version": SCHEMA_VERSION, "mesh": mesh}))

    def fields(self, data: Any, where: str) -> dict[str, Any]:
        """Of the content, by name. PlanError, naming the first place of `data` that does not fit the schema."""
        if not isinstance(data, dict) or "schema_version" not in data:
            raise PlanError(f"{where} is no autoshard plan: it has no schema_version{_AGAIN}")
        if data["schema_version"] != SCHEMA_VERSION:
            raise PlanError(
                f"{where} has plan schema {str(data['schema_version'])[:20]}; this version reads {SCHEMA_VERSION}\n"
                "  try: find_plan(...) again and save the new plan"
            )
        try:
            held = msgspec.convert(data, self.schema, str_keys=True)
            mesh: MeshData = held.mesh  # type: ignore[attr-defined]
            own = {one.name: getattr(held, one.name) for one in fields(self.content)}
            return own | {"mesh": MeshSpec(mesh.axes, mesh.device)}
        except ValueError as error:  # msgspec's own is one, and a ShardingError of the mesh
            said = (
                "a text in it is no UTF-8"
                if isinstance(error, UnicodeError)
                else str(error).partition("\n")[0]
            )
            raise damaged(where, said) from None
        except RecursionError:
            raise damaged(where, "nested too deep") from None


PLAN_FILE = PlanFile(
    PlanContent,
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
    },
)
PIPELINE_FILE = PlanFile(
    PipelineContent,
    {"memory_limit": "memory_limit_bytes", "reserve": "reserve_bytes", "parts": "stages"},
)


def is_pipeline(data: Any) -> bool:
    """Whether JSON data is of a plan with stages, damaged or not."""
    return isinstance(data, dict) and "stages" in data


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
