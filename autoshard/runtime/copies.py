"""Deep copies of a parallel model (an average, a teacher) that were made before its parameters had layouts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.watching.agreement import everyones

__all__ = ["Copies", "same_parameters"]

T = TypeVar("T")


class Copies(Generic[T]):
    """The copies that wait for a plan. They are not kept alive."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[T]] = []

    def add(self, copy: T) -> None:
        self._made.append(weakref.ref(copy))

    def everywhere(self, mesh: DeviceMesh) -> Iterator[T]:
        """Those that every rank still has. Collective: the collector of one rank may be ahead of another's."""
        alive = {number: found for number, ref in enumerate(self._made) if (found := ref()) is not None}
        common = set.intersection(*everyones(mesh, set(alive)))
        return (alive[number] for number in sorted(common))


def same_parameters(model: nn.Module, other: nn.Module) -> bool:
    """Whether both have the same names and shapes, so that the layouts of one fit the other."""
    shapes = [[(n, p.shape) for n, p in m.named_parameters(remove_duplicate=False)] for m in (model, other)]
    return shapes[0] == shapes[1]
