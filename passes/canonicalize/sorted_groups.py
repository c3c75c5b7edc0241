"""Whether a model's groups are the ids that it sorted: histograms are written in many ways, so it is tried."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from passes.ir.graph_pass import shape_of, tensor_at
from passes.ir.torch_sizes import counts_as

aten = torch.ops.aten


def counts_groups(groups: fx.Node, sort: fx.Node, experts: int, tried: dict[Hashable, bool]) -> bool:
    """Whether `groups` are the sorted ids, whatever these are: computed for some, most for one expert, none for
    another."""
    steps = _steps_from(groups, sort)
    if steps is None:
        return False
    numbers = {node: i for i, node in enumerate([*_as_they_come(sort), sort, *steps])}
    look = lambda node: (node.target, map_arg((node.args, node.kwargs), lambda n: ("node", numbers[n])))
    key = repr((*map(look, steps), [*map(shape_of, _as_they_come(sort))], experts))
    if key not in tried:
        fewer = _Fewer.of(steps, sort, experts)
        tried[key] = all(
            torch.equal(fewer.computed(steps, sort, ids)[groups], ids.sort().values)
            for ids in _tries(fewer(counts_as(shape_of(tensor_at(sort))[0])), experts)
        )
    return tried[key]


def _steps_from(groups: fx.Node, sort: fx.Node) -> list[fx.Node] | None:
    """The ops from the sorted ids to `groups`, in order; None if they read anything else."""
    given = {sort, *_as_they_come(sort)}
    needed, left = set[fx.Node](), [groups]
    while left:
        node = left.pop()
        if node in needed or node in given:
            continue
        if node.op != "call_function" or len(needed) > 64:
            return None
        needed.add(node)
        left += node.all_input_nodes
    return sorted(needed)


def _as_they_come(sort: fx.Node) -> list[fx.Node]:
    """The ids that are sorted, and what they are a reshape of."""
    found = [tensor_at(sort)]
    while found[-1].target is aten.reshape.default:
        found.append(tensor_at(found[-1]))
    return found


@dataclass(frozen=True)
class _Fewer:
    """How many ids are tried in place of those of the call, of which a histogram as one-hot rows can be 30 GB:
    numbers of the graph that are multiples of `tokens` are divided by `scale`."""

    tokens: int
    scale: int

    @staticmethod
    def of(steps: Sequence[fx.Node], sort: fx.Node, experts: int) -> _Fewer:
        """All, unless each number of `steps` is a multiple of the tokens or no more than there are experts: any other
        may be a limit, as of an expert's capacity, that fewer would not reach."""
        shapes = [[counts_as(size) for size in shape_of(node)] for node in _as_they_come(sort)]
        tokens = shapes[-1][0]
        numbers = set[int]()
        map_aggregate([(n.args, n.kwargs) for n in steps], lambda value: _add_integer(numbers, value))
        # Tokens an expert that are tried at least.
        least = 64 * experts
        if (
            max(map(len, shapes)) > 2
            or any(abs(n) > experts and n % tokens for n in numbers)
            or tokens < 2 * least
        ):
            return _Fewer(tokens, 1)
        return _Fewer(tokens, next(n for n in range(tokens // least, 0, -1) if tokens % n == 0))

    def __call__(self, number: Any) -> Any:
        scaled = isinstance(number, int) and not isinstance(number, bool) and number % self.tokens == 0
        return number // self.scale if scaled else number

    def computed(self, steps: Sequence[fx.Node], sort: fx.Node, ids: torch.Tensor) -> dict[fx.Node, Any]:
        come = {
            node: ids.reshape([self(counts_as(n)) for n in shape_of(node)]) for node in _as_they_come(sort)
        }
        values: dict[fx.Node, Any] = {**come, sort: ids.sort(stable=True)}
        for node in steps:
            given = map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = map_aggregate(given, lambda value: self(counts_as(value)))
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values


def _add_integer(numbers: set[int], value: Any) -> Any:
    if isinstance(counted := counts_as(value), int):
        numbers.add(int(counted))
    return value


def _tries(length: int, experts: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    yield torch.randint(experts, (length,), generator=generator)
    yield torch.where(torch.rand(length, generator=generator) < 0.9, experts - 1, 0)
