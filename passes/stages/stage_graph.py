"""`StageGraph`: what one stage of a pipeline computes, and what passes between it and its neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from passes.ir.joint import JointGraph


@dataclass(frozen=True)
class Crossing:
    """A tensor that stage `source` sends to stage `source + 1` in the forward of every piece.

    Stages send to their neighbours only. What a later stage reads passes through all between, which hand it on as it
    is; so does its gradient, which takes the way back.

    name:     the op of the whole graph that made it. made: the stage of that op.
    gradient: whether a gradient comes back in the backward, of the same shape and dtype.
    value:    False of a gradient that is like no value sent: the forward sends nothing, the graph's output is zeros and
              stage `target` may be given anything.
    """

    name: str
    source: int
    made: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    value: bool = True

    @property
    def target(self) -> int:
        return self.source + 1

    @property
    def nbytes(self) -> int:
        """Of the value, and of the gradient."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StageGraph:
    """Stage `stage` of `stages`, as a joint graph like any other.

    joint:    inputs: the parameters, buffers and constants that the stage holds; as kind "input" what it reads of the
              call, then `received`; tangents of its outputs; the seed. outputs: its share of the call's, then
              `sent`; new buffers; gradients of its parameters, and of what it received.
    inputs:   tensors of the call that it reads, by position there; in the graph they have index 0, 1, ...
    outputs:  tensor outputs of the call that it returns, by position there; in the graph index 0, 1, ...
    received: from stage `stage - 1`, in the graph the inputs after `inputs`. The gradients of those with one are
              outputs of kind "grad" with their names, and are sent to stage `stage - 1`.
    sent:     to stage `stage + 1`, in the graph the outputs after `outputs`. Those with a gradient have a tangent.
    summed:   parameters that the stage shares with others, each with the stages whose gradients are parts of its
              gradient: to be added up before the update.
    """

    stage: int
    stages: int
    joint: JointGraph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]
    summed: Mapping[str, tuple[int, ...]]

    @property
    def sent_nbytes(self) -> int:
        """Of the forward of one piece."""
        return sum(crossing.nbytes for crossing in self.sent if crossing.value)

    @property
    def returned_nbytes(self) -> int:
        """Of the gradients that the backward of one piece sends to the stage before."""
        return sum(crossing.nbytes for crossing in self.received if crossing.gradient)
