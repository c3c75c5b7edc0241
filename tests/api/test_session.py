"""A parallel model behaves as the unsharded one, whatever it is called with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from autoshard.runtime.module import dispatcher_of
from tests.api.programs import (
    Axes,
    assert_close,
    data,
    device_mesh,
    full,
    normed,
    parallel,
    trained,
    two_linear,
)
from tests.ranks import RankPool

SQUARE: Axes = (("a", 2), ("b", 2))
LINE: Axes = (("x", 3),)


def first_call(rank: int, axes: Axes | None, steps_before: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train with an optimizer that is older than the plan; `axes` None: in one process."""
    model = two_linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = trained(model, optimizer, steps_before)
    if axes is not None:
        assert parallel(model, axes) is model
        assert not hasattr(model, "autoshard_plan")
    losses += trained(model, optimizer, 4)
    if axes is not None:
        assert model.autoshard_plan.collectives
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return losses, full(dict(model.named_parameters()))


@pytest.mark.parametrize("steps_before", [0, 3])
def test_captured_at_the_first_call_with_an_older_optimizer(ranks: RankPool, steps_before: int) -> None:
    wanted = first_call(0, None, steps_before)
    for got in ranks.run(first_call, LINE, steps_before, world=3):
        assert_close(got, wanted)


def kinds_of_calls(rank: int, axes: Axes | None) -> tuple[list[Any], dict[str, Tensor], list[int]]:
    """(outputs, state at the end, executables after each call)."""
    model = normed()
    if axes is not None:
        parallel(model, axes, (data(8)[0],))
    outputs: list[Any] = []
    counts: list[int] = []
    placements: set[str] = set()
    for rows, training, grad in [
        (8, True, True),
        (6, True, True),
        (8, False, True),
        (8, False, False),
        (8, True, True),
        (6, True, True),
        (8, False, False),
    ]:
        model.train(training)
        with torch.set_grad_enabled(grad):
            output = model(data(rows)[0])
        assert output.requires_grad is grad
        outputs.append(full(output))
        if axes is not None:
            dispatcher = dispatcher_of(model)
            assert dispatcher is not None
            counts.append(len(dispatcher.executables))
            placements.add(str([p.placements for p in model.parameters()]))
    assert len(placements) <= 1
    return outputs, full(model.state_dict()), counts


@pytest.mark.parametrize("axes", [LINE, SQUARE], ids=["3", "2x2"])
def test_every_kind_of_call_has_its_own_cached_graph(ranks: RankPool, axes: Axes) -> None:
    outputs, state, _ = kinds_of_calls(0, None)
    world = 3 if axes is LINE else 4
    for got_outputs, got_state, counts in ranks.run(kinds_of_calls, axes, world=world):
        assert_close(got_outputs, outputs)
        assert_close(got_state, state)
        assert counts == [1, 2, 3, 4, 4, 4, 4]
        assert got_state["norm.num_batches_tracked"] == 4


def kept(rank: int) -> tuple[Any, ...]:
    model, x = two_linear(), data()[0]
    parallel(model, LINE, (x,), out_placements="keep")
    output = model(x)
    assert isinstance(output, DTensor)
    output.square().sum().backward()
    layout = model.autoshard_plan.outputs[0]
    gradient = model.up.weight.grad
    assert isinstance(gradient, DTensor)
    return output.full_tensor().detach(), gradient.full_tensor(), str(layout)


def test_kept_outputs_are_dtensors(ranks: RankPool) -> None:
    model, x = two_linear(), data()[0]
    wanted = model(x)
    wanted.square().sum().backward()
    for output, gradient, _ in ranks.run(kept, world=3):
        assert_close(output, wanted.detach())
        assert_close(gradient, model.up.weight.grad)


ROWS = (5, 7, 4)


def uneven(rank: int) -> tuple[Tensor, Tensor, str, Tensor]:
    """Each rank passes its own rows: (its rows of the output, gradient of its input, plan, a gradient)."""
    model, x = two_linear(), data(16)[0]
    mine = x.split(ROWS)[rank]
    parallel(model, LINE, (mine,), in_placements=[Shard(0)], out_placements=[Shard(0)])
    mine = mine.clone().requires_grad_()
    output = model(mine)
    output.square().sum().backward()
    assert mine.grad is not None
    return output.detach(), mine.grad, model.autoshard_plan.to_text(), full(model.down.weight.grad)


