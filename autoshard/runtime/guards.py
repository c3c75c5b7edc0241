"""What a program depends on beside the call's arguments, and whether it is still so: attributes, layers, hooks.

Checked before every call, so the common case, nothing has changed, is a comparison of identities in C.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cost_model.errors import type_of
from passes.capture.places import Root, Via, contents
from passes.capture.surroundings import held_by, is_open
from passes.ir.torch_compat import global_module_hooks

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_ABSENT = object()


@dataclass
class _Watch:
    """Values that stood somewhere. read: what stands there now, in the same order; names: of each, for an error."""

    where: str
    read: Callable[[], tuple[Any, ...]]
    names: tuple[Any, ...]
    values: tuple[Any, ...]
    same: Callable[[Any, Any], bool]
    held: Any = None
    """The container of the values: a dict, of which `names` are watched, or a list."""
    picked: bool = False
    """Whether `names` are some of the dict's keys only."""

    def holds(self) -> bool:
        now = self.read()
        if self._difference(now):
            return False
        self.values = now
        return True

    def changed(self) -> str:
        return self._difference(self.read())

    def _difference(self, now: tuple[Any, ...]) -> str:
        if len(now) != len(self.values):
            more = "more" if len(now) > len(self.values) else "fewer"
            return f"{self.where or 'the model'} has {more} items than before"
        for i, (old, new) in enumerate(zip(self.values, now, strict=True)):
            if old is not new and not self.same(old, new):
                name = self.names[i] if i < len(self.names) else i
                return f"{_path(self.where, name)} is {_shown(new)}, and was {_shown(old)}"
        return ""


