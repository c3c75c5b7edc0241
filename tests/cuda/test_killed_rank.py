"""A rank that is killed in a step ends the others with an error, within the time that NCCL is given."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from autoshard import autoshard
from tests.cuda.gpus import Axes, GpuPool, axes_of, gpu_mesh
from tests.cuda.programs import PRECISIONS, loss_of, prepared
from tests.profiles import slow_compute
from tests.ranks import RankFailure

NCCL_SECONDS = 20.0
GRACE_SECONDS = 150.0
"""How long the others may take to end: NCCL's time, and what its watchdog takes to write down where it stood."""


def killed_in_a_step(rank: int, axes: Axes, victim: int) -> str:
    kind = PRECISIONS["float32"]
    model, inputs = prepared("llama", kind, batch=8)
    autoshard(model, gpu_mesh(axes), None, profile=slow_compute(), backend="eager")
    for step in range(4):
        loss = loss_of(model(**inputs))
        if step == 2 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        loss.item()
    return "went on"


@pytest.mark.cuda(gpus=2)
def test_the_others_end_with_an_error(record_property: Callable[..., None]) -> None:
    axes = axes_of(1)
    world = axes[0][1]
    with GpuPool(grace_seconds=GRACE_SECONDS) as gpus, pytest.raises(RankFailure) as failure:
        gpus.run(killed_in_a_step, axes, world - 1, world=world, nccl_seconds=NCCL_SECONDS)
    errors = failure.value.errors
    record_property(
        "ends", ", ".join(f"rank {r}: {text.splitlines()[0]}" for r, text in sorted(errors.items()))
    )
    assert "exit code -9" in errors[world - 1]
    assert set(errors) == set(range(world)), "a rank went on without the killed one"
    hung = {rank: text for rank, text in errors.items() if text.startswith("no answer after")}
    assert not hung, hung
