"""Autocast switched off where graphs are made, compiled or run: a captured graph has its casts in it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

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