@dataclass
class Guards:
    """The guards of one program, made when it is, from the attributes that its capture read.

    reads: as `Captured.reads`. `hold()` says whether the program is still the model's; `changed()` what is not.
    Parameters that were replaced by others of the same shape and layout count as the same, plain tensors in
    attributes by others of the same shape and dtype; but not where two were one, or one is two.
    """

    model: nn.Module
    reads: Mapping[nn.Module, frozenset[str]]
    _watches: list[_Watch] = field(init=False)
    _quick: _Quick = field(init=False)
    _versions: list[tuple[Tensor, int]] = field(init=False)
    _tied: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._watches = [*_structure(self.model), *_attributes(self.model, self.reads)]
        self._tied = self._firsts()
        self._quick = _Quick(self._watches)
        self._versions = [(t, t._version) for watch in self._watches for t in _constants(watch)]

    def hold(self) -> bool:
        if not self._quick.unchanged():
            if not all(watch.holds() for watch in self._watches) or self._firsts() != self._tied:
                return False
            self._quick = _Quick(self._watches)
        return all(tensor._version == version for tensor, version in self._versions)

    def changed(self) -> str:
        """The first thing that is not as it was; "" if all is."""
        found = next((text for text in (watch.changed() for watch in self._watches) if text), "")
        if not found and self._firsts() != self._tied:
            return "two names of the model have one tensor that had two, or the other way round"
        if found or all(tensor._version == version for tensor, version in self._versions):
            return found
        return "a tensor in a list or dict of the model was changed in place"

    def _firsts(self) -> list[int]:
        """For each tensor that is watched the place of the first that is the same."""
        seen: dict[int, int] = {}
        values = chain.from_iterable(watch.read() for watch in self._watches)
        tensors = (value for value in values if isinstance(value, Tensor))
        return [seen.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


class _Quick:
    """Whether nothing at all was touched, for all watches at once, by identities and lengths."""

    def __init__(self, watches: list[_Watch]) -> None:
        self._whole = [w.held for w in watches if isinstance(w.held, dict) and not w.picked]
        others = [w for w in watches if w.held is not None and not w.picked]
        self._lists = [w.held for w in others if not isinstance(w.held, dict)]
        self._picked = [
            (itemgetter(present[0], *present), w.held)
            for w in watches
            if w.picked and (present := [name for name in w.names if name in w.held])
        ]
        self._sized = [w.held for w in watches if w.held is not None]
        self._others = [w.read for w in watches if w.held is None]
        self._lengths = list(map(len, self._sized))
        self._values = tuple(self._now())

    def unchanged(self) -> bool:
        try:
            # A missing name ends a getter; what is too long or too short shows in the lengths.
            return list(map(len, self._sized)) == self._lengths and all(map(is_, self._now(), self._values))
        except KeyError:
            return False

    def _now(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(map(dict.values, self._whole)),
            chain.from_iterable(self._lists),
            chain.from_iterable([pick(held) for pick, held in self._picked]),
            chain.from_iterable([read() for read in self._others]),
            (_ABSENT,),  # what is longer than it was comes where this stood
        )


def _structure(model: nn.Module) -> Iterator[_Watch]:
    """Layers, parameters, buffers and hooks: tables of every module, where a name's identity matters."""
    for name, module in model.named_modules():
        for table, same in (
            ("_modules", _same_layer),
            ("_parameters", _same_tensor),
            ("_buffers", _same_tensor),
        ):
            held = vars(module)[table]
            yield _of_dict(name, held, same)
    # Hooks of the model itself run outside its program, at every call.
    inner = [module for module in model.modules() if module is not model]
    hooks = [vars(module)[table] for module in inner for table in _HOOKS]
    hooks += global_module_hooks()
    read = lambda: tuple(hook for table in hooks if table for hook in table.values())
    yield _Watch("hooks of modules", read, (), read(), is_)
    modules = list(model.modules())
    yield _Watch("classes of modules", lambda: tuple(map(type, modules)), (), tuple(map(type, modules)), is_)


def _attributes(model: nn.Module, reads: Mapping[nn.Module, frozenset[str]]) -> Iterator[_Watch]:
    paths = {module: name for name, module in model.named_modules()}
    seen: set[int] = set()
    for owner, names in _of_classes(reads).items():
        yield _of_names(owner.__name__, vars(owner), tuple(sorted(names)))
    for module, names in reads.items():
        where, table = paths.get(module, type(module).__name__), vars(module)
        yield _of_names(where, table, tuple(sorted(names)))
        for name in sorted(names & table.keys()):
            for container in held_by(Via(Root(module, where), name, True), table[name]):
                if id(container.value) not in seen:
                    seen.add(id(container.value))
                    yield _of_container(str(container.where), container.value)


def _of_classes(reads: Mapping[nn.Module, frozenset[str]]) -> dict[type, set[str]]:
    """Names that were read of classes, by the class that has them."""
    found: dict[type, set[str]] = {}
    for module, names in reads.items():
        for name in names - vars(module).keys():
            owner = next((one for one in type(module).__mro__ if name in vars(one)), None)
            if owner is not None:
                found.setdefault(owner, set()).add(name)
    return found


def _of_names(where: str, table: Mapping[str, Any], names: tuple[str, ...]) -> _Watch:
    def read() -> tuple[Any, ...]:
        return tuple([table.get(name, _ABSENT) for name in names])

    return _Watch(where, read, names, read(), _same, table, picked=True)


def _of_dict(where: str, held: dict[Any, Any], same: Callable[[Any, Any], bool]) -> _Watch:
    def read() -> tuple[Any, ...]:
        found = contents(held)
        return (*found.values(), tuple(found))

    return _Watch(where, read, tuple(contents(held)), read(), same, held if type(held) is dict else None)


def _of_container(where: str, held: Any) -> _Watch:
    values = contents(held)
    if isinstance(values, dict):
        return _of_dict(where, held, _same_inside)
    return _Watch(
        where, lambda: tuple(contents(held)), tuple(range(len(values))), tuple(values), _same_inside,
        held if type(held) in (list, set, deque) else None,
    )  # fmt: skip


def _same(old: Any, new: Any) -> bool:
    """For an attribute. A tensor there is read at every call, unless it requires grad."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return _same_tensor(old, new) and not (old.requires_grad or new.requires_grad)
    return _same_inside(old, new)


def _same_inside(old: Any, new: Any) -> bool:
    """For what lies in a list, dict or object: Python values may be equal, others must be the same."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(_same_inside, old, new))
    if isinstance(old, _PLAIN):
        return bool(old == new)
    # Bound methods are made anew by every read.
    return callable(old) and bool(old == new)


def _same_layer(old: Any, new: Any) -> bool:
    """For a module, and for the names of a table."""
    return old is new or (isinstance(old, tuple) and _same_inside(old, new))


def _same_tensor(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return _same_layer(old, new)
    if old is new:
        return True
    alike = (old.shape, old.dtype, old.requires_grad) == (new.shape, new.dtype, new.requires_grad)
    return alike and _placements(old) == _placements(new)


def _placements(tensor: Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None


def _constants(watch: _Watch) -> Iterator[Tensor]:
    """Tensors that the program holds as constants: those in containers, not in attributes of modules."""
    if watch.same is _same_inside:
        yield from (value for value in watch.values if isinstance(value, Tensor))


def _path(where: str, name: Any) -> str:
    step = f".{name}" if isinstance(name, str) else f"[{name!r}]"
    return f"{where}{step}".removeprefix(".")


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "missing"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, nn.Module) or is_open(value):
        return type_of(value)
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
