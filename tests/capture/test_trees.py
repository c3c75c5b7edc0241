"""flatten and unflatten are inverse, on structures pytree knows and on plain objects."""

from __future__ import annotations

import collections
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.capture.call import tensor_paths
from passes.capture.trees import flatten, unflatten

_T = [torch.tensor(float(i)) for i in range(4)]
_leaves = st.sampled_from([*_T, None, 1, 2.5, "s", True])
_nests = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=8,
)


@given(_nests)
def test_round_trip(value: Any) -> None:
    tensors, tree = flatten(value)
    assert len({id(t) for t in tensors}) == len(tensors)
    rebuilt = unflatten(tree, tensors)
    assert type(rebuilt) is type(value) and _same(rebuilt, value)
    assert hash(tree) == hash(flatten(value)[1]) and tree == flatten(value)[1]
    assert set(tensor_paths(tree)) == set(range(len(tensors)))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or a == b


class Node:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.parts = {"list": [tensor, 3]}
        self.me = self


def test_object_with_a_cycle() -> None:
    node = Node(_T[0])
    tensors, tree = flatten([node, node])
    assert len(tensors) == 1 and tensor_paths(tree) == {0: "[0].tensor"}
    first, second = unflatten(tree, ["new"])
    assert first is second and first.me is first and first is not node
    assert first.parts == {"list": ["new", 3]} and node.tensor is _T[0]


def test_object_without_tensors_is_kept() -> None:
    plain = collections.Counter("aab")
    _, tree = flatten(plain)
    assert unflatten(tree, []) == plain

    class Config:
        def __init__(self) -> None:
            self.size = 3

    config = Config()
    assert unflatten(flatten(config)[1], []) is config


def test_types_tell_equal_values_apart() -> None:
    assert len({flatten(v)[1] for v in (1, 1.0, True)}) == 3
    assert flatten([1])[1] != flatten((1,))[1]
