"""Tensors of a model: as slots that tracing fills with fakes; those that containers hold; those that share memory."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from cost_model.errors import CaptureError
from passes.capture.places import contents, refill
from passes.capture.provenance import check_dense, refused
from passes.capture.snapshot import Snapshot
from passes.capture.surroundings import Container, containers_of
from passes.capture.torch_shortcuts import marked


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
    changes = lambda i, s: i in changed or s.is_trained
    held = [_Held(s.name, kinds[s.places[0][1]], s.tensor, changes(i, s)) for i, s in enumerate(slots)]
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
    space, start = tensor.get_device(), tensor.data_ptr()
    if tensor.is_meta:
        space, start = StorageWeakRef(tensor.untyped_storage()).cdata, int(tensor.storage_offset()) * size
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return space, start, start + int(last + 1) * size


Table = Literal["_parameters", "_buffers", "__dict__"]


@dataclass(frozen=True)
class Slot:
    """One distinct parameter, buffer, or tensor in a plain attribute (`self.scale = torch.ones(3)`), which counts as a
    buffer: it may change from call to call. places: every (module, its table, key) that holds it; the first gives
    `name`, the others `aliases`."""

    tensor: Tensor
    is_parameter: bool
    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, Table, str], ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_trained(self) -> bool:  # else a parameter is a state, as a buffer is: the forward may change it
        return self.is_parameter and self.tensor.requires_grad

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.names[1:]


def find_slots(model: nn.Module) -> list[Slot]:
    """Parameters in the order of `named_parameters()`, then buffers, then attributes; tied ones once.

    Raises CaptureError for a lazy parameter that has no shape yet, and for a tensor that is not dense.
    """
    found: dict[int, Slot] = {}
    for table in ("_parameters", "_buffers", "__dict__"):
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, tensor in vars(module).get(table, vars(module)).items():
                if tensor is None or (table == "__dict__" and not _is_state(tensor)):
                    continue
                full = f"{prefix}.{key}" if prefix else key
                check_initialised(tensor, full)
                found[id(tensor)] = _with_place(found.get(id(tensor)), tensor, table, module, key, full)
    return list(found.values())


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by every name it has: tied ones appear under all of them."""
    return dict(model.named_parameters(remove_duplicate=False))


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Every buffer and tensor attribute, by every name."""
    slots = [slot for slot in find_slots(model) if not slot.is_parameter]
    return {name: slot.tensor for slot in slots for name in slot.names}


def _is_state(value: Any) -> bool:
    """Whether an attribute is a tensor that a forward may read and change as it does a buffer. One that requires
    grad or is on `meta` has no place beside the parameters: capture names it in an error if it is used."""
    return (type(value) is Tensor and not (value.requires_grad or value.is_meta)) or (
        isinstance(value, Tensor) and value.is_nested
    )


def _with_place(
    slot: Slot | None, tensor: Tensor, table: Table, module: nn.Module, key: str, full: str
) -> Slot:
    place = (module, table, key)
    if slot is None:
        return Slot(tensor, table == "_parameters", (full,), (place,))
    places = slot.places if place in slot.places else (*slot.places, place)
    return replace(slot, names=(*slot.names, full), places=places)


def check_initialised(tensor: Tensor, name: str) -> None:
    """CaptureError for a lazy parameter and for what is not dense."""
    if torch.nn.parameter.is_lazy(tensor):
        remedy = "call the model once on one small batch before autoshard"
        raise refused(f"{name} is a lazy parameter, without a shape", remedy)
    check_dense(tensor, name)


@contextmanager
def state_kept(model: nn.Module, arguments: Iterable[Any] = ()) -> Generator[Snapshot]:
    """Whatever a traced forward changes in attributes and containers of the model is undone at the end."""
    before = Snapshot(model, arguments)
    try:
        yield before
    finally:
        before.restore()


@contextmanager
def state_replaced(slots: Sequence[Slot], values: Sequence[Tensor]) -> Generator[None]:
    """`values` in the places of `slots`, for one run of the forward; undone by `state_kept`."""
    with tables_kept(slots):
        for slot, value in zip(slots, values, strict=True):
            for (_, _, key), table in zip(slot.places, _tables(slot), strict=True):
                table[key] = marked(value) if slot.is_parameter else value
        for module in {module for slot in slots for module, _, _ in slot.places}:
            refresh_flat_weights(module)
        yield


@contextmanager
def tables_kept(slots: Sequence[Slot]) -> Generator[None]:
    """The tables that hold `slots` have at the end the values that they have now."""
    before = [(table, contents(table)) for slot in slots for table in _tables(slot)]
    try:
        yield
    finally:
        for table, old in before:
            refill(table, old)


def _tables(slot: Slot) -> list[dict[str, Any]]:
    return [vars(module) if table == "__dict__" else vars(module)[table] for module, table, _ in slot.places]


def refresh_flat_weights(module: nn.Module) -> None:
    """nn.LSTM and its kin read their weights from a list that they keep beside the parameters."""
    if isinstance(module, nn.RNNBase):
        weights = [module._parameters.get(name) for name in module._flat_weights_names]
        module.__dict__["_flat_weights"] = weights


def rebound_buffers(slots: Sequence[Slot], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Buffers that the forward assigned anew: slot position -> new value. CaptureError for a parameter."""
    new: dict[int, Tensor] = {}
    for position, (slot, value) in enumerate(zip(slots, values, strict=True)):
        for module, table, key in slot.places:
            held = value if table == "__dict__" else vars(module)[table].get(key)
            if held is not value and table == "_parameters":
                what = f"forward assigns parameter {slot.name} anew, which a compiled call cannot repeat"
                raise refused(what, "assign it before autoshard(), in __init__")
            if held is not value and held is not None:
                new[position] = held
    return new
