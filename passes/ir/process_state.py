"""States of the process that are set for a while: autocast, the garbage collector, random numbers."""

from __future__ import annotations

import gc
import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from cost_model.errors import UnsupportedOpError, log
from passes.ir.torch_dispatch import replaced_attribute

_DEVICE_TYPES = ("cpu", "cuda", "xpu")


def autocast_devices() -> list[str]:
    """Types of devices for which autocast is on."""
    return [device_type for device_type in _DEVICE_TYPES if torch.is_autocast_enabled(device_type)]


@contextmanager
def autocast_off() -> Generator[None]:
    """No autocast casts anything inside, whatever the script has switched on around the call. Also a decorator.

    A product that the model keeps out of autocast, such as the angles of a rotary embedding, would be traced again, or
    run, in lower precision.
    """
    on = autocast_devices()
    for device_type in on:
        torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        for device_type in on:
            torch.set_autocast_enabled(device_type, True)


T = TypeVar("T")


@contextmanager
def collector_paused() -> Generator[None]:
    """No collections inside; also a decorator.

    A graph is one large cycle that stays alive: as it grows, the collector walks all of it again and
    again to free nothing. That took an eighth of planning a deep model. What has no cycle is freed as usual.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def live(kinds: type[T] | tuple[type[T], ...]) -> list[T]:
    """Every object of these classes that there is."""
    objects = gc.get_objects()
    # type(), not isinstance: the latter asks every object, lazily loaded modules included.
    found = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return [one for one in objects if type(one) in found] if found else []


@contextmanager
def host_draws_told() -> Generator[None]:
    """A line of the log, if what is traced inside draws numbers that no graph can hold. Also a decorator."""
    states = lambda: (random.getstate(), [str(part) for part in np.random.get_state()])
    before = states()
    yield
    pairs = zip(("Python's random", "NumPy's"), before, states(), strict=True)
    if drawn := [name for name, old, new in pairs if old != new]:
        log.warning(
            "forward draws from %s numbers: they are those of the first call in all calls of its kind\n"
            "  try: torch.rand(()), of which each call has its own; or draw before the call, and pass what was drawn",
            " and ".join(drawn),
        )


@contextmanager
def seeds_refused() -> Generator[None]:
    """UnsupportedOpError for `torch.manual_seed` inside: a program's draws are of each call's own seed. One that
    `torch.seed()` has drawn there asks for no other."""
    reseed, fresh = torch.manual_seed, torch.seed
    drawn: list[int] = []

    def seed() -> int:
        drawn.append(fresh())
        return drawn[-1]

    def manual_seed(value: int) -> torch.Generator:
        if drawn:
            return reseed(value)
        raise UnsupportedOpError(
            "it calls torch.manual_seed, and what a program draws is another in every call\n  try: draw once, in "
            "__init__, and keep that (`self.register_buffer(name, torch.randn(...))`); or seed before the call"
        )

    with replaced_attribute(torch, "manual_seed", manual_seed), replaced_attribute(torch, "seed", seed):
        yield


@contextmanager
def random_state_kept() -> Generator[None]:
    """What is drawn inside does not move the generators that a training script draws from. Also a decorator."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
