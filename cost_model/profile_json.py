"""Read the parts of a profile's JSON; every mistake is a ProfileError naming file, field and remedy."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from cost_model.arguments import shown
from cost_model.errors import ProfileError
from cost_model.measurements import (
    KERNEL_KINDS,
    CollectiveSamples,
    DeviceRates,
    KernelKind,
    LinkLevel,
    MatmulRates,
    UpdateRates,
)

__all__ = ["Fields", "read_collective", "read_device", "read_link"]


class Fields:
    """The fields of one JSON object, by type.

    where: the file, `path`: place of the object in it ("links[0]."), both for messages. `close` refuses
    fields that nobody read: a misspelt field must not be ignored.
    """

    def __init__(self, where: str, path: str, data: object) -> None:
        self._where = where
        self._path = path
        if not isinstance(data, dict):
            self._refuse(path.rstrip("."), f"is {shown(data)}, not an object")
        self._data = cast("dict[str, Any]", data)
        self._read: set[str] = set()

    def _refuse(self, field: str, problem: str) -> NoReturn:
        raise ProfileError(
            f"{self._where}: field {field or '(top)'} {problem}\n"
            "  try: correct it, or measure the profile again"
        )

    def _get(self, field: str) -> Any:
        self._read.add(field)
        if field not in self._data:
            self._refuse(self._path + field, "is missing")
        return self._data[field]

    def text(self, field: str) -> str:
        value = self._get(field)
        if not isinstance(value, str):
            self._refuse(self._path + field, f"is {shown(value)}, not a text")
        return value

    def flag(self, field: str) -> bool:
        value = self._get(field)
        if not isinstance(value, bool):
            self._refuse(self._path + field, f"is {shown(value)}, neither true nor false")
        return value

    def number(self, field: str) -> float:
        return self._number(self._path + field, self._get(field))

    def count_or_none(self, field: str) -> int | None:
        value = self._get(field)
        return None if value is None else self._count(self._path + field, value)

    def numbers(self, field: str) -> tuple[float, ...]:
        return tuple(self._number(f"{self._path}{field}[{i}]", v) for i, v in enumerate(self._list(field)))

    def numbers_if_any(self, field: str) -> tuple[float, ...]:
        """A list that a profile may leave out: () then."""
        return self.numbers(field) if field in self._data else ()

    def counts(self, field: str) -> tuple[int, ...]:
        return tuple(self._count(f"{self._path}{field}[{i}]", v) for i, v in enumerate(self._list(field)))

    def pairs(self, field: str) -> tuple[tuple[int, int], ...]:
        """A list of two-element lists of integers."""
        result: list[tuple[int, int]] = []
        for i, pair in enumerate(self._list(field)):
            place = f"{self._path}{field}[{i}]"
            if not isinstance(pair, list) or len(cast("list[object]", pair)) != 2:
                self._refuse(place, f"is {shown(pair)}, not a pair [ranks, stride]")
            result.append((self._count(f"{place}[0]", pair[0]), self._count(f"{place}[1]", pair[1])))
        return tuple(result)

    def texts(self, field: str) -> tuple[str, ...]:
        values = self._list(field)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                self._refuse(f"{self._path}{field}[{i}]", f"is {shown(value)}, not a text")
        return tuple(values)

    def texts_by_name(self, field: str) -> tuple[tuple[str, str], ...]:
        value = self._get(field)
        if not isinstance(value, dict):
            self._refuse(self._path + field, f"is {shown(value)}, not an object of texts")
        items = cast("dict[str, object]", value)
        for name, text in items.items():
            if not isinstance(text, str):
                self._refuse(f"{self._path}{field}.{name}", f"is {shown(text)}, not a text")
        return tuple(cast("dict[str, str]", items).items())

    def has(self, field: str) -> bool:
        """Whether the field, which must be there, is not null."""
        return self._get(field) is not None

    def entry(self, field: str) -> Fields:
        return Fields(self._where, f"{self._path}{field}.", self._get(field))

    def lacks(self, field: str) -> bool:
        return field not in self._data

    def entries(self, field: str) -> list[Fields]:
        items = self._list(field)
        return [Fields(self._where, f"{self._path}{field}[{i}].", item) for i, item in enumerate(items)]

    def close(self, *also_read: str) -> None:
        unknown = sorted(self._data.keys() - self._read - set(also_read))
        if unknown:
            self._refuse(self._path + unknown[0], "is not a field of a profile")

    def _list(self, field: str) -> list[Any]:
        value = self._get(field)
        if not isinstance(value, list):
            self._refuse(self._path + field, f"is {shown(value)}, not a list")
        return cast("list[Any]", value)

    def _number(self, place: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(place, f"is {shown(value)}, not a number")
        return float(value)

    def _count(self, place: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(place, f"is {shown(value)}, not an integer")
        return value


def read_link(fields: Fields) -> LinkLevel:
    link = LinkLevel(
        fields.text("name"),
        fields.count_or_none("ranks"),
        fields.number("latency_seconds"),
        fields.number("bytes_per_second"),
        fields.number("peak_bytes_per_second"),
        _reduced(fields),
    )
    fields.close()
    return link


def _reduced(fields: Fields) -> float | None:
    """Older files say nothing of switches that sum."""
    field = "reduced_bytes_per_second"
    return None if fields.lacks(field) or not fields.has(field) else fields.number(field)


def read_collective(fields: Fields) -> CollectiveSamples:
    samples = CollectiveSamples(
        fields.text("kind"),
        fields.pairs("group"),
        fields.counts("nbytes"),
        fields.numbers("seconds"),
        fields.numbers_if_any("spread"),
    )
    fields.close()
    return samples


def read_device(fields: Fields) -> DeviceRates:
    device = DeviceRates(
        fields.number("launch_seconds"),
        fields.number("memory_bytes_per_second"),
        *(tuple(_read_rates(e) for e in _kernels(fields, kind)) for kind in KERNEL_KINDS),
        update=_read_update(fields.entry("update")) if fields.has("update") else None,
    )
    fields.close()
    return device


def _kernels(fields: Fields, kind: KernelKind) -> list[Fields]:
    """Rates of one kind; older files have none of those that were not measured then."""
    return [] if kind in ("pooling", "narrow_convolution") and fields.lacks(kind) else fields.entries(kind)


def _read_update(fields: Fields) -> UpdateRates:
    update = UpdateRates(fields.number("launch_seconds"), fields.number("bytes_per_second"))
    fields.close()
    return update


def _read_rates(fields: Fields) -> MatmulRates:
    rates = MatmulRates(
        fields.text("dtype"),
        fields.numbers("flops"),
        fields.numbers("flops_per_second"),
        fields.numbers_if_any("spread"),
    )
    fields.close()
    return rates
