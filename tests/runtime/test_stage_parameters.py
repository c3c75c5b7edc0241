"""Parameters held by stages: values, ties, gradients, optimizers, copies; against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard.runtime.parameters import StagePlaced
from autoshard.runtime.process_groups import place_in
from autoshard.runtime.sharding import like_parameter
from cost_model.errors import ShardingError
from tests.ranks import RankPool
from tests.runtime.placing import distribute_stage_parameters
from tests.runtime.stage_models import (
    CASES,
    TIED,
    Case,
    Net,
    give_gradients,
    net,
    net_of_stages,
    same,
    whole,
    whole_of,
)

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("Adam", {"lr": 0.1, "foreach": False}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "fused": True}),
    ("Adagrad", {"lr": 0.1}),
]


def _placed(rank: int, case: Case) -> dict[str, Any]:
    model, reference = net(), net()
    before = list(model.parameters())
    model.up.weight.tag = "mine"  # type: ignore[attr-defined]
    mesh = case.mesh()
    distribute_stage_parameters(model, mesh, "pp", case.placed())
    assert model.head.weight is model.embed.weight
    assert model.up.weight.tag == "mine"  # type: ignore[attr-defined]
    assert not model.frozen.requires_grad and model.up.weight.requires_grad
    assert list(model.state_dict()) == list(reference.state_dict())
    same(whole(model), dict(reference.state_dict()))
    coordinate = mesh.get_local_rank("pp")
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p, nn.Parameter)
        assert p.shape == reference.get_parameter(name).shape
        held = case.placed()[name].holders if name in case.placed() else tuple(range(case.stages))
        assert (place_in(p.device_mesh) is not None) == (coordinate in held), name
        if coordinate not in held and p.ndim:
            assert p.to_local().numel() == p.to_local().untyped_storage().nbytes() == 0
    with pytest.raises(ShardingError, match="was replaced by a DTensor"):
        nn.utils.clip_grad_norm_(before, 1.0)
    return {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.parametrize("case", [*CASES, TIED], ids=str)
def test_values_names_and_ties(ranks: RankPool, case: Case) -> None:
    found = ranks.run(_placed, case, world=case.world)
    if case is TIED:
        # 10 rows over two ranks; stages 0 and 2 hold them. 7 columns of 6 are 3 and 3.
        assert [shapes["embed.weight"] for shapes in found] == [(5, 6), (5, 6), (0,), (0,), (5, 6), (5, 6)]
        assert [shapes["up.weight"] for shapes in found] == [(7, 3), (7, 3), (0,), (0,), (0,), (0,)]
        assert [shapes["down.bias"] for shapes in found] == [(0,), (0,), (0,), (0,), (3,), (2,)]


def _of_other_seeds(rank: int, case: Case) -> dict[str, Tensor]:
    return whole(net_of_stages(case, seed=rank))


@pytest.mark.parametrize("case", [CASES[1], TIED], ids=str)
def test_rank_0_decides_the_values(ranks: RankPool, case: Case) -> None:
    for found in ranks.run(_of_other_seeds, case, world=case.world):
        same(found, dict(net(0).state_dict()))


def _trained(rank: int, case: Case) -> None:
    """Optimizers made before the parameters are distributed; gradients are given, in shards."""
    mesh = case.mesh()
    for name, options in KINDS:
        found = []
        for distribute in (True, False):
            model = net()
            optimizer = getattr(torch.optim, name)(model.parameters(), **options)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            give_gradients(model, 0)
            optimizer.step()  # state and gradients come along
            if distribute:
                distribute_stage_parameters(model, mesh, "pp", case.placed())
            optimizer.step()
            scheduler.step()
            give_gradients(model, 1)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad(set_to_none=False)
            for p, gradient in zip(
                (p for p in model.parameters() if p.requires_grad), gradients, strict=True
            ):
                assert p.grad is gradient and not whole_of(gradient).any()
            give_gradients(model, 2)
            optimizer.step()
            found.append(whole(model))
        same(found[0], found[1], name, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_optimizers_step_as_in_one_process(ranks: RankPool, case: Case) -> None:
    ranks.run(_trained, case, world=case.world)


def _copied(rank: int, case: Case) -> None:
    model = net_of_stages(case)
    give_gradients(model, 0)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight is not model.embed.weight
    same(whole(twin), dict(net().state_dict()))
    averaged = torch.optim.swa_utils.AveragedModel(
        twin, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    averaged.update_parameters(twin)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(3.0)
    averaged.update_parameters(twin)
    assert isinstance(averaged.module, Net)
    for name, value in net().named_parameters():
        torch.testing.assert_close(whole_of(averaged.module.get_parameter(name)), 2 * value.detach())
    same(whole(model), dict(net().state_dict()))


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_copies_and_their_average(ranks: RankPool, case: Case) -> None:
    ranks.run(_copied, case, world=case.world)


def _from_meta(rank: int, case: Case) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Net()
    distribute_stage_parameters(model, case.mesh(), "pp", case.placed())
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    assert model.up.weight.full_tensor().shape == (7, 6)  # type: ignore[attr-defined]
    assert all(torch.zeros_like(p).is_meta and (p * 2).is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(net().get_parameter(name))
    model.steps.zero_()  # type: ignore[operator]
    return whole(model)


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_a_meta_model_is_materialised_in_shards(ranks: RankPool, case: Case) -> None:
    for found in ranks.run(_from_meta, case, world=case.world):
        same(found, dict(net().state_dict()))


def _penalised(rank: int, case: Case) -> None:
    """Whole values in a loss: every rank computes it, and each keeps its part of the gradient."""
    model, reference = net_of_stages(case), net()
    for one in (model, reference):
        values = [p.full_tensor() if isinstance(p, DTensor) else p for p in one.parameters()]
        loss = torch.stack([value.pow(2).sum() for value in values if value.requires_grad]).sum()
        loss.backward()
    for name, p in reference.named_parameters():
        ours = model.get_parameter(name).grad
        assert (ours is None) == (p.grad is None)
        if p.grad is not None and ours is not None:
            torch.testing.assert_close(whole_of(ours), p.grad)


def test_whole_values_are_differentiable(ranks: RankPool) -> None:
    ranks.run(_penalised, CASES[2], world=4)


def _moved(rank: int, case: Case) -> None:
    """From some stages to others, and from one mesh to stages."""
    mesh = case.mesh()
    model = net_of_stages(case, mesh)
    placed = {**case.placed(), "up.weight": case.placed()["down.weight"], "down.bias": case.placed()["scale"]}
    distribute_stage_parameters(model, mesh, "pp", placed)
    assert model.up.weight.device_mesh == model.down.weight.device_mesh  # type: ignore[attr-defined]
    same(whole(model), dict(net().state_dict()))


def test_distributed_again(ranks: RankPool) -> None:
    ranks.run(_moved, CASES[2], world=4)


def _refused(rank: int, name: str, placed: StagePlaced) -> str:
    model = net()
    with pytest.raises(ShardingError) as error:
        distribute_stage_parameters(model, CASES[0].mesh(), "pp", {**CASES[0].placed(), name: placed})
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize(
    ("name", "placed", "message"),
    [
        (
            "up.weight",
            StagePlaced((0,), (Shard(0),)),
            "parameter up.weight has S(0) on axis 'pp', which is that of",
        ),
        ("up.weight", StagePlaced((2,), (Replicate(),)), "holders (2,) are no coordinates of axis 'pp'"),
        (
            "lost",
            StagePlaced((0,), (Replicate(),)),
            "placements name 'lost', which is no parameter of the model",
        ),
        ("up.bias", StagePlaced((0,), ()), "up.bias has 0 placements; the mesh has 1 axes ('pp',)"),
    ],
)
def test_refused_before_anything_changes(
    ranks: RankPool, name: str, placed: StagePlaced, message: str
) -> None:
    for text in ranks.run(_refused, name, placed, world=2):
        assert text.startswith(message)


def _numbers(rank: int, case: Case) -> None:
    """What a script reads of a parameter or gradient is of the whole one, on every rank."""
    before = [p.detach() * 2 for p in net_of_stages(case).parameters()]  # on an equal mesh
    mesh = case.mesh()
    model, reference = net_of_stages(case, mesh), net()
    for name, q in reference.named_parameters():
        p = model.get_parameter(name)
        assert isinstance(p, DTensor)
        double = p.detach() * 2
        assert isinstance(double, DTensor) and (double.device_mesh is p.device_mesh or p.device_mesh is mesh)
        assert p.numel() == q.numel()
        torch.testing.assert_close(p.norm().item(), q.norm().item())
        torch.testing.assert_close(float(p.detach().abs().max()), float(q.detach().abs().max()))
        assert torch.equal(p, p.detach().clone()) and not bool(p.isnan().any())
        p.data = q.data * 2
        assert torch.equal(whole_of(p), q * 2)
        p.data = DTensor.from_local(q.detach() * 3, mesh, [Replicate()] * mesh.ndim)
        assert torch.equal(whole_of(p), q * 3)
        with torch.no_grad():
            p.copy_(q)
            p.add_(like_parameter(torch.ones(q.shape), p)).sub_(1.0)
        torch.testing.assert_close(whole_of(p), q.detach())
    assert len(before) == len(list(model.parameters()))


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_numbers_read_and_values_set(ranks: RankPool, case: Case) -> None:
    ranks.run(_numbers, case, world=case.world)


def _initialised(rank: int, case: Case, seed: int) -> None:
    """A meta model gets its numbers from `reset_parameters`: those of one process, on every rank that holds them."""
    with torch.device("meta"):
        model = Net()
    distribute_stage_parameters(model, case.mesh(), "pp", case.placed())
    model.to_empty(device="cpu")
    reference = net()
    for one, start in ((model, seed), (reference, 0)):
        torch.manual_seed(start)
        for layer in (one.up, one.down, one.embed, one.head):
            layer.reset_parameters()
        for p in (one.up.bias, one.scale, one.frozen):
            nn.init.trunc_normal_(p, std=0.5)
            p.data.add_(torch.randn_like(p.detach()))
    for name, q in reference.named_parameters():
        p = model.get_parameter(name)
        assert isinstance(p, DTensor)
        assert torch.equal(whole_of(p), q), name
        if place_in(p.device_mesh) is not None:  # of each who holds it
            assert torch.equal(p.to_local(), like_parameter(q.detach(), p).to_local()), name


@pytest.mark.parametrize("case", [CASES[1], CASES[3], TIED], ids=str)
def test_random_numbers_are_those_of_one_process(ranks: RankPool, case: Case) -> None:
    ranks.run(_initialised, case, 0, world=case.world)


def _of_own_seed(rank: int) -> None:
    _initialised(rank, CASES[1], rank)
    torch.manual_seed(rank)
    model = net_of_stages(CASES[1])
    torch.manual_seed(rank)
    nn.init.normal_(model.up.weight)
    drawn = torch.rand(())
    torch.manual_seed(rank)
    if rank == 0:
        torch.randn(7, 6)
    assert torch.equal(drawn, torch.rand(()))


def test_ranks_of_other_seeds_take_rank_0s_numbers_and_keep_their_own(ranks: RankPool) -> None:
    ranks.run(_of_own_seed, world=4)
