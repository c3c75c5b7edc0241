"""What plans hold, which checks and explanations read, and their files: names, schema, and what is said of damage."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import torch
from msgspec import Meta, Struct, structs

from autoshard.plan.plan_memory import MemoryTimeline
from autoshard.plan.stage_schedule import Scheduled, SchedulePrices
from autoshard.version import __version__
from cost_model.errors import MOST_BYTES, PRINTABLE, Count, PlanError, Seconds, Text, checked_path, write_text
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.timed import TimedPrices
from passes.ir.joint import JointGraph
from passes.layout.layout import JoinedAxes, Layout
from passes.plan.describe import graph_hash
from passes.plan.planned_graph import Collective, NodeRecord, PlannedGraph
from passes.predict.predict_step import StageFigures
from passes.predict.prediction import TimelinePart
from passes.search.search_space import ALIKE
from passes.stages.pipeline_orders import ORDERS, PipelineTimeline, pipeline_order


class PlanOrigin(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan was found for and with.

    profile, profile_hash, nominal: the prices; nominal ones were never measured.
    graph_hash: of the canonical joint graph. autoshard, torch: versions. timed: hash of the kernels and collectives
    whose times took the place of modelled prices; "": none, the plan is unrefined. optimizer: by its name in
    `cost_model.memory.OPTIMIZERS`, whose states and update are counted; "": none, or an older file does not say.
    routing: a factor, or rows by expert as shares (`passes.ir.routing`); (): experts are equally loaded.
    """

    profile: Text
    profile_hash: Text
    nominal: bool
    graph_hash: Text
    autoshard: Text
    torch: Text
    timed: Text = ""
    optimizer: Text = ""
    routing: tuple[float, ...] = ()

    @staticmethod
    def of(
        profile: Profile, joint: JointGraph, optimizer: str, timed: TimedPrices | None = None
    ) -> PlanOrigin:
        """optimizer: that is counted where something is trained. timed: what took the place of modelled prices, if
        anything did."""
        return PlanOrigin(
            profile=profile.name,
            profile_hash=profile.hash(),
            nominal=profile.nominal,
            graph_hash=graph_hash(joint),
            autoshard=__version__,
            torch=torch.__version__,
            timed="" if timed is None else timed.hash,
            optimizer=optimizer if joint.trained else "",
            routing=joint.routing.numbers,
        )


