"""`print(plan)`: one screen, each axis by the name of its pattern."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard import MeshSpec, Plan, PlanError, find_plan
from autoshard.drawing.page_data import page_data
from autoshard.plan.crossovers import crossover_lines
from autoshard.plan.judged import Judged
from autoshard.plan.plan_content import Nearly
from autoshard.plan.plan_summary import axis_words, without_shares
from autoshard.plan.task import CallLayouts, Task, search_plans
from autoshard.planning import canonical_capture
from cost_model.errors import titled
from cost_model.memory import format_bytes
from tests.plans.test_patterns import DP4_TP4, H100, regression, rows
from tests.profiles import slow_compute


def axes(plan: object) -> dict[str, str]:
    """Subject -> words, of each line."""
    return dict(line.split(maxsplit=1) for line in str(plan).replace("\n" + " " * 12, " ").splitlines())


def test_one_screen() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(512, 64)
    plan = find_plan(model, MeshSpec({"dp": 4}), (x,), profile=slow_compute(), memory_limit="100MB")
    said = axes(plan)
    assert list(said) == ["plan", "prices", "step", "memory", "proof", "dp", "nearly", "more"]
    assert all(len(line) <= 100 for line in str(plan).splitlines())
    assert said["plan"] == "33.1 thousand parameters on mesh (dp=4) of cpu"  # 64 x 256 x 2 + 256 + 64
    assert "of 100MB" in said["memory"]


def test_a_long_line_is_folded() -> None:
    lines = titled("nearly", " ".join(["gathered"] * 40)).splitlines()
    assert len(lines) == 5 and all(len(line) <= 100 for line in lines)
    assert [line[:12] for line in lines] == ["nearly      ", *[" " * 12] * 4]


def test_pages_are_folded() -> None:
    """Prose, that is; tables and the planned graph have long lines."""
    plan = find_plan(regression(4096, 8192), DP4_TP4, rows(65536, 4096), profile=H100)
    with pytest.raises(PlanError) as caught:
        plan.why_not("ZeRO-1")
    texts = [plan.why_not("DDP"), plan.why_not("sequence parallel"), *crossover_lines(plan.crossovers())]
    text = "\n".join([*texts, str(caught.value), plan.explain().partition("\n\n")[0]])
    assert "weights whole; " in text and max(map(len, text.splitlines())) <= 100


def test_memory_is_all_that_counts_against_the_limit() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(64, 64)
    plan = find_plan(model, MeshSpec({"dp": 2}, device_type="cuda"), (x,), memory_limit="10GB")
    held = format_bytes(plan.peak_memory + plan.reserve)
    assert plan.reserve > plan.peak_memory
    assert axes(plan)["memory"].startswith(f"{held} of 10GB on the fullest device, predicted: ")
    assert page_data(("a", plan))["plans"][0]["peak"] == plan.peak_memory + plan.reserve


@pytest.mark.parametrize(
    ("placement", "words"), [(Replicate(), "DDP; batch split"), (Shard(0), "FSDP; batch split")], ids=str
)
def test_data_parallel(placement: Placement, words: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(4096, 64)
    pins = {"*": [placement]}
    plan = find_plan(model, MeshSpec({"dp": 4}), (x,), profile=slow_compute(), constraints=pins)
    assert axes(plan)["dp"] == words


def test_space() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.Conv2d(1, 1, 3, padding=1))
    plan = find_plan(model, MeshSpec({"sp": 2}), (torch.randn(1, 1, 64, 48),), profile=slow_compute(10_000))
    assert axes(plan)["sp"] == "FSDP; space split"


def test_stages() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    mesh, x = MeshSpec({"pp": 2, "dp": 2}), torch.randn(64, 32)
    plan = find_plan(model, mesh, (x,), profile=slow_compute(), stages="pp", micro_batches=4)
    said = axes(plan)
    assert said["pp"].startswith(f"pipeline: {len(plan.parts)} stages along pp, ")
    assert f"of 4 pieces, bubble {plan.bubble:.0%}" in said["pp"]
    assert said["dp"] == "tensor parallel"


def test_a_bound_is_said_as_one() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(512, 64)
    plan = find_plan(model, MeshSpec({"dp": 2}), (x,), profile=slow_compute())
    assert axes(plan)["proof"] == "optimal under these prices"
    far = replace(plan, cost=0.1, lower_bound=0.09)
    assert axes(far)["proof"] == "within 10.0% of optimal under these prices (bound 90 ms)"
    limited = replace(far, memory_limit=10**9)
    assert axes(limited)["proof"].startswith(
        "within 10.0% of the fastest plan without a limit under these prices"
    )
    assert axes(replace(far, lower_bound=0.0))["proof"].startswith("not known")


def two_products() -> tuple[nn.Module, torch.Tensor]:
    """On four slow CPUs: half of the weights gathered; FSDP of all of them is a little slower."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(512, 64)


def test_what_nearly_won() -> None:
    """The fastest of all that was judged whose words are others; of that one itself nothing: a faster one is known."""
    model, x = two_products()
    captured = canonical_capture(model, (x,), {})
    mesh = MeshSpec({"dp": 4})
    task = Task(captured, slow_compute(), mesh, CallLayouts({}, {}), {}, None, "inductor", 60.0)
    judged: list[Judged] = []
    best, *others = search_plans(task, rivals=judged.append, most=9)  # type: ignore[arg-type]
    words = lambda one: axis_words([one.planned.nodes], "dp")
    apart = [one for one in judged if without_shares(words(one)) != without_shares(words(best))]
    rival = min(apart, key=lambda one: one.seconds)
    assert best.nearly is not None and best.nearly.pattern == {"dp": words(rival)} == {
        "dp": "FSDP; batch split"
    }
    assert best.nearly.slower == pytest.approx(rival.seconds / best.step_time - 1.0)
    assert axes(best)["nearly"].startswith(f"FSDP on dp, batch split: +{best.nearly.slower:.1%}, ")
    assert str(Plan.from_json(best.to_json())) == str(best)
    assert [one.nearly for one in others if words(one) == words(rival)] == [None]


def test_what_does_not_fit_did_not_nearly_win() -> None:
    model, x = two_products()
    limited = lambda limit: find_plan(
        model, MeshSpec({"dp": 4}), (x,), profile=slow_compute(), memory_limit=limit
    )
    roomy, short = limited("1MB"), limited("920KB")  # FSDP takes 951 KB
    assert roomy.step_time == short.step_time
    assert "nearly" in axes(roomy) and "nearly" not in axes(short)


def test_what_it_costs_is_said_in_parts() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(512, 64)
    plan = find_plan(model, MeshSpec({"dp": 2, "tp": 2}), (x,), profile=slow_compute())
    said = lambda *nearly: axes(replace(plan, step_time=1.0, nearly=Nearly(*nearly)))["nearly"]
    fsdp, tensor = "FSDP; batch split", "tensor parallel of 60% of the weights"
    assert (
        said({"dp": fsdp}, 0.012, 0.001) == "FSDP on dp, batch split: +1.2%, 11 ms more exposed communication"
    )
    assert said({"dp": fsdp, "tp": fsdp}, 0.25, 0.5) == (
        "FSDP on dp and tp, batch split: +25.0%, 250 ms less exposed communication, 500 ms more computation"
    )
    assert said({"dp": fsdp, "tp": tensor}, 0.0, 0.0) == f"FSDP on dp, batch split; {tensor} on tp: +0.0%"
    assert (
        without_shares(f"{tensor}, FSDP of 40% of the weights; batch split")
        == "tensor parallel, FSDP; batch split"
    )
