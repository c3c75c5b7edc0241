"""Records and layouts as JSON data: what is usual is left out, so that files of other plans stay as they were."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import FieldInfo, fields


def json_data(value: Any) -> Any:
    """A struct, and all that it holds, as `msgspec.convert` reads it."""
    if isinstance(value, Struct):
        written = {
            f.encode_name: getattr(value, f.name) for f in _fields(type(value)) if not _is_usual(value, f)
        }
        return json_data(list(written.values()) if value.__struct_config__.array_like else written)
    if isinstance(value, (tuple, list)):
        return [json_data(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): json_data(one) for key, one in value.items()}
    return value.to_json() if hasattr(value, "to_json") else value


_fields = cache(fields)


def _is_usual(value: Struct, field: FieldInfo) -> bool:
    """Whether a field has its default: () is also that of which nothing is said."""
    held = getattr(value, field.name)
    return held == field.default or (field.default == () and not any(held))
