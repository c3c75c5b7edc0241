"""A plan with stages as JSON data and back: one file, with each stage's plan in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from autoshard.plan.pipeline_content import PipelineContent
from autoshard.plan.plan_content import PlanContent, PlanOrigin
from autoshard.plan.plan_json import (
    SCHEMA_VERSION,
    MeshData,
    OriginData,
    RacedData,
    RehearsedData,
    damaged,
    plan_head,
    plan_to_json,
    race_to_json,
    rehearsed_to_json,
)
from autoshard.plan.stage_schedule import SchedulePrices
from cost_model.errors import InfeasibleError, PlanError
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout
from passes.plan.record_json import Count, LayoutData, Text, layout_to_json
from passes.predict.predict_stage import StageFigures
from passes.stages.pipeline_orders import pipeline_order

__all__ = ["is_pipeline", "pipeline_from_json", "pipeline_to_json"]

P = TypeVar("P", bound=PlanContent)

_Seconds = Annotated[float, Meta(ge=0.0, le=1e30)]
_Place = Annotated[int, Meta(ge=0, lt=1_000_000_000)]
_Index = Annotated[str, Meta(pattern=r"^(0|[1-9]\d{0,8})$")]
_Many = Meta(max_length=10_000)


class FiguresData(Struct, frozen=True, forbid_unknown_fields=True):
    """`StageFigures`."""

    forward: _Seconds
    backward: _Seconds
    input: _Seconds
    weight: _Seconds
    before: _Seconds
    after: _Seconds
    update: _Seconds
    held: Count
    kept: Count
    peak: Count


class StageData(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage. sent, returned: seconds of what passes to the next stage, and back; 0 of the last."""

    reads: tuple[_Place, ...]
    returns: tuple[_Place, ...]
    figures: FiguresData
    sent: _Seconds
    returned: _Seconds
    plan: dict[str, Any]


class PipelineData(Struct, frozen=True, forbid_unknown_fields=True):
    """`PipelinePlan`: all that a file holds."""

    schema_version: int
    mesh: MeshData
    origin: OriginData
    axis: Text
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
    micro_batches: Annotated[int, Meta(ge=1, le=100_000)]
    cut: Annotated[tuple[Text, ...], _Many]
    stages: Annotated[tuple[StageData, ...], _Many]
    inputs: dict[_Index, LayoutData]
    memory_limit_bytes: Count | None
    reserve_bytes: Count
    bound_of_cut: _Seconds | None
    race: tuple[RacedData, ...] = ()
    rehearsed: RehearsedData | None = None


def is_pipeline(data: Any) -> bool:
    """Whether JSON data is of a plan with stages, damaged or not."""
    return isinstance(data, dict) and "stages" in data


def pipeline_to_json(plan: PipelineContent[Any]) -> dict[str, Any]:
    prices = plan.prices
    sent, returned = (*prices.sent, 0.0), (*prices.returned, 0.0)
    return {
        **plan_head(plan.mesh, plan.origin),
        "axis": plan.axis,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "cut": list(plan.cut),
        "inputs": {str(i): layout_to_json(layout) for i, layout in plan.inputs.items()},
        "memory_limit_bytes": plan.memory_limit,
        "reserve_bytes": plan.reserve,
        "bound_of_cut": plan.bound_of_cut,
        **race_to_json(plan.race),
        **rehearsed_to_json(plan.rehearsed),
        "stages": [
            {
                "reads": list(plan.reads[i]),
                "returns": list(plan.returns[i]),
                "figures": asdict(prices.stages[i]),
                "sent": sent[i],
                "returned": returned[i],
                "plan": plan_to_json(stage),
            }
            for i, stage in enumerate(plan.stages)
        ],
    }


