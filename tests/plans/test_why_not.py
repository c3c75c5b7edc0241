"""`why_not`: a family of plans, and any node, against the plan."""

from __future__ import annotations

import re
import runpy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard import InfeasibleError, MeshSpec, Plan, PlanError, ShardingError, find_plan
from autoshard.plan.families import FAMILIES, Variant, family_named
from tests.plans.patterns import Block, LanguageModel, Regression
from tests.plans.test_patterns import DP4, DP4_TP4, H100, TP4, counts, moved, regression, rows
from tests.structure.source_tree import ROOT


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Fully sharded: tests/plans/test_patterns.py."""
    return find_plan(regression(4096, 4096), DP4, rows(65536, 4096), profile=H100)


@pytest.fixture(scope="module")
def grid() -> Plan:
    """dp of 4 nodes, tp of 4 GPUs."""
    return find_plan(regression(4096, 8192), DP4_TP4, rows(65536, 4096), profile=H100)


def as_family(plan: Plan, name: str) -> Plan:
    family = family_named(name)
    assert family is not None and plan.again is not None
    found = plan.again.search(Variant(family=family))
    assert isinstance(found, Plan)
    return found


def step_change(text: str) -> float:
    found = re.search(r"^step   .* \(([+-][\d.]+)%\)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_a_family_is_the_plan_that_its_pins_give(plan: Plan) -> None:
    """No weight is ever split under data parallelism, so pinned weights are the same plan."""
    found = as_family(plan, "DDP")
    pinned = find_plan(
        regression(4096, 4096),
        DP4,
        rows(65536, 4096),
        profile=H100,
        constraints={"*": [Replicate()]},
    )
    assert found.parameters == pinned.parameters
    assert found.step_time == pytest.approx(pinned.step_time)
    assert counts(found, "backward") == {"all_reduce[dp]": 3}
    text = plan.why_not("DDP")
    slower = found.step_time / plan.step_time - 1
    assert text.startswith(f"DDP (weights whole on every rank): {slower:.1%} slower\n")
    assert "weights whole; gradients by all_reduce[dp]\n" in text
    assert text.endswith(plan.diff(found)) and text.count("75.2 ms -> ") == 1


def test_equal_layers_differ_in_one_line() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    plan = find_plan(model, DP4, rows(64, 64)[:1], profile=H100, constraints={"*": [Replicate()]})
    other = find_plan(model, DP4, rows(64, 64)[:1], profile=H100, constraints={"*": [Shard(0)]})
    lines = [line for line in plan.diff(other).splitlines() if "weight" in line]
    assert lines == ["  0-3.weight: [-, -] -> [@dp, -]  x 4"]


def test_no_line_ends_in_a_space(plan: Plan) -> None:
    for name in plan.parameter_layouts:
        assert not [line for line in plan.explain(name).splitlines() if line != line.rstrip()]


def test_the_family_that_the_plan_is_of(plan: Plan) -> None:
    assert "the plan is one" in plan.why_not("FSDP").splitlines()[0]
    assert plan.why_not("ZeRO") == plan.why_not("fsdp") == plan.why_not("zero-3")


def test_tensor_parallelism_moves_no_weight(plan: Plan) -> None:
    found = as_family(plan, "Megatron")
    assert not {name for phase in ("forward", "backward") for name, _ in moved(found, phase) if name}
    assert all(p != (Replicate(),) for p in found.parameters.values())
    assert step_change(plan.why_not("Megatron")) > 0


def test_fully_sharded_gathers_every_weight() -> None:
    """Where tensor parallelism wins: column, then row."""
    plan = find_plan(regression(4096, 16384), TP4, rows(128, 4096), profile=H100)
    assert moved(plan, "forward") == {("", "all_reduce[tp]")}
    found = as_family(plan, "FSDP")
    names = {name for name, way in moved(found, "forward") if way == "all_gather[tp]"}
    assert names >= set(found.parameters)
    assert "the plan is one" in plan.why_not("TP")
    assert "slower" in plan.why_not("FSDP")


def test_sequence_parallelism_splits_the_residual_stream() -> None:
    with torch.device("meta"):
        model = Regression(nn.Sequential(Block(1024, 8, 0.1)))
    x = torch.empty(1, 1024, 1024, device="meta")
    plan = find_plan(model, TP4, (x, x), profile=H100)
    found = as_family(plan, "sequence parallel")
    sums = [r for r in found.records if r.op == "aten.add.Tensor" and r.results[0].shape == (1, 1024, 1024)]
    residual = [r for r in sums if r.phase == "forward" and len(r.operands) == 2 and "norm" not in r.module]
    assert len(residual) == 2
    assert {str(r.results[0].layout) for r in residual} == {"[-, @tp, -]"}
    whole = [c for c in found.collectives if c.phase == "forward" and c.nbytes > 1e6]
    assert whole and not any(c.kind == "all_reduce" for c in whole)


@pytest.mark.parametrize("family", ["HSDP", "DDP x TP", "FSDP x TP"])
def test_families_of_two_axes(grid: Plan, family: str) -> None:
    """Of every weight: over which axis it is stored split, and over which it is gathered."""
    found = as_family(grid, family)
    roles = dict(family_named(family).roles(found.mesh))  # type: ignore[union-attr]
    assert list(roles) == ["dp", "tp"]
    weights = found.parameter_layouts
    assert len(weights) == 3
    travelled = {(n, way) for phase in ("forward", "backward") for n, way in moved(found, phase) if n}
    for axis, role in roles.items():
        assert all((axis in layout.axes) == (role != "whole") for layout in weights.values())
        over = {name for name, way in travelled if axis in way}
        assert over == (set(weights) if role == "stored" else set())
    assert found.step_time >= grid.step_time * (1 - 1e-6)


def test_vocabulary_parallelism() -> None:
    with torch.device("meta"):
        model = LanguageModel(131072, 1024, nn.Identity())
    tokens = torch.zeros(2, 512, dtype=torch.int64)
    plan = find_plan(model, TP4, (tokens, tokens), profile=H100)
    assert "the plan is one" in plan.why_not("vocabulary parallel")
    assert as_family(plan, "vocabulary parallel").parameters["head.weight"] == (Shard(0),)
    assert as_family(plan, "DDP").parameters["head.weight"] == (Replicate(),)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("FSDP x TP", "it needs 2 mesh axes of several ranks, and mesh (dp=4) has 1"),
        ("sequence parallel", "it has no residual stream"),
        ("vocabulary parallel", "no weight whose length is a vocabulary's"),
        ("EP", "the model has no products with experts"),
        ("Context-Parallel", "it has no residual stream"),
    ],
)
def test_a_family_that_cannot_be_says_why(plan: Plan, family: str, why: str) -> None:
    text = plan.why_not(family)
    assert text.startswith(f"{family} (") and ": no plan\n" in text and why in text


def test_a_family_that_does_not_fit_says_what_binds() -> None:
    model, data, prices = regression(4096, 4096), rows(64, 4096), H100
    free = find_plan(model, DP4, data, profile=prices)
    least = find_plan(model, DP4, data, profile=prices, constraints={"*": [Shard(0)]})
    limit = least.peak_memory + least.reserve + 2**24
    plan = find_plan(model, DP4, data, profile=prices, memory_limit=limit)
    assert free.mesh == plan.mesh
    text = plan.why_not("DDP")
    assert "no plan fits memory_limit=" in text and "body.w1.weight (with gradient" in text


def test_a_family_takes_the_place_of_pins() -> None:
    plan = find_plan(regression(256, 512), DP4, rows(65536, 256), profile=H100, constraints={"*": [Shard(0)]})
    assert all(p == (Replicate(),) for p in as_family(plan, "DDP").parameters.values())


def test_any_node(plan: Plan) -> None:
    """The product of the two branches left split by its features, not by the batch."""
    assert plan.again is not None
    found = plan.again.search(Variant(nodes={"mul": {"dp": Shard(1)}}))
    assert isinstance(found, Plan)
    assert str(plan.planned.layouts["mul"].results[0]) == "[@dp, -]"
    assert str(found.planned.layouts["mul"].results[0]) == "[-, @dp]"
    assert found.step_time > plan.step_time
    assert plan.why_not("mul", [Shard(1)]) == plan.why_not("mul", {"dp": Shard(1)}) == plan.diff(found)
    assert step_change(plan.why_not("mul", [Shard(0)])) == 0


def test_a_pending_sum_is_a_layout_too(plan: Plan) -> None:
    assert step_change(plan.why_not("contract_2", [Partial()])) > 0


def test_a_node_without_its_first_result_is_pinned_by_the_next() -> None:
    """The first layer's images need no gradient: its backward makes those of weight and bias alone."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))
    plan = find_plan(model, MeshSpec({"dp": 2}), (torch.zeros(8, 3, 8, 8),), profile="cpu")
    assert plan.again is not None
    (name,) = (record.name for record in plan.records if record.op == "aten.convolution_backward")
    found = plan.again.search(Variant(nodes={name: [Shard(1)]}))
    assert isinstance(found, Plan)
    assert [str(layout) for layout in found.planned.layouts[name].results[1:]] == ["[-, @dp, -, -]", "[-]"]
    assert plan.why_not(name, [Shard(1)]) == plan.diff(found)
    with pytest.raises(ShardingError, match="it has 4 dims"):
        plan.why_not(name, [Shard(4)])


