"""A capture, whether it succeeds or fails, leaves what the forward reaches as it was."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_model.errors import CaptureError
from passes.capture import capture
from passes.capture.places import contents, slots_of


class Made(OrderedDict[str, Any]):
    """As transformers' table of activations: what is read is made from what is held."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def _barred(self: Any, *args: Any) -> Any:
    raise RuntimeError("not for others")


BARRED = dict.fromkeys(["__iter__", "__len__", "__contains__", "copy", "clear", "update", "extend"], _barred)
BarredDict: Any = type("BarredDict", (dict,), {**BARRED, "items": _barred, "values": _barred})
BarredList: Any = type("BarredList", (list,), BARRED)
BarredSet: Any = type("BarredSet", (set,), BARRED)
BarredDeque: Any = type("BarredDeque", (deque,), BARRED)


class Slotted:
    __slots__ = ("last", "unset")
    last: Any


@dataclass(frozen=True)
class Frozen:
    last: Any = None


class Plain:
    pass


class Described:
    """Keeps a value for each of its owners, in the class's attribute."""

    def __init__(self) -> None:
        self.values: Any = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.values.get(owner)

    def __set__(self, owner: Any, value: Any) -> None:
        self.values[owner] = value


ACTIVATIONS = Made(relu=nn.ReLU, gelu=nn.GELU)
LOG: list[Any] = []
STATE = Plain()
latest: Any = None


def remember(value: Any) -> None:
    global latest
    latest = value
    LOG.append(value)


@functools.lru_cache
def positions(length: int) -> Tensor:
    return torch.arange(length) * 2.0


class Reaches(nn.Module):
    """forward does `act(self, y)` and returns y."""

    described = Described()
    shared: dict[str, Any] = {}  # noqa: RUF012
    count = 0

    def __init__(self, held: Any, act: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.mix, self.held = nn.Linear(3, 3), held
        self.act: Any = act
        self.described = 0

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        y = self.mix(x)
        self.act(self, y)
        self.described, self.shared["last"], STATE.last = y, y, y  # type: ignore[attr-defined]
        Reaches.count += 1
        self.note(y)
        if fails:
            raise ValueError("later")
        return y * positions(3)

    def note(self, y: Tensor) -> None:
        remember(y)


def _assigned(self: Any, y: Any) -> None:
    object.__setattr__(self.held, "last", y)


def _referred(self: Any, y: Any) -> None:
    self.held[0]().last = y


def _fill(log: list[Any], y: Any) -> None:
    log.append(y)


def _put_in_module(self: Any, y: Any) -> None:
    self.held[0].last = y


KEPT = Plain()
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "activations": (lambda: ACTIVATIONS, lambda self, y: self.held["relu"](y), lambda h: [*dict.items(h)]),
    "dict": (lambda: BarredDict(a=1), lambda self, y: self.held.__setitem__("b", y), lambda h: [*dict.items(h)]),
    "list": (lambda: BarredList([1]), lambda self, y: self.held.append(y), lambda h: [*list.__iter__(h)]),
    "set": (lambda: BarredSet([1]), lambda self, y: self.held.add(2), lambda h: [*set.__iter__(h)]),
    "deque": (lambda: BarredDeque([1]), lambda self, y: self.held.append(y), lambda h: [*deque.__iter__(h)]),
    "slots": (Slotted, _assigned, lambda h: getattr(h, "last", None)),
    "frozen": (Frozen, _assigned, lambda h: h.last),
    "empty object": (Plain, _assigned, lambda h: getattr(h, "last", None)),
    "weak reference": (lambda: [weakref.ref(KEPT)], _referred, lambda h: getattr(KEPT, "last", None)),
    "method": (lambda: Frozen([].copy), lambda self, y: None, lambda h: h.last()),
    "partial": (lambda: functools.partial(_fill, []), lambda self, y: self.held(y), lambda h: h.args[0]),
    "hidden module": (lambda: [nn.Dropout()], _put_in_module, lambda h: sorted(vars(h[0]))),
    "deep": (lambda: [[[[[[0]]]]]], lambda self, y: self.held[0][0][0][0][0].append(y), str),
}  # fmt: skip


def seen(model: Any, look: Callable[[Any], Any]) -> str:
    around = (LOG, latest, vars(STATE), model.described, dict(Reaches.shared), Reaches.count)
    return repr((look(model.held), around, positions.cache_info().currsize))


def test_all_that_a_forward_reaches_is_as_it_was() -> None:
    for make, act, look in HELD.values():
        model = Reaches(make(), act)
        before = seen(model, look)
        capture(model, (torch.randn(2, 3), False), {})
        assert seen(model, look) == before


def test_a_capture_that_fails_leaves_all_as_it_was() -> None:
    for make, act, look in HELD.values():
        model = Reaches(make(), act)
        before = seen(model, look)
        with pytest.raises(CaptureError, match="later"):
            capture(model, (torch.randn(2, 3), True), {})
        assert seen(model, look) == before


def test_what_is_put_back_is_left_by_every_call() -> None:
    for name in ("list", "dict", "slots", "frozen", "weak reference"):
        _check_left(*HELD[name])


def _check_left(make: Callable[[], Any], act: Callable[[Any, Any], Any], look: Callable[[Any], Any]) -> None:
    model, x, value = Reaches(make(), act), torch.randn(2, 3), torch.ones(1)
    before = look(model.held)
    captured = capture(model, (x, False), {})
    captured.call.unflatten([value] * captured.call.output_count, (x, False), {})
    left = (*LOG, Reaches.shared.pop("last"), vars(STATE).pop("last"), model.described)
    LOG.clear()
    assert len(left) == 4 and all(held is value for held in left)
    assert repr(look(model.held)) != repr(before) and repr(value) in repr(look(model.held))
    vars(KEPT).clear()


@pytest.mark.parametrize(
    "make", [lambda: {1}, lambda: BarredList([1]), Slotted], ids=["set", "list", "slots"]
)
def test_an_argument_that_is_passed_on_as_it_is(make: Callable[[], Any]) -> None:
    def forward(self: nn.Module, x: Tensor, held: Any) -> Tensor:
        if isinstance(held, Slotted):
            held.last = x
        else:
            (held.add if isinstance(held, set) else held.append)(2)
        return x * 2

    model, held = type("Fills", (nn.Module,), {"forward": forward})(), make()
    before = repr(contents(slots_of(held) or held))
    captured = capture(model, (torch.randn(2), held), {})
    assert repr(contents(slots_of(held) or held)) == before
    captured.call.unflatten([torch.ones(1)] * captured.call.output_count, (torch.randn(2), held), {})
    assert repr(contents(slots_of(held) or held)) != before


_TEXT = """
import functools, torch

class Waves(torch.nn.Module):
    @functools.lru_cache(maxsize=2)
    def table(self, length):
        return torch.arange(length) * 2.0

    def forward(self, x):
        return x * self.table(len(x))
"""


def test_a_class_of_no_module(tmp_path: Path) -> None:
    """Code that was run as text, as `runpy` and loaders of files do: no traced tensor stays in its cache."""
    space: dict[str, Any] = {"__name__": "run as text"}
    exec(compile(_TEXT, str(tmp_path / "model.py"), "exec"), space)
    model = space["Waves"]()
    capture(model, (torch.ones(3),), {})
    assert type(model.table(3)) is Tensor
