"""Tensors in lists, dicts and objects of the model: constants of the graph, which a forward may not change."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cost_model.errors import CaptureError
from passes.capture.contents import contents
from passes.capture.surroundings import Container, containers_of

__all__ = ["held_tensors", "held_tensors_kept"]


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
        raise CaptureError(
            f"cannot capture {type(model).__name__}: forward changes {', '.join(changed)} in place, a tensor that is "
            "neither buffer nor attribute\n  try: self.register_buffer(name, tensor, persistent=False)"
        ) from cause
