"""The notation: what it says about factors, and what it refuses."""

from __future__ import annotations

import pytest

from cost_model.errors import ShardingError
from passes.rules.core.notation import parse
from passes.rules.core.rule import OpRule


def bind(text: str, operands: list[tuple[int, ...]], *results: tuple[int, ...]) -> OpRule:
    return parse(text).bind(operands, results)


def test_a_shared_factor_that_goes_is_summed() -> None:
    rule = bind("m k, k n -> m n", [(2, 3), (3, 4)], (2, 4))
    assert rule.operands == ((("m",), ("k",)), (("k",), ("n",)))
    assert rule.results == ((("m",), ("n",)),)
    assert rule.sizes == {"m": 2, "k": 3, "n": 4}
    assert rule.reductions == {"k": "sum"}
    assert rule.splittable == ("m", "n", "k")


def test_notes() -> None:
    rule = bind("a k t -> a; k: max; t: whole; linear: 0", [(2, 3, 4)], (2,))
    assert rule.reductions == {"k": "max"}
    assert rule.whole == {"t"}
    assert rule.linear == (frozenset({0}),)
    assert parse("a b -> a   b: sum").reductions == {"b": "sum"}, "as in the design's table"
    assert parse("a b, a b -> a b; linear: 0 1").linear == (frozenset({0, 1}),)


def test_broadcasting_is_aligned_at_the_right() -> None:
    rule = bind("..., ... -> ...", [(2, 3, 4), (3, 1)], (2, 3, 4))
    assert rule.operands == ((("...0",), ("...1",), ("...2",)), (("...1",), ()))
    assert bind("..., d -> ... d", [(2, 3), (4,)], (2, 3, 4)).results == ((("...0",), ("...1",), ("d",)),)
    assert bind("..., ... -> ...", [(), (2,)], (2,)).operands == ((), (("...0",),))


def test_many_dims() -> None:
    rule = bind("v d, *t -> *t d; v: sum", [(9, 4), (2, 3)], (2, 3, 4))
    assert rule.results == ((("t0",), ("t1",), ("d",)),)
    assert bind("v d, *t -> *t d; v: sum", [(9, 4), ()], (4,)).results == ((("d",),),)
    whole = bind("n *x -> n *y; *x: whole", [(2, 5, 6)], (2, 3, 4))
    assert whole.splittable == ("n",)
    assert whole.whole == {"x0", "x1", "y0", "y1"}


def test_products() -> None:
    rule = bind("(a b) c -> a (b c)", [(6, 4)], (2, 12))
    assert rule.sizes == {"a": 2, "b": 3, "c": 4} if "b" in rule.sizes else False
    assert rule.operands == ((("a", "b"), ("c",)),)


def test_a_factor_of_size_1_does_not_exist() -> None:
    rule = bind("(a b), b 1 -> a b", [(3,), (3, 1)], (1, 3))
    assert rule.operands == ((("b",),), (("b",), ()))
    assert rule.sizes == {"b": 3}
    assert bind("a k -> a; k: sum", [(2, 1)], (2,)).reductions == {}


def test_a_new_dim_is_whole() -> None:
    assert bind("a -> a n", [(2,)], (2, 3)).splittable == ("a",)


def test_no_operands_or_dims() -> None:
    assert bind(" -> ", [], ()).results == ((),)
    assert bind("k, k -> ", [(3,), (3,)], ()).reductions == {"k": "sum"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "rule 'm k, k n' has no '->'\n  try: 'm k, k n -> m n'"),
        ("a b -> a", "does not say what happens to 'b', which is in no result\n  try: 'a b -> a; b: sum'"),
        ("a b -> a; b: mean", "a note 'b: mean' that is not understood\n  try: 'k: sum'"),
        ("a -> a; z: sum", "a note on 'z', which is no factor of it"),
        ("a -> a; linear: 1", "cannot be linear in operands [1]: it has 1 operands"),
        ("a a -> a", "has 'a' twice in 'a a'"),
        ("(a -> a", "has an unclosed '(' in '(a'"),
        ("a) -> a", "has an unexpected ')' in 'a)'"),
        ("a + b -> a", "has an unexpected '+' in 'a + b'"),
        ("... *x -> ...", "has two of '...' and '*x' in '... *x'"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ShardingError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "operands", "results", "message"),
    [
        ("a, b -> a b", [(2,)], [(2, 2)], "rule 'a, b -> a b' has 2 operands, the op has 1"),
        ("a b -> a b", [(2,)], [(2,)], "does not fit a tensor of shape (2,)\n  it describes the dims 'a b'"),
        ("a, a -> a", [(2,), (3,)], [(3,)], "factor 'a' has size 2 in one dim and 3 in another"),
        ("*x, *x -> *x", [(2,), (2, 2)], [(2,)], "does not fit a tensor of shape (2, 2)"),
        ("(a b) -> (b a)", [(6,)], [(6,)], "the shapes do not determine the size of factor 'a'"),
        ("(a b) -> a b; a: whole", [(6,)], [(2, 4)], "a dim of size 6 cannot be the product (a b), of 8"),
    ],
)
def test_what_does_not_fit(
    text: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ShardingError) as caught:
        parse(text).bind(operands, results)
    assert message in str(caught.value)
