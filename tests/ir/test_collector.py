"""`collector_paused` leaves the collector as it found it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from passes.ir.process_state import collector_paused


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_paused_inside_and_back_after() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_back_after_an_error() -> None:
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_left_off_where_it_was_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_as_a_decorator_on_calls_in_calls() -> None:
    @collector_paused()
    def enabled(depth: int) -> list[bool]:
        return [*(enabled(depth - 1) if depth else []), gc.isenabled()]

    assert enabled(2) == [False] * 3
    assert gc.isenabled()
