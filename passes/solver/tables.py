"""Cost tables by value: every distinct array is held once, and every operation on it is done once.

Most nodes of a deep model are copies of a few hundred, so the same min-plus product, restriction or comparison
comes up once per layer. Interned arrays are compared by identity, which makes those memo look-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

Array = NDArray[np.float64]
Index = NDArray[np.intp]
BLOCK = 1 << 20
"""Entries of the largest temporary array of a blocked operation."""


class Tables:
    """Interns arrays, and memoises operations on interned ones. All results are interned and read-only."""

    def __init__(self, above: Tables | None = None) -> None:
        """above: tables whose arrays are known here too; what they say of one array is computed there, once for all."""
        self._above = above
        self._by_digest: dict[Hashable, Array] = {}
        self._interned: dict[int, Array] = {}
        self._memo: dict[Hashable, object] = {}
        self.entries = 0
        """Of all arrays that are held."""

    @property
    def size(self) -> int:
        """Number of distinct arrays held."""
        return len(self._interned)

    def intern(self, array: Array) -> Array:
        """The one array with this shape and these values."""
        if self._holds(array) or self._of(array) is not self:
            return array
        array = np.ascontiguousarray(array, dtype=np.float64)
        digest = array.shape, hash(array.tobytes()), int(array.view(np.uint64).sum())
        known = self._by_digest.get(digest)
        if known is None and self._above is not None:
            known = self._above._by_digest.get(digest)
        if known is None:
            known = array.copy()
            known.flags.writeable = False
            self._by_digest[digest] = known
            self._interned[id(known)] = known
            self.entries += known.size
        return known

    def _holds(self, array: Array) -> bool:
        return self._interned.get(id(array)) is array

    def _of(self, array: Array) -> Tables:
        """The tables that know `array` by itself: those above if it is theirs."""
        return self._above if self._above is not None and self._above._holds(array) else self

    def _array(self, key: Hashable, make: Callable[[], Array]) -> Array:
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self.intern(make())
        assert isinstance(found, np.ndarray)
        return found

    def transpose(self, matrix: Array) -> Array:
        own = self._of(matrix)
        key = ("T", id(matrix))
        found = own._memo.get(key)
        if isinstance(found, np.ndarray):
            return found
        result = own.intern(np.ascontiguousarray(matrix.T))
        own._memo[key] = result
        own._memo["T", id(result)] = matrix
        return result

    def take(self, table: Array, keep: Index) -> Array:
        """`table[keep]`."""
        return self._array(("take", id(table), keep.tobytes()), lambda: table[keep])

    def add(self, left: Array, right: Array) -> Array:
        return self._array(("+", id(left), id(right)), lambda: left + right)

    def project(self, matrix: Array, cost: Array) -> Array:
        """[a] = min over k of matrix[a, k] + cost[k]."""
        return self._array(("min", id(matrix), id(cost)), lambda: (matrix + cost).min(axis=1))

    def min_plus(self, left: Array, cost: Array, right: Array) -> Array:
        """[a, b] = min over k of left[a, k] + cost[k] + right[k, b]."""
        return self._array(("min+", id(left), id(cost), id(right)), lambda: _min_plus(left + cost, right))

    def possible(self, matrix: Array) -> NDArray[np.bool_]:
        """[a]: row a has a finite entry."""
        memo, key = self._of(matrix)._memo, ("possible", id(matrix))
        found = memo.get(key)
        if found is None:
            found = memo[key] = np.isfinite(matrix).any(axis=1)
        assert isinstance(found, np.ndarray)
        return found

    def once(self, name: str, arrays: tuple[Array, ...], make: Callable[[], T]) -> T:
        """What `make` returns, the operation `name` of these arrays: made once for the same objects."""
        key = (name, *map(id, arrays))
        if key not in self._memo:
            self._memo[key] = arrays, make()  # with the arrays, so that their ids stay their own
        _, made = cast(tuple[object, T], self._memo[key])
        return made

    def function(self, matrix: Array) -> Index | None:
        """The column of each row, if every row has exactly one finite entry; otherwise None."""
        memo, key = self._of(matrix)._memo, ("function", id(matrix))
        if key not in memo:
            finite = np.isfinite(matrix)
            single = bool((finite.sum(axis=1) == 1).all())
            memo[key] = finite.argmax(axis=1) if single else None
        found = memo[key]
        return found if isinstance(found, np.ndarray) else None

    def separate(self, matrix: Array) -> tuple[Array, Array] | None:
        """(rows, columns) with matrix[a, b] = rows[a] + columns[b], if there are such; otherwise None."""
        own = self._of(matrix)
        key = ("separate", id(matrix))
        if key not in own._memo:
            parts = _separate(matrix)
            own._memo[key] = parts and (own.intern(parts[0]), own.intern(parts[1]))
        found = own._memo[key]
        return found if isinstance(found, tuple) else None


def _min_plus(left: Array, right: Array) -> Array:
    columns = np.ascontiguousarray(left.T)
    result = columns[0][:, None] + right[0]
    term = np.empty_like(result)
    for k in range(1, len(columns)):
        np.add(columns[k][:, None], right[k], out=term)
        np.minimum(result, term, out=result)
    return result


def _separate(matrix: Array) -> tuple[Array, Array] | None:
    if not np.isfinite(matrix).all():
        return None
    rows = matrix[:, 0] - matrix[0, 0]
    columns = matrix[0]
    rounding = 4 * np.finfo(np.float64).eps * np.abs(matrix).max()
    if np.abs(matrix - rows[:, None] - columns).max() > rounding:
        return None
    return rows, columns
