"""Strategies of small rules, counted and spelled out by hand."""

from cost_model.mesh import MeshSpec
from passes.rules.core.rule import OpRule
from passes.strategies.cuts import Cuts
from passes.strategies.strategies import enumerate_strategies

MM = OpRule(
    operands=((("m",), ("k",)), (("k",), ("n",))),
    results=((("m",), ("n",)),),
    sizes={"m": 8, "k": 6, "n": 4},
    reductions={"k": "sum"},
    linear=(frozenset({0}), frozenset({1})),
)


def _texts(
    rule: OpRule, operands: list[tuple[int, ...]], result: tuple[int, ...], mesh: MeshSpec
) -> list[str]:
    return [
        " ".join(str(layout) for layout in (*s.operands, *s.results))
        for s in enumerate_strategies(rule, operands, [result], mesh)
    ]


def test_matrix_product_on_one_axis() -> None:
    assert _texts(MM, [(8, 6), (6, 4)], (8, 4), MeshSpec({"tp": 2})) == [
        "[-, -] [-, -] [-, -]",
        "[@tp, -] [-, -] [@tp, -]",
        "[-, -] [-, @tp] [-, @tp]",
        "[-, @tp] [@tp, -] [-, -]+tp:sum",
        "[-, -]+tp:sum [-, -] [-, -]+tp:sum",
        "[-, -] [-, -]+tp:sum [-, -]+tp:sum",
    ]


def test_two_axes_are_the_product() -> None:
    assert len(_texts(MM, [(8, 6), (6, 4)], (8, 4), MeshSpec({"dp": 2, "tp": 2}))) == 36


def test_an_axis_of_one_device_changes_nothing() -> None:
    assert len(_texts(MM, [(8, 6), (6, 4)], (8, 4), MeshSpec({"dp": 1}))) == 1


FLATTEN = OpRule(
    operands=((("h",), ("d",)),), results=((("h", "d"),),), sizes={"h": 4, "d": 16}, linear=(frozenset({0}),)
)


def test_a_product_is_split_by_its_first_factor_in_whole_units() -> None:
    strategies = enumerate_strategies(FLATTEN, [(4, 16)], [(64,)], MeshSpec({"tp": 3}))
    split = [s for s in strategies if s.splits]
    assert len(split) == 1, "the minor factor's shards are not contiguous"
    assert split[0].operands[0].split_sizes((4, 16), MeshSpec({"tp": 3}), 0) == (2, 2, 0)
    assert split[0].results[0].sizes == ((32, 32, 0),)


def test_needed_units_are_offered() -> None:
    whole = OpRule((), ((("n",),),), {"n": 64})
    sizes = {
        s.results[0].split_sizes((64,), MeshSpec({"tp": 3}), 0)
        for s in enumerate_strategies(
            whole, [], [(64,)], MeshSpec({"tp": 3}), cuts=Cuts(units={64: frozenset({16})})
        )
        if s.splits
    }
    assert sizes == {(22, 22, 20), (32, 32, 0)}


def test_any_order_adds_the_other_nesting() -> None:
    rule = OpRule((), ((("n",),),), {"n": 8})
    mesh = MeshSpec({"dp": 2, "tp": 2})
    orders = {
        s.results[0].dims[0] for s in enumerate_strategies(rule, [], [(8,)], mesh, any_order=True) if s.splits
    }
    assert orders == {("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")}


def test_joined_axes_do_what_one_axis_does() -> None:
    one = _texts(MM, [(8, 6), (6, 4)], (8, 4), MeshSpec({"x": 4}))
    mesh = MeshSpec({"a": 2, "b": 2})
    joined = enumerate_strategies(MM, [(8, 6), (6, 4)], [(8, 4)], mesh, joined=(("a", "b"),))
    assert [" ".join(str(layout) for layout in (*s.operands, *s.results)) for s in joined] == [
        text.replace("+x:sum", "+a:sum+b:sum").replace("@x", "@a@b") for text in one
    ]
    third = MeshSpec({"a": 2, "b": 2, "c": 2})
    two = enumerate_strategies(MM, [(8, 6), (6, 4)], [(8, 4)], third, joined=(("a", "b"),), any_order=True)
    orders = {s.results[0].dims[0] for s in two}
    assert orders == {(), ("c",), ("a", "b"), ("a", "b", "c"), ("c", "a", "b")}
