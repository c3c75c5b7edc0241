"""A program that makes gradients, of one piece of many, which are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from autoshard.runtime.input_side import conform
from autoshard.runtime.piece_compiler import Compiler, Known, Like
from passes.compile.compile_graph import Compiled
from passes.lower.piece_values import leave
from passes.lower.piecewise import Collected

__all__ = ["GradientProgram"]


class GradientProgram:
    """A program of gradients. Where earlier pieces left all of its sums, it adds to them as it goes: that takes the
    memory of one gradient, and not of all."""

    def __init__(self, module: fx.GraphModule, left: Sequence[Collected], compile_: Compiler) -> None:
        self._left = left
        self.run, self.takes = compile_(module)
        results: Any = module.graph.output_node().args[0]
        pairs = list(zip(left, results, strict=True))
        names = [one.name for one in left]
        self._places = [
            place
            for place, (one, result) in enumerate(pairs)
            if one.how == "sum" and result is not None and names.count(one.name) == 1
        ]
        self._others = [place for place in range(len(left)) if place not in self._places]
        self._module, self._compile = module, compile_
        self._later: tuple[Compiled, Like] | None = None

    def __call__(self, inputs: list[Tensor], known: Known) -> None:
        """Adds to `known` what it leaves. inputs: emptied, maybe."""
        sums = [known.get(self._left[place].name) for place in self._places]
        if not self._compile.joins or not sums or any(value is None for value in sums):
            leave(self._left, self.run(inputs), known)  # type: ignore[arg-type]
            return
        if self._later is None:
            self._later = self._compile(self._module, self._places)
        run, takes = self._later
        given = zip(sums, takes[len(inputs) :], strict=True)
        inputs += [conform(value, like) for value, like in given]  # type: ignore[arg-type]
        found = run(inputs)
        known.update((self._left[place].name, found[place]) for place in self._places)  # type: ignore[misc]
        leave([self._left[i] for i in self._others], [found[i] for i in self._others], known)  # type: ignore[misc]
