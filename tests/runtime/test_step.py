"""One program as a differentiable function: gradients, buffers, repeated and retained use, shards."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from autoshard.runtime.leaves import (
    Compiler,
    InputSide,
    OutputSide,
    RankSides,
    conform,
    output_wrapper,
    plain_input,
)
from autoshard.runtime.process_groups import groups_for
from autoshard.runtime.step import PhaseCode, Program
from cost_model.mesh import MeshSpec
from passes.capture.trace import decomposition_table
from passes.ir.joint import GraphInput, GraphOutput, JointGraph
from passes.layout.layout import Layout
from passes.lower.partition import RankGraph
from passes.lower.rank_program import RankProgram
from tests.ranks import RankPool
from tests.runtime.graphs import Local, joint_graph
from tests.runtime.placing import distribute_parameters

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ONE = MeshSpec({"dp": 1})


class Net(nn.Module):
    """Two outputs: logits and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.down(F.gelu(self.norm(self.up(x))))
        return logits, -logits.log_softmax(-1)[:, 0].mean()


def whole_program(joint: JointGraph, backend: str = "eager") -> Program:
    """The program of a mesh of one rank."""
    ours = RankProgram.of(RankGraph(joint.module, {}), joint.inputs, joint.outputs)
    shapes = [tuple(n.meta["val"].shape) for n in joint.placeholders]
    sides = [InputSide(s, Layout.replicated(len(s))) for s in shapes[: len(ours.phases.inputs)]]
    return Program(PhaseCode(ours, Compiler(backend)), RankSides(sides, ONE, 0))


def net_program(backend: str = "eager") -> tuple[Net, Net, Program]:
    model, x = Net(), torch.randn(6, 8)
    program = whole_program(joint_graph(model, [x], decomposition_table()), backend)
    return model, copy.deepcopy(model), program


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "loss alone": lambda logits, loss: loss,
    "logits alone": lambda logits, loss: logits.square().sum(),
    "both": lambda logits, loss: loss + logits.sum(),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_of_any_of_the_outputs(backend: str) -> None:
    model, reference, program = net_program(backend)
    x = torch.randn(6, 8)
    for name, loss in LOSSES.items():
        model.zero_grad()
        reference.zero_grad()
        outputs, expected = program([*model.parameters(), x]), reference(x)
        torch.testing.assert_close(outputs, expected)
        loss(*outputs).backward()
        loss(*expected).backward()
        torch.testing.assert_close(gradients(model), gradients(reference), msg=name)


def test_training_follows_the_model() -> None:
    model, reference, program = net_program()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(5):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        program([*model.parameters(), x])[1].backward()
        reference(x)[1].backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))


def test_two_forwards_before_a_backward_and_gradients_add_up() -> None:
    model, reference, program = net_program()
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    first, second = program([*model.parameters(), x])[1], program([*model.parameters(), y])[1]
    first.backward()
    second.backward()
    (reference(x)[1] + reference(y)[1]).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))


def test_a_retained_graph_can_be_used_again_a_freed_one_cannot() -> None:
    model, reference, program = net_program()
    x = torch.randn(6, 8)
    loss = program([*model.parameters(), x])[1]
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * reference(x)[1]).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_frozen_parameters_get_no_gradient_and_no_grad_none_at_all() -> None:
    model, _, program = net_program()
    model.up.requires_grad_(False)
    x = torch.randn(6, 8)
    program([*model.parameters(), x])[1].backward()
    assert model.up.weight.grad is None and model.down.weight.grad is not None
    with torch.no_grad():
        assert not program([*model.parameters(), x])[1].requires_grad


def test_expanded_and_half_tangents_are_brought_into_shape() -> None:
    model, reference, program = net_program("inductor")
    x = torch.randn(6, 8)
    for run, owner in (
        (lambda: program([*model.parameters(), x])[0], model),
        (lambda: reference(x)[0], reference),
    ):
        run().backward(torch.ones(1, 4).expand(6, 4))
        assert owner.up.weight.grad is not None
    torch.testing.assert_close(gradients(model), gradients(reference))
    like = torch.empty(2, 3)
    assert conform(like, like) is like
    assert conform(torch.ones(3, 2).t(), like).is_contiguous()


def test_autocast_does_not_reach_into_the_graph() -> None:
    model, reference, program = net_program()
    x = torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = program([*model.parameters(), x])
        loss.backward()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference(x)[0])


