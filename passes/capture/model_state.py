"""Parameters, buffers and tensor attributes of a model as slots, which tracing fills with fakes and empties again."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from passes.capture.places import contents, refill
from passes.capture.provenance import check_dense, refused
from passes.capture.snapshot import Snapshot

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
                _check_initialised(tensor, full)
                found[id(tensor)] = _with_place(found.get(id(tensor)), tensor, table, module, key, full)
    return list(found.values())


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


def _check_initialised(tensor: Tensor, name: str) -> None:
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
    before = [(table, contents(table)) for slot in slots for table in _tables(slot)]
    try:
        for slot, value in zip(slots, values, strict=True):
            for (_, _, key), table in zip(slot.places, _tables(slot), strict=True):
                table[key] = value
        for module in {module for slot in slots for module, _, _ in slot.places}:
            _refresh_flat_weights(module)
        yield
    finally:
        for table, old in before:
            refill(table, old)


def _tables(slot: Slot) -> list[dict[str, Any]]:
    return [vars(module) if table == "__dict__" else vars(module)[table] for module, table, _ in slot.places]


def _refresh_flat_weights(module: nn.Module) -> None:
    """nn.LSTM and its kin read their weights from a list that they keep beside the parameters."""
    if isinstance(module, nn.RNNBase):
        weights = [module._parameters.get(name) for name in module._flat_weights_names]
        module.__dict__["_flat_weights"] = weights


def rebound_buffers(slots: Sequence[Slot], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Buffers that the forward assigned anew (`self.mean = ...`): slot position -> new value."""
    new: dict[int, Tensor] = {}
    for position, (slot, value) in enumerate(zip(slots, values, strict=True)):
        for module, table, key in slot.places:
            held = module._buffers.get(key) if table == "_buffers" else None
            if held is not None and held is not value:
                new[position] = held
    return new
