"""At which bandwidth another plan wins: where arithmetic says, as the search finds it, and said in a line."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, Plan, PlanError, Profile, find_plan
from cost_model.measurements import CollectiveSamples
from cost_model.profile import scaled_link
from tests.plans.test_patterns import DP4, H100, regression, rows
from tests.profiles import slow_compute

SIDE = 64
COMPUTE = 1e-3
"""Seconds of the one product on one rank."""
START = 2e-6
"""Of a collective: launch and one hop."""
EQUAL = SIDE * SIDE * 4 / 2 / (COMPUTE / 2 - START)
"""Bytes per second at which gathering the other half of the result takes as long as computing it:
COMPUTE = COMPUTE / 2 + START + half of the bytes / bandwidth."""


class Product(nn.Module):
    """One product with a weight that is not trained, so that there is no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def profile(bandwidth: float, measured: bool = False) -> Profile:
    """Products take `COMPUTE`, memory nothing. measured: gathers by a curve, of the same links."""
    cpu = slow_compute()
    rate = 2 * SIDE**3 / COMPUTE
    rates = tuple(replace(r, flops_per_second=(rate,) * len(r.flops)) for r in cpu.device.matmul)
    (link,) = cpu.links[-1:]
    link = replace(
        link,
        ranks=None,
        latency_seconds=1e-6,
        bytes_per_second=bandwidth,
        peak_bytes_per_second=2 * bandwidth,
    )
    sizes = (1024, 16384, 262144)
    gathers = CollectiveSamples(
        "all_gather", ((2, 1),), sizes, tuple(START + n / 2 / bandwidth for n in sizes)
    )
    return replace(
        cpu,
        links=(link,),
        collectives=(gathers,) if measured else (),
        overlap_efficiency=0.0,
        device=replace(cpu.device, matmul=rates, memory_bytes_per_second=1e18, launch_seconds=1e-12),
    )


def product(bandwidth: float, measured: bool = False) -> Plan:
    mesh = MeshSpec({"x": 2})
    return find_plan(Product(), mesh, (torch.zeros(SIDE, SIDE),), profile=profile(bandwidth, measured))


@pytest.mark.parametrize("measured", [False, True], ids=["links", "curves"])
def test_slower_links_leave_the_product_whole(measured: bool) -> None:
    """Curves bend between sizes, in logarithms, so at 16384 bytes they are exact."""
    plan = product(5 * EQUAL, measured)
    assert [c.kind for c in plan.collectives] == ["all_gather"]
    (found,) = plan.crossovers()
    assert found.slower_links and found.confirmed
    assert found.bytes_per_second == pytest.approx(EQUAL, rel=1e-3)
    assert found.step_time == pytest.approx(COMPUTE, rel=1e-3)
    assert found.now == 5 * EQUAL
    assert found.words == "weights whole"


def test_faster_links_split_the_product() -> None:
    plan = product(EQUAL / 5)
    assert plan.collectives == ()
    (found,) = plan.crossovers()
    assert not found.slower_links and found.confirmed
    assert found.bytes_per_second == pytest.approx(EQUAL, rel=1e-3)
    assert "activations by all_gather[x]" in found.words


def test_a_search_on_either_side_agrees() -> None:
    """What the crossover says is what `find_plan` finds: with links just above it the plan, just below another."""
    plan = find_plan(regression(4096, 4096), DP4, rows(65536, 4096), profile=H100)
    found = next(c for c in plan.crossovers() if c.slower_links)
    assert found.confirmed and 1 / 16 < found.bytes_per_second / found.now < 1
    for factor, same in ((1.05, True), (0.8, False)):
        prices = scaled_link(H100, found.level, factor * found.bytes_per_second / found.now)
        other = find_plan(regression(4096, 4096), DP4, rows(65536, 4096), profile=prices)
        assert (other.parameters == plan.parameters) == same


def test_no_other_plan_wins() -> None:
    """More compute than any link takes: the product is always split."""
    plan = product(500 * EQUAL)
    assert plan.crossovers() == ()
    assert "none: this plan stays the fastest" in plan.explain(crossovers=True)


def test_explain_says_it() -> None:
    plan = product(5 * EQUAL)
    (found,) = plan.crossovers()
    text = plan.explain(crossovers=True)
    assert text.startswith(plan.explain())
    assert str(found) in text
    assert f"{found.link} (level 0, now 82.25MB/s) at 16.45MB/s or less: weights whole" in str(found)
    assert "crossovers" in plan.explain("weight", crossovers=True)


def test_a_mesh_without_links_has_none() -> None:
    mesh = MeshSpec({"x": 1})
    plan = find_plan(Product(), mesh, (torch.zeros(SIDE, SIDE),), profile=profile(EQUAL))
    assert plan.crossovers() == ()


def test_a_loaded_plan_cannot_search(tmp_path: Path) -> None:
    product(EQUAL).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"crossovers\(\) must search again.*loaded from a file"):
        Plan.load(tmp_path / "plan.json").crossovers()
    with pytest.raises(PlanError, match="crossovers"):
        product(EQUAL).explain(crossovers="yes")  # type: ignore[arg-type]


def test_a_copy_can_still_be_asked() -> None:
    """As `copy.deepcopy(model)` copies its plan."""
    plan = product(EQUAL / 5)
    assert copy.deepcopy(plan).crossovers() == plan.crossovers()
