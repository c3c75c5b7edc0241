"""What ranks got by parallel code, held against what one process got."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from autoshard.verification.joined_pieces import Index, MeanAxes, joined_errors, parts_of, place_by_values
from autoshard.verification.observed_run import Call, ObservedRun
from autoshard.verification.part_errors import CANCELLED, Divergence, largest, relative_error
from autoshard.verification.verify_plan import TOLERANCE, VerifyReport
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.ir.torch_dtensor import whole_value


@dataclass(frozen=True)
class Parts:
    """How a step is divided, and a rank's part of it."""

    mesh: MeshSpec
    rank: int
    means: MeanAxes

    def of(self, value: torch.Tensor, expected: torch.Tensor) -> tuple[Mapping[str, int], Index] | None:
        """Which axes split which dims of an output, and where the rank's piece lies in what one process returns; of
        several that fit, where the numbers are most alike. None: it is no part."""
        found = list(parts_of(value.shape, expected.shape, self.mesh, self.rank, self.means))
        off = lambda one: _error(value, expected[one[1]], largest([expected]))
        return min(found, key=off) if len(found) > 1 else found[0] if found else None

    def tangent(self, given: torch.Tensor, value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """The gradient of the rank's piece of an output. given: of the whole."""
        part = self.of(value.detach(), expected)
        if part is None:  # it will differ
            return torch.ones_like(value)
        split, index = part
        return math.prod(self.mesh.size(axis) for axis in self.means.both if axis in split) * given[index]


@dataclass(frozen=True)
class RankComparison:
    """What this rank and the others `got`, beside what one process `wanted`. All ranks ask the same, in one order.
    tolerance: None: by the dtypes that are computed with."""

    parts: Parts
    wanted: ObservedRun
    got: ObservedRun
    tolerance: float | None
    factors: set[float] = field(default_factory=set[float])
    """By how much gradients of what a rank computes of its part are larger than in one process."""

    def report(self) -> VerifyReport:
        """The same on every rank. ShardingError where the parallel model has other outputs or parameters."""
        self._check_names()
        limit = self._limit  # which all ranks ask together
        own = dict(self._output_errors())
        own |= dict(self._buffer_errors())
        own |= {f"grad {name}": self._gradient_error(name) for name in self.wanted.gradients}
        all_own = self._of_all({name: error for name, error in own.items() if error is not None})
        names = dict.fromkeys(name for one in all_own for name in one)
        errors = {name: max(one.get(name, 0.0) for one in all_own) for name in names}
        self.factors.update(*self._of_all(set(self.factors)))
        if not errors:
            raise ShardingError(
                "the model returns no tensor, and there is nothing to compare\n"
                "  try: make_model whose model returns its loss"
            )
        worst = max(errors.values())
        if worst <= limit:
            return VerifyReport(True, worst, errors, None)
        return VerifyReport(False, worst, errors, self._first(errors, limit))

    @cached_property
    def _limit(self) -> float:
        """That of the coarsest dtype, as `verify` has it: parallel code may compute in a narrower one."""
        runs = (self.wanted, self.got)
        values = [
            one for run in runs for one in (*run.outputs, *run.gradients.values(), *run.forward.values())
        ]
        limits = (TOLERANCE.get(one.dtype.to_real(), 0.0) for one in values if one is not None)
        own = max(limits, default=0.0) or 1e-4 if self.tolerance is None else self.tolerance
        return max(self._of_all(own))

    @cached_property
    def _floor(self) -> float:
        """Below which gradients are rounding left by cancellations: of narrow dtypes, of their precision."""
        most = largest(self.wanted.gradients.values())
        floats = [one.dtype for one in self.got.forward.values()]
        coarse = max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
        return max(CANCELLED, coarse / 4.0 / self._limit if self._limit else 0.0) * most

    def _check_names(self) -> None:
        """ShardingError for parameters that no rank has."""
        there = set[str]().union(*self._of_all(set(self.got.gradients)))
        missing = sorted(self.wanted.gradients.keys() - there)
        if missing:
            more = f", and {len(missing) - 1} others of the model's" if missing[1:] else ""
            raise ShardingError(
                f"the parallel model has no parameter {missing[0]}{more}\n"
                "  try: code that keeps parameters under their names, as fully_shard and parallelize_module do"
            )

    def _output_errors(self) -> Iterator[tuple[str, float]]:
        if len(self.got.outputs) != len(self.wanted.outputs):
            raise ShardingError(
                f"the parallel model returns {len(self.got.outputs)} tensors, and the model "
                f"{len(self.wanted.outputs)}\n  try: make_parallel that returns the same"
            )
        mesh, rank, means = self.parts.mesh, self.parts.rank, self.parts.means.both
        for place, (value, expected) in enumerate(zip(self.got.outputs, self.wanted.outputs, strict=True)):
            found = self.parts.of(value, expected)
            split, index = ({}, ()) if found is None else found
            rest = [axis for axis in means if axis not in split]
            shared = len(mesh.group(rank, rest)) > 1
            if any(self._of_all(shared)):  # one for the batch: a mean of the ranks', or their sum
                pieces = self._of_all(value)
                stack = torch.stack([pieces[other] for other in mesh.group(rank, rest)]) if shared else None
            else:
                stack = None
            if found is None:
                yield f"output {place}", float("inf")
                continue
            errors = {1.0: _error(value, expected[index], 0.0)}
            if stack is not None:
                ways = {float(len(stack)): stack.mean(0), 1.0: stack.sum(0)}
                errors = {factor: _error(one, expected[index], 0.0) for factor, one in ways.items()}
            factor = min(errors, key=lambda one: errors[one])
            others = math.prod(mesh.size(axis) for axis in means if axis in split)
            self.factors.add(factor * others)
            over = [axis for axis in split if axis not in means]
            said = f", in parts over {' and '.join(over)}" if over else ""
            yield f"output {place}{said}", errors[factor]

    def _buffer_errors(self) -> Iterator[tuple[str, float]]:
        """Of those that the model writes."""
        for name, expected in self.wanted.buffers.items():
            pieces = self._of_all(self.got.buffers.get(name))
            if all(one is not None for one in pieces):
                ways = joined_errors(pieces, expected, self.parts.mesh, MeanAxes())
                yield f"buffer {name}", min(ways, default=float("inf"))

    def _gradient_error(self, name: str) -> float | None:
        """None: this rank has no such parameter, or nothing wants its gradient."""
        got, expected = self.got.gradients.get(name), self._own(name)
        if name not in self.got.gradients:
            return None
        if self.wanted.gradients[name] is None:
            return float("inf") if got is not None and bool(got.any()) else None
        return float("inf") if expected is None else _error(got, expected, self._floor)

    def _own(self, name: str) -> torch.Tensor | None:
        """What one process has of the gradient of this rank's piece of a parameter."""
        expected, index = self.wanted.gradients[name], self._places.get(name, ((), True))
        return None if expected is None or index is None else expected[index[0]]

    @cached_property
    def _places(self) -> Mapping[str, tuple[Index, bool] | None]:
        """Where pieces of parameters lie in these, and whether in order, of those that are plain tensors of a part."""
        wanted, mesh = self.wanted.parameters, self.parts.mesh
        return {
            name: place_by_values(piece, wanted[name], mesh, self.parts.rank)
            for name, piece in self.got.parameters.items()
            if name in wanted and piece.shape != wanted[name].shape
        }

    def _of_all(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.parts.mesh.device_count
        dist.all_gather_object(found, own)
        return found

    def _first(self, errors: Mapping[str, float], limit: float) -> Divergence | None:
        """A module that returns something else, else a buffer, else a module whose output has another gradient, else a
        parameter. What modules return may cancel where results do not: it differs from ten times the tolerance on."""
        return (
            self._first_module("its output", "forward", {1.0}, limit)
            or self._first_of(errors, limit, "buffer ", "its value after the call", "a buffer")
            or self._first_module("the gradient of its output", "backward", self.factors, limit)
            or self._first_of(
                errors, limit, "grad ", f"its gradient{self._how(errors, limit)}", "a parameter"
            )
            or self._first_of(errors, limit, "", "what is returned", "an output")
        )

    def _first_module(
        self, said: str, side: str, factors: Iterable[float], limit: float
    ) -> Divergence | None:
        mesh, means = self.parts.mesh, self.parts.means
        mixed = {name.rpartition(".")[0] for name, place in self._places.items() if place and not place[1]}
        mixed = set[str]().union(*self._of_all(mixed))  # what they return has the order of their parts
        for call, value in getattr(self.wanted, side).items():
            own = self._called(side, call)
            if call[0] in mixed or not all(self._of_all(own is not None)):
                continue
            pieces = self._of_all(own)
            ways = (joined_errors(pieces, value * factor, mesh, means) for factor in sorted(factors))
            error = min((one for way in ways for one in way), default=float("inf"))
            if error > 10.0 * limit:
                name, draws = call[0] or "the model", call[0] in self.wanted.draws
                kind = self.wanted.kinds[call[0]] + (", which draws random numbers" if draws else "")
                return Divergence(name, said, error, kind, "")
        return None

    def _called(self, side: str, call: Call) -> torch.Tensor | None:
        """What parallel code has of a call, gathered where it is a DTensor; of micro-batches one after the other."""
        (name, number, place), values = call, getattr(self.got, side)
        each, rest = divmod(self.got.calls[name], self.wanted.calls[name])
        numbers = (
            range(number, self.got.calls[name], self.wanted.calls[name]) if each and not rest else [number]
        )
        found = [values.get((name, one, place)) for one in numbers]
        if any(one is None or (len(found) > 1 and not one.ndim) for one in found):
            return None
        whole = [whole_value(one) for one in found]
        return torch.cat(whole) if len(whole) > 1 else whole[0]

    def _how(self, errors: Mapping[str, float], limit: float) -> str:
        """ ", 2 times the model's", where that is so of all gradients that differ; or that a rank has none."""
        wrong = [name[5:] for name, error in errors.items() if name.startswith("grad ") and error > limit]
        if any(self._of_all(self.got.gradients.get(wrong[0]) is None) if wrong else ()):
            return ", which a rank lacks"
        ratios = [ratio for name in wrong if (ratio := self._ratio(name, limit)) is not None]
        same = max(ratios, default=0.0) - min(ratios, default=0.0) <= 10.0 * limit
        found: list[float] = self._of_all(ratios[0] if ratios and same else 0.0)
        return f", {found[0]:.4g} times the model's" if all(found) else ""

    def _ratio(self, name: str, limit: float) -> float | None:
        """Of this rank's gradient to the model's; None: any, as that is 0. NaN: they differ otherwise."""
        got, expected = self.got.gradients.get(name), self._own(name)
        if got is None or expected is None or got.shape != expected.shape:
            return math.nan
        if not expected.any():
            return None
        ratio = float((got * expected.conj()).sum().real / expected.abs().square().sum())
        return ratio if _error(got, ratio * expected, self._floor) <= limit else math.nan

    def _first_of(
        self, errors: Mapping[str, float], limit: float, start: str, said: str, what: str
    ) -> Divergence | None:
        names = (name for name, error in errors.items() if error > limit and name.startswith(start))
        name = next(names, None)
        return None if name is None else Divergence(name.removeprefix(start), said, errors[name], what, "")


def _error(value: torch.Tensor | None, expected: torch.Tensor, floor: float) -> float:
    if value is None or value.shape != expected.shape:
        return float("inf")
    return relative_error(value, expected, max(largest([expected]), floor))
