"""A forward that synchronizes ranks computes, of the global batch, what it computes without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_model.errors import CaptureError
from passes.capture import capture
from passes.simulate.reference import graph_values, reference_inputs


class Gathered(torch.autograd.Function):
    """The rows of all ranks, as contrastive losses gather them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Synchronized(nn.Module):
    def __init__(self, alone: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.alone = nn.Linear(4, 4), alone

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        mean = h.detach().mean(0)
        if self.alone:
            return ((h - mean) @ h.T).square().mean()
        if dist.is_initialized():
            raise AssertionError("asked of one process")
        dist.barrier()
        work: Any = dist.all_reduce(mean, op=dist.ReduceOp.SUM, async_op=True)
        work.wait()
        everything: Any = Gathered.apply(h)
        return ((h - mean / dist.get_world_size()) @ everything.T).square().mean()


def test_what_ranks_tell_each_other_is_there_already() -> None:
    x, results = torch.randn(6, 4), []
    for model in (Synchronized(True), Synchronized(False)):
        joint = capture(model, (x,), {}).joint
        results.append(graph_values(joint, reference_inputs(joint, model, [x], seed=0))[0])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def of_two(h: Tensor) -> None:
    dist.all_gather([torch.zeros_like(h), torch.zeros_like(h)], h)


def exchanged(h: Tensor) -> None:
    dist.all_to_all_single(h, h.clone())


@pytest.mark.parametrize("rest", [of_two, exchanged], ids=lambda rest: rest.__name__)
def test_what_is_done_between_more_is_an_error(rest: Any) -> None:
    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            h = super().forward(input)
            rest(h)
            return h

    with pytest.raises(CaptureError, match="its forward communicates"):
        capture(Model(4, 4), (torch.randn(2, 4),), {})
    assert not dist.is_initialized()
