"""Objects that take the place of a number or a container while a forward is traced, and tell of their uses."""

from __future__ import annotations

from typing import Any

__all__ = ["CONTAINERS", "NUMBERS", "note_uses"]

_BOTH = "bool eq ne lt le gt ge mul rmul str format hash iter len getitem contains reversed"
NUMBERS = (
    f"{_BOTH} add radd sub rsub int float complex index truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos "
    "abs round divmod rdivmod trunc floor ceil"
)
CONTAINERS = f"{_BOTH} add radd delitem iadd or ior"
"""Special methods, which Python looks up on the class."""


def note_uses(kind: type, names: str) -> None:
    """Give `kind` the special methods that it has not, each as a call of its `_looked(method, *args)`."""
    for name in names.split():
        method = f"__{name}__"
        if method not in vars(kind):
            setattr(kind, method, _noted(method))


def _noted(method: str) -> Any:
    return lambda self, *args: self._looked(method, *args)
