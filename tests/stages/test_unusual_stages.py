"""Graphs without a backward, outputs that no stage computes, gradients of inputs, one stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph
from passes.micro_batches.cut_batch import cut_for_stages
from passes.simulate.reference import graph_values, reference_inputs
from passes.stages.cut_costs import choose_cut, cut_costs
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs
from tests.stages.stage_models import Mlp, canonical
from tests.stages.whole_stages import staged_results


def check(joint: JointGraph, model: nn.Module, given: list[Tensor], stages: int) -> tuple[StageGraph, ...]:
    """At every place, or at the best ones."""
    values = reference_inputs(joint, model, given, seed=2)
    wanted, _ = graph_values(joint, values)
    costs = cut_costs(joint, lambda n: 1.0)
    cuts = (
        [[place.op] for place in costs.places]
        if stages == 2
        else [choose_cut(costs, stages, lambda n: n / 1e6).cut]
    )
    graphs: tuple[StageGraph, ...] = ()
    for chosen in cuts:
        graphs = stage_graphs(joint, chosen)
        for got, expected in zip(staged_results(joint, graphs, values), wanted, strict=True):
            assert (got is None) == (expected is None)
            if got is not None and expected is not None:
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    return graphs


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_graph_without_a_backward(stages: int) -> None:
    model = Mlp().double().requires_grad_(False)
    given = [torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)]
    graphs = check(canonical_capture(model, tuple(given), {}).joint, model, given, stages)
    assert not any(crossing.gradient for graph in graphs for crossing in graph.sent)


def test_one_stage_is_the_whole_graph() -> None:
    joint, values = canonical("gpt2")
    (graph,) = stage_graphs(joint, ())
    assert graph.received == graph.sent == () and not graph.summed
    read = [spec for spec, node in zip(joint.inputs, joint.placeholders, strict=True) if node.users]
    assert sorted(spec.name for spec in graph.joint.inputs) == sorted(spec.name for spec in read)
    ops = [[str(n.target) for n in j.graph.nodes if n.op == "call_function"] for j in (joint, graph.joint)]
    assert sorted(ops[0]) == sorted(ops[1])
    wanted, _ = graph_values(joint, values)
    for got, expected in zip(staged_results(joint, (graph,), values), wanted, strict=True):
        assert got is expected is None or torch.equal(got, expected)  # type: ignore[arg-type]


class Several(nn.Module):
    """Returns a parameter, what is known of the inputs, a value of the middle, and the end; reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        seen = mask.float().cumsum(0)
        middle = self.first(x * self.scale).relu()
        end = self.second(middle) * mask[:, None] + x * self.scale
        return self.scale, seen, middle, end, end.sum()


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_outputs_of_all_kinds_and_gradients_of_inputs(stages: int, grad: bool) -> None:
    model = Several().double()
    given = [torch.randn(5, 4, dtype=torch.float64, requires_grad=grad), torch.arange(5) > 1]
    joint = canonical_capture(model, tuple(given), {}).joint
    graphs = check(joint, model, given, stages)
    returned = sorted(index for graph in graphs for index in graph.outputs)
    assert returned == [0, 1, 2, 3, 4]


class Scattered(nn.Module):
    """Its rule writes slices as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.scatter(1, torch.full((1, 1, 1), 3), 0.7)).relu())


def test_stages_of_a_cut_scatter() -> None:
    """By the checks of passes: each spells as the first graph does."""
    cut = cut_for_stages(
        canonical_capture(Scattered().double(), (torch.randn(3, 8, 8).double(),), {}).joint, 3
    )
    place = cut_costs(cut, lambda n: 1.0).places[-1]
    assert len(stage_graphs(cut, [place.op])) == 2
