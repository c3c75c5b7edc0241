"""Parameters become DTensors in place; optimizers, clipping and checkpoints work on them unpatched."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard.runtime.sharding import checksum, like_parameter
from cost_model.errors import ShardingError
from passes.ir.torch_dtensor import strided_shard
from tests.ranks import RankPool
from tests.runtime.placing import distribute_parameters


class Net(nn.Module):
    """A tied weight, an uneven one (10 rows), a scalar, a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 7)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.register_buffer("steps", torch.zeros(2))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "pp")[: len(sizes)])


PLACEMENTS: dict[int, dict[str, Any]] = {
    1: {"embed.weight": [Shard(0)], "up.weight": [Shard(1)], "up.bias": [Shard(0)]},
    2: {
        "embed.weight": [Shard(0), Shard(0)],
        "up.weight": [Shard(1), Shard(0)],
        "up.bias": [Replicate(), Shard(0)],
        "frozen": [strided_shard(1, 2), Shard(1)],
    },
}


def whole(model: nn.Module) -> dict[str, Tensor]:
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
    return {n: p.detach().clone() for n, p in full.items()}


def placed(rank: int, sizes: tuple[int, ...]) -> None:
    model, reference = net(), net()
    before = list(model.parameters())
    model.up.weight.tag = "mine"  # type: ignore[attr-defined]
    mesh = mesh_of(sizes)
    placements = PLACEMENTS[len(sizes)]
    distribute_parameters(model, mesh, placements)

    assert model.head.weight is model.embed.weight
    assert model.up.weight.tag == "mine"  # type: ignore[attr-defined]
    assert not model.frozen.requires_grad and model.up.weight.requires_grad
    assert list(model.state_dict()) == list(reference.state_dict())
    replicated = [Replicate()] * len(sizes)
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p, nn.Parameter)
        assert list(p.placements) == placements.get(name, replicated)
    for name, value in whole(model).items():
        assert torch.equal(value, reference.state_dict()[name]), name
    with pytest.raises(ShardingError, match="was replaced by a DTensor"):
        nn.utils.clip_grad_norm_(before, 1.0)


@pytest.mark.parametrize("sizes", [(1,), (3,), (4,), (2, 2)], ids=str)
def test_names_ties_and_values_stay(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    ranks.run(placed, sizes, world=torch.Size(sizes).numel())


def local_shapes(rank: int) -> list[tuple[int, ...]]:
    model = net()
    distribute_parameters(model, mesh_of((4,)), PLACEMENTS[1])
    local = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in local)
    return [tuple(t.shape) for t in local]


def test_each_rank_keeps_its_chunk_alone(ranks: RankPool) -> None:
    # torch.chunk: 10 rows over 4 ranks are 3, 3, 3, 1; 6 columns 2, 2, 2, 0; 7 are 2, 2, 2, 1.
    rows, columns, biases = (3, 3, 3, 1), (2, 2, 2, 0), (2, 2, 2, 1)
    got = ranks.run(local_shapes, world=4)
    for rank, shapes in enumerate(got):
        assert shapes == [(), (3, 4), (rows[rank], 6), (7, columns[rank]), (biases[rank],)]


def other_seed(rank: int) -> dict[str, Tensor]:
    model = net(seed=rank)
    with torch.no_grad():
        model.frozen.copy_(torch.arange(12.0).view(3, 4))  # this one is the same everywhere
    distribute_parameters(model, mesh_of((2, 2)), PLACEMENTS[2])
    return whole(model)


def test_rank_0_decides_the_values(ranks: RankPool) -> None:
    expected = net(seed=0).state_dict()
    expected["frozen"] = torch.arange(12.0).view(3, 4)
    for got in ranks.run(other_seed, world=4):
        for name, value in got.items():
            assert torch.equal(value, expected[name]), name


def test_checksum_tells_tensors_apart() -> None:
    x = torch.randn(100, 7)
    permuted = x.flip(0)
    assert checksum(x) == checksum(x.clone()) != checksum(permuted)
    assert checksum(x)[0] == checksum(permuted)[0]
    assert checksum(torch.tensor(1, dtype=torch.uint8)) == (1, 1)
    assert checksum(torch.tensor([2, 3])) == (5, 8)


