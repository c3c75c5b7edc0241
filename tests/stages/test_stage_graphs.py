"""Stages together compute what the whole graph does, and pass what they say that they pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning import canonical_capture
from cost_model.errors import ShardingError
from passes.ir.graph_properties import INVARIANTS
from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_product, is_use
from passes.simulate.reference import graph_values, reference_inputs
from passes.stages.graph_parts import graph_parts
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs
from tests.stages.stage_models import MODELS, Mlp, canonical, random_cut
from tests.stages.whole_stages import staged_results


def first_op(joint: JointGraph, module: str) -> str:
    """The first op of the forward inside a module."""
    return next(n.name for n in graph_parts(joint).forward if n.meta["module"].startswith(module))


def cut_anywhere(joint: JointGraph, stages: int, seed: int) -> tuple[StageGraph, ...]:
    """Of a random cut; where a buffer is in the way, of another."""
    for attempt in range(100):
        try:
            return stage_graphs(joint, random_cut(joint, stages, 1000 * seed + attempt))
        except ShardingError as error:
            assert "buffer" in str(error)
    raise AssertionError("no cut will do")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_whole_graph_does(name: str, stages: int, seed: int) -> None:
    joint, values = canonical(name)
    before = str(joint.graph)
    graphs = cut_anywhere(joint, stages, seed)
    assert str(joint.graph) == before
    wanted, _ = graph_values(joint, values)
    for spec, one, other in zip(joint.outputs, staged_results(joint, graphs, values), wanted, strict=True):
        if other is None:
            assert one is None, spec
        else:
            assert one is not None, spec
            assert one.shape == other.shape and one.dtype == other.dtype
            torch.testing.assert_close(
                one, other, rtol=1e-12, atol=1e-14, msg=lambda text, s=spec: f"{s}: {text}"
            )


@pytest.mark.parametrize("name", MODELS)
def test_neighbours_agree_on_what_passes_and_graphs_are_whole(name: str) -> None:
    joint, _ = canonical(name)
    graphs = cut_anywhere(joint, 4, 7)
    assert graphs[0].received == () and graphs[-1].sent == ()
    for one, other in itertools.pairwise(graphs):
        assert one.sent == other.received
    for graph in graphs:
        assert not [p.name for p in INVARIANTS if p.violation(graph.joint)]
        results, own = graph.joint.results, len(graph.outputs)
        for crossing, node in zip(graph.sent, results[own:], strict=False):
            assert node is not None
            assert (tuple(node.meta["val"].shape), node.meta["val"].dtype) == (crossing.shape, crossing.dtype)
        named = {spec.name for spec in graph.joint.outputs if spec.kind == "grad"}
        assert {c.name for c in graph.received if c.gradient} <= named
        tangents = {spec.index for spec in graph.joint.inputs if spec.kind == "tangent"}
        wanted = {own + i for i, crossing in enumerate(graph.sent) if crossing.gradient}
        assert {i for i in tangents if i >= own} == wanted


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "t5"])
def test_every_product_runs_in_one_stage(name: str) -> None:
    joint, _ = canonical(name)
    graphs = cut_anywhere(joint, 3, 5)
    parts = graph_parts(joint)
    whole = [n for n in joint.graph.nodes if is_product(n) and n not in parts.everywhere]
    found = [n.name for graph in graphs for n in graph.joint.graph.nodes if is_product(n)]
    once = [name for name in found if name in {n.name for n in whole}]
    assert sorted(once) == sorted(n.name for n in whole)


def test_a_transformer_cut_between_layers_passes_the_residual_stream_alone() -> None:
    """Masks, positions, rotations and the numbers that dropout draws are computed in each stage."""
    for name, layer in (("gpt2", "transformer.h.1"), ("llama", "model.layers.1")):
        joint, _ = canonical(name)
        one, other = stage_graphs(joint, [first_op(joint, layer)])
        (crossing,) = one.sent
        assert (crossing.shape, crossing.dtype, crossing.gradient) == ((2, 16, 32), torch.float64, True)
        assert other.received == one.sent
        layers = {
            spec.name.split(".")[2] for spec in other.joint.inputs if ".1." in spec.name or ".0." in spec.name
        }
        assert layers == {"1"}


def test_what_comes_back_is_the_gradient_of_what_was_sent() -> None:
    """Compared with autograd at the output of a layer."""
    torch.manual_seed(0)
    model = Mlp().double()
    x, wanted = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    joint = canonical_capture(model, (x, wanted), {}).joint
    first, second = stage_graphs(joint, [first_op(joint, "layers.3")])
    y = x
    for layer in model.layers[:3]:
        y = torch.tanh(layer(y))
    y = y.detach().requires_grad_()
    z = y
    for layer in model.layers[3:-1]:
        z = torch.tanh(layer(z))
    nn.functional.mse_loss(model.layers[-1](z), wanted).backward()
    known = {**dict(model.named_parameters()), "args[1]": wanted, first.sent[0].name: y}
    values = [known.get(s.name, torch.ones((), dtype=torch.float64)).detach() for s in second.joint.inputs]
    results, _ = graph_values(second.joint, values)
    gradients = {s.name: r for s, r in zip(second.joint.outputs, results, strict=True) if s.kind == "grad"}
    assert y.grad is not None
    torch.testing.assert_close(gradients[first.sent[0].name], y.grad, rtol=1e-12, atol=0.0)


def test_a_tied_weight_gets_a_part_of_its_gradient_in_each_stage() -> None:
    joint, _ = canonical("gpt2")
    graphs = stage_graphs(joint, [first_op(joint, "transformer.h.0"), first_op(joint, "transformer.h.1")])
    name = "transformer.wte.weight"
    assert [graph.summed for graph in graphs] == [{name: (0, 2)}, {}, {name: (0, 2)}]
    for graph in graphs:
        held = [spec.name for spec in graph.joint.inputs if spec.kind == "param"]
        returned = [spec.name for spec in graph.joint.outputs if spec.kind == "grad"]
        assert (name in held) == (name in returned) == (graph.stage != 1)
    assert not any(crossing.shape == (96, 32) for graph in graphs for crossing in graph.sent)


def test_a_skip_passes_through_the_stages_between() -> None:
    """The U-Net's first level is read by its last; its gradient takes the way back."""
    joint, _ = canonical("unet")
    graphs = stage_graphs(
        joint, [first_op(joint, "down.1"), first_op(joint, "norm"), first_op(joint, "up.1")]
    )
    skip = [c for c in graphs[0].sent if c in graphs[0].sent and c.name in {d.name for d in graphs[1].sent}]
    assert [(c.made, c.gradient) for c in skip] == [(0, True)]
    through = next(c for c in graphs[1].sent if c.name == skip[0].name)
    assert (through.made, through.source) == (0, 1)
    results = graphs[1].joint.results[len(graphs[1].outputs) :]
    handed_on = results[graphs[1].sent.index(through)]
    assert handed_on is not None and handed_on.op == "placeholder"