def test_a_node_that_a_limit_made_is_no_question() -> None:
    """Which ops the backward computes again is another choice in another plan."""
    layers = [nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)]
    model, mesh = nn.Sequential(*layers), MeshSpec({"dp": 2})
    data = (torch.zeros(512, 8),)
    free = find_plan(model, mesh, data, profile="cpu")
    plan = find_plan(model, mesh, data, profile="cpu", memory_limit=int(0.6 * free.peak_memory))
    copies = [record.name for record in plan.records if record.name.endswith("_again")]
    assert copies
    for name in copies:
        origin = name.partition("_again")[0]
        with pytest.raises(PlanError, match=rf"memory limit of this plan(.|\n)*try: why_not\('{origin}', "):
            plan.why_not(name, [Shard(0)])
    assert plan.why_not("gelu", [Shard(0)]).startswith("step ")


def test_the_node_of_a_parameter_is_the_parameter(plan: Plan) -> None:
    by_name = plan.why_not("body.w1.weight", [Replicate()])
    assert plan.why_not("body_w1_weight", [Replicate()]) == by_name
    assert "body.w1.weight: [@dp, -] -> [-, -]" in by_name
    assert plan.why_not("body.*", [Replicate()]) != by_name


def test_a_node_that_cannot_be_so(plan: Plan) -> None:
    with pytest.raises(
        InfeasibleError, match=r"no way to compute node silu leaves \[-, -\]\+dp:sum"
    ) as caught:
        plan.why_not("silu", [Partial()])
    assert "[@dp, -]" in str(caught.value)
    with pytest.raises(ShardingError, match="cannot split dim 5 of node silu"):
        plan.why_not("silu", [Shard(5)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("FDSP",), r"no family has it(.|\n)*families: DDP, FSDP, HSDP(.|\n)*try: FSDP"),
        (("PP",), r"try: find_plan\(\.\.\., stages='auto'"),
        (("silo", [Replicate()]), r"no parameter or node of that name(.|\n)*families: DDP(.|\n)*try: silu"),
        (("body.w1.weigth", [Replicate()]), r"try: body\.w1\.weight"),
        (("silu",), r"why_not\('silu'\) lacks placements"),
        (("body.w1.weight",), "lacks placements"),
        (("FSDP", [Shard(0)]), r"a family of plans takes no placements\n  try: why_not\('FSDP'\)"),
        (("args_0", [Shard(0)]), "in_placements"),
        (("output", [Shard(0)]), "out_placements"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_names(plan: Plan, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan.why_not(*arguments)  # type: ignore[arg-type]


def test_every_family_has_its_names_alone() -> None:
    names = [name for family in FAMILIES for name in (family.name, *family.aliases)]
    for family in FAMILIES:
        for name in (family.name, *family.aliases):
            assert family_named(name.upper()) is family, name
    assert len(names) == len(set(names))
    assert family_named("nope") is None


def test_what_the_page_shows_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "plans.md").read_text()
    shown = re.search(r"^<!-- output: (\S+) -->\n```\n(.+?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert shown
    runpy.run_path(str(ROOT / shown[1]))["main"]()
    assert f"\n{shown[2]}\n" in capsys.readouterr().out


def test_a_mesh_of_one_device() -> None:
    plan = find_plan(regression(64, 64), MeshSpec({"dp": 1}), rows(8, 64), profile="cpu")
    assert "no plan" in plan.why_not("FSDP")