def pipeline_from_json(data: Any, where: str, stage_from: Callable[..., P]) -> PipelineContent[P]:
    """Inverse of `pipeline_to_json`. stage_from: `Plan.from_json`, which knows of this.

    PlanError for anything else: what is accepted can be shown, drawn and put on a timeline."""
    if data.get("schema_version") != SCHEMA_VERSION:
        raise PlanError(
            f"{where} has plan schema {str(data.get('schema_version'))[:20]}; this version reads {SCHEMA_VERSION}\n"
            "  try: find_plan(..., stages=...) again and save the new plan"
        )
    try:
        content = msgspec.convert(data, PipelineData)
    except msgspec.ValidationError as error:
        raise damaged(where, str(error)) from None
    except (RecursionError, UnicodeEncodeError):
        raise damaged(where, "nested too deep, or a text in it is no UTF-8") from None
    try:
        for problem in _problems(content):
            raise damaged(where, problem)
        stages = [
            stage_from(stage.plan, where=f"{where}, stage {i}") for i, stage in enumerate(content.stages)
        ]
        plan = _plan_of(content, stages)
    except (ValueError, InfeasibleError) as error:
        if isinstance(error, PlanError):
            raise
        raise damaged(where, str(error).partition("\n")[0]) from None
    for problem in _stage_problems(plan):
        raise damaged(where, problem)
    return plan


def _problems(content: PipelineData) -> Iterator[str]:
    """What is wrong with the pipeline itself."""
    mesh = MeshSpec(content.mesh.axes, content.mesh.device)
    if content.axis not in mesh.names:
        yield f"its stages are along {content.axis!r}, and {mesh} has no such axis"
        return
    ranks, stages = mesh.size(content.axis), len(content.stages)
    if not stages or stages % ranks:
        yield f"it has {stages} stages for {ranks} ranks"
        return
    if len(content.cut) != stages - 1:
        yield f"it is cut at {len(content.cut)} places into {stages} stages"
    if stages * content.micro_batches > 10_000_000:
        yield f"{content.micro_batches} micro-batches on {stages} stages, which nothing runs"
        return
    pipeline_order(content.schedule, ranks, content.micro_batches, stages_per_rank=stages // ranks)
    returned = [position for stage in content.stages for position in stage.returns]
    if len(set(returned)) != len(returned):
        yield "two of its stages return one output of the call"


def _stage_problems(plan: PipelineContent[Any]) -> Iterator[str]:
    """Where its stages do not belong together."""
    own = plan.mesh.resized(plan.axis, 1)
    layouts: dict[str, Layout] = {}
    for number, stage in enumerate(plan.stages):
        if stage.mesh != own:
            yield f"stage {number} is planned for {stage.mesh}, and not for {own}"
        if any(place not in stage.outputs for place in range(len(plan.returns[number]))):
            yield f"stage {number} does not have the outputs that it returns"
        if stage.micro_batches != plan.micro_batches:
            yield f"stage {number} runs {stage.micro_batches} micro-batches, and not {plan.micro_batches}"
        for name, layout in stage.parameter_layouts.items():
            if layouts.setdefault(name, layout) != layout:
                yield f"parameter {name} has two layouts, {layouts[name]} and {layout}"


def _plan_of(content: PipelineData, stages: list[P]) -> PipelineContent[P]:
    own = content.stages
    prices = SchedulePrices(
        tuple(StageFigures(**msgspec.structs.asdict(stage.figures)) for stage in own),
        tuple(stage.sent for stage in own[:-1]),
        tuple(stage.returned for stage in own[:-1]),
    )
    inputs: Mapping[int, Layout] = {int(i): layout.layout() for i, layout in content.inputs.items()}
    return PipelineContent(
        mesh=MeshSpec(content.mesh.axes, content.mesh.device),
        axis=content.axis,
        schedule=content.schedule,
        micro_batches=content.micro_batches,
        cut=content.cut,
        stages=tuple(stages),
        reads=tuple(stage.reads for stage in own),
        returns=tuple(stage.returns for stage in own),
        prices=prices,
        memory_limit=content.memory_limit_bytes,
        reserve=content.reserve_bytes,
        bound_of_cut=content.bound_of_cut,
        inputs=inputs,
        origin=PlanOrigin(**msgspec.structs.asdict(content.origin)),
        race=tuple(one.raced() for one in content.race),
        rehearsed=None if content.rehearsed is None else content.rehearsed.rehearsed(),
    )