class Raced(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that ran for a few real steps. name: how it was found. words: the plan in a line. predicted, measured:
    seconds of a step; measured: of the slowest rank, its median."""

    name: Text
    words: Text
    predicted: Seconds
    measured: Seconds


class Rehearsed(Struct, frozen=True, forbid_unknown_fields=True):
    """Real steps of a plan. modelled: seconds of a step under modelled and timed prices. measured: of the slowest rank,
    its median. busy: of stages, the share of all ranks' time in which they computed; None where it was not measured."""

    modelled: Annotated[float, Meta(gt=0.0, le=1e30)]
    measured: Annotated[float, Meta(gt=0.0, le=1e30)]
    busy: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None


class Nearly(Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest program that the search judged of those whose pattern is another. pattern: its words, of the axes on
    which it differs. slower, computed: how much longer its step takes, and what it computes in it, as shares of the
    plan's step; the rest is communication that is not hidden, and what packs it."""

    pattern: dict[Text, Text]
    slower: Annotated[float, Meta(ge=0.0, le=1e30)]
    computed: Annotated[float, Meta(ge=-1e30, le=1e30)]


def pace_of(rehearsed: Rehearsed | None) -> float:
    """How many times as long as modelled a step took: all seconds of the plan are times that."""
    return 1.0 if rehearsed is None else rehearsed.measured / rehearsed.modelled


Position = Annotated[int, Meta(ge=0, lt=1_000_000_000)]
"""Of an input or output of a call."""


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage. reads, returns: the call's tensor inputs and outputs that it reads and returns, by position. sent,
    returned: seconds of what passes to the next stage for a piece, and back; 0 of the last. plan: of its graph."""

    reads: tuple[Position, ...]
    returns: tuple[Position, ...]
    figures: StageFigures
    sent: Seconds
    returned: Seconds
    plan: Any


@dataclass(frozen=True, kw_only=True)
class PlanContent:
    """A plan as data, in the order of its file. `autoshard.Plan` says what each field is, and what can be done with
    it; `autoshard.PipelinePlan` does so of one with stages, all of whose figures follow from them (`of_stages`)."""

    mesh: MeshSpec
    origin: PlanOrigin
    cost: float
    lower_bound: float
    status: Annotated[str, Meta(pattern="^(optimal|feasible)$")]
    step_time: float
    peak_memory: Count
    peak_node: Text
    memory_limit: Count | None
    reserve: Count
    parameter_layouts: Mapping[Text, Layout]
    inputs: Mapping[Position, Layout]
    outputs: Mapping[Position, Layout | None]
    fallbacks: tuple[Text, ...]
    joined_axes: JoinedAxes = ()
    moved_nbytes: Count | None = None
    race: tuple[Raced, ...] = ()
    rehearsed: Rehearsed | None = None
    # A file holds its outline: no plan is another for that.
    memory: MemoryTimeline | None = field(default=None, compare=False)
    ran: tuple[TimelinePart, ...] = field(default=(), compare=False)
    # Of the search, not of the plan.
    nearly: Nearly | None = field(default=None, compare=False)
    micro_batches: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    head_pieces: Annotated[int, Meta(ge=1, le=1_000)] = 1
    most_gain: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    records: tuple[NodeRecord, ...] = ()
    other_sizes: tuple[tuple[NodeRecord, ...], ...] = ()
    axis: Text = ""
    schedule: Annotated[str, Meta(pattern=f"^({'|'.join(ORDERS)})$")] = ""
    cut: tuple[Text, ...] = ()
    bound_of_cut: Seconds | None = None
    parts: Annotated[tuple[Part, ...], Meta(max_length=10_000)] = ()

    @property
    def stages(self) -> tuple[PlanContent, ...]:
        """Without an axis of stages it is its only one."""
        return tuple(part.plan for part in self.parts) or (self,)

    @property
    def gap(self) -> float:
        """How far the cost may be above the least there is, as a share of it; with `joined_axes`, above the least of
        plans that use those together."""
        return gap_of(self.cost, self.lower_bound)

    @property
    def latency_decides(self) -> bool:
        """Whether no plan is 2 % faster than one in which every rank does all the work."""
        return self.most_gain is not None and self.most_gain <= ALIKE

    @cached_property
    def planned(self) -> PlannedGraph:
        """Of the step with the first piece; of stages each has its own."""
        return PlannedGraph(self.records)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of a step, in order, stage by stage; what passes between stages is none."""
        return tuple(c for stage in self.stages for c in stage.planned.collectives)

    @property
    def ranks(self) -> int:
        """Along `axis`. PlanError of a plan without stages, as of all that asks for them."""
        if not self.axis:
            raise PlanError(
                "the plan has no stages, and so no schedule of them\n"
                "  try: plan.explain(), or find_plan(..., stages=...) with the name of a mesh axis"
            )
        return self.mesh.size(self.axis)

    @property
    def stages_per_rank(self) -> int:
        return len(self.parts) // self.ranks

    @cached_property
    def scheduled(self) -> Scheduled:
        """Its stages under its schedule."""
        return scheduled_parts(self.ranks, self.schedule, self.micro_batches, self.parts)

    @property
    def timeline(self) -> PipelineTimeline:
        """When each rank runs which stage's forward and backward of which piece."""
        return self.scheduled.timeline

    @property
    def bubble(self) -> float:
        return self.timeline.bubble

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for number, stage in enumerate(self.stages):
            for name in stage.parameter_layouts:
                found.setdefault(name, set()).add(number % self.ranks)
        return {name: tuple(sorted(places)) for name, places in found.items()}

    @cached_property
    def returned_by(self) -> dict[int, int]:
        """Tensor output of the call -> the stage that returns it."""
        return {position: stage for stage, part in enumerate(self.parts) for position in part.returns}


def gap_of(cost: float, bound: float) -> float:
    return 0.0 if cost <= 0 else max(0.0, (cost - bound) / cost)


def scheduled_parts(ranks: int, schedule: str, micro_batches: int, parts: Sequence[Part]) -> Scheduled:
    """ranks: along the axis of stages. InfeasibleError where the schedule cannot run so many pieces."""
    own = parts[:-1]
    order = pipeline_order(schedule, ranks, micro_batches, stages_per_rank=len(parts) // ranks)
    passed = tuple(part.sent for part in own), tuple(part.returned for part in own)
    return Scheduled(order, SchedulePrices(tuple(part.figures for part in parts), *passed))


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
