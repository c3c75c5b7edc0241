"""Buffers of a model on `meta` have no values after `to_empty`: whoever forgets to give them some is told so."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cost_model.errors import ShardingError
from passes.ir.torch_compat import version_of

__all__ = ["watch_empty_buffers"]


def watch_empty_buffers(model: nn.Module) -> None:
    """After `model.to_empty(...)`, a call raises ShardingError as long as some buffer that was on `meta` is unwritten.

    A checkpoint has persistent buffers only, and `reset_parameters` of most modules writes parameters alone.
    """
    model.to_empty = _ToEmpty(model)  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Empty:
    """A buffer as `to_empty` left it: filled with a value that no model computes, where its dtype has one."""

    name: str
    tensor: weakref.ref[Tensor]
    version: int

    def still(self, model: nn.Module) -> bool:
        module, _, name = self.name.rpartition(".")
        now = model.get_submodule(module)._buffers.get(name)
        # `buffer.data.copy_` writes without a new version, hence the look at the values.
        return (
            now is not None and now is self.tensor() and version_of(now) == self.version and _is_filled(now)
        )


class _ToEmpty:
    """The model's `to_empty`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *, device: Any, recurse: bool = True) -> nn.Module:
        model = self._model
        meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        type(model).to_empty(model, device=device, recurse=recurse)
        made = [_filled(name, model.get_buffer(name)) for name in meta]
        if any(not model.get_buffer(name).is_meta for name in meta):
            _Check.register(model, made)
        return model


class _Check:
    """A forward pre-hook that goes when it has passed."""

    def __init__(self, empties: list[_Empty]) -> None:
        self._empties = empties
        self._handle: Any = None

    @staticmethod
    def register(model: nn.Module, empties: list[_Empty]) -> None:
        check = _Check(empties)
        check._handle = model.register_forward_pre_hook(check)

    def __call__(self, model: nn.Module, args: Any) -> None:
        names = [empty.name for empty in self._empties if empty.still(model)]
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ShardingError(
                f"the model was on meta, and to_empty left buffers without values: {shown}\n"
                f"  try: model.get_buffer({names[0]!r}).copy_(...) after to_empty, load_state_dict if persistent, "
                "or make buffers outside torch.device('meta')"
            )
        self._handle.remove()


def _filled(name: str, buffer: Tensor) -> _Empty:
    value = _never(buffer.dtype)
    if value is not None:
        with torch.no_grad():
            buffer.fill_(value)
    return _Empty(name, weakref.ref(buffer), version_of(buffer))


def _is_filled(buffer: Tensor) -> bool:
    value = _never(buffer.dtype)
    if value is None:
        return True
    return bool((buffer.isnan() if value != value else buffer == value).all())


def _never(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype == torch.bool else torch.iinfo(dtype).min or torch.iinfo(dtype).max
