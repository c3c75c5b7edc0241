"""The model and its surroundings before a forward runs: to see what it leaves behind, and to put all back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from cost_model.errors import CaptureError
from passes.capture.places import (
    Added,
    Appended,
    Assigned,
    Hooked,
    Incremented,
    Place,
    Root,
    Via,
    contents,
    refill,
    unchanged,
)
from passes.capture.provenance import refused
from passes.capture.stand_ins import Awaited, Counted, Spot, Stored
from passes.capture.surroundings import Container, containers_of, is_own, module_attributes
from passes.ir.torch_dispatch import module_reads_seen

_ABSENT = object()
_TABLES = (
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip

Changes = list[tuple[Place, Any]]
"""Where a forward left something, and the value."""


class Snapshot:
    """Attributes, tables and containers of `model` as they are now, shallow copies, and of what is held by
    `arguments` of its call."""

    def __init__(self, model: nn.Module, arguments: Iterable[Any] = ()) -> None:
        self._modules = [(name, module, dict(vars(module))) for name, module in model.named_modules()]
        self._tables = [
            (table, contents(table))
            for _, module, _ in self._modules
            for table in (vars(module).get(name) for name in _TABLES)
            if table is not None
        ]
        self._parts = [(name, module._modules, dict(module._modules)) for name, module, _ in self._modules]
        self._containers: list[tuple[Container, Any]] = [
            (c, contents(c.value)) for c in containers_of(model, arguments)
        ]
        self._hooks = [
            (table, contents(table))
            for _, module, _ in self._modules
            for table in (vars(module)[key] for key in _TABLES if "_hooks" in key)
        ]
        self._attributes = {id(module): attributes for _, module, attributes in self._modules}

    def untouched(self, module: nn.Module, name: str, value: Any) -> bool:
        """Whether `value` of the attribute is still the one from before."""
        return self._attributes.get(id(module), {}).get(name, _ABSENT) is value

    def lacks(self, module: nn.Module, name: str) -> bool:
        """Whether a name was an attribute of the module's class, not of its own, and still is."""
        known = self._attributes.get(id(module))
        return known is not None and name not in known and name not in vars(module)

    def changes(self) -> Changes:
        """What is new since then, in attributes and containers; CaptureError for what cannot be done at each call.

        An attribute that was assigned an equal Python value has not changed.
        """
        for name, modules, parts in self._parts:
            _check_parts(name, modules, parts)
        found: Changes = []
        for name, module, old in self._modules:
            kept = {key: value for key, value in old.items() if not is_own(module, key)}
            found += _attribute_changes(Root(module, name), module_attributes(module), kept)
        for container, old in self._containers:
            found += _container_changes(container, old) if container.repeated else []
        for table, old in self._hooks:
            found += [(Hooked(table, key), hook) for key, hook in contents(table).items() if key not in old]
        return found

    def restore(self) -> None:
        """All as it was: the same objects in the same places."""
        _put(self._holders())

    def now(self) -> Callable[[], None]:
        """What puts all as it is now."""
        return partial(_put, [(holder, contents(holder)) for holder, _ in self._holders()])

    def _holders(self) -> list[tuple[Any, Any]]:
        return [
            *((container.value, old) for container, old in self._containers),
            *self._tables,
            *((vars(module), attributes) for _, module, attributes in self._modules),
        ]


def _put(held: Iterable[tuple[Any, Any]]) -> None:
    for holder, old in held:
        refill(holder, old)


def _check_parts(name: str, new: Mapping[str, nn.Module | None], old: Mapping[str, nn.Module | None]) -> None:
    """CaptureError where the forward put another module in the place of one. One that it adds, it would add again."""
    gone = [key for key, part in old.items() if part is not None and new.get(key) is not part]
    if gone:
        raise refused(
            f"forward exchanges the module {f'{name}.' if name else ''}{gone[0]}, which a compiled call cannot repeat",
            "call the model once before autoshard(), if that settles its modules; else exchange it outside of forward",
        )


def _attribute_changes(where: Root | Via, new: Mapping[str, Any], old: Mapping[str, Any]) -> Changes:
    found: Changes = []
    for key, value in new.items():
        at, before = Via(where, key, True), old.get(key, _ABSENT)
        if isinstance(value, Counted):
            is_changed = isinstance(value.change, Awaited) or value.change
            found += [(Incremented(at), value.change)] if is_changed else []
        elif not _same(before, value.held if isinstance(value, Stored) else value):
            found.append((Assigned(at), value))
    gone = [key for key in old if key not in new]
    if gone and hasattr(where.get(), gone[0]):
        raise refused(
            f"forward makes {Via(where, gone[0], True)} a buffer, parameter or module, which it was not, and which a "
            "compiled call cannot repeat",
            "call the model once before autoshard(), or make it in __init__",
        )
    if gone:
        raise _unrepeatable(f"deletes {Via(where, gone[0], True)}")
    return found


