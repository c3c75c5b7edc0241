"""The programs of pieces, compiled: equal ones once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from autoshard.runtime.input_side import expected
from passes.compile.compile_graph import Compiled, compile_graph

__all__ = ["Compiler", "Known", "Like"]

Known = dict[str, Tensor]
"""Values of a step by name: a rank's placeholders, and all that is made so far."""
Like = Sequence[Tensor]


class Compiler:
    """Equal graphs are compiled once: pieces mostly are. joins: whether programs are to be joined before."""

    def __init__(self, backend: str) -> None:
        self.joins = backend == "eager"  # a compiler joins more itself
        self._backend = backend
        self._known: dict[str, tuple[Compiled, tuple[Tensor, ...]]] = {}

    def __call__(
        self, module: fx.GraphModule, adding: Sequence[int] = ()
    ) -> tuple[Compiled, tuple[Tensor, ...]]:
        """What runs it, and how its inputs look. adding: as `compile_graph` takes it."""
        text = "\n".join(node.format_node() or "" for node in module.graph.nodes)
        values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        results: Any = module.graph.output_node().args[0]
        values += [results[place].meta["val"] for place in adding]
        key = f"{text} {adding} {[(v.shape, v.stride(), v.dtype) for v in values]}"
        if key not in self._known:
            self._known[key] = compile_graph(module, self._backend, adding), expected(values)
        return self._known[key]
