"""Tensors of a model beside its parameters and buffers: in lists, dicts and objects they are constants of the graph,
which a forward may not change. Tensors that share memory, which they no longer do once they are shards."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cost_model.errors import CaptureError
from passes.capture.model_state import Slot
from passes.capture.places import contents
from passes.capture.provenance import refused
from passes.capture.surroundings import Container, containers_of


@contextmanager
def held_tensors_kept(model: nn.Module) -> Generator[None]:
    """Such tensors have their values again at the end. CaptureError if a forward inside changed one in place: tracing
    runs that for real, and a call would not do it again."""
    kept = [(name, tensor, tensor.detach().clone()) for name, tensor in held_tensors(model)]
    try:
        yield
    except Exception as cause:
        _refuse(model, _restored(kept), cause)
        raise
    finally:
        changed = _restored(kept)
    _refuse(model, changed, None)


Kept = list[tuple[str, Tensor, Tensor]]


def held_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """With their names."""
    own = {id(tensor) for module in model.modules() for tensor in _tensors_of(module)}
    found: dict[int, tuple[str, Tensor]] = {}
    for container in containers_of(model):
        for name, value in _entries(container):
            if type(value) is not Tensor or value.layout != torch.strided or value.is_meta:
                continue
            if id(value) not in own:
                found.setdefault(id(value), (name, value))
    return list(found.values())


def _tensors_of(module: nn.Module) -> list[Tensor]:
    values = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
    return [value for value in values if isinstance(value, Tensor)]


def _entries(container: Container) -> list[tuple[str, object]]:
    held, where = contents(container.value), container.where
    if isinstance(held, dict):
        step = "[{!r}]" if isinstance(container.value, dict) and not container.of_object else ".{}"
        return [(f"{where}{step.format(key)}", entry) for key, entry in held.items()]
    return [(f"{where}[{i}]", entry) for i, entry in enumerate(held)] if isinstance(held, list) else []


def _restored(kept: Kept) -> list[str]:
    """Put the values back, in place, so that views see them too; the names of those that had changed."""
    changed: list[str] = []
    with torch.no_grad():
        for name, tensor, before in kept:
            if not torch.equal(tensor.detach().nan_to_num(), before.nan_to_num()):
                tensor.detach().copy_(before)
                changed.append(name)
    return changed


def _refuse(model: nn.Module, changed: list[str], cause: Exception | None) -> None:
    if changed:
        names = ", ".join(changed)
        raise refused(
            f"forward changes {names} in place, a tensor that is neither buffer nor attribute",
            "self.register_buffer(name, tensor, persistent=False)",
            model=model,
        ) from cause


@dataclass(frozen=True, eq=False)
class _Held:
    """kind: "parameter", "buffer", "attribute", or "tensor" for one in a list or dict. changes: whether a step may
    change its values."""

    name: str
    kind: str
    tensor: Tensor
    changes: bool


def check_shared_memory(
    model: nn.Module, slots: Sequence[Slot], written: Iterable[int], constants: Iterable[Tensor]
) -> None:
    """Raises CaptureError, with both names, where two tensors overlap of which a step changes one: a parameter that is
    trained, or a slot that the forward writes to in place (`written`, by position).

    constants: what the forward reads from lists and dicts.
    """
    changed = set(written)
    kinds = {"_parameters": "parameter", "_buffers": "buffer", "__dict__": "attribute"}
    held = [
        _Held(
            s.name,
            kinds[s.places[0][1]],
            s.tensor,
            i in changed or (s.is_parameter and s.tensor.requires_grad),
        )
        for i, s in enumerate(slots)
    ]
    held += [_Held("", "tensor", tensor, False) for tensor in constants]
    for first, second in _near(held):
        if (first.changes or second.changes) and overlap(first.tensor, second.tensor):
            raise _refused(model, *sorted((first, second), key=lambda h: (not h.changes, held.index(h))))


def _refused(model: nn.Module, owner: _Held, other: _Held) -> CaptureError:
    if not other.name:
        names = [name for name, tensor in held_tensors(model) if tensor is other.tensor]
        other = replace(other, name=next(iter(names), f"of shape {list(other.tensor.shape)}"))
    if other.kind == "parameter":
        why, remedy = "and each is updated by itself", f"one parameter for both: {other.name} = {owner.name}"
        if owner.tensor.shape != other.tensor.shape:
            remedy = "one parameter, of which forward takes the parts or the transpose"
    else:
        why = "and would no longer follow it"
        remedy = f"compute {other.name} from {owner.name} in forward, or in a property"
    shared = f"{other.kind} {other.name} shares memory with {owner.kind} {owner.name}"
    return refused(f"{shared}, {why}", remedy)


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether an element of one lies, in part or whole, in the memory of an element of the other."""
    (space, start, end), (other, at, stop) = _range(first), _range(second)
    if space != other or end <= at or stop <= start:
        return False
    unit = gcd(first.element_size(), second.element_size(), start - at)
    origin = min(start, at)
    marks = torch.zeros((max(end, stop) - origin) // unit, dtype=torch.bool)
    _cells(marks, first, unit, (start - origin) // unit).fill_(True)
    return bool(_cells(marks, second, unit, (at - origin) // unit).any())


def _cells(marks: Tensor, tensor: Tensor, unit: int, offset: int) -> Tensor:
    """The units of memory that `tensor` lies in, of `marks`."""
    each = tensor.element_size() // unit
    strides = tuple(stride * each for stride in tensor.stride())
    return marks.as_strided((*tensor.shape, each), (*strides, 1), offset)


def _near(held: Iterable[_Held]) -> Iterator[tuple[_Held, _Held]]:
    """Pairs whose first and last elements lie within each other's, in order of their begin."""
    ranged = [(*_range(h.tensor), h) for h in held if _has_memory(h.tensor)]
    alive: list[tuple[int, int, int, _Held]] = []
    for space, start, end, new in sorted(ranged, key=lambda entry: entry[:3]):
        alive = [entry for entry in alive if entry[0] == space and entry[2] > start]
        yield from ((entry[3], new) for entry in alive)
        alive.append((space, start, end, new))


def _has_memory(tensor: Tensor) -> bool:
    """Not a wrapper of other tensors (a DTensor, a fake), and not empty."""
    plain = getattr(type(tensor), "__torch_dispatch__", None) == getattr(Tensor, "__torch_dispatch__", None)
    return plain and tensor.numel() > 0 and (tensor.is_meta or tensor.untyped_storage().data_ptr() != 0)


def _range(tensor: Tensor) -> tuple[int, int, int]:
    """(address space, first byte, byte after the last). On meta each storage is a space of its own."""
    size = tensor.element_size()
    space, start = tensor.get_device(), 0
    if tensor.is_meta:
        space, start = StorageWeakRef(tensor.untyped_storage()).cdata, int(tensor.storage_offset()) * size
    else:
        start = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return space, start, start + int(last + 1) * size