def _container_changes(container: Container, old: Any) -> Changes:
    value, where, new = container.value, container.where, contents(container.value)
    if unchanged(new, old):  # nor looked for: what held it may be gone
        return []
    if container.of_object:
        holder = where.get()
        mine = {k: v for k, v in new.items() if not (isinstance(holder, nn.Module) and is_own(holder, k))}
        return _attribute_changes(where, mine, {k: v for k, v in old.items() if k in mine or k not in new})
    if isinstance(value, dict):
        if any(key not in new for key in old):
            raise _unrepeatable(f"removes items of {where}")
        changed = [(k, v) for k, v in new.items() if not _same(old.get(k, _ABSENT), v)]
        return [(Assigned(Via(where, k, False)), v) for k, v in changed]
    if isinstance(value, set):
        if not set(old) <= set(new):
            raise _unrepeatable(f"removes items of {where}")
        return [(Added(where), item) for item in set(new) - set(old)]
    return _list_changes(where, new, old, getattr(value, "maxlen", None))


def _list_changes(where: Root | Via, new: list[Any], old: list[Any], most: int | None) -> Changes:
    """most: of a deque that drops its first item for one more."""
    dropped = 0
    while most is not None and dropped < len(old) and not _starts(new, old[dropped:]):
        dropped += 1
    old = old[dropped:]
    if len(new) < len(old):
        raise _unrepeatable(f"removes items of {where}")
    replaced = [(i, b) for i, (a, b) in enumerate(zip(old, new, strict=False)) if not _same(a, b)]
    added = new[len(old) :]
    changes: Changes = [(Assigned(Via(where, i, False)), item) for i, item in replaced]
    return changes + [(Appended(where, len(added) - i), item) for i, item in enumerate(added)]


def _starts(items: list[Any], first: list[Any]) -> bool:
    return len(items) >= len(first) and all(a is b for a, b in zip(items, first, strict=False))


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and _plain(new) and bool(old == new))


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(item) for item in value)
    return isinstance(value, (bool, int, float, complex, str, bytes, type(None)))


def _unrepeatable(what: str) -> CaptureError:
    remedy = "return the value instead, or keep it in a buffer (register_buffer)"
    return refused(f"forward {what}, which a compiled call cannot repeat", remedy)


_EVERY_CLASS = frozenset(vars(nn.Module))


@contextmanager
def attributes_read(
    before: Snapshot, known: dict[nn.Module, set[str]] | None = None
) -> Generator[dict[nn.Module, set[str]]]:
    """Module -> names of the attributes read inside, as they were `before`, in `known`: one that was assigned first is
    no input of the forward. Attributes of the class count, methods too, and `forward` counts, since users exchange
    it. Tables of parameters, modules and hooks, and the training flag, do not count."""
    found: dict[nn.Module, set[str]] = {} if known is None else known

    def note(module: nn.Module, name: str, value: object) -> None:
        if name.startswith("__") or is_own(module, name):
            return
        if before.untouched(module, name, value) or (
            before.lacks(module, name) and (name == "forward" or name not in _EVERY_CLASS)
        ):
            found.setdefault(module, set()).add(name)

    with module_reads_seen(note):
        yield found


def write_only_candidates(
    writes: Sequence[tuple[Place, Any]], reads: Mapping[nn.Module, set[str]]
) -> list[Spot]:
    """Attributes that were read and changed, numbers by numbers and containers by appending or storing."""
    found: dict[tuple[int, str], Spot] = {}
    for place, value in writes:
        spot = _spot(place, value)
        if spot is not None and spot[1] in reads.get(spot[0], ()):
            found.setdefault((id(spot[0]), spot[1]), spot)
    return list(found.values())


def _spot(place: Place, value: Any) -> Spot | None:
    at = place.at if isinstance(place, Assigned) else None
    held = at if at is not None and at.attribute else getattr(at or place, "holder", None)
    if not isinstance(place, (Assigned, Appended)) or not isinstance(held, Via) or not held.attribute:
        return None
    module = held.holder.value if isinstance(held.holder, Root) else None
    if not isinstance(module, nn.Module):
        return None
    old = vars(module).get(held.key)
    is_number = type(old) in (int, float) and value.__class__ is type(old)  # one that is awaited too
    return (module, held.key) if held is not at or is_number else None