def test_every_stage_has_its_own_buffers() -> None:
    joint, _ = canonical("normed")
    graphs = stage_graphs(joint, [first_op(joint, "convolutions.1"), first_op(joint, "convolutions.2")])
    for graph in graphs:
        new = {spec.name for spec in graph.joint.outputs if spec.kind == "buffer"}
        assert new == {
            f"norms.{graph.stage}.{x}" for x in ("running_mean", "running_var", "num_batches_tracked")
        }
    assert all(graph.summed == {"scale": (0, 1, 2)} for graph in graphs)


def test_readers_of_a_value_share_a_use_within_a_stage() -> None:
    joint, _ = canonical("gpt2")
    for graph in cut_anywhere(joint, 3, 2):
        for node in graph.joint.graph.nodes:
            early = [u for u in node.users if u.op != "output" and u.meta["phase"] == "forward"]
            assert (
                len(early) < 2
                or is_use(node)
                or not isinstance(node.meta["val"], Tensor)
                or not node.all_input_nodes
            )


class Counting(nn.Module):
    """Reads a counter in every layer and changes it at the end."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x) * self.count.clone()
        y = self.down(x).sum() * self.count.clone()
        self.count += 1
        return y


def test_a_buffer_that_changes_is_in_one_stage() -> None:
    joint = canonical_capture(Counting(), (torch.randn(3, 4),), {}).joint
    with pytest.raises(ShardingError, match="the buffer count is read in the stages \\[0, 1\\]"):
        stage_graphs(joint, [first_op(joint, "down")])


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (["nothing"], "nothing is no op"),
        (["contract_3", "contract_1"], "do not begin one stage after another"),
    ],
)
def test_a_cut_that_is_none(cut: list[str], text: str) -> None:
    joint, _ = canonical("mlp")
    with pytest.raises(ShardingError, match=text):
        stage_graphs(joint, cut)


class Frozen(nn.Module):
    """An untrained first layer, an unused one, and a gradient that nothing gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).sum()


