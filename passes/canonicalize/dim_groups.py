"""How a shape arises by flattening a finer one: the arithmetic of views."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Group", "flatten", "is_mixed", "refine", "resolve", "trivial"]


@dataclass(frozen=True)
class Group:
    """One dim: the product of finer dims of `sizes`, major first.

    firm: the flattening is the token kind (batch with sequence), where the finer dims are what the
    model means: an unflattened partner is split to match. Otherwise (heads with head size) the
    flattened dim is what the model means, and the flattening is done when a plain partner appears.
    """

    sizes: tuple[int, ...]
    firm: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def ones(self) -> Group:
        """The same structure with every size 1: what broadcasts against this group."""
        return Group((1,) * len(self.sizes))

    @property
    def whole(self) -> Group:
        return Group((self.size,))


def trivial(shape: Iterable[int]) -> tuple[Group, ...]:
    return tuple(Group((size,)) for size in shape)


def flatten(groups: Iterable[Group]) -> tuple[int, ...]:
    """The finer shape."""
    return tuple(itertools.chain.from_iterable(group.sizes for group in groups))


def is_mixed(sizes: Sequence[int]) -> bool:
    """Whether a group really mixes dims: two or more that are not 1."""
    return sum(size != 1 for size in sizes) > 1


def refine(source: Sequence[int], target: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per target dim, finer sizes such that both shapes are flattenings of the finer shape.

    (4, 16, 32) as (64, 32)      -> ((4, 16), (32,))
    (64, 32)    as (64, 4, 8)    -> ((64,), (4,), (8,))
    (5, 6, 4)   as (5, 8, 3)     -> ((5,), (8,), (3,))        a cut at 8 and one at 6: given up
    (8, 4)      as (2, 16)       -> ((2,), (4, 4))
    (4, 1, 16)  as (64,)         -> ((4, 16),)                no dims of size 1 inside a group
    """
    if 0 in source:
        return tuple((size,) for size in target)
    groups: list[tuple[int, ...]] = []
    i = j = 0
    while j < len(target):
        i0, j0 = i, j
        j += 1
        have, want = 1, target[j0]
        if i < len(source):
            have, i = source[i], i + 1
        while have != want:
            if have < want:
                have, i = have * source[i], i + 1
            else:
                want, j = want * target[j], j + 1
        groups += _block(source[i0:i], target[j0:j])
    return tuple(tuple(size for size in group if size != 1) or (1,) for group in groups)


def _block(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, ...]]:
    """`refine` where no proper prefixes of the two have equal products."""
    if len(target) == 1:
        return [tuple(source)]
    cuts = sorted(_cuts(source) | _cuts(target))
    if any(b % a for a, b in itertools.pairwise(cuts)):
        return [(size,) for size in target]
    groups: list[tuple[int, ...]] = []
    low = 1
    for size in target:
        high = low * size
        inside = [c for c in cuts if low <= c <= high]
        groups.append(tuple(b // a for a, b in itertools.pairwise(inside)) or (1,))
        low = high
    return groups


def _cuts(sizes: Sequence[int]) -> set[int]:
    """Products of the leading sizes: where the flat dim is cut."""
    return set(itertools.accumulate(sizes, operator.mul, initial=1))


def resolve(groups: Sequence[Group]) -> Group:
    """The group that partners of one dim agree on: all have its size.

    A firm group meets plain dims: the firm group. Otherwise the cuts that all have in common.
    """
    firm = any(group.firm for group in groups)
    kinds = {group.sizes for group in groups}
    if len(kinds) == 1:
        return Group(kinds.pop(), firm)
    mixed = {sizes for sizes in kinds if is_mixed(sizes)}
    if firm and len(mixed) == 1:
        return Group(mixed.pop(), True)
    common = set.intersection(*(_cuts(sizes) for sizes in kinds))
    sizes = tuple(b // a for a, b in itertools.pairwise(sorted(common))) or (1,)
    return Group(sizes, firm and is_mixed(sizes))
