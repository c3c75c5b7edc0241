"""Another kind of call on the stages of the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import InfeasibleError
from autoshard.plan.derived_plans import carried_stages, cut_by_parameters
from autoshard.plan.plan import PipelinePlan
from autoshard.plan.task import Task
from autoshard.planning import canonical_capture
from passes.stages.cut_costs import cut_costs
from tests.plans.pipelines import PP, SQUARE, planned, stage_task
from tests.stages.stage_models import MODELS, canonical


def carried(name: str, mesh: Any, *, training: bool, rows: int = 1) -> tuple[PipelinePlan, PipelinePlan]:
    """(the first plan, of two pieces; that of another call, of a batch so many times as large and one row more)."""
    first = planned(name, mesh, 2)
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    larger = lambda x: torch.cat([*[x] * rows, x[:1]])
    args, kwargs = tuple(map(larger, args)), {key: larger(x) for key, x in kwargs.items()}
    with torch.set_grad_enabled(training):
        captured = canonical_capture(model.train(training), args, kwargs)
    return first, carried_stages(replace(stage_task(name, mesh), captured=captured), first)


@pytest.mark.parametrize(
    ("name", "mesh"), [("mlp", SQUARE), ("gpt2", PP), pytest.param("llama", SQUARE, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("training", [False, True])
def test_stages_hold_what_they_held(name: str, mesh: Any, training: bool) -> None:
    first, later = carried(name, mesh, training=training, rows=2)
    assert later.holders == first.holders and later.parameter_layouts == first.parameter_layouts
    assert later.micro_batches == (2 if training else 1) and later.bound_of_cut is None
    assert later.stages_per_rank == first.stages_per_rank
    assert "holds already" in later.explain()


@pytest.mark.slow
def test_a_smaller_batch_runs_in_fewer_pieces() -> None:
    first, later = carried("llama", PP, training=True, rows=0)
    assert (first.micro_batches, later.micro_batches) == (2, 1)


def test_of_cuts_that_fit_the_narrowest() -> None:
    """Layers of widths 12, 8, 16, 8, 4 between: cut between layers as the parameters ask, at what is narrower of the
    two sides of a tanh, which are equally wide: where the first call was cut."""
    joint, _ = canonical("mlp")
    costs = cut_costs(joint, lambda node: 1.0)
    names = [f"layers.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]
    products = [n.name for n in costs.parts.forward if str(n.target) == "autoshard.contract.default"]
    for at in range(1, 6):
        held = [set(names[: 2 * at]), set(names[2 * at :])]
        (found,) = cut_by_parameters(costs, held, [products[at]])
        assert found == products[at]


class Swapped(nn.Module):
    """Runs its layers the other way round where it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.first, self.second) if self.training else (self.second, self.first)
        for layer in layers:
            x = layer(x).tanh()
        return x.square().mean()


def swapped(training: bool) -> Task:
    model = Swapped().train(training)
    with torch.set_grad_enabled(training):
        captured = canonical_capture(model, (torch.randn(4, 8),), {})
    return replace(stage_task("mlp"), captured=captured)


def test_layers_in_another_order_are_refused() -> None:
    from autoshard.plan.plan_stages import plan_stages

    first = plan_stages(swapped(True), "pp", 2)
    assert first.holders["first.weight"] == (0,) and first.holders["second.weight"] == (1,)
    with pytest.raises(InfeasibleError, match=r"first\.weight.*held by a later stage") as error:
        carried_stages(swapped(False), first)
    assert "try:" in str(error.value)