def running_mean() -> Program:
    """y = (x - mean) * w, mean <- (mean + x) / 2."""
    local = Local()
    w, mean, x, tangent = (local.input(3) for _ in range(4))
    centred = local.call(aten.sub.Tensor, x, mean)
    y = local.call(aten.mul.Tensor, centred, w)
    new = local.call(aten.div.Tensor, local.call(aten.add.Tensor, mean, x), 2.0)
    gradient = local.call(aten.mul.Tensor, tangent, centred)
    inputs = (
        GraphInput("param", "w"),
        GraphInput("buffer", "mean"),
        GraphInput("input", "x"),
        GraphInput("tangent", "tangent 0"),
    )
    outputs = (GraphOutput("output", "y"), GraphOutput("buffer", "mean", 1), GraphOutput("grad", "w"))
    return whole_program(JointGraph(local.module(y, new, gradient), inputs, outputs))


def test_buffers_are_updated_in_place_and_the_backward_reads_the_old() -> None:
    program = running_mean()
    w = nn.Parameter(torch.randn(3))
    mean, x, y = torch.zeros(3), torch.randn(3), torch.randn(3)
    first = program([w, mean, x])[0]
    torch.testing.assert_close(mean, x / 2)
    second = program([w, mean, y])[0]
    torch.testing.assert_close(mean, (x / 2 + y) / 2)
    (first + second).sum().backward()
    torch.testing.assert_close(w.grad, x + y - x / 2)


def test_integer_outputs_have_no_gradient() -> None:
    local = Local()
    x, tangent = local.input(3), local.input(3)
    sign = local.call(aten.gt.Scalar, x, 0.0)
    module = local.module(sign, local.call(aten.neg.default, x), local.call(aten.neg.default, tangent))
    joint = JointGraph(
        module,
        (GraphInput("input", "x"), GraphInput("tangent", "tangent 1", 1)),
        (GraphOutput("output", "sign", 0), GraphOutput("output", "y", 1), GraphOutput("grad", "x")),
    )
    x_value = torch.randn(3, requires_grad=True)
    sign_value, y = whole_program(joint)([x_value])
    assert not sign_value.requires_grad
    y.sum().backward()
    torch.testing.assert_close(x_value.grad, -torch.ones(3))


def test_the_backward_alone_holds_what_was_saved() -> None:
    model, _, program = net_program()
    program.code.backward(frozenset())
    compiled = program.code.backward(frozenset())
    leaves = [*(p.detach() for p in model.parameters()), torch.randn(6, 8)]
    outputs, saved, late = program.run_forward(leaves)
    outside = {id(t) for t in (*leaves, *outputs)}
    references = [weakref.ref(t) for t in saved if id(t) not in outside]
    alive: list[bool] = []

    def run(inputs: list[Tensor]) -> list[None]:
        inputs.clear()
        alive.extend(reference() is not None for reference in references)
        return [None] * 6

    program.code._compiled[frozenset()] = replace(compiled, run=run)
    program.run_backward(saved, [torch.ones_like(o) for o in outputs], late)
    assert alive == [False] * len(references) and references


def test_a_whole_gradient_of_an_input_that_came_as_a_shard() -> None:
    """Rank 1 of 2 holds [3, 5) of x [5]; its graph returns the gradient of all of x."""
    local = Local()
    x, tangent = local.input(2), local.input(2)
    y = local.call(aten.mul.Tensor, x, 2.0)
    doubled = local.call(aten.mul.Tensor, tangent, 2.0)
    whole = local.call(aten.constant_pad_nd.default, doubled, [3, 0])
    inputs = [GraphInput("input", "x"), GraphInput("tangent", "tangent 0")]
    outputs = [GraphOutput("output", "y"), GraphOutput("grad", "x")]
    ours = RankProgram.of(RankGraph(local.module(y, whole), {}), inputs, outputs)
    sides = [InputSide((5,), Layout((("dp",),)))]
    program = Program(PhaseCode(ours, Compiler("eager")), RankSides(sides, MeshSpec({"dp": 2}), 1))
    values = torch.arange(5.0, requires_grad=True)
    shard = torch.tensor([3.0, 4.0], requires_grad=True)
    for given in (values, shard):
        (result,) = program([given])
        assert result.tolist() == [6.0, 8.0]
        result.backward(torch.tensor([1.0, 10.0]))
    assert values.grad is not None and values.grad.tolist() == [0.0, 0.0, 0.0, 2.0, 20.0]
    assert shard.grad is not None and shard.grad.tolist() == [2.0, 20.0]


# Shards: y = x w, x split over its rows, w stored split over its rows (ZeRO-3), on three ranks.

ROWS, WIDTH, OUT = 7, 4, 5