def test_uneven_shards_are_used_as_they_are(ranks: RankPool) -> None:
    model, x = two_linear(), data(16)[0].requires_grad_()
    wanted = model(x)
    wanted.square().sum().backward()
    assert x.grad is not None
    replies = ranks.run(uneven, world=3)
    assert [len(r[1]) for r in replies] == list(ROWS)
    assert [len(r[0]) for r in replies] == [6, 6, 4]  # Shard(0) asks for torch's split
    assert_close(torch.cat([r[0] for r in replies]), wanted.detach())
    assert_close(torch.cat([r[1] for r in replies]), x.grad)
    for _, _, text, gradient in replies:
        assert "[16@x" in next(line for line in text.splitlines() if "input args[0]" in line)
        assert_close(gradient, model.down.weight.grad)


def dtensor_input(rank: int) -> tuple[Tensor, str]:
    model, x = two_linear(), data()[0]
    mesh = device_mesh(LINE)
    given = distribute_tensor(x, mesh, [Shard(0)])
    parallel(model, LINE, (given,))
    first = full(model(given))
    return torch.stack([first, full(model(distribute_tensor(x, mesh, [Replicate()])))]), str(
        model.autoshard_plan.inputs[0]
    )


def test_dtensor_inputs(ranks: RankPool) -> None:
    model, x = two_linear(), data()[0]
    wanted = model(x).detach()
    for outputs, layout in ranks.run(dtensor_input, world=3):
        assert_close(outputs, torch.stack([wanted, wanted]))
        assert "@x" in layout


def fused(rank: int, axes: Axes | None, foreach: bool) -> tuple[list[float], dict[str, Tensor], list[str]]:
    model = normed()
    if axes is not None:
        parallel(model, axes, (data()[0],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    losses = trained(model, optimizer, 4, clip=0.1)
    names = [type(model).__name__, *model.state_dict(), *(name for name, _ in model.named_parameters())]
    return losses, full(model.state_dict()), names


@pytest.mark.parametrize("foreach", [True, False])
def test_torch_optimizers_clipping_and_names_are_as_before(ranks: RankPool, foreach: bool) -> None:
    wanted = fused(0, None, foreach)
    for got in ranks.run(fused, SQUARE, foreach, world=4):
        assert_close(got[:2], wanted[:2])
        assert got[2] == wanted[2]


def thin(rank: int, axes: Axes) -> tuple[list[float], list[tuple[str, ...]], Tensor]:
    model, x = two_linear(), data()[0]
    parallel(model, axes, (x,))
    losses = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    return losses, [c.axes for c in model.autoshard_plan.collectives], full(model(x))


def test_one_device_is_the_plain_model(ranks: RankPool) -> None:
    model = two_linear()
    losses = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    for axes in [(("x", 1),), (("x", 1), ("y", 1))]:
        ((got, collectives, output),) = ranks.run(thin, axes, world=1)
        assert not collectives
        assert_close((got, output), (losses, model(data()[0]).detach()), 1e-6)


def test_an_axis_of_size_one_changes_nothing(ranks: RankPool) -> None:
    (plain, _) = ranks.run(thin, (("x", 2),), world=2)
    for got in ranks.run(thin, (("one", 1), ("x", 2)), world=2):
        assert got[0] == plain[0]
        assert got[1] == plain[1]
        assert torch.equal(got[2], plain[2])


def profiled(rank: int, backend: str) -> set[str]:
    """Names of the ranges in a training step."""
    model, (x, y) = two_linear(), data()
    pins = {"up.*": [Shard(0)], "down.weight": [Shard(1)], "down.bias": [Shard(0)]}
    parallel(model, (("x", 2),), (x,), backend=backend, constraints=pins)
    F.mse_loss(model(x), y).backward()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        F.mse_loss(model(x), y).backward()
    return {event.name for event in record.events()}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_profiler_names_what_each_collective_serves(ranks: RankPool, backend: str) -> None:
    wanted = {
        "reduce_scatter_tensor: down",  # the products' pending sum
        "all_gather_into_tensor: down.bias",  # the parameter, for its use
        "reduce_scatter_tensor: down.bias",  # its gradient
    }
    for events in ranks.run(profiled, backend, world=2):
        assert wanted <= events, sorted(events)


def test_a_copy_of_the_original_is_not_changed(ranks: RankPool) -> None:
    assert ranks.run(copied, world=2) == [True, True]


def copied(rank: int) -> bool:
    model, x = two_linear(), data()[0]
    original = copy.deepcopy(model)
    parallel(model, (("x", 2),), (x,))
    return torch.allclose(original(x), model(x), atol=1e-6) and not hasattr(original, "autoshard_plan")
