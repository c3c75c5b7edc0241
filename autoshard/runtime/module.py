"""Put a compiled program behind an unchanged module: same class, same names, another `forward`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from autoshard.runtime.call_program import MOST_TRIED, Otherwise
from autoshard.runtime.guards import Guards
from cost_model.errors import CaptureError, ShardingError, log
from passes.capture.questions import NO_ANSWERS, Answers
from passes.ir.process_state import autocast_devices
from passes.ir.torch_compat import inside_function_transform
from passes.ir.torch_dispatch import replaced_attribute

Key = Callable[[tuple[Any, ...], dict[str, Any]], Hashable]


class Built(Protocol):
    """An executable of one kind of call."""

    guards: Guards
    """Everything it depends on beside the call's arguments and the module's mode."""
    answers: tuple[Tensor, ...]
    """To what the forward asks of values: a call for which they come out otherwise raises Otherwise."""
    is_remade: bool
    """Whether another one is made at once, by a program that is kept elsewhere."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def end(self) -> None:
        """It is called no more."""
        ...


MOST_KEPT = 128
"""Executables of one model."""

Build = Callable[[tuple[Any, ...], dict[str, Any], Answers], Built]


class Dispatcher:
    """The installed `forward`: runs the executable made for this kind of call, building it the first time.

    key:   of a call's arguments: their structure, shapes, dtypes. The module's mode is added here.
    build: makes the executable for a call like this one, in which questions have the given answers; what
           it raises reaches the caller, and nothing is remembered.

    An executable is used as long as its guards hold; after that another is built, and the first is kept for the
    case that what has changed changes back. Only so many are kept: where sizes change at every step there would be
    thousands. One more takes the place of the one not called for longest, of those that are made again at once if there
    are any. The same on all ranks, since all call the same ones.
    """

    def __init__(self, model: nn.Module, key: Key, build: Build) -> None:
        self.original = model.forward
        # Trainers look at what a model takes.
        self.__signature__ = inspect.signature(model.forward)
        self._uncompiled: Callable[..., Any] = torch.compiler.disable(_run)
        self.executables: dict[Hashable, list[Built]] = {}
        self._used: dict[Built, Hashable] = {}
        """The kind of call of each, the one called last at the end."""
        self.model = model
        self._mode = Mode(model)
        self._key = key
        self.build = build

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(self, args, kwargs)

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], otherwise: Otherwise | None = None
    ) -> Built:
        """The executable for a call like this one, in the module's present state; built if there is none.

        otherwise: what the last one said of this call."""
        _refuse_transforms()
        key = self._key(args, kwargs)
        known = self.executables.get((self._mode.key(), key), [])
        answers = NO_ANSWERS if otherwise is None else otherwise.answers
        for place, built in enumerate(known):
            if built.guards.hold() and all(map(torch.equal, answers.sure, built.answers)):
                known.insert(0, known.pop(place))  # where answers differ, those of the last call
                self._used[built] = self._used.pop(built)
                return built
        if known:
            _tell(known, otherwise)
            self._mode = Mode(self.model)  # layers may have changed
        built = self.build(args, kwargs, answers)
        self._keep((Mode(self.model).key(), key), built)
        return built

    def _keep(self, key: Hashable, built: Built) -> None:
        self.executables.setdefault(key, []).insert(0, built)
        if len(self._used) >= MOST_KEPT:
            left = next((one for one in self._used if one.is_remade), next(iter(self._used)))
            self.keep_only(lambda one: one is not left)
        self._used[built] = key

    def keep_only(self, is_kept: Callable[[Built], bool]) -> None:
        for built in [one for one in self._used if not is_kept(one)]:
            known = self.executables[key := self._used.pop(built)]
            known.remove(built)
            if not known:
                del self.executables[key]
            built.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """A copied module is parallel too; what runs it was made for this one's tensors."""
        twin = object.__new__(Dispatcher)
        memo[id(self)] = twin
        for name, value in vars(self).items():
            own = {"executables": {}, "_used": {}}
            setattr(twin, name, own[name] if name in own else copy.deepcopy(value, memo))
        return twin

    def __reduce__(self) -> Any:
        raise ShardingError(
            "a model that autoshard made parallel cannot be pickled whole: it belongs to a mesh of processes\n"
            "  try: its state_dict(), see docs/checkpoints.md; copy.deepcopy(model) for a copy in this process"
        )


