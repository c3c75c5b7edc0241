"""How far rounding alone may move each value of a graph: measured, by running it again with every rounding another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir.autocast_off import autocast_off
from passes.ir.joint import JointGraph
from passes.ir.op_traits import draws, rounds


@dataclass(frozen=True)
class Rounding:
    """Largest absolute change of each result and of each node's value, by name; inf for whole numbers that change."""

    results: Sequence[float]
    nodes: Mapping[str, float]


@autocast_off()
def measured_rounding(
    joint: JointGraph,
    values: Sequence[Tensor],
    results: Sequence[Tensor | None],
    nodes: Mapping[str, Any],
    *,
    seed: int,
    runs: int = 2,
) -> Rounding:
    """What `runs` of the graph with other roundings make of `results` and `nodes`, those of a plain run on `values`.

    Every result of an op that rounds is multiplied by 1 + e, |e| at most its dtype's epsilon, drawn for each element.
    Whole numbers stay: masks and counts are exact. [Stochastic arithmetic: Vignes, CESTAC]
    """
    found = dict.fromkeys(nodes, 0.0)
    ends = [0.0] * len(results)
    for run in range(runs):
        nudged = _Nudged(joint.module, nodes, found, torch.Generator().manual_seed(seed + run + 1))
        with torch.no_grad():
            flat = nudged.run(*values)
        for i, (now, before) in enumerate(zip(flat, results, strict=True)):
            ends[i] = max(ends[i], _change(now, before))
    return Rounding(ends, found)


class _Nudged(fx.Interpreter):
    def __init__(
        self,
        module: fx.GraphModule,
        before: Mapping[str, Any],
        found: dict[str, float],
        generator: torch.Generator,
    ) -> None:
        super().__init__(module)
        self._before, self._found, self._generator = before, found, generator

    def run_node(self, n: fx.Node) -> Any:
        value = seeded_call(n, super().run_node)
        if n.op != "call_function":
            return value
        if rounds(n):
            nudge = self._nudge
            value = type(value)(map(nudge, value)) if isinstance(value, (tuple, list)) else nudge(value)
        if isinstance(value, Tensor):
            self._found[n.name] = max(self._found[n.name], _change(value, self._before[n.name]))
        return value

    def _nudge(self, value: Any) -> Any:
        if (
            not isinstance(value, Tensor)
            or not (value.is_floating_point() or value.is_complex())
            or not value.numel()
        ):
            return value
        epsilon = torch.finfo(value.dtype).eps
        share = (torch.rand(value.shape, generator=self._generator) * 2 - 1).to(value.device) * epsilon
        wide = widened(value)
        moved = (wide + wide * share).to(value.dtype)
        whole = torch.zeros((), dtype=torch.bool) if value.is_complex() else wide == wide.round()
        return torch.where(whole | ~wide.isfinite(), value, moved)


def seeded_call(node: fx.Node, run: Any) -> Any:
    """`run(node)`; an op that draws gives the same numbers wherever and however often it runs."""
    if draws(node):
        torch.manual_seed(0)
    return run(node)


def widened(value: Tensor) -> Tensor:
    """A real or complex `value` in double precision: torch compares no float8."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _change(now: Any, before: Any) -> float:
    """Largest finite |now - before|; inf where whole numbers, or what is finite, differ."""
    if not isinstance(now, Tensor) or not isinstance(before, Tensor) or not now.numel():
        return 0.0
    if not (now.is_floating_point() or now.is_complex()):
        return 0.0 if torch.equal(now, before) else math.inf
    now, before = widened(now), widened(before)
    difference = (now - before).abs()
    if bool((now.isfinite() != before.isfinite()).any()):
        return math.inf
    return float(torch.where(now.isfinite(), difference, 0.0).max())
