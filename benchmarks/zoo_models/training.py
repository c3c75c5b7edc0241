"""A model of the zoo trained on ranks, against one process."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from autoshard import autoshard
from benchmarks.zoo_models.prices import LIMIT, prices
from benchmarks.zoo_models.row import AS_ONE, Call, Row, state_of, words_of
from passes.capture.operator_calls import GroupedAsCaptured

RATE = 0.05
"""Of learning."""


@dataclass(frozen=True)
class Training:
    """On ranks. mesh: its sizes. close: how far apart losses may be, relative. rate: of learning."""

    mesh: tuple[int, ...] = (2,)
    steps: int = 3
    close: float = 1e-5
    rate: float = RATE


def _loss(result: Any) -> Tensor:
    """Its own, or squares of all that is returned."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    floats = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor) and one.requires_grad]
    return torch.stack([one.abs().square().mean() for one in floats]).sum()


def _steps(model: nn.Module, call: Call, training: Training) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], training.rate)
    losses: list[float] = []
    for _ in range(training.steps):
        optimizer.zero_grad()
        loss = _loss(model(*call[0], **call[1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(row: Row, training: Training) -> str:
    """On ranks, against one process: "as one process", or what differs."""
    count = math.prod(training.mesh)
    with tempfile.NamedTemporaryFile() as store:
        context = multiprocessing.get_context("fork")
        ends = [context.Pipe() for _ in range(count)]
        ranks = [
            context.Process(target=_rank, args=(rank, store.name, row, training, ends[rank][1]))
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        found = [ours.recv() if ours.poll(300) else "no answer" for ours, _ in ends]
        for process in ranks:
            process.kill()
            process.join()
    return next((one for one in found if one != AS_ONE), AS_ONE)


def _rank(rank: int, store: str, row: Row, training: Training, end: Any) -> None:
    try:
        sizes = training.mesh
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=math.prod(sizes))
        model, call = row.made()
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y", "z")[: len(sizes)])
        parallel = autoshard(
            model,
            mesh,
            profile=prices(),
            refine="off",
            tune="first",
            backend="eager",
            time_limit=LIMIT,
            gap=0.1,
        )
        torch.manual_seed(1)
        losses = _steps(parallel, call, training)
        end.send(
            _compared(
                losses, _alone_losses(row, 1, training), _alone_losses(row, 2, training), training.close
            )
        )
    except Exception as error:
        end.send(f"{state_of(error)} {words_of(error)}")
    time.sleep(600)  # Until the other rank has answered as well.


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Relative. One process repeats itself but for the rounding of kernels on memory that lies otherwise."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))


def _compared(losses: Sequence[float], wanted: Sequence[float], again: Sequence[float], close: float) -> str:
    if not all(map(math.isfinite, wanted)):
        return "diverges"
    worst = _apart(losses, wanted)
    return (
        "draws"
        if _apart(wanted, again) > close
        else AS_ONE
        if worst < close
        else f"losses differ by {worst:.1e}"
    )


def _alone_losses(row: Row, seed: int, training: Training) -> list[float]:
    """Of one process."""
    model, call = row.made()
    torch.manual_seed(seed)
    with GroupedAsCaptured():  # in float64, which torch's grouped products do not take
        return _steps(model, call, training)
