"""A model in equal stages, as a user of `torch.distributed.pipelining` writes it, and what ranks compute in a step."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from autoshard.runtime.pipeline_stage import PipelineStage as OwnStage
from autoshard.runtime.pipeline_stage import StageRun
from benchmarks.racing.contestants import Race, Runner
from benchmarks.racing.models import GPT, MLP
from passes.stages.pipeline_orders import ORDERS

__all__ = ["BusyClock", "StagesByHand", "equal_stages", "staged_by_hand"]


@dataclass(frozen=True)
class StagesByHand:
    """axis: of `mesh`, whose ranks hold the stages, `local` each. inside: "DP" or "TP" over the other axis, "" where
    there is none."""

    mesh: DeviceMesh
    axis: str
    schedule: str
    pieces: int
    local: int
    inside: str = ""

    @property
    def ranks(self) -> int:
        return self.mesh[self.axis].size()

    @property
    def other(self) -> DeviceMesh | None:
        names = [name for name in self.mesh.mesh_dim_names or () if name != self.axis]
        return self.mesh[names[0]] if names else None


def equal_stages(model: nn.Module, stages: int) -> tuple[list[nn.Module], Callable[[Tensor, Tensor], Tensor]]:
    """(as many layers in each, the loss of the last one's output)."""
    assert isinstance(model, (MLP, GPT)), "models of equal layers alone"
    layers = list(model.layers)
    assert len(layers) % stages == 0, f"{len(layers)} layers do not make {stages} equal stages"
    count = len(layers) // stages
    parts = [layers[i * count : (i + 1) * count] for i in range(stages)]
    if isinstance(model, MLP):
        return [nn.Sequential(*part) for part in parts], F.mse_loss
    parts[0].insert(0, _Words(model))
    parts[-1] += [model.norm, model.head]
    return [nn.Sequential(*part) for part in parts], _word_loss


def staged_by_hand(race: Race, how: StagesByHand) -> Runner:
    """Its loss is scaled so that the mean over all ranks is the whole batch's: stages but the last have none."""
    stages, loss_of = equal_stages(race.model(), how.ranks * how.local)
    own = how.mesh.get_local_rank(how.axis)
    mine = nn.ModuleList(_inside(stages[at], how) for at in range(own, len(stages), how.ranks))
    kind: Any = get_schedule_class(ORDERS[how.schedule].torch_name)
    group = how.mesh.get_group(how.axis)
    torch_stages = [
        PipelineStage(module, own + i * how.ranks, len(stages), torch.device("cpu"), group=group)
        for i, module in enumerate(mine)
    ]
    given: Any = torch_stages[0] if issubclass(kind, PipelineScheduleSingle) else torch_stages
    schedule = kind(given, how.pieces, loss_fn=loss_of)

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        first = (x,) if own == 0 else ()
        last = own == how.ranks - 1
        schedule.step(
            *first, target=y if last else None, losses=losses if last else None, return_outputs=False
        )
        if how.other is not None and how.inside == "DP":
            _average(mine, how.other.get_group())
        loss = how.ranks * torch.stack(losses).mean().detach() if last else torch.zeros(())
        return loss.requires_grad_()  # the schedule has run the backward

    return Runner(step, mine, _rows(race, how))


def _inside(stage: nn.Module, how: StagesByHand) -> nn.Module:
    if how.other is None or how.inside == "DP":
        return stage
    styles = {name: ColwiseParallel() for name, _ in stage.named_modules() if name.endswith("up")}
    rows = {name: RowwiseParallel() for name, _ in stage.named_modules() if name.endswith("down")}
    return parallelize_module(stage, how.other, styles | rows)


def _average(stages: nn.Module, group: dist.ProcessGroup) -> None:
    """Gradients over replicas of a stage, after the last piece. DistributedDataParallel fails here: it counts the
    parameters of torch's first step twice, and does not see gradients that are made apart from those of inputs."""
    grads = [p.grad for p in stages.parameters() if p.grad is not None]
    started = [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]
    for grad, one in zip(grads, started, strict=True):
        assert one is not None
        one.wait()
        grad.div_(dist.get_world_size(group))


def _rows(race: Race, how: StagesByHand) -> tuple[Tensor, Tensor]:
    x, y = race.batch()
    if how.other is None or how.inside != "DP":
        return x, y
    rank, count = how.other.get_local_rank(), how.other.size()
    return x.chunk(count)[rank].contiguous(), y.chunk(count)[rank].contiguous()


class _Words(nn.Module):
    """Embedded words and places, of a GPT."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.places = model.tokens, model.places

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device).unsqueeze(0))


def _word_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class BusyClock:
    """Seconds that this rank computed in stages and updates, while `running`; what it waited for is not among them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[BusyClock]:
        computing = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        with contextlib.ExitStack() as stack:
            for kind, names in (
                (OwnStage, computing),
                (PipelineStage, computing),
                (StageRun, ("start", "finish")),
                (torch.optim.AdamW, ("step",)),
            ):
                for name in names:
                    stack.enter_context(self._timing(kind, name))
            yield self

    @contextlib.contextmanager
    def _timing(self, kind: type, name: str) -> Iterator[None]:
        own = name in vars(kind)
        plain = getattr(kind, name)

        @functools.wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(kind, name, timed)
        try:
            yield
        finally:
            if own:
                setattr(kind, name, plain)
            else:
                delattr(kind, name)


class Watched:
    """A runner, and what a `clock` counted in each of its steps."""

    def __init__(self, runner: Runner, clock: BusyClock) -> None:
        self._runner, self._clock = runner, clock
        self.busy: list[float] = []

    def step(self) -> Tensor:
        before = self._clock.seconds
        loss = self._runner.step()
        self.busy.append(self._clock.seconds - before)
        return loss


def bubbles(busy: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Per step the share of all ranks' time in which they waited. busy: of this rank; seconds: of the slowest rank."""
    total = torch.tensor(busy, dtype=torch.float64)
    dist.all_reduce(total)
    world = dist.get_world_size()
    return [1.0 - one / (world * whole) for one, whole in zip(total.tolist(), seconds, strict=True)]
