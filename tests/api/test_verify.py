"""`verify` accepts right plans and names the first node of a wrong one."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, Plan, PlanError, ShardingError, find_plan, verify
from autoshard.plan.plan_words import fallback_lines
from autoshard.planning import canonical_capture
from passes.rules.core.rule_registry import USER_RULES, register_rule
from tests.api.forged import forgotten_sum
from tests.api.programs import data, normed, two_linear
from tests.profiles import slow_compute


@pytest.mark.parametrize(
    "axes", [{"x": 2}, {"x": 3}, {"x": 7}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}], ids=str
)
@pytest.mark.parametrize("build", [two_linear, normed])
def test_what_the_search_finds_is_right(axes: dict[str, int], build: Any) -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = find_plan(model, MeshSpec(axes), (data()[0],), profile=slow_compute())
    report = verify(model, plan, (data()[0],))
    assert report.ok and report.first_divergence is None, str(report)
    assert report.max_error < 1e-5
    assert {"grad up.weight", "grad down.bias"} < set(report.errors)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@torch.library.custom_op("apitest::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    """x minus half its mean over dim 0: not pointwise in dim 0. It is its own adjoint."""
    return x - x.mean(0, keepdim=True) / 2


@center.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


center.register_autograd(lambda ctx, gradient: center(gradient))


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 32)
        self.down = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(center(self.up(x)))


def centered() -> Centered:
    torch.manual_seed(0)
    return Centered()


def by_rows(model: nn.Module) -> Plan:
    """A plan that splits the batch, if the rules allow."""
    return find_plan(
        model,
        MeshSpec({"x": 2}),
        (data(4)[0],),
        profile=slow_compute(),
        in_placements=[Shard(0)],
        out_placements=[Shard(0)],
        constraints={"*": [Replicate()]},
    )


def test_a_wrong_rule_is_refused_when_a_plan_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(USER_RULES, "builders", {})
    register_rule(center, "b d -> b d; d: whole")  # wrong: d is free and b is not
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    with pytest.raises(ShardingError) as caught:
        by_rows(centered())
    said, remedy = str(caught.value).splitlines()
    at = f"registered at {__file__}:{line}, is wrong: "
    assert said.startswith(
        f"the rule of apitest.center.default, {at}[@x, -] -> [@x, -] on mesh (x=2), result 0"
    )
    proposed = re.fullmatch(
        r"  try: '(.+)', which autoshard.discover_rule finds; or trial=False, if .+", remedy
    )
    assert proposed
    register_rule(center, proposed[1])
    by_rows(centered())


def test_a_wrong_rule_that_is_not_tried_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(USER_RULES, "builders", {})
    register_rule(center, "b d -> b d; d: whole", trial=False)
    model = centered()
    plan = by_rows(model)
    report = verify(model, plan, (data(8)[0],))
    assert not report.ok
    assert report.first_divergence is not None
    assert "apitest.center" in report.first_divergence.op
    assert "test_verify.py" in report.first_divergence.source
    assert "DIFFERS" in str(report) and "first divergence" in str(report)
    register_rule(center, "b d -> b d; d: whole")  # as where a plan was made that could not try it
    with pytest.raises(ShardingError, match=r"the rule of apitest.center.default, registered at .* is wrong"):
        plan.check_graph(canonical_capture(model, (data(8)[0],), {}).joint)


def test_a_right_rule_for_the_same_op_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(USER_RULES, "builders", {})
    register_rule(center, "b d -> b d; b: whole", linear=[{0}])
    model = centered()
    report = verify(model, by_rows(model), (data(8)[0],))
    assert report.ok, str(report)


def test_an_op_without_a_rule_is_right_too() -> None:
    model = centered()
    plan = by_rows(model)
    assert plan.fallbacks == ("apitest.center.default",)
    *_, title, place = plan.explain().splitlines()
    assert title == "ops without a rule, run replicated with their inputs gathered"
    line = inspect.getsourcelines(Centered.forward)[1] + 1
    assert place == f"  apitest.center.default at test_verify.py:{line} x2"  # forward and backward
    assert fallback_lines([plan, plan]) == [
        title,
        place.replace("x2", "x4"),
    ]  # of stages, and in a session's log
    assert verify(model, plan, (data(8)[0],)).ok


def test_a_tampered_plan_is_named() -> None:
    """The pending sum of the second product is forgotten: read as if it were whole."""
    model = two_linear()
    pins = {"up.weight": [Shard(0)], "down.weight": [Shard(1)]}
    plan = find_plan(model, MeshSpec({"x": 3}), (data()[0],), profile=slow_compute(), constraints=pins)
    assert plan.planned.layouts["contract_1"].results[0].partial
    forged = forgotten_sum(model, plan, (data()[0],), "contract_1", 0)
    report = verify(model, forged, (data()[0],))
    assert not report.ok
    assert report.first_divergence is not None and report.first_divergence.node == "contract_1"
    assert report.first_divergence.module == "down"


def test_dropout_is_compared_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.5), nn.Linear(32, 5))
    plan = find_plan(model, MeshSpec({"x": 3}), (data()[0],), profile=slow_compute())
    assert verify(model, plan, (data()[0],)).ok


def test_parameters_may_be_named_in_capitals() -> None:
    """As BERT's LayerNorm and Mamba's A_log; one of the same letters is another."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A, self.a = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8, 8))
            self.LayerNorm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.LayerNorm(x @ self.A)) @ self.a

    model, x = Named(), torch.rand(4, 8)
    for pieces in (1, 2):
        plan = find_plan(model, MeshSpec({"x": 2}), (x,), profile=slow_compute(), micro_batches=pieces)
        assert verify(model, plan, (x,)).ok


class AsksWhetherItIsTraced(nn.Module):
    """As `transformers.utils.is_tracing` asks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean() * (1.0 if type(x) is Tensor else 2.0)


def test_a_model_that_computes_otherwise_where_it_is_traced_is_not_ok() -> None:
    model, x = AsksWhetherItIsTraced(), torch.randn(8, 16)
    plan = find_plan(model, MeshSpec({"x": 2}), (x,), profile=slow_compute())
    assert not verify(model, plan, (x,)).ok


def test_values_are_needed() -> None:
    with torch.device("meta"):
        model = nn.Linear(10, 5)
        x = torch.empty(8, 10)
    plan = find_plan(model, MeshSpec({"x": 2}), (x,), profile=slow_compute())
    with pytest.raises(PlanError, match="on `meta`"):
        verify(model, plan, (x,))


def test_a_saved_plan_is_verified_by_path(tmp_path: Any) -> None:
    model = two_linear()
    find_plan(model, MeshSpec({"x": 2}), (data()[0],), profile=slow_compute()).save(tmp_path / "plan.json")
    assert verify(model, str(tmp_path / "plan.json"), (data()[0],)).ok
    assert verify(model, tmp_path / "plan.json", (data()[0],)).ok