def zero3(rank: int, spec: MeshSpec, group: str, kept: bool) -> Program:
    rows, cols = Layout((("dp",), ())), Layout((("dp",), ()))
    lo, hi = rows.interval((ROWS, WIDTH), spec, 0, rank)
    pad = -(-WIDTH // 3)
    w_lo, w_hi = cols.interval((WIDTH, OUT), spec, 0, rank)
    local = Local()
    w, x = local.input(w_hi - w_lo, OUT), local.input(hi - lo, WIDTH)
    tangent = local.input(hi - lo if kept else ROWS, OUT)
    padded = local.call(aten.constant_pad_nd.default, w, [0, 0, 0, pad - (w_hi - w_lo)])
    gathered = local.call(c10d.all_gather_into_tensor.default, padded, 3, group)
    whole = local.call(aten.slice.Tensor, local.call(c10d.wait_tensor.default, gathered), 0, 0, WIDTH)
    y = local.call(aten.mm.default, x, whole)
    if not kept:
        filled = local.call(aten.constant_pad_nd.default, y, [0, 0, 0, 3 - (hi - lo)])
        rows_node = local.call(c10d.all_gather_into_tensor.default, filled, 3, group)
        y = local.call(aten.slice.Tensor, local.call(c10d.wait_tensor.default, rows_node), 0, 0, ROWS)
        mine = local.call(aten.slice.Tensor, tangent, 0, lo, hi)
    else:
        mine = tangent
    partial = local.call(aten.mm.default, local.call(aten.t.default, x), mine)
    partial = local.call(aten.constant_pad_nd.default, partial, [0, 0, 0, 3 * pad - WIDTH])
    scattered = local.call(c10d.reduce_scatter_tensor.default, partial, "sum", 3, group)
    grad_w = local.call(c10d.wait_tensor.default, scattered)
    grad_w = local.call(aten.slice.Tensor, grad_w, 0, 0, w_hi - w_lo)
    module = local.module(y, grad_w)
    ours = RankProgram.of(
        RankGraph(module, {}),
        [GraphInput("param", "w"), GraphInput("input", "x"), GraphInput("tangent", "tangent 0")],
        [GraphOutput("output", "y"), GraphOutput("grad", "w")],
    )
    sides = [InputSide((WIDTH, OUT), cols), InputSide((ROWS, WIDTH), rows)]
    return Program(PhaseCode(ours, Compiler("eager")), RankSides(sides, spec, rank))


def run_zero3(rank: int, given: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    spec = MeshSpec.of(mesh)
    program = zero3(rank, spec, groups_for(mesh, [("dp",)])[("dp",)], kept=given != "global")
    x, model = values()
    distribute_parameters(model, mesh, {"weight": [Shard(0)]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    side = InputSide((ROWS, WIDTH), Layout((("dp",), ())))
    out_side = OutputSide((ROWS, OUT), Layout((("dp",), ())), "dtensor" if given == "dtensor" else "local")
    arrives = {
        "global": x,
        "local": x.chunk(3)[rank],
        "dtensor": distribute_tensor(x, mesh, [Replicate()]),
    }[given]
    y = gradient = x
    for _ in range(2):
        optimizer.zero_grad()
        y = program([model.weight, plain_input(arrives, side, mesh, spec)])[0]
        y = output_wrapper(out_side, mesh, spec)(y) if given != "global" else y
        loss = y.square().sum()
        loss.backward()
        assert isinstance(model.weight.grad, DTensor)
        assert model.weight.grad.placements == (Shard(0),)
        gradient = model.weight.grad.full_tensor()
        optimizer.step()
    if given == "dtensor":
        assert isinstance(y, DTensor)
        y = y.full_tensor()
    elif given == "local":
        parts: list[Any] = [None] * 3
        dist.all_gather_object(parts, y.detach())
        y = torch.cat(parts)
    return {"y": y.detach(), "grad": gradient, "w": model.weight.full_tensor().detach()}  # type: ignore[attr-defined]


class Weight(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, OUT, generator=generator))


def values() -> tuple[Tensor, Weight]:
    generator = torch.Generator().manual_seed(3)
    model = Weight(generator)
    return torch.randn(ROWS, WIDTH, generator=generator), model


@pytest.mark.parametrize("given", ["global", "local", "dtensor"])
def test_inputs_and_outputs_as_shards(ranks: RankPool, given: str) -> None:
    x, model = values()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    y = gradient = x
    for _ in range(2):
        optimizer.zero_grad()
        y = x @ model.weight
        y.square().sum().backward()
        assert model.weight.grad is not None
        gradient = model.weight.grad.clone()
        optimizer.step()
    for got in ranks.run(run_zero3, given, world=3):
        torch.testing.assert_close(got["y"], y.detach())
        torch.testing.assert_close(got["grad"], gradient)
        torch.testing.assert_close(got["w"], model.weight.detach())
