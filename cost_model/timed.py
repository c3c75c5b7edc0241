"""Kernels and collectives of a program that were timed, one by one, where the program will run: `TimedPrices`.

They take the place of the modelled prices of equal and of near shapes: a kernel of equal shapes takes what was timed;
one of near shapes what the model says, times the ratio of timed to modelled at the nearest timed shapes; any other what
the model says, times the median ratio of what is limited alike. Without that, what was timed would look fast beside
what was not, or slow, wherever the model is off as a whole.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import msgspec

from cost_model.groups import GroupShape
from cost_model.measurements import KernelKind

_K = TypeVar("_K")
_T = TypeVar("_T")
Shapes = tuple[tuple[int, ...], ...]

Priced = Literal["modelled", "near", "timed"]
"""Where a price comes from. near: modelled, and scaled by what a kernel of near shapes took."""

NEAREST = 1.0
"""Powers of two: no dim of near shapes is more than twice as long in one as in the other."""


ENOUGH = 3
"""Kernels of a kind that say how far the model is off for all of the kind; or that were timed again, how the machine
changed."""


@dataclass(frozen=True)
class KernelKey:
    """What kernels have in common that take equally long.

    form: the op with its arguments, dtypes in place of tensors. shapes: of its tensor operands, as one rank has them.
    orders: per operand its dims longer than 1, the one of the largest stride first.
    """

    form: str
    shapes: Shapes
    orders: Shapes = ()


@dataclass(frozen=True)
class KernelWork:
    """What the model prices a kernel by: the arguments of `ComputePrices.kernel_seconds`. launched: whether it is a
    kernel of its own and not part of a fused loop. groups: of experts' products, matrices."""

    flops: float
    nbytes: float
    dtype: str
    kind: KernelKind | None = "matmul"
    stored: float = 0.0
    launched: bool = True
    groups: int = 1

    @property
    def limited_by(self) -> KernelKind | None:
        """What it is like where the model is off: a kind of arithmetic; None: memory traffic alone."""
        return self.kind if self.flops else None


@dataclass(frozen=True)
class TimedKernel:
    """seconds: of one call, all ranks computing at once. inner: of a fused group, what is computed in the same loop as
    `work`, of which `seconds` are too. Those are priced apart, by the model."""

    key: KernelKey
    work: KernelWork
    seconds: float
    inner: tuple[KernelWork, ...] = ()

    def own_seconds(self, model: Callable[[KernelWork], float]) -> float:
        """Without those of `inner`. model: the price of a work."""
        return max(0.0, self.seconds - sum(map(model, self.inner)))


