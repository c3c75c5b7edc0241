"""A second wrapper around a model is refused, or harmless, before the first call and after it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from autoshard.runtime.module import dispatcher_of
from cost_model.errors import ShardingError
from tests.api.programs import Axes, Normed, assert_close, data, device_mesh, full, normed, parallel
from tests.ranks import RankPool

ONE: Axes = (("x", 1),)
TWICE = "is wrapped by {}, and autoshard is the parallelism"


def wrapped_after(rank: int) -> None:
    x = data()[0]
    for example in (None, (x,)):
        with pytest.raises(ShardingError, match=TWICE.format("DistributedDataParallel")):
            DistributedDataParallel(parallel(normed(), ONE, example))
    model = parallel(normed(), ONE)
    outer = DistributedDataParallel(nn.Sequential(model))
    with pytest.raises(ShardingError, match=TWICE.format("DistributedDataParallel")):
        outer(x)
    model = parallel(normed(), ONE)
    fully_shard(model)
    with pytest.raises(ShardingError, match=TWICE.format("fully_shard")):
        model(x)


def wrapped_before(rank: int) -> None:
    refused: list[tuple[nn.Module, str]] = [
        (DistributedDataParallel(normed()), TWICE.format("DistributedDataParallel")),
        (nn.Sequential(fully_shard(nn.Linear(10, 4))), "0 of the model " + TWICE.format("FSDPLinear")),
        (torch.compile(normed(), backend="eager"), "model is what torch.compile returned"),  # type: ignore[list-item]
    ]
    for model, text in refused:
        with pytest.raises(ShardingError, match=text):
            parallel(model, ONE)
        if isinstance(model, Normed):
            assert "forward" not in vars(model)
    split = parallelize_module(nn.Sequential(nn.Linear(10, 4)), device_mesh(ONE), {"0": ColwiseParallel()})
    with pytest.raises(
        ShardingError, match=r"0 is split by parallelize_module.*\n  try: the model without it"
    ):
        parallel(split, ONE)
    x, inner = data()[0], normed()
    wrapper = DistributedDataParallel(inner)
    with pytest.raises(ShardingError, match="try: del the wrapper, or the model without it"):
        parallel(inner, ONE, (x,))
    del wrapper
    assert_close(full(parallel(inner, ONE, (x,))(x)), full(normed()(x)))


def compiled_after(rank: int) -> None:
    """torch.compile runs the parallel model as it is: no second program is made for a call that was planned."""
    x = data()[0]
    model = parallel(normed(), ONE, (x,))
    dispatcher = dispatcher_of(model)
    assert dispatcher is not None
    compiled = torch.compile(model, backend=_never)
    output = compiled(x)
    output.sum().backward()
    assert len(dispatcher.executables) == 1
    plain = normed()
    wanted = plain(x)
    wanted.sum().backward()
    assert_close(full(output), full(wanted))
    assert_close(full(model.up.weight.grad), full(plain.up.weight.grad))


def _never(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
    raise AssertionError(f"torch.compile got a graph of the parallel model:\n{graph.code}")


def every_way(rank: int) -> None:
    wrapped_after(rank)
    wrapped_before(rank)
    compiled_after(rank)
    model = parallel(normed(), ONE)
    assert inspect.signature(model.forward) == inspect.signature(normed().forward)


def test_wrappers(ranks: RankPool) -> None:
    ranks.run(every_way, world=1)
