"""What is made once for a DeviceMesh, kept on it as its own groups are: an equal mesh of another world has others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, TypeVar

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Kept", "kept_on"]

K = TypeVar("K")
V = TypeVar("V")


class Kept(dict[K, V], Generic[K, V]):
    """What it holds belongs to a process: a saved mesh comes back without any, a copied one shares it.

    It is saved as an empty OrderedDict, which `torch.load` takes without being told of this class.
    """

    def __reduce__(self) -> Any:
        return OrderedDict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept[K, V]:
        return self


def kept_on(mesh: DeviceMesh, what: str) -> Kept[Any, Any]:
    """What there is so far of `what`, to be read and added to."""
    name = f"_autoshard_{what}"
    found = vars(mesh).get(name)
    if not isinstance(found, Kept):
        found = vars(mesh)[name] = Kept()
    return found