def _refuse_transforms() -> None:
    if inside_function_transform():
        raise ShardingError(
            "a parallel model is called inside a transform of torch.func (grad, vmap, jvp), which cannot see into "
            "its compiled programs\n  try: loss.backward() or torch.autograd.grad; or the transform inside the model's "
            "own forward"
        )


def _tell(known: list[Built], otherwise: Otherwise | None) -> None:
    """Why another program is made."""
    reason = (
        known[0].guards.changed()
        if otherwise is None
        else f"a value comes out otherwise at {otherwise.place}"
    )
    log.info("the model has changed since this kind of call was planned: %s", reason)
    # With so many programs for one kind of call, something in the model changes at every call.
    if len(known) == 8:
        log.warning(
            "%d programs were made for one kind of call, since the model keeps changing: %s\n  try: %s",
            len(known),
            reason,
            "pass it as a tensor argument, or keep it in a buffer (register_buffer)"
            if otherwise is None
            else "torch.where or a mask, which are both sides of a branch in one program",
        )


def _run(dispatcher: Dispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call. torch.compile leaves it alone: programs are compiled already, and planning is not to be traced. In a
    capture (the model calls itself, or is part of another) it is part of that."""
    if torch.compiler.is_compiling():
        return dispatcher.original(*args, **kwargs)
    otherwise: Otherwise | None = None
    for _ in range(MOST_TRIED):
        try:
            return dispatcher.prepare(args, kwargs, otherwise).call(args, kwargs)
        except Otherwise as found:
            otherwise = found
    assert otherwise is not None
    raise CaptureError(
        f"after {MOST_TRIED} programs for one call, the value of a tensor still decides what runs next\n"
        f"  at {otherwise.place}\n  try: torch.where, masks, or do it outside of forward"
    )


def install(model: nn.Module, key: Key, build: Build) -> Dispatcher:
    """Let `model(...)` run what `build` makes, one executable per mode and key.

    Class, parameter names and state dict stay; only the instance gets a `forward`. Installing again
    replaces the first dispatcher.
    """
    old = dispatcher_of(model)
    if old is not None:
        del vars(model)["forward"]
    dispatcher = Dispatcher(model, key, build)
    model.forward = dispatcher
    return dispatcher


def dispatcher_of(model: nn.Module) -> Dispatcher | None:
    """The dispatcher that `install` put on the model, if any; also where a library wrapped it since, for autocast."""
    found = vars(model).get("forward")
    while found is not None and not isinstance(found, Dispatcher):
        found = getattr(found, "__wrapped__", None)
    return found


def original_forward(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, `model(...)` is the user's own forward again: for capture."""
    dispatcher = dispatcher_of(model)
    return nullcontext() if dispatcher is None else replaced_attribute(model, "forward", dispatcher.original)


class Mode:
    """Everything but the arguments that decides what a call computes, and whether it needs a backward: the training
    flag of every module, grad mode, which parameters require gradients, autocast."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._tables = [m._parameters for m in self._modules if m._parameters]

    def key(self) -> Hashable:
        training = tuple(map(_TRAINING, self._modules))
        if not torch.is_grad_enabled():
            return training, None, _autocast()
        trained = tuple([p.requires_grad for table in self._tables for p in table.values() if p is not None])
        return training, trained, _autocast()


_TRAINING = attrgetter("training")


def _autocast() -> Hashable:
    return tuple((device, torch.get_autocast_dtype(device)) for device in autocast_devices())


T = TypeVar("T")