def test_no_gradient_of_what_needs_none() -> None:
    model, x = Frozen(), torch.randn(3, 4)
    joint = canonical_capture(model, (x,), {}).joint
    one, other = stage_graphs(joint, [first_op(joint, "second")])
    assert [crossing.gradient for crossing in one.sent] == [False]
    assert {spec.kind for spec in one.joint.inputs} <= {"param", "input"}
    names = [spec.name for graph in (one, other) for spec in graph.joint.inputs if spec.kind == "param"]
    read = [name for name, _ in model.named_parameters() if not name.startswith("unused")]
    assert sorted(names) == sorted(read)
    values = reference_inputs(joint, model, [x], seed=0)
    wanted, _ = graph_values(joint, values)
    for got, expected in zip(staged_results(joint, (one, other), values), wanted, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)  # type: ignore[arg-type]


class Padded(nn.Module):
    """A padded value is larger than its gradient needs to be; a table is smaller than what is looked up in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        padded = nn.functional.pad(self.table(tokens), (3, 3))
        return self.head(self.norm(padded)).square().mean()


@pytest.mark.parametrize(("module", "shape"), [("norm", (5, 7, 10)), ("head", (5, 7, 10))])
def test_gradients_come_back_as_values_were_sent(module: str, shape: tuple[int, ...]) -> None:
    """And not as fewer bytes: a padded value's without the padding, or the table's own."""
    joint = canonical_capture(Padded(), (torch.zeros(5, 7, dtype=torch.long),), {}).joint
    one, other = stage_graphs(joint, [first_op(joint, module)])
    assert [(c.shape, c.value, c.gradient) for c in one.sent] == [(shape, True, True)]
    targets = [[str(n.target) for n in graph.joint.graph.nodes] for graph in (one, other)]
    assert ["aten.embedding_dense_backward.default" in own for own in targets] == [True, False]


def test_a_table_s_gradient_is_made_where_the_table_is() -> None:
    joint = canonical_capture(Padded(), (torch.zeros(5, 7, dtype=torch.long),), {}).joint
    behind = next(n for n in graph_parts(joint).forward if str(n.target).startswith("aten.embedding")).name
    order = [n.name for n in graph_parts(joint).forward]
    one, _ = stage_graphs(joint, [order[order.index(behind) + 1]])
    assert [(c.shape, c.value, c.gradient) for c in one.sent] == [((5, 7, 4), True, True)]
    assert any("embedding_dense_backward" in str(n.target) for n in one.joint.graph.nodes)


class Cast(nn.Module):
    """One weight, cast once, read by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.between = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        low = self.weight.t().double()
        y = self.between((x.double() @ low).float())
        return (y.double() @ low).square().mean()


def test_a_cast_of_a_shared_weight_is_no_value_to_send() -> None:
    model, x = Cast(), torch.randn(3, 8)
    joint = canonical_capture(model, (x,), {}).joint
    one, other = stage_graphs(joint, [first_op(joint, "between")])
    assert [c.shape for c in one.sent] == [(3, 8)]
    assert one.summed == other.summed == {"weight": (0, 1)}
    values = reference_inputs(joint, model, [x], seed=0)
    wanted, _ = graph_values(joint, values)
    for got, expected in zip(staged_results(joint, (one, other), values), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("early", [False, True])
def test_two_values_alike_have_each_its_own_gradient(early: bool) -> None:
    """As the streams of an encoder and a decoder are. Autograd says whose gradient is whose."""
    torch.manual_seed(0)
    model = Two(early).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    joint = canonical_capture(model, (x,), {}).joint
    one, other = stage_graphs(joint, ["sin" if early else first_op(joint, "third")])
    assert [c.shape for c in one.sent] == [(3, 4), (3, 4)]
    a = model.first(x).detach().requires_grad_()
    b = model.second(a).tanh().detach().requires_grad_()
    (model.third(b) * torch.sin(a)).sum().backward()
    known = {**dict(model.named_parameters()), one.sent[0].name: a, one.sent[1].name: b}
    values = [known.get(s.name, torch.ones((), dtype=torch.float64)).detach() for s in other.joint.inputs]
    results, _ = graph_values(other.joint, values)
    gradients = {s.name: r for s, r in zip(other.joint.outputs, results, strict=True) if s.kind == "grad"}
    for crossing, value in zip(one.sent, (a, b), strict=True):
        torch.testing.assert_close(gradients[crossing.name], value.grad, rtol=1e-12, atol=0.0)


class Two(nn.Module):
    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(a).tanh()
        if self.early:
            c = torch.sin(a)
            return (self.third(b) * c).sum()
        return (self.third(b) * torch.sin(a)).sum()
