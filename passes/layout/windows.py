"""Which part of an operand a part of the result reads: the interval algebra of windows.

Per dim, half-open. The operand has `length` positions, what lies outside is padding. `reads(lo, hi)` is what results
[lo, hi) read of it, clipped to [0, length); (0, 0) if they read nothing. A periodic window may read outside of
[0, length), and more than `length`: positions then count modulo `length`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from passes.layout.layout import Span


class Window(Protocol):
    """What results [lo, hi) read of an operand."""

    def reads(self, lo: int, hi: int) -> Span: ...


def _clipped(lo: int, hi: int, length: int) -> Span:
    lo, hi = max(0, lo), min(length, hi)
    return (lo, hi) if lo < hi else (0, 0)


@dataclass(frozen=True)
class _Strided:
    """Position i of the one end meets i * stride - before + dilation * j, for j in [0, kernel), of the other."""

    length: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0

    def reach(self, lo: int, hi: int) -> Span:
        """What [lo, hi) meet, beyond both ends too; `lo < hi`."""
        start = lo * self.stride - self.before
        return start, (hi - 1) * self.stride - self.before + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class SlidingWindow(_Strided):
    """Convolution and pooling: result o reads o * stride - before + dilation * j for j in [0, kernel)."""

    def reads(self, lo: int, hi: int) -> Span:
        return _clipped(*self.reach(lo, hi), self.length) if lo < hi else (0, 0)

    def padding(self, lo: int, hi: int) -> tuple[int, int]:
        """What to pad `reads(lo, hi)` with before and after, so that without any other padding the window makes just
        the results [lo, hi)."""
        start, end = self.reach(lo, hi)
        first, last = self.reads(lo, hi)
        before = min(end - start, max(0, -start))
        return before, end - start - before - (last - first)


@dataclass(frozen=True)
class TransposedWindow(_Strided):
    """Transposed convolution: operand i adds to results i * stride - before + dilation * j for j in [0, kernel)."""

    def reads(self, lo: int, hi: int) -> Span:
        if lo >= hi:
            return 0, 0
        first = lo + self.before - self.dilation * (self.kernel - 1)
        return _clipped(-(-first // self.stride), (hi - 1 + self.before) // self.stride + 1, self.length)


@dataclass(frozen=True)
class AdaptiveWindow:
    """Adaptive pooling: result o of `results` reads [floor(o n / m), ceil((o + 1) n / m))."""

    length: int
    results: int

    def reads(self, lo: int, hi: int) -> Span:
        if lo >= hi:
            return 0, 0
        return lo * self.length // self.results, -(-hi * self.length // self.results)

    @property
    def is_even(self) -> bool:
        """Whether all results read equally many positions, none of them twice."""
        return self.length % self.results == 0

    @property
    def widest(self) -> int:
        """The most positions that any result reads."""
        spans = (self.reads(o, o + 1) for o in range(self.results))
        return max(hi - lo for lo, hi in spans)


@dataclass(frozen=True)
class LinearResize:
    """Linear interpolation: result o lies at `place(o)` of the operand, between two of its positions.

    ratio: operand positions per result.   [torch: area_pixel_compute_source_index]
    """

    length: int
    ratio: float
    align_corners: bool

    def place(self, result: int) -> float:
        if self.align_corners:
            return self.ratio * result
        return max(0.0, self.ratio * (result + 0.5) - 0.5)

    def reads(self, lo: int, hi: int) -> Span:
        if lo >= hi:
            return 0, 0
        first, last = (min(int(self.place(o)), self.length - 1) for o in (lo, hi - 1))
        return first, min(last + 2, self.length)


@dataclass(frozen=True)
class NearestResize:
    """Nearest neighbour: result o is the operand's floor((o + offset) * ratio), the product rounded to float32.

    ratio: operand positions per result. precise: multiplied in float64, as torch mostly does in the forward of float64.
    offset: 0.5 for "nearest-exact", the middle of a result.   [torch: UpSample.h, UpSampleKernel.cpp]
    """

    length: int
    ratio: float
    precise: bool = False
    offset: float = 0.0

    def place(self, result: int) -> int:
        number = np.float64 if self.precise else np.float32
        product = number(result + self.offset) * number(self.ratio)
        return min(int(np.floor(np.float32(product))), self.length - 1)

    def reads(self, lo: int, hi: int) -> Span:
        return (self.place(lo), self.place(hi - 1) + 1) if lo < hi else (0, 0)


@dataclass(frozen=True)
class CubicResize:
    """Cubic interpolation: result o lies at `place(o)` of the operand, which may be before its first position; it reads
    two positions on either side, the first and the last in place of those beyond.

    ratio: operand positions per result.
    """

    length: int
    ratio: float
    align_corners: bool

    def place(self, result: int) -> float:
        return self.ratio * result if self.align_corners else self.ratio * (result + 0.5) - 0.5

    def reads(self, lo: int, hi: int) -> Span:
        if lo >= hi:
            return 0, 0
        first, last = math.floor(self.place(lo)) - 1, math.floor(self.place(hi - 1)) + 2
        most = self.length - 1
        return min(max(first, 0), most), min(max(last, 0), most) + 1


@dataclass(frozen=True)
class AntialiasResize:
    """Interpolation by a filter as wide as what a result stands for: result o reads what is less than `support` from
    the middle of its share of the operand.

    ratio: operand positions per result. radius: of the filter, in positions (linear: 1, cubic: 2) where it enlarges.
    """

    length: int
    ratio: float
    radius: int

    @property
    def stretch(self) -> float:
        """Operand positions per unit of the filter."""
        return max(1.0, self.ratio)

    @property
    def support(self) -> float:
        return self.radius * self.stretch

    @property
    def widest(self) -> int:
        """The most positions that any result reads."""
        return 2 * math.ceil(self.support) + 1

    def start(self, result: int) -> int:
        """The first position that a result reads."""
        return max(0, math.floor(self.ratio * (result + 0.5) - self.support + 0.5))

    def reads(self, lo: int, hi: int) -> Span:
        if lo >= hi:
            return 0, 0
        last = math.floor(self.ratio * (hi - 0.5) + self.support + 0.5)
        return min(self.start(lo), self.length - 1), min(last, self.length)


@dataclass(frozen=True)
class EdgePad:
    """Padding with what is inside: result o is the operand's position o - before, outside of it mirrored at the edge
    (`reflects`) or that of the edge itself."""

    length: int
    before: int
    reflects: bool

    def place(self, result: int) -> int:
        at, last = result - self.before, self.length - 1
        return last - abs(last - abs(at)) if self.reflects else min(max(at, 0), last)

    def reads(self, lo: int, hi: int) -> Span:
        if lo >= hi:
            return 0, 0
        edges = (self.before, self.before + self.length - 1)
        places = [self.place(o) for o in (lo, hi - 1, *(o for o in edges if lo <= o < hi))]
        return min(places), max(places) + 1


@dataclass(frozen=True)
class MirroredWindow:
    """Flipping: result o is the operand's position length - 1 - o."""

    length: int

    def reads(self, lo: int, hi: int) -> Span:
        return (self.length - hi, self.length - lo) if lo < hi else (0, 0)


@dataclass(frozen=True)
class PeriodicWindow:
    """Rolling, and padding with what is at the other end: result o is the operand's position o - before, modulo its
    length."""

    length: int
    before: int

    def reads(self, lo: int, hi: int) -> Span:
        return (lo - self.before, hi - self.before) if lo < hi else (0, 0)
