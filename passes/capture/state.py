"""A model's parameters and buffers as slots that tracing fills with fakes, and empties again."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cost_model.errors import CaptureError
from passes.capture.contents import contents_of

__all__ = ["Slot", "find_slots", "rebound_buffers", "state_kept", "state_replaced"]


@dataclass(frozen=True)
class Slot:
    """One distinct parameter or buffer. places: every (module, attribute) that holds it; the first
    gives `name`, the others `aliases`."""

    tensor: Tensor
    is_parameter: bool
    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.names[1:]


def find_slots(model: nn.Module) -> list[Slot]:
    """Parameters in the order of `named_parameters()`, then buffers; tied ones once.

    Raises CaptureError for a lazy parameter that has no shape yet.
    """
    names: dict[int, list[str]] = {}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    tensors: dict[int, tuple[Tensor, bool]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                full = f"{prefix}.{key}" if prefix else key
                _check_initialised(tensor, full)
                tensors.setdefault(id(tensor), (tensor, is_parameter))
                names.setdefault(id(tensor), []).append(full)
                if (module, key) not in places.setdefault(id(tensor), []):
                    places[id(tensor)].append((module, key))
    slots = [Slot(t, p, tuple(names[i]), tuple(places[i])) for i, (t, p) in tensors.items()]
    return [s for s in slots if s.is_parameter] + [s for s in slots if not s.is_parameter]


def _check_initialised(tensor: Tensor, name: str) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise CaptureError(
            f"cannot capture: {name} is a lazy parameter, without a shape\n"
            "  try: call the model once on one small batch before autoshard"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CaptureError(
            f"cannot capture: {name} is {tensor.layout}, not a dense tensor\n  try: {name}.to_dense()"
        )


@contextmanager
def state_kept(model: nn.Module) -> Generator[None]:
    """Whatever a forward inside does to what the modules hold is undone at the end.

    Attributes, parameters and buffers as such, hooks, and the contents of containers and plain tensors. Raises
    CaptureError for a plain tensor that was changed in place: a graph would not do that again at each call.
    """
    contents = contents_of(model)
    try:
        yield
    except BaseException as cause:
        _refuse_changed(model, contents.restore(), cause)
        raise
    _refuse_changed(model, contents.restore(), None)


def _refuse_changed(model: nn.Module, tensors: Sequence[str], cause: BaseException | None) -> None:
    if tensors and (cause is None or isinstance(cause, Exception)):
        raise CaptureError(
            f"cannot capture {type(model).__name__}: forward changes {', '.join(tensors)} in place, a tensor that is "
            f"no buffer\n  try: self.register_buffer({tensors[0].rpartition('.')[2]!r}, tensor, persistent=False)"
        ) from cause


def _refill(table: dict[str, Any], old: dict[str, Any]) -> None:
    table.clear()
    table.update(old)


@contextmanager
def state_replaced(slots: Sequence[Slot], values: Sequence[Tensor]) -> Generator[None]:
    """`values` in the places of `slots`, for one run of the forward; undone by `state_kept`."""
    before = [
        (module, dict(module._parameters), dict(module._buffers)) for s in slots for module, _ in s.places
    ]
    try:
        for slot, value in zip(slots, values, strict=True):
            for module, key in slot.places:
                (module._parameters if slot.is_parameter else module._buffers)[key] = value  # type: ignore[assignment]
        for module in {module for slot in slots for module, _ in slot.places}:
            _refresh_flat_weights(module)
        yield
    finally:
        for module, parameters, buffers in before:
            _refill(module._parameters, parameters)
            _refill(module._buffers, buffers)


def _refresh_flat_weights(module: nn.Module) -> None:
    """nn.LSTM and its kin read their weights from a list that they keep beside the parameters."""
    if isinstance(module, nn.RNNBase):
        weights = [module._parameters.get(name) for name in module._flat_weights_names]
        module.__dict__["_flat_weights"] = weights


def rebound_buffers(slots: Sequence[Slot], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Buffers that the forward assigned anew (`self.mean = ...`): slot position -> new value."""
    new: dict[int, Tensor] = {}
    for position, (slot, value) in enumerate(zip(slots, values, strict=True)):
        for module, key in slot.places:
            held = None if slot.is_parameter else module._buffers.get(key)
            if held is not None and held is not value:
                new[position] = held
    return new
