"""While a model is traced on the CPU, it sees the device type of its mesh.

Fakes of a device that this build of torch cannot drive abort the process in autograd, so every model is traced on
CPU fakes, wherever that happens. What the model's code asks of a tensor's device is answered as on the mesh, and
device arguments that name the mesh's device type mean the CPU. So a model takes the same way on a laptop as on GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.capture.autocast import accelerator_autocast
from passes.capture.provenance import is_user_file
from passes.ir.joint import CPU
from passes.ir.torch_dispatch import autocast_of_cpu_ignored
from passes.ir.torch_tracing import fake_devices_answered, replaced_attribute, tracing_suspended

__all__ = ["seen_on"]

_CAPABILITY = (9, 0)
"""What a model that asks for the compute capability is told, whatever the GPU: the graph is one for all of them. It
is Hopper's; the kernels that run are chosen by the real one."""


@contextmanager
def seen_on(device_type: str) -> Generator[None]:
    """Inside, traced tensors are on the first device of `device_type` as far as the model's code can see, its
    autocast is that of `device_type`, and the machine has one such device. To be entered around the model's own code
    only, and answered to it only: torch asks too, for itself.

    Real tensors that live on a device (a mask that is neither parameter nor buffer) are read as copies on the CPU.
    """
    with ExitStack() as stack:
        # A default device that the user set names where tensors are made, not where they are traced.
        stack.enter_context(torch.device(CPU))
        if device_type != CPU.type:
            stack.enter_context(accelerator_autocast(device_type))
            _answer_for_machine(stack, device_type)
            view = stack.enter_context(_View(torch.device(device_type, 0)))
            stack.enter_context(fake_devices_answered(_asked_by_user, view.device_of))
        elif torch.accelerator.is_available():
            stack.enter_context(_OnCpu())
        yield


def _answer_for_machine(stack: ExitStack, device_type: str) -> None:
    """What a model may ask of the machine, answered as on a rank."""
    of_type: dict[str, Any] = {
        "is_available": True, "is_bf16_supported": True, "current_device": 0, "get_device_capability": _CAPABILITY,
    }  # fmt: skip
    of_any: dict[str, Any] = {"is_available": True, "current_accelerator": torch.device(device_type)}
    for module, answers in ((getattr(torch, device_type, None), of_type), (torch.accelerator, of_any)):
        for name, value in answers.items():
            if hasattr(module, name):
                stack.enter_context(replaced_attribute(module, name, _answer(value)))


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _asked_by_user() -> bool:
    """Whether what the calling function answers is asked in the user's code."""
    return is_user_file(sys._getframe(2).f_code.co_filename)


class _OnCpu(TorchFunctionMode):
    """Real tensors of a device are read as copies on the CPU, one copy of each."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._carried(args, kwargs or {})
        return func(*args, **kwargs)

    def _carried(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return pytree.tree_map_only(Tensor, self._copy, (args, kwargs))

    def _copy(self, leaf: Any) -> Any:
        if not _is_real_elsewhere(leaf):
            return leaf
        if id(leaf) not in self._copies:
            with tracing_suspended(), torch.no_grad():
                copy = leaf.detach().to(CPU).requires_grad_(leaf.requires_grad)
            # The tensor is kept too: its id must not be another's while the copy is known by it.
            self._copies[id(leaf)] = leaf, copy
        return self._copies[id(leaf)][1]


def _is_real_elsewhere(leaf: Any) -> bool:
    """Traced tensors are subclasses. `meta` tensors have no values to copy: capture names them in an error."""
    plain = type(leaf) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and leaf.device.type not in (CPU.type, "meta")


class _View(_OnCpu):
    """Answers what code asks about devices, and carries out on the CPU what it asks of the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        kind = device.type
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: self.device_of,  # type: ignore[attr-defined]
            Tensor.get_device: lambda tensor: self._device.index,
            getattr(Tensor, f"is_{kind}").__get__: lambda tensor: tensor.device.type == CPU.type,
            Tensor.is_cpu.__get__: lambda tensor: False,  # type: ignore[attr-defined]
        }
        self._moves = getattr(Tensor, kind)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._carried(args, kwargs or {})
        answer = self._answers.get(func)
        if answer is not None and _asked_by_user():
            return answer(*args, **kwargs)
        with autocast_of_cpu_ignored() if torch.is_autocast_enabled(CPU.type) else nullcontext():
            if func is self._moves:
                return Tensor.to(args[0], CPU)
            return func(*self._places(func, args), **self._keywords(kwargs))

    def device_of(self, tensor: Tensor) -> torch.device:
        found = tensor.device
        return self._device if found.type == CPU.type else found

    def _keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("device") is None:
            return kwargs
        return {**kwargs, "device": self._here(kwargs["device"])}

    def _places(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Devices given by position: objects anywhere, names and numbers to `Tensor.to` only."""
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, int)):
            return args[0], self._here(args[1]), *args[2:]
        return tuple(self._here(a) if isinstance(a, torch.device) else a for a in args)

    def _here(self, device: Any) -> Any:
        """The CPU for a device of the mesh's type: an object, "cuda:1", or a number."""
        if isinstance(device, int):
            return CPU
        return CPU if torch.device(device).type == self._device.type else device
