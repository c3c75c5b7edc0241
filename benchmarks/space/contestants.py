"""Ways to train the network on rows split over ranks: each does forward and backward on the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autoshard import Plan, Profile, autoshard
from autoshard.plan.plan_ends import Constraints
from benchmarks.models import family_constraints
from benchmarks.space.by_hand import SpaceStack, functional_halo, neighbour_messages
from benchmarks.space.networks import SPLIT_DIM, Work

__all__ = ["CONTESTANTS", "GRAD_SEED", "INPUT_SEED", "Contest", "Contestant", "planned"]

INPUT_SEED, GRAD_SEED = 1, 2
SLOWER = 1e4


@dataclass(frozen=True)
class Contest:
    """mesh: of one axis. backend: "eager" or "inductor", for all alike."""

    work: Work
    mesh: DeviceMesh
    profile: Profile
    backend: str

    def part(self, seed: int) -> Tensor:
        return self.work.part(seed, self.mesh.get_local_rank(), self.mesh.size())

    def compiled(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        return model if self.backend == "eager" else torch.compile(model, backend=self.backend)


class Contestant:
    """x: this rank's rows. grad: of the result, the same places as `call` returns. after: what is done to gradients
    at the end of a step. plan: autoshard's."""

    def __init__(
        self,
        call: Callable[[Tensor], Tensor],
        model: nn.Module,
        x: Tensor,
        grad: Tensor,
        after: Callable[[nn.Module], None] = lambda model: None,
        plan: Plan | None = None,
    ) -> None:
        self._call = call
        self._model = model
        self._x = x
        self._grad = grad
        self._after = after
        self.plan = plan

    def step(self) -> Tensor:
        """Forward and backward; this rank's result."""
        self._model.zero_grad()
        y = self._call(self._x)
        y.backward(self._grad)
        self._after(self._model)
        return y.detach()

    def gradients(self) -> list[Tensor]:
        """Of all weights, whole, after a step."""
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def planned_in_space(contest: Contest) -> Contestant:
    """autoshard where computing anything twice never pays: it stays in space, whatever the links; weights whole."""
    device = contest.profile.device
    slower = replace(
        device,
        memory_bytes_per_second=device.memory_bytes_per_second / SLOWER,
        matmul=tuple(
            replace(rate, flops_per_second=tuple(flops / SLOWER for flops in rate.flops_per_second))
            for rate in device.matmul
        ),
    )
    profile = replace(contest.profile, name="slow computing", device=slower)
    return planned(replace(contest, profile=profile), family_constraints("DDP", 1))


def planned(contest: Contest, constraints: Constraints | None = None) -> Contestant:
    """autoshard, its input and output split in space."""
    model, x = contest.work.network(), contest.part(INPUT_SEED)
    autoshard(
        model,
        contest.mesh,
        (x,),
        profile=contest.profile,
        in_placements=[Shard(SPLIT_DIM)],
        out_placements=[Shard(SPLIT_DIM)],
        constraints=constraints,
        backend=contest.backend,
        time_limit=60.0,
        tune="first",
    )
    plan: Plan = model.autoshard_plan  # type: ignore[assignment]
    return Contestant(model, model, x, contest.part(GRAD_SEED), plan=plan)


def gathering(contest: Contest) -> Contestant:
    """Every rank gathers the rows of all and computes everything."""
    model, x = contest.work.network(), contest.part(INPUT_SEED)
    run = contest.compiled(model)
    grad = contest.work.part(GRAD_SEED, 0, 1)

    def call(part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(contest.mesh.size())]
        dist.all_gather(parts, part, contest.mesh.get_group())
        return run(torch.cat(parts, SPLIT_DIM))

    return Contestant(call, model, x, grad)


def exchanging(contest: Contest) -> Contestant:
    """`halo_exchange` before each convolution."""
    return _split(contest, SpaceStack(contest.work.network(), functional_halo(contest.mesh)))


def hand_written(contest: Contest) -> Contestant:
    """isend and irecv before each convolution."""
    return _split(contest, SpaceStack(contest.work.network(), neighbour_messages(contest.mesh)))


def _split(contest: Contest, model: SpaceStack) -> Contestant:
    group = contest.mesh.get_group()

    def add_up(model: nn.Module) -> None:
        """Gradients of weights over all rows, in one all-reduce."""
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))

    return Contestant(
        contest.compiled(model), model, contest.part(INPUT_SEED), contest.part(GRAD_SEED), add_up
    )


CONTESTANTS: dict[str, Callable[[Contest], Contestant]] = {
    "autoshard": planned,
    "autoshard in space": planned_in_space,
    "gathering": gathering,
    "halo_exchange": exchanging,
    "isend/irecv": hand_written,
}
