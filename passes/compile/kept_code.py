"""Code that was compiled before, here or in another process: found by its graph alone, which is not even traced."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from cost_model.cache_files import remember, remembered
from passes.ir.torch_inductor import inductor_settings, load_inductor_code

_log = logging.getLogger("autoshard")

_NAMESPACES = ("aten", "prims", "_c10d_functional", "autoshard")
"""Of ops whose bodies are torch's, or this code's."""


def code_name(module: fx.GraphModule) -> str | None:
    """What decides the code of a graph, hashed; None where something else may: an op of the user's, whose body may
    change, a constant, a size that is a symbol."""
    if not all(map(_is_known, module.graph.nodes)):
        return None
    return hashlib.sha256("\n".join(_lines(module)).encode()).hexdigest()


def _is_known(node: fx.Node) -> bool:
    if node.op == "call_function":
        target: Any = node.target
        known = getattr(target, "namespace", "") in _NAMESPACES or target.__module__ == "_operator"
    else:
        known = node.op in ("placeholder", "output")
    return known and all(isinstance(size, int) for value in _values(node) for size in value.shape)


def _values(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [
        one for one in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(one, Tensor)
    ]


def _lines(module: fx.GraphModule) -> Iterator[str]:
    yield inductor_settings()
    places = {node: f"%{place}" for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target = node.target if node.op == "call_function" else ""
        looks = [(tuple(v.shape), v.stride(), v.storage_offset(), v.dtype, v.device) for v in _values(node)]
        given = map_arg((node.args, node.kwargs), lambda operand: _Place(places[operand]))
        yield f"{node.op} {target} {given} {node.meta.get('serves')} {looks}"


class _Place(str):
    """Which node of a graph an operand is."""

    __repr__ = str.__str__


def keep_code(name: str | None, key: str | None) -> None:
    """key: of the code of this name in the compiler's cache."""
    if name is not None and key is not None:
        remember("code", name, text=key)


def kept_code(name: str) -> Callable[[list[Any]], Any] | None:
    key = remembered("code", name)
    if key is None:
        return None
    try:
        with torch.no_grad():
            return load_inductor_code(key)
    except Exception as error:  # of a cache that was cut off, or a torch that loads otherwise
        _log.debug("compiled code is not loaded: %s", error)
        return None
