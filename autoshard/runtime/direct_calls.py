"""A layer of a parallel model called by itself, as in `model.up(x)`: plain tensors in, plain tensors out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autoshard.runtime.stage_mesh import pipeline_mesh_of

__all__ = ["accept_direct_calls"]


def accept_direct_calls(model: nn.Module) -> list[RemovableHandle]:
    """Let every layer with parameters run on DTensor's own ops when it is called outside the model's forward.

    Tensors of such a call are the same on every rank, and so is what it returns; gradients flow through. It is as
    slow as DTensor is. A call with a DTensor among its arguments is torch's own.
    """
    calls = _DirectCalls()
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if module is not model and next(module.parameters(), None) is not None:
            handles.append(module.register_forward_pre_hook(calls.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(calls.leave, always_call=True))
    return handles


class _DirectCalls:
    """The outermost layer of the call that runs now, if any: what is inside it sees DTensors."""

    def __init__(self) -> None:
        self._outermost: nn.Module | None = None
        self._mixing: AbstractContextManager[Any] = nullcontext()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = _mesh_of(module)
        if mesh is None or self._outermost is not None or _any_dtensor((args, kwargs)):
            return None
        replicated = [Replicate()] * mesh.ndim
        wrap = lambda value: DTensor.from_local(value, mesh, replicated, run_check=False)
        wrapped = pytree.tree_map_only(Tensor, wrap, (args, kwargs))
        self._outermost, self._mixing = module, implicit_replication()
        self._mixing.__enter__()
        return wrapped

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if module is not self._outermost:
            return None
        self._mixing.__exit__(None, None, None)
        self._outermost, self._mixing = None, nullcontext()
        return pytree.tree_map_only(DTensor, lambda value: value.full_tensor(), output)


def _mesh_of(module: nn.Module) -> DeviceMesh | None:
    """None while parameters are plain: before the first call, and while a call is captured. Of all stages, where they
    are of some."""
    found = next((p.device_mesh for p in module.parameters() if isinstance(p, DTensor)), None)
    return None if found is None else pipeline_mesh_of(found) or found


def _any_dtensor(values: Any) -> bool:
    seen: list[Tensor] = []
    pytree.tree_map_only(DTensor, seen.append, values)
    return bool(seen)
