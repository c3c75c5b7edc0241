"""Options of a configuration: each is read, told as not read, or an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cost_model.errors import ShardingError


class Options:
    """Options of one file by name; each is taken once, and what is left is checked.

    section: that names are told with."""

    def __init__(self, values: Mapping[str, Any], where: str, section: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ShardingError(f"{where} is {values!r}\n  try: options below it, with their names")
        self._left = dict(values)
        self._where = where
        self._section = f"{section}." if section else ""

    def __call__(self, name: str, default: Any, kind: Callable[[Any], Any] | None = None) -> Any:
        value = self._left.pop(name, default)
        make = kind or type(default)
        try:
            return _truth(value) if make is bool else make(value)
        except (TypeError, ValueError):
            raise self.error(name, value, f"{name} as in {default!r}") from None

    def count(self, name: str, default: int, *, none: int | None = None) -> int:
        """A number from 1; `none` says that there is none."""
        value: int = self(name, default)
        if value < 1 and value not in (default, none):
            raise self.error(name, value, "a number from 1")
        return value

    def only(self, name: str, *allowed: Any, remedy: str = "") -> Any:
        """An option of which other values cannot be priced."""
        value = self._left.pop(name, allowed[0])
        if value not in allowed:
            raise self.error(name, value, remedy or f"{name} = {' or '.join(map(repr, allowed))}")
        return value

    def error(self, name: str, value: object, remedy: str) -> ShardingError:
        return ShardingError(f"{self._where}: {name} is {value!r}, which cannot be priced\n  try: {remedy}")

    def left(self, *harmless: str, any_but: Sequence[str] | None = None) -> tuple[str, ...]:
        """Names not taken, as they are told. ShardingError for one that is not harmless: of `harmless`, or with none of
        the words `any_but` in it."""
        for name, value in self._left.items():
            known = name in harmless if any_but is None else not any(word in name for word in any_but)
            if not known and value not in (False, None, 0, "", {}, []):
                raise self.error(name, value, f"the configuration without {name}")
        return tuple(f"{self._section}{name}" for name in self._left)


def _truth(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def of_gpus(where: str, gpus: int | None, model_parallel: int, given: int | None = None) -> int:
    """Data-parallel ranks. given: all ranks, by the configuration itself."""
    count = gpus or given
    if count is None:
        raise ShardingError(f"{where}: it does not say how many GPUs run it\n  try: --gpus 64")
    if count % model_parallel:
        raise ShardingError(
            f"{where}: {count} GPUs are no multiple of the {model_parallel} that hold a model\n"
            f"  try: --gpus {-(-count // model_parallel) * model_parallel}"
        )
    return count // model_parallel


def check_gpus(where: str, gpus: int | None, given: int) -> None:
    """ShardingError where sizes of a configuration, multiplied, are another number than there is."""
    if gpus not in (None, given):
        raise ShardingError(
            f"{where}: its sizes multiply to {given} GPUs, and there are {gpus}\n  try: --gpus {given}"
        )
