"""Every property of joint graphs: a graph written by hand that is against it, and what is said of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from passes.canonicalize import PIPELINE
from passes.canonicalize.gradients import GRADIENTS_APART, SCATTERS_WRITTEN
from passes.canonicalize.insert_uses import READERS_SHARE
from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING
from passes.canonicalize.permutes import (
    ONE_RESHAPE,
    PERMUTES_ABSORBED,
    PERMUTES_FUSED,
    PRODUCTS_ARE_CONTRACTS,
)
from passes.canonicalize.random_to_uniform import NO_GENERATORS, PLAIN_CREATIONS
from passes.canonicalize.remove_noops import CONJUGATES_WRITTEN
from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import INVARIANTS, NO_DEAD_CODE, NO_USES, Property
from passes.ir.joint import GraphInput, GraphOutput, JointGraph
from tests.verification.written import Written

aten = torch.ops.aten
ops = torch.ops.autoshard
AT = ", up, model.py:7: "
ORDER, LINT, ENDS, FUNCTIONAL, META, PHASES = INVARIANTS


def one_op(target: Any, *args: Any, shape: tuple[int, ...] = (4, 4), **kwargs: Any) -> JointGraph:
    """Of one input, which is the op's first argument."""
    g = Written()
    return g.returning(g.call(target, g.input(*shape), *args, **kwargs))


def no_output() -> JointGraph:
    g = Written()
    joint = g.returning(g.input(4))
    joint.graph.erase_node(joint.output_node)
    return joint


def reader_first() -> JointGraph:
    g = Written()
    x = g.input(4)
    a = g.call(aten.relu.default, x)
    b = g.call(aten.exp.default, a)
    joint = g.returning(b)
    a.prepend(b)
    return joint


def placeholder_last() -> JointGraph:
    g = Written()
    a = g.call(aten.relu.default, g.input(4))
    g.input(4)
    return g.returning(a)


def method() -> JointGraph:
    g = Written()
    return g.returning(g.graph.create_node("call_method", "relu", (g.input(4),), name="relu"))


def same_name() -> JointGraph:
    g = Written()
    x = g.input(4)
    a, b = g.call(aten.relu.default, x), g.call(aten.exp.default, x)
    joint = g.returning(a, b)
    b._rename("relu_again")
    b.name = a.name
    return joint


def no_spec() -> JointGraph:
    return replace(one_op(aten.relu.default), inputs=())


def no_result() -> JointGraph:
    return replace(one_op(aten.relu.default), outputs=())


def seed_first() -> JointGraph:
    g = Written()
    g.input(dtype=torch.int64, kind="seed")
    return g.returning(g.call(aten.relu.default, g.input(4)))


def other_input() -> JointGraph:
    return replace(one_op(aten.relu.default), outputs=(GraphOutput("grad", "up.weight", 0),))


def without_source() -> JointGraph:
    joint = one_op(aten.relu.default)
    del next(n for n in joint.graph.nodes if n.op == "call_function").meta["source"]
    return joint


def too_early() -> JointGraph:
    g = Written()
    a = g.call(aten.relu.default, g.input(4), phase="backward")
    return g.returning(g.call(aten.exp.default, a))


def unread() -> JointGraph:
    g = Written()
    x = g.input(4)
    g.call(aten.exp.default, x)
    return g.returning(g.call(aten.relu.default, x))


def noted_view() -> JointGraph:
    g = Written()
    return g.returning(
        g.call(aten.view.default, g.call(aten._conj.default, g.input(4, dtype=torch.complex64)), [2, 2])
    )


def bit_of_a_view() -> JointGraph:
    """The conjugate itself has been written; a view of it has the bit still."""
    joint = noted_view()
    conjugate = next(n for n in joint.graph.nodes if n.op == "call_function")
    conjugate.target = aten.conj_physical.default
    conjugate.meta["val"] = conjugate.meta["val"].resolve_conj()
    return joint


def scatter() -> JointGraph:
    g = Written()
    zeros, index = g.input(4, 6), g.input(4, 1, dtype=torch.int64)
    return g.returning(g.call(aten.scatter.value, zeros, 1, index, -1.0))


def whole_convolution_backward() -> JointGraph:
    g = Written()
    dy, x, w = g.input(2, 4, 5), g.input(2, 3, 5), g.input(4, 3, 3)
    args = (None, [1], [1], [1], False, [0], 1, [True, True, False])
    both = g.call(aten.convolution_backward.default, dy, x, w, *args)
    return g.returning(g.call(operator.getitem, both, 0))


def twice() -> JointGraph:
    g = Written()
    x = g.input(4)
    return g.returning(g.call(aten.mul.Tensor, x, 2.0), g.call(aten.mul.Tensor, x, 2.0))


def views(first: Any, second: Any, argument: Any) -> Callable[[], JointGraph]:
    def build() -> JointGraph:
        g = Written()
        return g.returning(g.call(second, g.call(first, g.input(4, 4), argument), argument))

    return build


def contract_of_permute() -> JointGraph:
    g = Written()
    x, w = g.input(8, 4), g.input(6, 4)
    turned = g.call(aten.permute.default, w, [1, 0])
    return g.returning(g.call(ops.contract.default, x, turned, "m k, k n -> m n"))


def product() -> JointGraph:
    g = Written()
    return g.returning(g.call(aten.mm.default, g.input(8, 4), g.input(4, 6)))


def two_readers() -> JointGraph:
    g = Written()
    x = g.input(4)
    return g.returning(g.call(aten.relu.default, x), g.call(aten.exp.default, x))


def default_dtype() -> JointGraph:
    g = Written()
    return g.returning(g.call(aten.full.default, [4], 1.0))