def trained(rank: int, sizes: tuple[int, ...], foreach: bool) -> dict[str, Tensor]:
    """AdamW made before the parameters are distributed; gradients are given, in shards."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    mesh = mesh_of(sizes)
    distribute_parameters(model, mesh, PLACEMENTS[len(sizes)])
    norm = torch.zeros(())
    for step in range(3):
        give_gradients(model, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(norm, DTensor)
    return {**whole(model), "norm": norm.full_tensor()}


def give_gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    for p in model.parameters():
        if p.requires_grad:
            gradient = torch.randn(p.shape)
            p.grad = like_parameter(gradient, p) if isinstance(p, DTensor) else gradient


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=str)
def test_adamw_and_clipping(ranks: RankPool, sizes: tuple[int, ...], foreach: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    norm = torch.zeros(())
    for step in range(3):
        give_gradients(model, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    expected = {**model.state_dict(), "norm": norm}
    for got in ranks.run(trained, sizes, foreach, world=torch.Size(sizes).numel()):
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def with_old_state(rank: int) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    give_gradients(model, 0)
    optimizer.step()
    give_gradients(model, 1)
    distribute_parameters(model, mesh_of((3,)), PLACEMENTS[1])
    optimizer.step()
    return whole(model)


def test_an_optimizer_with_state_goes_on(ranks: RankPool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    for got in ranks.run(with_old_state, world=3):
        for name, value in got.items():
            torch.testing.assert_close(value, model.state_dict()[name], msg=name)


def from_meta(rank: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Net()
    mesh = mesh_of((2, 2))
    distribute_parameters(model, mesh, PLACEMENTS[2])
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    local = model.embed.weight.to_local()  # type: ignore[attr-defined]
    assert local.device.type == "cpu" and local.untyped_storage().nbytes() == local.numel() * 4
    values = net().state_dict()
    for name, p in model.state_dict().items():
        if isinstance(p, DTensor):
            values[name] = like_parameter(values[name], p)
    model.load_state_dict(values)
    return whole(model)


def test_a_meta_model_is_materialised_in_shards(ranks: RankPool) -> None:
    for got in ranks.run(from_meta, world=4):
        for name, value in got.items():
            assert torch.equal(value, net().state_dict()[name]), name


def save(rank: int, path: str, sizes: tuple[int, ...]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    distribute_parameters(model, mesh_of(sizes), PLACEMENTS[len(sizes)])
    give_gradients(model, 0)
    optimizer.step()
    dcp.save(
        {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}, checkpoint_id=path
    )


def load(rank: int, path: str, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    model = net(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    distribute_parameters(model, mesh_of(sizes), PLACEMENTS[len(sizes)])
    give_gradients(model, 3)
    optimizer.step()  # so that there is state to load into
    state = {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state(model, optimizer, state["optimizer"])
    give_gradients(model, 1)
    optimizer.step()
    return whole(model)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer)


def set_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(model, optimizer, state)


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (3,)), ((3,), (2, 2))], ids=str)
def test_checkpoint_from_one_mesh_to_another(
    ranks: RankPool, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    with tempfile.TemporaryDirectory() as path:
        ranks.run(save, path, saved, world=torch.Size(saved).numel())
        for got in ranks.run(load, path, loaded, world=torch.Size(loaded).numel()):
            for name, value in got.items():
                torch.testing.assert_close(value, model.state_dict()[name], msg=name)


def refused(rank: int, name: str, placements: Any) -> str:
    model = net()
    with pytest.raises(ShardingError) as error:
        distribute_parameters(model, mesh_of((2,)), {"up.weight": [Shard(0)], name: placements})
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize(
    ("name", "placements", "message"),
    [
        ("down.weight", [Shard(0)], "placements name 'down.weight', which is no parameter of the model"),
        ("up.bias", [Shard(1)], "cannot split dim 1 of up.bias over axis 'dp': it has 1 dims (7,)"),
        ("up.bias", [Shard(0), Shard(0)], "up.bias has 2 placements; the mesh has 1 axes ('dp',)"),
    ],
)
def test_refused_before_anything_changes(ranks: RankPool, name: str, placements: Any, message: str) -> None:
    assert ranks.run(refused, name, placements, world=2) == [message] * 2