@dataclass(frozen=True)
class TimedCollective:
    """nbytes: as `cost_model.collectives` counts. seconds: as a profile's, behind as much computing."""

    kind: str
    group: GroupShape
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class TimedPrices:
    """Distinct kernels and collectives of programs, with what each took on one kind of machine."""

    kernels: tuple[TimedKernel, ...] = ()
    collectives: tuple[TimedCollective, ...] = ()

    def joined(self, newer: TimedPrices) -> TimedPrices:
        """Both; what was timed twice counts as `newer` has it."""
        kernels = {kernel.key: kernel for kernel in (*self.kernels, *newer.kernels)}
        collectives = {(c.kind, c.group, c.nbytes): c for c in (*self.collectives, *newer.collectives)}
        return TimedPrices(tuple(kernels.values()), tuple(collectives.values()))

    def change_to(self, newer: TimedPrices) -> float:
        """How many times as long kernels took in `newer` as here, the median of those that both have; 1 where that is
        next to nothing, or they are too few."""
        before = {kernel.key: kernel.seconds for kernel in self.kernels}
        again = [(kernel.seconds, before.get(kernel.key, 0.0)) for kernel in newer.kernels]
        ratios = [now / then for now, then in again if now > 0.0 and then > 0.0]
        ratio = statistics.median(ratios) if len(ratios) >= ENOUGH else 1.0
        # A median change of less than a tenth is not the machine's doing.
        return ratio if abs(math.log(ratio)) > math.log1p(0.1) else 1.0

    def kernels_times(self, factor: float) -> TimedPrices:
        """As on a machine on which kernels take `factor` times as long, and collectives what they take."""
        return replace(
            self, kernels=tuple(replace(kernel, seconds=factor * kernel.seconds) for kernel in self.kernels)
        )

    def if_any(self) -> TimedPrices | None:
        """None: nothing was timed, so every price is the model's."""
        return self if self.kernels or self.collectives else None

    def kernel(self, key: KernelKey) -> TimedKernel | None:
        """The one of equal shapes; where none has its orders, the quickest that has others."""
        found = self._equal.get((key.form, key.shapes), ())
        return next((k for k in found if k.key.orders == key.orders), found[0] if found else None)

    def near(self, key: KernelKey) -> TimedKernel | None:
        """The one of the nearest shapes, if any is near."""
        far = ((_distance(kernel.key.shapes, key.shapes), kernel) for kernel in self._forms.get(key.form, ()))
        found = [(distance, kernel) for distance, kernel in far if distance is not None]
        return min(found, key=lambda item: (item[0], item[1].key.shapes))[1] if found else None

    def collective_priced(self, kind: str, group: GroupShape, nbytes: int) -> Priced:
        """Where the price of a collective comes from. near: of a size between those timed, or half or twice one."""
        sizes = [one.nbytes for one in self._groups.get((kind, group), ())]
        if nbytes in sizes:
            return "timed"
        between = sizes and min(sizes) / 2**NEAREST <= nbytes <= max(sizes) * 2**NEAREST
        return "near" if between else "modelled"

    def seconds(
        self, key: KernelKey, work: KernelWork, model: Callable[[KernelWork], float], scale: float
    ) -> float:
        """The price of a kernel. model: the price of a work; scale: of `work.limited_by`, by `scale`."""
        equal = self.kernel(key)
        if equal is not None:
            return equal.own_seconds(model)
        near = self.near(key)
        return model(work) * (scale if near is None else _ratio(near, model))

    def scale(self, limited_by: KernelKind | None, model: Callable[[KernelWork], float]) -> float:
        """Timed over modelled, the median of all kernels that are limited alike; 1 where there are too few to tell."""
        ratios = [_ratio(kernel, model) for kernel in self.kernels if kernel.work.limited_by == limited_by]
        return statistics.median(ratios) if len(ratios) >= ENOUGH else 1.0

    def priced(self, key: KernelKey) -> Priced:
        """How `seconds` finds it."""
        if self.kernel(key) is not None:
            return "timed"
        return "modelled" if self.near(key) is None else "near"

    @cached_property
    def _equal(self) -> dict[tuple[str, Shapes], list[TimedKernel]]:
        found = _grouped(self.kernels, lambda kernel: (kernel.key.form, kernel.key.shapes))
        return {
            key: sorted(kernels, key=lambda k: (k.seconds, k.key.orders)) for key, kernels in found.items()
        }

    @cached_property
    def _forms(self) -> dict[str, list[TimedKernel]]:
        return _grouped(self.kernels, lambda kernel: kernel.key.form)

    @cached_property
    def _groups(self) -> dict[tuple[str, GroupShape], list[TimedCollective]]:
        return _grouped(self.collectives, lambda one: (one.kind, one.group))

    @cached_property
    def hash(self) -> str:
        """16 hex digits of all of it, in whatever order it was timed; the same in every process."""
        kernels = sorted(msgspec.json.encode(kernel) for kernel in self.kernels)
        collectives = sorted(msgspec.json.encode(collective) for collective in self.collectives)
        return hashlib.sha256(b"\n".join((*kernels, b"", *collectives))).hexdigest()[:16]


def _grouped(timed: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    found: dict[_K, list[_T]] = {}
    for one in timed:
        found.setdefault(key(one), []).append(one)
    return found


def _ratio(kernel: TimedKernel, model: Callable[[KernelWork], float]) -> float:
    return kernel.own_seconds(model) / max(model(kernel.work), 1e-12)


def _distance(one: Shapes, other: Shapes) -> float | None:
    """Powers of two between shapes, summed over their dims; None where they are not near."""
    if [len(shape) for shape in one] != [len(shape) for shape in other]:
        return None
    apart = [_apart(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return None if max(apart, default=0.0) > NEAREST else math.fsum(apart)


def _apart(one: int, other: int) -> float:
    if one == other:
        return 0.0
    return abs(math.log2(one / other)) if one and other else math.inf
