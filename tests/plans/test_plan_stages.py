"""Planning a call in stages: where it is cut, what stages agree on, which schedule is kept, what cannot be."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from autoshard import InfeasibleError, MeshSpec, PipelinePlan, Plan, ShardingError, find_plan
from autoshard.plan.division import Division
from autoshard.plan.plan import PipelinePlan as Pipeline
from autoshard.plan.plan_ends import parameter_shapes, resolve_pins
from autoshard.plan.plan_stages import _counts, plan_stages
from autoshard.plan.stage_tasks import StageCutter
from cost_model.deadline import Deadline
from cost_model.profile import Profile
from passes.ir.joint import JointGraph
from passes.search.coarse_to_fine import find_fastest
from passes.search.find import Found, Sought
from passes.search.search_terms import Narrowing
from passes.stages.cut_costs import places_between_products, stage_seconds
from passes.stages.pipeline_orders import in_flight
from passes.stages.stage_graphs import stage_graphs
from tests.models import Followed
from tests.plans.pipelines import PP, SQUARE, planned, stage_task
from tests.profiles import slow_compute
from tests.stages.stage_models import MODELS

CASES = [
    ("mlp", PP, 1),
    ("mlp", SQUARE, 4),
    ("gpt2", PP, 2),
    ("gpt2", SQUARE, 2),
    pytest.param("t5", SQUARE, 2, marks=pytest.mark.slow),
]


def parameters(name: str) -> set[str]:
    model, _, _ = MODELS[name]()
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(("name", "mesh", "pieces"), CASES)
def test_stages_agree_on_what_passes(name: str, mesh: MeshSpec, pieces: int) -> None:
    """A stage reads what it receives in the layout in which it is sent; all parameters are held, shared ones alike."""
    plan = planned(name, mesh, pieces)
    task = stage_task(name, mesh)
    graphs = plan.stage_graphs(task.joint)
    assert len(graphs) == len(plan.stages) and plan.micro_batches == pieces
    for stage, graph in zip(plan.stages, graphs, strict=True):
        stage.check_graph(graph.joint)
        assert stage.mesh == mesh.resized("pp", 1)
    for before, after in zip(range(len(graphs)), range(1, len(graphs)), strict=False):
        own = len(graphs[before].outputs)
        sent = [plan.stages[before].outputs[own + i] for i in range(len(graphs[before].sent))]
        read = len(graphs[after].inputs)
        assert [plan.stages[after].inputs[read + i] for i in range(len(sent))] == sent
    assert set(plan.parameter_layouts) == set(plan.holders) == parameters(name)
    for stage in plan.stages:
        assert all(plan.parameter_layouts[n] == layout for n, layout in stage.parameter_layouts.items())
    for number, graph in enumerate(graphs):
        for shared, stages in graph.summed.items():
            assert set(plan.holders[shared]) == {s % plan.ranks for s in stages} and number in stages


def test_a_tied_parameter_has_several_holders() -> None:
    plan = planned("gpt2", PP, 2)
    tied = {name: places for name, places in plan.holders.items() if len(places) > 1}
    assert tied == {"transformer.wte.weight": (0, 1), "lm_head.weight": (0, 1)}
    assert plan.returned_by[0] == len(plan.stages) - 1


def test_the_cut_is_the_best_of_the_narrow_ones() -> None:
    task = stage_task("llama")
    cutter = StageCutter(task, task.joint, "pp")
    price = lambda nbytes: task.prices.redistributor.collective_seconds(
        "point_to_point", ("pp",), int(nbytes)
    )
    best = min(max(stage_seconds(cutter.costs, [place.op], price)) for place in cutter.places)
    found = cutter.cut(2)
    assert best * (1 - 1e-9) <= max(found.seconds) <= 1.02 * best
    assert found.cut[0] in [place.op for place in cutter.places]


def test_where_narrow_places_are_too_few_others_are_tried() -> None:
    """Layers of widths 6, 12, 8, 16, 8, 4, 3: narrow are 8 and 4; for four stages the best between any two products."""
    task = stage_task("mlp")
    cutter = StageCutter(task, task.joint, "pp")
    ways = places_between_products(cutter.costs)
    assert len(cutter.places) == 2 < len(ways)
    price = lambda nbytes: task.prices.redistributor.collective_seconds(
        "point_to_point", ("pp",), math.ceil(nbytes)
    )
    cuts = [[place.op for place in places] for places in itertools.combinations(ways, 3)]
    best = min(max(stage_seconds(cutter.costs, cut, price)) for cut in cuts)
    found = cutter.cut(4)
    assert set(found.cut) <= {place.op for place in ways} and max(found.seconds) <= 1.02 * best


def test_costs_learned_of_a_cut_are_its_stages_seconds() -> None:
    task = stage_task("mlp")
    cutter = StageCutter(task, task.joint, "pp")
    cut = cutter.cut(3).cut
    learned = cutter.learned(cut, [5.0, 1.0, 2.0])
    assert stage_seconds(learned, cut, lambda nbytes: 0.0) == pytest.approx((5.0, 1.0, 2.0))
    (half,) = {place.position for place in cutter.costs.places if place.op == cut[0]}
    part = cutter.costs.seconds[half - 1] / cutter.costs.seconds[half]
    assert learned.seconds[half - 1] == pytest.approx(5.0 * part)


def test_a_transformer_is_cut_where_its_residual_stream_passes() -> None:
    plan = planned("gpt2", PP, 2, "1f1b")
    graphs = plan.stage_graphs(stage_task("gpt2").joint)
    assert [crossing.shape for graph in graphs for crossing in graph.sent] == [(1, 16, 32)] * (
        len(graphs) - 1
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_a_schedule_may_be_asked_for(schedule: str) -> None:
    plan = planned("mlp", PP, 4, schedule)
    assert plan.schedule == schedule and plan.timeline.order.pieces == 4


def test_the_fastest_schedule_is_kept() -> None:
    fastest = planned("mlp", PP, 4)
    names = ("gpipe", "1f1b", "interleaved", "zero_bubble")
    others = [planned("mlp", PP, 4, name).step_time for name in names]
    assert fastest.step_time <= min(others) * (1 + 1e-9)


def test_the_prediction_is_of_the_busiest_rank_at_least() -> None:
    plan = planned("mlp", SQUARE, 2)
    assert 0.0 < plan.lower_bound <= plan.step_time and 0.0 <= plan.gap < 1.0
    assert max(plan.timeline.busy) <= plan.step_time
    waiting = sum(plan.step_time - busy for busy in plan.timeline.busy)
    assert plan.bubble == pytest.approx(waiting / plan.step_time / plan.ranks)


def test_forward_alone_runs_whole() -> None:
    plan = plan_stages(stage_task("gpt2", SQUARE, training=False), "pp", 4)
    assert plan.micro_batches == 1 and plan.schedule == "gpipe"
    assert all(stage.backward == stage.update == 0.0 for stage in plan.scheduled.prices.stages)


def test_what_is_sent_without_a_gradient_is_in_any_layout() -> None:
    """Of a forward alone: gathering the residual stream to send it would cost more than sending a part."""
    batch = MeshSpec({"pp": 2, "dp": 2})
    plan = plan_stages(stage_task("llama", batch, training=False), "pp", 1)
    own = len(plan.parts[0].returns)
    assert any(plan.stages[0].outputs[place].axes for place in plan.stages[0].outputs if place >= own)  # type: ignore[union-attr]


def test_a_limit_leaves_room_for_what_is_in_flight() -> None:
    free = planned("mlp", PP, 4, "gpipe")
    assert in_flight(free.timeline.order) == (4, 4)
    first, second = free.scheduled.prices.stages
    assert free.scheduled.peaks == (first.peak + 3 * first.kept, second.peak + 3 * second.kept)
    limit = free.peak_memory - 1
    found = plan_stages(stage_task("mlp", memory_limit=limit), "pp", 4)
    assert found.peak_memory <= limit == found.memory_limit
    assert all(flight <= 4 for flight in in_flight(found.timeline.order))


def test_a_limit_does_not_search_twice_what_memory_does_not_matter_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stage's fastest plan is searched once, for whatever schedules it is planned again within the limit."""
    whole: list[int] = []

    def counted(asked: Sought, deadline: Deadline) -> Found:
        if asked.narrowing == Narrowing():
            whole.append(id(asked.joint.graph))
            kept.append(asked.joint)
        return find_fastest(asked, deadline)

    kept: list[JointGraph] = []  # so that no number is another graph's
    monkeypatch.setattr("autoshard.plan.task.find_fastest", counted)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)))
    within = lambda limit: find_plan(
        model,
        PP,
        (torch.ones(512, 16),),
        profile=slow_compute(),
        stages="pp",
        micro_batches=4,
        memory_limit=limit,
    )
    limit = within(None).peak_memory * 4 // 5
    whole.clear()
    found = within(limit)
    assert isinstance(found, Pipeline) and found.peak_memory <= limit
    assert any(stage.planned.again for stage in found.stages)
    assert len(whole) == len(set(whole)) > 1


