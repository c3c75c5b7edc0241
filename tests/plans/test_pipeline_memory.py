"""`PipelinePlan.memory`: the actions of the fullest rank, against arithmetic and a count of what every piece keeps."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from msgspec import structs

from autoshard import InfeasibleError, Plan
from autoshard.plan.plan_memory import AtPeak, MemoryTimeline
from autoshard.plan.stage_schedule import Scheduled, SchedulePrices, pipeline_memory
from autoshard.plan.stage_search import StageSearch
from autoshard.plan.task import search_plan
from cost_model.deadline import Deadline
from passes.micro_batches.cut_batch import cut_for_stages
from passes.predict.predict_step import StageFigures
from passes.predict.prediction import KINDS, MemoryStep
from passes.stages.pipeline_orders import ORDERS, pipeline_order
from tests.plans.pipelines import PP, SQUARE, planned, stage_task

Stage = tuple[StageFigures, MemoryTimeline]


def stage(most: int = 5, *, weights: int = 20, kept: int = 10, beside: int = 0) -> Stage:
    """Holds 4 times its weights, and inputs of 20. A piece makes 3 in the forward besides what it keeps, `most` in the
    backward, and `beside` that only the figures count."""
    held = {"parameters": weights, "optimizer": 2 * weights, "inputs": 20}
    trained = {**held, "gradients": weights}
    moments = [
        ("forward", "start", held),
        ("forward", "up", {**held, "kept": kept, "working": 3}),
        ("backward", "down", {**trained, "kept": kept, "working": most}),
        ("backward", "last", trained),
    ]
    steps = tuple(
        MemoryStep(place, phase, node, tuple(nbytes.get(kind, 0) for kind in KINDS))
        for place, (phase, node, nbytes) in enumerate(moments)
    )
    rows = [AtPeak(kind, "w", "", "", 1, n) for kind, n in zip(KINDS, steps[2].by_kind, strict=True) if n]
    figures = StageFigures(1.0, 2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0, 0, 0)
    figures = structs.replace(
        figures, held=4 * weights + 20, kept=kept, peak=4 * weights + 20 + kept + most + beside
    )
    return figures, MemoryTimeline(len(steps), steps, tuple(rows))


def scheduled(name: str, stages: Sequence[Stage], pieces: int, ranks: int = 2) -> Scheduled:
    order = pipeline_order(name, ranks, pieces, stages_per_rank=len(stages) // ranks)
    free = (0.0,) * (len(stages) - 1)
    return Scheduled(order, SchedulePrices(tuple(figures for figures, _ in stages), free, free))


def timeline(name: str, stages: Sequence[Stage], pieces: int, ranks: int = 2) -> MemoryTimeline:
    found = pipeline_memory(scheduled(name, stages, pieces, ranks), [memory for _, memory in stages])
    assert found is not None
    return found


def told(memory: MemoryTimeline) -> list[tuple[str, str, int]]:
    return [(step.node, step.phase, step.nbytes) for step in memory.steps]


def adds_up(memory: MemoryTimeline, peak: int) -> None:
    assert max(step.nbytes for step in memory.steps) == memory.peak.nbytes == peak
    assert [step.place for step in memory.steps] == list(range(memory.count))
    for kind, nbytes in memory.by_kind.items():
        assert sum(row.nbytes for row in memory.at_peak if row.kind == kind) == nbytes
    sizes = [row.nbytes for row in memory.at_peak]
    assert sizes == sorted(sizes, reverse=True) and 0 not in sizes


def test_every_action_by_hand() -> None:
    """1F1B: rank 0 is one forward ahead. Forward: 80 held and 13 of the piece; backward: 100 and 15. The other piece in
    flight keeps 10."""
    memory = timeline("1f1b", [stage(), stage()], 3)
    forward = lambda piece, nbytes: (f"up (stage 0, piece {piece})", "forward", nbytes)
    backward = lambda piece, nbytes: (f"down (stage 0, piece {piece})", "backward", nbytes)
    assert told(memory) == [
        forward(0, 93),
        forward(1, 103),
        backward(0, 125),
        forward(2, 103),
        backward(1, 125),
        backward(2, 115),
    ]
    adds_up(memory, 100 + 2 * 10 + 5)
    assert memory.peak.place == 2 and memory.by_kind["kept"] == 20
    assert AtPeak("kept", "stage 0, other pieces", "", "10B each", 1, 10) in memory.at_peak


def test_halves_of_a_backward_keep_a_piece_to_the_end() -> None:
    """Rank 1 runs the half of its weights one piece late, so its second piece comes when the first is kept."""
    memory = timeline("zero_bubble", [stage(), stage(weights=30)], 2)
    place = lambda piece: f"(stage 1, piece {piece})"
    assert told(memory) == [
        (f"up {place(0)}", "forward", 110 + 13),
        (f"down {place(0)}", "input", 140 + 15),
        (f"up {place(1)}", "forward", 110 + 13 + 10),
        (f"down {place(1)}", "input", 140 + 15 + 10),
        (f"down {place(0)}", "weight", 140 + 15 + 10),
        (f"down {place(1)}", "weight", 140 + 15),
    ]
    adds_up(memory, 165)


def test_what_other_stages_of_the_rank_hold() -> None:
    """Rank 1 begins with stage 3's backward when stage 1 has run both pieces. Stage 1 holds 60: 10 of weights, ..."""
    memory = timeline(
        "interleaved", [stage(weights=5), stage(weights=10), stage(weights=5), stage(most=50)], 2
    )
    assert told(memory)[:4] == [
        ("up (stage 1, piece 0)", "forward", 50 + 13 + 100),
        ("up (stage 1, piece 1)", "forward", 50 + 13 + 10 + 100),
        ("up (stage 3, piece 0)", "forward", 80 + 13 + 20 + 60),
        ("down (stage 3, piece 0)", "backward", 100 + 60 + 20 + 60),
    ]
    adds_up(memory, 100 + 60 + 30 + 50)
    rows = [row for row in memory.at_peak if row.name.startswith("stage")]
    assert rows == [
        AtPeak("optimizer", "stage 1", "", "", 1, 20),
        AtPeak("inputs", "stage 1", "", "", 1, 20),
        AtPeak("kept", "stage 1, other pieces", "", "10B each", 2, 20),
        AtPeak("parameters", "stage 1", "", "", 1, 10),
        AtPeak("gradients", "stage 1", "", "", 1, 10),
    ]


