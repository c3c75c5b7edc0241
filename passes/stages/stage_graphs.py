"""Cut a joint graph into the graphs of pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_model.errors import ShardingError
from passes.ir.collector import collector_paused
from passes.ir.joint import JointGraph
from passes.stages.assign_stages import assign_stages, assigned_like
from passes.stages.build_stage import build_stage
from passes.stages.graph_parts import GraphParts, graph_parts
from passes.stages.stage_graph import StageGraph

Cut = Sequence[str]
"""For every stage but the first the op of the forward that it begins with, in the graph's order."""


@collector_paused()
def stage_graphs(joint: JointGraph, cut: Cut) -> tuple[StageGraph, ...]:
    """One graph for each stage; together they compute what `joint` does. It is left as it is.

    joint: canonical, before `passes.states` adds anything, which is for each stage by itself. An op of the forward runs
    in the stage whose part of the graph it stands in; what is computed from inputs alone and is no product, in every
    stage that needs it. An op of the backward runs where the values
    and parameters are that it works on (`passes.stages.backward_stages`).

    What passes is that of the first piece, where the graph is of a batch in pieces; the graphs of its `others` are cut
    alike.

    Raises ShardingError if `cut` names no ops of the forward in order, or parts what must stay together: a buffer's
    readers and the op that makes its new value.
    """
    parts = graph_parts(joint)
    count = len(cut) + 1
    assigned = assign_stages(parts, _starts(parts, cut), count)
    others = [(other, assigned_like(assigned, other)) for other in map(graph_parts, joint.others)]
    return tuple(
        _with_others(build_stage(parts, assigned, stage), [build_stage(*other, stage) for other in others])
        for stage in range(count)
    )


def _with_others(first: StageGraph, others: Sequence[StageGraph]) -> StageGraph:
    return replace(first, joint=replace(first.joint, others=tuple(other.joint for other in others)))


def _starts(parts: GraphParts, cut: Cut) -> tuple[int, ...]:
    positions = {node.name: i for i, node in enumerate(parts.forward)}
    unknown = [name for name in cut if name not in positions]
    if unknown:
        raise ShardingError(
            f"cut: {unknown[0]} is no op of the forward at which a stage may begin\n"
            "  try: find_plan(..., stages=...) again, which chooses a cut"
        )
    starts = tuple(positions[name] for name in cut)
    if list(starts) != sorted(set(starts)) or 0 in starts:
        raise ShardingError(
            f"cut: {', '.join(cut)} do not begin one stage after another\n  try: in the graph's order, each once, not "
            f"{parts.forward[0].name}, with which the first stage begins"
        )
    return starts
