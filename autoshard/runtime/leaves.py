"""The leaves of one kind of call: tensors as the caller has them, and as a rank's program takes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.input_side import InputSide, conform, expected, sliced
from cost_model.mesh import MeshSpec
from passes.ir.joint import GraphOutput
from passes.ir.torch_dtensor import dtensor_from, local_of, sharding_of

__all__ = ["LeafLooks", "Leaves"]


def _no_tensor() -> None:
    return None


@dataclass(frozen=True)
class LeafLooks:
    """What a call's leaves were, beside their values. shardings: of DTensors; shapes: of those that may be sliced."""

    shardings: Sequence[Any]
    shapes: Mapping[int, torch.Size]


class Leaves:
    """kinds, values: of the placeholders that take the leaves, None of one that this rank does not read; sides: where
    they meet the caller.

    may_slice: leaves that may come whole where the graph takes a part: all but parameters.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        values: Sequence[Tensor | None],
        sides: Sequence[InputSide],
        spec: MeshSpec,
        rank: int,
    ) -> None:
        assert len(kinds) == len(values) == len(sides)
        self._spec, self._rank, self._sides = spec, rank, tuple(sides)
        self._expected = [None if value is None else expected([value])[0] for value in values]
        self._known: list[Callable[[], Tensor | None]] = [_no_tensor] * len(self._expected)
        # Parameters and buffers by far outnumber what may need slicing.
        self.may_slice = [i for i, kind in enumerate(kinds) if kind != "param"]

    def looks(self, leaves: Sequence[Tensor]) -> LeafLooks:
        return LeafLooks([sharding_of(leaf) for leaf in leaves], {i: leaves[i].shape for i in self.may_slice})

    def local(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """As the graph takes them."""
        locals_ = [local_of(leaf) for leaf in leaves]
        for i in self.may_slice:
            like = self._expected[i]
            if like is not None and locals_[i].shape != like.shape:
                locals_[i] = sliced(locals_[i], self._sides[i], self._spec, self._rank)
        for i, (value, known) in enumerate(zip(locals_, self._known, strict=True)):
            if known() is not value:
                locals_[i] = self._conformed(i, value)
        return locals_

    def gradients(
        self,
        looks: LeafLooks,
        needed: Sequence[bool],
        ends: Sequence[GraphOutput],
        found: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Per leaf its gradient as autograd wants it. ends, found: what the program returned."""
        gradients: list[Tensor | None] = [None] * len(looks.shardings)
        for end, gradient in zip(ends, found, strict=True):
            leaf = end.index
            if gradient is None or not needed[leaf]:
                continue
            sharding = looks.shardings[leaf]
            if sharding is not None:
                gradient = dtensor_from(gradient, sharding)
            shape = looks.shapes.get(leaf)
            # A leaf that came as a shard, where the graph returns its gradient whole.
            if shape is not None and gradient.shape != shape:
                gradient = sliced(gradient, self._sides[leaf], self._spec, self._rank)
            gradients[leaf] = gradient
        return gradients

    def _conformed(self, position: int, value: Tensor) -> Tensor:
        """`value` as the graph takes it. A parameter that is so already is remembered: it comes again at every step."""
        like = self._expected[position]
        found = value if like is None else conform(value, like)
        if found is value and position not in self.may_slice:
            self._known[position] = weakref.ref(value)
        return found