def test_what_is_in_flight_at_another_time_is_not_counted() -> None:
    """Rank 0 runs all forwards, stage 2's backwards, and then stage 0's, which makes most when of the four pieces that
    were in flight there are two."""
    memory = timeline("interleaved", [stage(most=50), stage(), stage(), stage()], 2)
    at_once = {node: nbytes for node, _, nbytes in told(memory)}
    assert at_once["down (stage 2, piece 0)"] == 2 * 100 + 4 * 10 + 5
    peak = 2 * 100 + 2 * 10 + 50
    assert memory.peak.node == "down (stage 0, piece 0)" and at_once[memory.peak.node] == peak
    adds_up(memory, peak)


def test_any_schedule_as_it_is_run() -> None:
    for name, local, seed in itertools.product(ORDERS, (1, 2, 4), range(20)):
        if ORDERS[name].looped or local == 1:
            as_it_is_run(name, local, random.Random(seed))


def as_it_is_run(name: str, local: int, draw: random.Random) -> None:
    """Which pieces are between their forward and the end of their backward, action by action."""
    ranks, pieces = draw.choice([(2, 2), (2, 4), (3, 3), (4, 8)])
    size = lambda: draw.randrange(1, 100)
    stages = [stage(size() + 3, weights=size(), kept=size()) for _ in range(ranks * local)]
    one = scheduled(name, stages, pieces, ranks)
    memory = timeline(name, stages, pieces, ranks)
    adds_up(memory, max(one.peaks))
    rank = one.peaks.index(max(one.peaks))
    held = sum(stages[number][0].held for number in range(rank, len(stages), ranks))
    alive: set[tuple[int, int]] = set()
    for action, step in zip(one.order.ranks[rank], memory.steps, strict=True):
        figures, own = stages[action.stage]
        alive.add((action.stage, action.piece))
        kept = sum(stages[number][0].kept for number, _ in alive)
        # Gradients are not there in a stage's own forward, where 3 are made.
        less = figures.peak - own.steps[1].nbytes if action.kind == "forward" else 0
        expected = held + kept + figures.peak - figures.held - figures.kept - less
        assert step.nbytes == expected
        if action.kind in ("backward", "weight"):
            alive.remove((action.stage, action.piece))
    assert not alive


def test_gradients_that_no_step_asks_for_are_counted_as_the_figures_do() -> None:
    memory = timeline("gpipe", [stage(beside=7), stage()], 2)
    adds_up(memory, 100 + 2 * 10 + 5 + 7)
    assert AtPeak("working", "stage 0", "gradients of other outputs", "", 1, 7) in memory.at_peak


