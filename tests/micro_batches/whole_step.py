"""The step of the graphs of all pieces, unsharded: what a plan in pieces must compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_collect
from passes.simulate.reference import seeded_call

__all__ = ["step_in_pieces"]

_REDUCTIONS = {
    "sum": torch.add,
    "cat": torch.add,  # every piece leaves zeros where it is not
    "max": torch.maximum,
    "min": torch.minimum,
}


def step_in_pieces(graphs: Sequence[JointGraph], values: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The flat results of a step whose pieces `graphs` are, each with what runs before and after. values: one per
    placeholder."""
    totals: dict[str, torch.Tensor] = {}
    results: tuple[torch.Tensor | None, ...] = ()
    with torch.no_grad():
        for index, graph in enumerate(graphs):
            run = _Piece(graph.module, totals, index + 1 == len(graphs))
            results = run.run(*values)
    return list(results)


class _Piece(fx.Interpreter):
    """What runs after is only right in the last piece, which reads what all have left."""

    def __init__(self, module: fx.GraphModule, totals: dict[str, torch.Tensor], last: bool) -> None:
        super().__init__(module)
        self.totals, self.last = totals, last

    def run_node(self, n: fx.Node) -> Any:
        value = seeded_call(n, super().run_node)
        if n.op == "call_function" and is_collect(n):
            found = self.totals.get(n.name)
            value = value if found is None else _REDUCTIONS[str(n.args[1])](found, value)
            self.totals[n.name] = value
        return value
