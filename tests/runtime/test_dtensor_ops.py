"""Ops of DTensors that scripts apply to parameters: on two ranks, of uneven parts, against whole tensors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.utils import parametrize

from autoshard.runtime.parameters import complete_dtensor_ops
from tests.ranks import RankPool

WHOLE = torch.arange(15.0).view(5, 3)
LONGER = torch.arange(21.0, dtype=torch.float64).view(7, 3)


def _made() -> tuple[Any, DTensor]:
    complete_dtensor_ops(torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    return mesh, distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])


def _copied(rank: int) -> list[Tensor]:
    mesh, parameter = _made()
    found: list[Tensor] = []
    other = distribute_tensor(WHOLE + 2, mesh, [Shard(1)])
    for source in (WHOLE + 1, other, torch.ones(3), torch.tensor(7.0), WHOLE.double() * 3):
        assert parameter.copy_(source) is parameter
        found.append(parameter.full_tensor().clone())
    plain = torch.zeros(5, 3)
    assert plain.copy_(other) is plain
    return [*found, plain]


def test_copy_takes_and_gives_whole_tensors(ranks: RankPool) -> None:
    wanted = [WHOLE + 1, WHOLE + 2, torch.ones(5, 3), torch.full((5, 3), 7.0), WHOLE * 3, WHOLE + 2]
    for found in ranks.run(_copied, world=2):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _assigned(rank: int) -> list[Tensor]:
    mesh, parameter = _made()
    parameter.data = parameter.data * 2
    found = [parameter.full_tensor()]
    for value in (WHOLE + 1, distribute_tensor(WHOLE + 2, mesh, [Shard(1)])):
        parameter.data = value
        found.append(parameter.full_tensor())
    assert parameter.placements == (Shard(0),)
    parameter.data = LONGER
    doubled: Any = parameter * 2
    return [*found, parameter.full_tensor(), doubled.full_tensor()]


def test_data_is_assigned(ranks: RankPool) -> None:
    for found in ranks.run(_assigned, world=2):
        for ours, theirs in zip(found, (WHOLE * 2, WHOLE + 1, WHOLE + 2, LONGER, 2 * LONGER), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class _Doubled(nn.Module):
    """Whole, as what a layer of a parallel model makes when it is called by itself."""

    def forward(self, x: Any) -> Tensor:
        return 2 * x.full_tensor()


def _unparametrized(rank: int) -> Tensor:
    layer = nn.Linear(3, 5, bias=False)
    layer.weight = original = nn.Parameter(_made()[1])
    parametrize.register_parametrization(layer, "weight", _Doubled())
    parametrize.remove_parametrizations(layer, "weight")
    assert layer.weight is original and original.placements == (Shard(0),)  # type: ignore[attr-defined]
    return original.full_tensor().detach()  # type: ignore[attr-defined]


def test_a_parametrization_leaves_its_value(ranks: RankPool) -> None:
    for found in ranks.run(_unparametrized, world=2):
        torch.testing.assert_close(found, 2 * WHOLE)


def _mixed(rank: int) -> list[Tensor]:
    """A plain loss and a penalty on a parameter, differentiated together."""
    _, parameter = _made()
    parameter.requires_grad_()
    x = torch.linspace(0, 1, 3, requires_grad=True)
    loss = (x * torch.ones(3)).square().sum() + (parameter * torch.ones(3)).square().sum()
    loss.backward()
    grads = [x.grad, parameter.grad]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]  # type: ignore[misc]


def test_a_plain_tensor_beside_a_parameter_is_whole(ranks: RankPool) -> None:
    for x, parameter in ranks.run(_mixed, world=2):
        torch.testing.assert_close(x, 2 * torch.linspace(0, 1, 3))
        torch.testing.assert_close(parameter, 2 * WHOLE)


def _read(rank: int) -> list[Any]:
    mesh, parameter = _made()
    pending = DTensor.from_local(torch.tensor(float(rank + 1)), mesh, [Partial()])
    last = distribute_tensor(WHOLE, mesh, [Shard(0)]) == 14.0
    return [
        pending.item(),
        parameter.sum().item(),
        bool(torch._is_any_true(last)),
        bool(torch._is_all_true(last)),
        parameter.sum(1).tolist(),
        parameter[3:].tolist(),
        f"{parameter.sum():.2f} {pending:.1f}",
    ]


def test_numbers_are_read_of_the_whole_tensor(ranks: RankPool) -> None:
    wanted = [3.0, 105.0, True, False, WHOLE.sum(1).tolist(), WHOLE[3:].tolist(), "105.00 3.0"]
    assert ranks.run(_read, world=2) == [wanted] * 2


def _written(x: Tensor) -> list[Tensor]:
    """What hand-written optimizers do with the sum, mean and norm of a state, in place."""
    mask = (x > 6).to(x.dtype)
    mask.mul_(mask.numel() / mask.sum().add_(1))
    cautious = (x > 6).to(x.dtype)
    cautious.div_(cautious.mean().clamp_(min=1e-3))
    return [
        mask,
        cautious,
        x.sum().sqrt_(),
        x.norm().add_(1e-6),
        x.square().mean(0).add_(1).rsqrt_(),
        x.mean().mul_(2).neg_(),
        x.amax().clamp_(max=3),
        x.sum().pow_(2).fill_(3),
    ]


def _written_of_shards(rank: int) -> list[Tensor]:
    return [r.full_tensor() if isinstance(r, DTensor) else r for r in _written(_made()[1])]


def test_what_is_written_into_a_pending_sum_is_of_the_whole(ranks: RankPool) -> None:
    for found in ranks.run(_written_of_shards, world=2):
        for ours, theirs in zip(found, _written(WHOLE.clone()), strict=True):
            torch.testing.assert_close(ours, theirs)


_INTO_PLAIN = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autoshard.runtime.parameters import complete_dtensor_ops

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
complete_dtensor_ops(torch.device("cpu"))
row = distribute_tensor(torch.arange(3.0), init_device_mesh("cpu", (1,)), [Replicate()])
sums, outs = [row.clone(), torch.zeros(3)], [row.clone(), torch.zeros(3)]
for total, out in zip(sums, outs, strict=True):  # torch has seen each op with a DTensor there
    total.add_(row).add_(row, alpha=2)
    torch.mul(row, row, out=out)
assert not isinstance(sums[1], DTensor) and not hasattr(outs[1], "_spec")
print(sums[1].tolist(), outs[1].tolist())
"""


def test_what_is_written_into_a_plain_tensor_is_whole() -> None:
    """As into a state that an optimizer makes plain. In a process of its own: torch looks its method up once."""
    ran = subprocess.run([sys.executable, "-c", _INTO_PLAIN], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "[0.0, 3.0, 6.0] [0.0, 1.0, 4.0]", ran.stderr