def test_a_forward_alone_has_no_other_steps() -> None:
    figures, whole = stage()
    rows = tuple(
        AtPeak(kind, "w", "", "", 1, n) for kind, n in zip(KINDS, whole.steps[1].by_kind, strict=True) if n
    )
    alone = MemoryTimeline(2, whole.steps[:2], rows)
    figures = structs.replace(figures, held=whole.steps[0].nbytes, kept=0, peak=whole.steps[1].nbytes)
    memory = timeline("gpipe", [(figures, alone), (figures, alone)], 1)
    assert told(memory) == [("up (stage 0, piece 0)", "forward", 93)]
    adds_up(memory, 93)


def test_a_file_s_outline_makes_the_same() -> None:
    """A bump that an outline leaves out, as all else turns more."""
    curve = [("forward", n) for n in [100] * 5 + [101] + [100] * 5 + [10, 100] * 60] + [("backward", 200)]
    steps = tuple(
        MemoryStep(place, phase, f"n{place}", (10, *[0] * (len(KINDS) - 2), nbytes - 10))
        for place, (phase, nbytes) in enumerate(curve)
    )
    rows = (AtPeak("working", "w", "", "", 1, 190), AtPeak("parameters", "w", "", "", 1, 10))
    whole = MemoryTimeline(len(steps), steps, rows)
    assert steps[5] not in whole.outline().steps
    figures = structs.replace(stage()[0], held=10, kept=10, peak=200)
    stages = [(figures, whole), (figures, whole)]
    memory = timeline("gpipe", stages, 2)
    assert memory == timeline("gpipe", [(figures, whole.outline())] * 2, 2)
    adds_up(memory, 210)


def test_unknown_where_a_stage_of_the_rank_is() -> None:
    stages = [stage(most=6), stage()]
    one = scheduled("gpipe", stages, 2)
    assert pipeline_memory(one, [None, stages[1][1]]) is None
    assert pipeline_memory(one, [stages[0][1], None]) is not None
    _, larger = stage(most=7)
    assert pipeline_memory(one, [larger, None]) is None


@pytest.mark.parametrize(
    ("name", "mesh", "pieces", "schedule"), [("mlp", SQUARE, 4, "1f1b"), ("gpt2", PP, 2, None)]
)
def test_of_a_plan_and_of_its_file(name: str, mesh: object, pieces: int, schedule: str | None) -> None:
    plan = planned(name, mesh, pieces, schedule)  # type: ignore[arg-type]
    assert plan.memory is not None
    adds_up(plan.memory, plan.peak_memory)
    data = json.loads(json.dumps(plan.to_json()))
    assert "memory" not in data
    assert Plan.from_json(data).memory == plan.memory
    for one in data["stages"]:
        del one["plan"]["memory"]
    older = Plan.from_json(data)
    assert older.memory is None and "memory at the peak" not in older.explain()


def test_as_text() -> None:
    memory = timeline(
        "interleaved", [stage(weights=5), stage(weights=10), stage(weights=5), stage(most=50)], 2
    )
    assert_expected_inline(
        str(memory),
        """\
peak 240B at down (stage 3, piece 0), step 3 of 7, backward
  ▅▆▆█▆█▆▆
  optimizer       60B
  working         50B
  inputs          40B
  parameters      30B
  gradients       30B
  kept            30B
  the largest of what lives there
         50B  working     w
         40B  optimizer   w
         20B  parameters  w
         20B  gradients   w
         20B  optimizer   stage 1
         20B  inputs      stage 1
         20B  inputs      w
         20B  kept        stage 1, other pieces x 2  10B each
         10B  parameters  stage 1
         10B  gradients   stage 1
         10B  kept        w""",
    )


def test_where_stages_do_not_fit_it_says_what_lives_there() -> None:
    """Stages that were searched without their limit."""
    free = planned("mlp", SQUARE, 4, "1f1b")
    task = stage_task("mlp", SQUARE, memory_limit=free.peak_memory - 1)
    joint = cut_for_stages(task.joint, 4, sizes_only=True)
    unlimited = lambda task, stage, until: search_plan(replace(task, memory_limit=None), until)
    search = StageSearch(task, "pp", joint, free.cut, Deadline.after(60.0), unlimited)
    with pytest.raises(InfeasibleError) as error:
        search.best([free.timeline.order])
    first, *lines, last = str(error.value).splitlines()
    assert "the ranks of stage 1 hold 3.62KB" in first and last.startswith("  try: memory_limit=")
    assert lines[0].startswith("    gradients   1.332KB  layers.2-3 collect x 2 512B")