CASES: list[tuple[Property[JointGraph], Callable[[], JointGraph], str]] = [
    (ORDER, no_output, "the graph has no output"),
    (
        ORDER,
        reader_first,
        f"%exp = aten.exp.default(%relu){AT}stands before its operand %relu, or that is of no graph",
    ),
    (ORDER, placeholder_last, "%x1 (placeholder): stands behind nodes of kind call_function"),
    (ORDER, method, "%relu (call_method): a node of kind call_method"),
    (LINT, same_name, "Node redefined name relu!"),
    (ENDS, no_spec, "1 placeholders for 0 inputs"),
    (ENDS, no_result, "1 values returned for 0 outputs"),
    (ENDS, seed_first, "%x0 (placeholder): the seed is not the last input"),
    (ENDS, other_input, "grad up.weight points at the input x0"),
    (
        FUNCTIONAL,
        lambda: one_op(aten.relu_.default),
        f"%relu_ = aten.relu_.default(%x0){AT}writes to an operand",
    ),
    (META, without_source, "%relu = aten.relu.default(%x0), up: has no meta source"),
    (
        META,
        lambda: one_op(aten.relu.default, phase="sideways"),
        f"%relu = aten.relu.default(%x0){AT}is in the phase 'sideways'",
    ),
    (PHASES, too_early, f"%exp = aten.exp.default(%relu){AT}reads %relu, of the backward"),
    (NO_DEAD_CODE, unread, f"%exp = aten.exp.default(%x0){AT}nothing reads it"),
    (NO_USES, lambda: one_op(ops.use.default), f"%use = autoshard.use.default(%x0){AT}a use"),
    (CONJUGATES_WRITTEN, noted_view, f"%_conj = aten._conj.default(%x0){AT}a conjugate that is only noted"),
    (
        CONJUGATES_WRITTEN,
        bit_of_a_view,
        f"%view = aten.view.default(%_conj){AT}a conjugate that is only noted",
    ),
    (
        ONE_SPELLING,
        lambda: one_op(aten.view.default, [16]),
        f"%view = aten.view.default(%x0){AT}with ([16],) {{}} where aten.reshape.default has ([16],) {{}}",
    ),
    (
        ONE_SPELLING,
        lambda: one_op(aten.sum.dim_IntList, [-1]),
        f"%sum_1 = aten.sum.dim_IntList(%x0){AT}with ([-1],) {{}} where aten.sum.dim_IntList has ([1], False) {{}}",
    ),
    (
        PLAIN_CREATIONS,
        lambda: one_op(aten.zeros_like.default),
        f"%zeros_like = aten.zeros_like.default(%x0){AT}a constant or a range in other words",
    ),
    (PLAIN_CREATIONS, default_dtype, f"%full = aten.full.default(){AT}leaves dtype or device to a default"),
    (
        NO_GENERATORS,
        lambda: one_op(aten.rand_like.default),
        f"%rand_like = aten.rand_like.default(%x0){AT}draws from a generator",
    ),
    (SCATTERS_WRITTEN, scatter, f"%scatter = aten.scatter.value(%x0, %x1){AT}is one"),
    (
        GRADIENTS_APART,
        whole_convolution_backward,
        f"%convolution_backward = aten.convolution_backward.default(%x0, %x1, %x2){AT}computes both",
    ),
    (NO_DUPLICATES, twice, f"%mul_1 = aten.mul.Tensor(%x0){AT}computes what %mul does"),
    (PRODUCTS_ARE_CONTRACTS, product, f"%mm = aten.mm.default(%x0, %x1){AT}is one"),
    (
        PERMUTES_FUSED,
        views(aten.permute.default, aten.permute.default, [1, 0]),
        f"%permute_1 = aten.permute.default(%permute){AT}reads %permute, a permute",
    ),
    (
        ONE_RESHAPE,
        views(aten.reshape.default, aten.reshape.default, [2, 8]),
        f"%reshape_1 = aten.reshape.default(%reshape){AT}reads %reshape, a reshape",
    ),
    (
        PERMUTES_ABSORBED,
        contract_of_permute,
        f"%contract = autoshard.contract.default(%x0, %permute){AT}reads %permute, a permute",
    ),
    (READERS_SHARE, two_readers, "%x0 (placeholder): read in the forward by [relu, exp]"),
]


@pytest.mark.parametrize(("stated", "graph", "said"), CASES, ids=[case[0].name for case in CASES])
def test_a_violation_is_found_and_named(
    stated: Property[JointGraph], graph: Callable[[], JointGraph], said: str
) -> None:
    found = stated.violation(graph())
    assert found is not None and found.splitlines()[0] == said


def test_every_property_has_its_case() -> None:
    def stated(graph_pass: GraphPass) -> set[Property[Any]]:
        return {*graph_pass.requires, *graph_pass.ensures, *graph_pass.breaks}

    known = {*INVARIANTS, NO_USES}.union(*map(stated, PIPELINE))
    assert known == {case[0] for case in CASES}


def test_a_right_graph_is_against_none() -> None:
    """A seed at the end, a gradient that is None, and each phase reading what it may."""
    g = Written()
    x, w = g.input(4, 4), g.input(4, 4, kind="param")
    y = g.call(ops.contract.default, x, w, "m k, k n -> m n")
    g.inputs.append(GraphInput("seed", "seed"))
    with g.graph.inserting_after(w):
        seed = g.graph.placeholder("seed")
    seed.meta["val"] = x.meta["val"].new_empty((), dtype=torch.int64)
    back = g.call(ops.contract.default, y, x, "m k, m n -> k n", phase="backward")
    joint = g.returning(y, back, None)
    for stated in {case[0] for case in CASES}:
        assert stated.violation(joint) is None, stated.name
