"""Ops and optimizers that mix what different stages hold: right on every rank, or an error on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.attachments import accept_direct_calls
from tests.ranks import RankPool
from tests.runtime.stage_models import CASES, Case, give_gradients, net, net_of_stages, same, whole, whole_of


def _lists(values: list[Tensor]) -> list[Tensor]:
    clones = [value.clone() for value in values]
    torch._foreach_mul_(clones, 2.0)
    torch._foreach_mul_(clones, torch.tensor(0.5))
    torch._foreach_add_(clones, values, alpha=3)
    torch._foreach_mul_(clones, [float(i) for i in range(len(clones))])
    torch._foreach_addcmul_(clones, values, values, 0.5)
    torch._foreach_mul_(clones, sum(torch._foreach_norm(values)))  # type: ignore[arg-type]
    return clones


def _zeroed(values: list[Tensor]) -> list[Tensor]:
    clones = [value.clone() for value in values]
    torch._foreach_zero_(clones)
    return clones


def _numbers(values: list[Tensor]) -> list[Tensor]:
    norms = [value.norm() for value in values]
    total = sum(norms) / len(norms)
    assert isinstance(total, Tensor)
    return [
        total,
        torch.stack(norms),
        torch.stack(norms).norm(),
        torch.dot(values[0].flatten(), values[0].flatten()),
    ]


def _joined(values: list[Tensor]) -> list[Tensor]:
    flat = torch.cat([value.reshape(-1) for value in values])
    return [flat, flat.dot(flat), *torch.nn.utils.parameters_to_vector(values).split(10)]


def _in_place(values: list[Tensor]) -> list[Tensor]:
    clones = [value.clone() for value in values]
    norm = sum(value.norm() for value in values)
    for clone in clones:
        clone.mul_(norm).div_(clones[0].norm())
    clones[1].add_(clones[2].sum()).sub_(clones[4].t() if clones[4].shape == clones[1].t().shape else 1.0)
    return clones


@pytest.mark.parametrize("compute", [_lists, _zeroed, _numbers, _joined, _in_place])
def test_what_several_stages_hold(ranks: RankPool, compute: Callable[[list[Tensor]], list[Tensor]]) -> None:
    # torch flattens no uneven shards, so what joins tensors has whole ones on each stage.
    ranks.run(_compared, CASES[1 if compute is _joined else 2], compute, world=4)


def _compared(rank: int, case: Case, compute: Callable[[list[Tensor]], list[Tensor]]) -> None:
    found = []
    for model in (net_of_stages(case), net()):
        give_gradients(model, 0)
        values = [p.grad for p in model.parameters() if p.grad is not None]
        compute(values)
        results = compute(values)  # now torch has seen all layouts
        found.append({str(i): whole_of(value) for i, value in enumerate(results)})
    same(found[0], found[1], rtol=1e-5, atol=1e-5)


def _norms_in_a_loss(rank: int, case: Case) -> None:
    found = []
    for model in (net_of_stages(case), net()):
        give_gradients(model, 0)
        loss = sum((p**2).sum() for p in model.parameters() if p.requires_grad)
        assert isinstance(loss, Tensor)
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({n: whole_of(g) for n, g in grads.items()} | {"loss": whole_of(loss)})
        if isinstance(loss, DTensor):
            assert all(g.device_mesh == model.get_parameter(n).device_mesh for n, g in grads.items())  # type: ignore[attr-defined]
    same(found[0], found[1])


def test_a_loss_over_parameters_of_all_stages(ranks: RankPool) -> None:
    ranks.run(_norms_in_a_loss, CASES[2], world=4)


def _stepped(rank: int, case: Case, name: str) -> None:
    found = []
    for model in (net_of_stages(case), net()):
        parameters = [p for p in model.parameters() if p.requires_grad and (p.ndim == 2 or name != "Muon")]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.05)
        for step in range(3):
            give_gradients(model, step)
            optimizer.step(lambda: 0.0) if name == "LBFGS" else optimizer.step()
        found.append(whole(model))
    # Muon computes in bfloat16.
    loose = {"rtol": 0.05, "atol": 0.005} if name == "Muon" else {}
    same(found[0], found[1], name, **loose)


@pytest.mark.parametrize("name", ["Muon", "LBFGS", "Adafactor"])
def test_optimizers_of_whole_parameters(ranks: RankPool, name: str) -> None:
    # torch has L-BFGS and Adafactor for no uneven shards.
    ranks.run(_stepped, CASES[2 if name == "Muon" else 1], name, world=4)


def _called(rank: int, case: Case) -> None:
    """A layer, and layers of several stages, by themselves: every rank calls them and gets the whole result."""
    model, reference = net_of_stages(case), net()
    outer = [nn.Sequential(nn.Sequential(m.up, nn.ReLU(), m.down)) for m in (model, reference)]
    accept_direct_calls(outer[0])
    x = torch.arange(12.0).view(2, 6) / 10
    found = []
    for layers in outer:
        first, both = layers[0][0](x), layers[0](x)  # type: ignore[index]
        (first.sum() + both.pow(2).sum()).backward()
        found.append({"first": first.detach(), "both": both.detach()})
    same(found[0], found[1])
    for name in ("up.weight", "up.bias", "down.weight", "down.bias"):
        p = model.get_parameter(name)
        assert isinstance(p.grad, DTensor) and isinstance(p, DTensor)
        torch.testing.assert_close(whole_of(p.grad), reference.get_parameter(name).grad)


def test_layers_called_by_themselves(ranks: RankPool) -> None:
    ranks.run(_called, CASES[2], world=4)


def _refused(rank: int) -> str:
    model = net_of_stages(CASES[2])
    model.requires_grad_(False)
    with pytest.raises(Exception) as error:
        torch.add(model.up.weight, model.down.weight.sum(), out=model.down.bias)
    return str(error.value)


def test_an_op_into_another_stages_tensor_is_refused_everywhere(ranks: RankPool) -> None:
    for text in ranks.run(_refused, world=4):
        assert "writes into tensors of different stages" in text