def test_a_stage_that_cannot_fit_is_named() -> None:
    free = planned("mlp", SQUARE, 2)
    with pytest.raises(InfeasibleError, match=r"stage|no cut") as error:
        plan_stages(stage_task("mlp", SQUARE, memory_limit=free.peak_memory // 3), "pp", 2)
    assert "try:" in str(error.value)


def test_a_pin_holds_in_its_stage() -> None:
    task = stage_task("mlp", SQUARE)
    pins = resolve_pins({"layers.[24].weight": {"tp": Shard(0)}}, parameter_shapes(task.captured), SQUARE)
    plan = plan_stages(replace(task, pins=pins), "pp", 1, schedule="gpipe")
    assert all(plan.parameter_layouts[name] == layout for name, layout in pins.items())


def test_groups_of_a_stage_are_as_far_apart_as_on_the_whole_mesh() -> None:
    """Ranks of "dp" are two apart, with a stage between them."""
    mesh = MeshSpec({"dp": 8, "pp": 4}, device_type="cuda")
    task = replace(stage_task("mlp", mesh.resized("pp", 1)), links=mesh, profile=Profile.named("h100"))
    near = task.prices.redistributor.collective_seconds("all_reduce", ("dp",), 2**24)
    alone = replace(task, links=None).prices.redistributor.collective_seconds("all_reduce", ("dp",), 2**24)
    assert near > alone


@pytest.mark.parametrize(
    ("axis", "said"),
    [("tp", "one device"), ("pipe", "no such axis"), (3, "stages"), ("dp,pp", "no such axis")],
)
def test_an_axis_that_cannot_hold_stages(axis: object, said: str) -> None:
    model, args, _ = MODELS["mlp"]()
    with pytest.raises(ShardingError, match=said) as error:
        find_plan(model, MeshSpec({"pp": 2, "tp": 1}), args, stages=axis)  # type: ignore[arg-type]
    assert "stages" in str(error.value) and "try:" in str(error.value)


def test_too_few_layers() -> None:
    model, args, _ = MODELS["mlp"]()
    with pytest.raises(InfeasibleError, match=r"^stages='pp': cannot cut .* too few layers"):
        find_plan(model, MeshSpec({"pp": 64}), args, stages="pp")
    with pytest.raises(InfeasibleError, match=r"stages='pp'.* 0 places .*\n  try: stages=None"):
        find_plan(nn.ReLU(), PP, (torch.ones(4, 4),), stages="pp")
    with pytest.raises(InfeasibleError, match=r"stages='pp'.* 0 places .*\n  try: stages=None"):
        find_plan(Zero(), PP, (torch.ones(4, 4, requires_grad=True),), stages="pp")


class Zero(nn.Module):
    """The result is a constant: its forward has no op, and its backward one of the input's gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x > x).double().mul(x).zero_()


def test_a_cut_that_does_not_fit_names_the_limit() -> None:
    with pytest.raises(InfeasibleError, match=r"(?s)^stages='pp', memory_limit=300B: .*larger memory_limit"):
        plan_stages(stage_task("mlp", memory_limit=300), "pp", 2)


def test_statistics_of_the_batch_are_not_cut() -> None:
    model, args, _ = MODELS["normed"]()
    with pytest.raises(InfeasibleError, match="needs the whole batch"):
        find_plan(model, PP, args, stages="pp", micro_batches=2)


def test_what_is_split_over_the_stages() -> None:
    model, args, _ = MODELS["mlp"]()
    with pytest.raises(ShardingError, match=r"layers.0.weight .*holds stages"):
        find_plan(model, PP, args, stages="pp", constraints={"layers.0.weight": [Shard(0)]})
    with pytest.raises(ShardingError, match=r"in_placements.*holds stages"):
        find_plan(model, PP, args, stages="pp", in_placements=([Shard(0)], [Shard(0)]))


def test_a_schedule_that_cannot_run_says_why() -> None:
    with pytest.raises(InfeasibleError, match="at least as many micro-batches"):
        plan_stages(stage_task("mlp"), "pp", 1, schedule="1f1b")


@pytest.mark.slow
def test_auto_takes_what_is_fastest() -> None:
    """Of no stages, and stages along either axis; pieces are as many as is fastest."""
    model, args, kwargs = MODELS["mlp"]()
    options = {"profile": slow_compute(), "backend": "eager"}
    mesh = MeshSpec({"a": 2, "b": 2})
    found = find_plan(model, mesh, (args, kwargs), stages="auto", micro_batches="auto", **options)  # type: ignore[arg-type]
    ways = [
        find_plan(model, mesh, (args, kwargs), micro_batches="auto", stages=s, **options)
        for s in (None, "a", "b")
    ]  # type: ignore[arg-type]
    assert [type(way) for way in ways] == [Plan, PipelinePlan, PipelinePlan]
    assert found.step_time == pytest.approx(min(way.step_time for way in ways))


def test_pieces_of_auto_are_as_fast_as_any() -> None:
    model, args, kwargs = MODELS["mlp"]()
    options = {"profile": slow_compute(), "backend": "eager", "stages": "pp"}
    found = find_plan(model, PP, (args, kwargs), micro_batches="auto", **options)  # type: ignore[arg-type]
    assert isinstance(found, Pipeline) and found.micro_batches in (2, 4)
    every = [find_plan(model, PP, (args, kwargs), micro_batches=k, **options).step_time for k in (2, 4)]  # type: ignore[arg-type]
    assert found.step_time == pytest.approx(min(every))


def test_stages_that_take_turns_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """One piece; and not where nothing is trained, or several are asked for."""
    task, without = stage_task("mlp", PP), lambda task, until: pytest.fail("not asked for")
    for pieces in (1, 2):
        Division(pieces, "pp").fastest(task, Deadline.after(60.0), without)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "one stage computes at a time" in said and "micro_batches='auto'" in said


@pytest.mark.parametrize(
    ("names", "cut_well", "counts"),
    [
        (("interleaved",), (1, 2, 4), [2, 4, 1]),
        (("interleaved",), (1, 2), [2, 1, 4]),
        (("interleaved",), (), [1, 2, 4]),
        (("1f1b", "interleaved"), (1, 2, 4), [1, 2, 4]),
    ],
)
def test_what_is_interleaved_alone_has_several_stages_a_rank_first(
    names: tuple[str, ...], cut_well: tuple[int, ...], counts: list[int]
) -> None:
    assert list(_counts(names, cut_well.__contains__)) == counts


def test_what_is_asked_of_an_op_is_not_asked_of_its_value_in_another_stage() -> None:
    """What passes is an input of the stage after, by the name of the op that makes it, and reads no operands there."""
    task, free = stage_task("mlp"), planned("mlp")
    passing = stage_graphs(task.joint, free.cut)[1].received
    reads = lambda strategies: [i for i, one in enumerate(strategies) if one.operands]
    asked = Narrowing(allowed={crossing.name: reads for crossing in passing})
    assert passing and plan_stages(replace(task, narrowing=asked), "pp", 1).cut == free.cut


def test_a_parameter_that_forward_changes_is_on_no_other_rank() -> None:
    """Without stages it may change: the remedy works."""
    model, x = Followed(), torch.randn(4, 6)
    plan = functools.partial(find_plan, model, PP, (x,), profile=slow_compute(), micro_batches=2)
    with pytest.raises(InfeasibleError, match=r"changes parameter slow\.weight in place") as caught:
        plan(stages="pp")
    assert "try: stages=None" in str(caught.value)
    assert plan(stages="auto").axis == plan().axis == ""
