"""Code that was compiled before, here or in another process: found by its graph alone, which is not even traced."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from cost_model.cache_files import remember, remembered
from passes.ir.sized_graph import Numbers
from passes.ir.torch_inductor import inductor_settings, load_inductor_code
from passes.ir.torch_sizes import SizeSymbols, evaluation

_log = logging.getLogger("autoshard")

_NAMESPACES = ("aten", "prims", "_c10d_functional", "autoshard")
"""Of ops whose bodies are torch's, or this code's."""


def code_name(module: fx.GraphModule) -> str | None:
    """What decides the code of a graph, hashed; None where something else may: an op of the user's, whose body may
    change, or a constant. Sizes that are symbols have the names that `SizeSymbols` gives them by their places."""
    if not all(map(_is_known, module.graph.nodes)):
        return None
    return hashlib.sha256("\n".join(_lines(module)).encode()).hexdigest()


def _is_known(node: fx.Node) -> bool:
    if node.op == "call_function":
        target: Any = node.target
        return getattr(target, "namespace", "") in _NAMESPACES or target.__module__ == "_operator"
    return node.op in ("placeholder", "output")


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


def keep_code(
    name: str | None, key: str | None, symbols: SizeSymbols | None = None, numbers: Sequence[Any] = ()
) -> None:
    """key: of the code of this name in the compiler's cache. symbols: of its sizes; numbers: in them, that it takes."""
    if name is None or key is None:
        return
    held = Numbers(symbols or SizeSymbols(()))
    for number in numbers:
        held.place(number)
    # Codes of one graph: each for other answers to what was asked of its sizes.
    remember("code", name, text=json.dumps([[key, held.holds(), held.codes()], *_kept(name)][:8]))


def kept_code(
    name: str, symbols: SizeSymbols | None = None
) -> tuple[Callable[[list[Any]], Any], list[Any]] | None:
    """The code of this name, and the numbers that it takes. symbols: of the graph's sizes, as they count now: what was
    asked of them when it was made must hold, and is asked of them again."""
    symbols = symbols or SizeSymbols(())
    for key, holds, codes in _kept(name):
        evaluate = evaluation(len(symbols.hints), holds, codes)
        if evaluate(symbols.hints) is None:
            continue
        numbers = evaluate(symbols.sizes)
        try:
            with torch.no_grad():
                code = load_inductor_code(key)
        except Exception as error:  # of a cache that was cut off, or a torch that loads otherwise
            _log.debug("compiled code is not loaded: %s", error)
            continue
        if code is not None and numbers is not None:
            return code, numbers
    return None


def _kept(name: str) -> list[tuple[str, list[str], list[str]]]:
    """Of each code its key, what holds of its sizes, and how the numbers that it takes are computed of them."""
    try:
        return json.loads(remembered("code", name) or "[]")
    except ValueError:  # cut off
        return []
