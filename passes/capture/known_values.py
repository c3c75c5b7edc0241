"""Values in a run on fake tensors that follow from the call's own tensors, what they are if all are finite, and which
are computed alike."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from passes.ir.joint import CPU, ancestors, node_value, tensor_operands
from passes.ir.op_traits import draws, is_product, is_view
from passes.ir.torch_sizes import computed
from passes.ir.torch_tracing import fake_of, tracing_suspended

aten = torch.ops.aten
_COUNTS = (aten.any.default, aten.sum.default, aten.count_nonzero.default)
_CHOICES = {aten.where.self: 0, aten.masked_fill.Scalar: 1, aten.masked_fill.Tensor: 1}
"""By a mask, which argument that is."""
_ALIKE: dict[Any, Any] = {
    aten._is_all_true.default: aten.all.default,
    aten._is_any_true.default: aten.any.default,
}
"""Ops by which torch's own code asks what a script asks by others."""
_COPIES = (aten._to_copy.default, aten.clone.default)
_TESTS = (aten.isinf.default, aten.isnan.default)
_FACTORED = (
    aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default, aten.linalg_lu_factor_ex.default,
    aten.linalg_ldl_factor_ex.default, aten._linalg_solve_ex.default,
)  # fmt: skip
"""Their last result is not 0 where a matrix is singular, or not positive definite."""
_SAME: dict[Any, bool] = {aten.eq.Tensor: True, aten.ne.Tensor: False}
_OTHER: dict[Any, bool] = {aten.eq.Scalar: False, aten.ne.Scalar: True}


@dataclass(frozen=True)
class Known:
    """value: None: not known. is_plain: whether it is made of the call's inputs, of parameters and buffers without a
    product, so that it is known wherever those have values. is_finite: it is known as long as numbers are finite."""

    value: Tensor | None = None
    is_plain: bool = False
    is_finite: bool = False


class History:
    """What ops made of the fakes of a call's tensors, as a graph: `note` is told of each op, and of one that calls
    others last. Nothing is known of what is written to, or comes from elsewhere."""

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._nodes: dict[int, tuple[Any, fx.Node]] = {}
        self._real: dict[fx.Node, Tensor | None] = {}
        self._numbers: dict[fx.Node, str] = {}
        self._table: dict[tuple[Any, str], str] = {}

    def begin(self, fakes: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """given: the tensors of which these are fakes."""
        for fake, real in zip(fakes, given, strict=True):
            self._real[self._noted(self._graph.placeholder("given"), fake)] = _here(real)

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._noted(self._graph.placeholder("written"), leaf)
            return
        given: Any = pytree.tree_map_only(Tensor, self._node, (args, kwargs))
        node = self._noted(self._graph.call_function(_ALIKE.get(func, func), *given), result)
        for index, part in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if isinstance(part, Tensor):
                self._noted(self._graph.call_function(operator.getitem, (node, index)), part)

    def _noted(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta |= {"val": value, "place": len(self._graph.nodes)}
        self._nodes[id(value)] = value, node
        return node

    def _node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:  # a constant of the forward, or made by what is not seen
            node = self._noted(self._graph.placeholder("found"), tensor)
            if type(tensor) in (Tensor, nn.Parameter):
                self._real[node] = _here(tensor)
        return self._nodes[id(tensor)][1]

    def known(self, tensor: Tensor) -> Known:
        node = self._node(fake_of(tensor))
        with tracing_suspended(), torch.no_grad():
            return _known(node, self._real)

    def filled(self, tensor: Tensor) -> Tensor | None:
        """What a truth is as long as the mask that it asks about has any value that is true; None: it asks of more."""
        with tracing_suspended():
            asked = _of_a_mask(self._node(fake_of(tensor)))
        return None if asked is None else asked[0]

    def chooses(self, tensor: Tensor) -> bool:
        """Whether the mask that it so asks about has chosen values: then there is nothing to do where none is true."""
        with tracing_suspended():
            asked = _of_a_mask(self._node(fake_of(tensor)))
        chosen = {
            self._number(_source(node.args[place]))  # type: ignore[arg-type]
            for target, place in _CHOICES.items()
            for node in self._graph.find_nodes(op="call_function", target=target)
        }
        return asked is not None and self._number(asked[1]) in chosen

    def number(self, tensor: Tensor) -> str:
        """The same for values that are computed alike."""
        return self._number(self._node(fake_of(tensor)))

    def _number(self, asked: fx.Node) -> str:
        for node in sorted(ancestors([asked]) - self._numbers.keys(), key=_place):
            arguments = repr(fx.map_arg((node.args, node.kwargs), lambda operand: self._numbers[operand]))
            alone = node.op != "call_function" or draws(node)
            key = node if alone else node.target, arguments
            self._numbers[node] = self._table.setdefault(key, f"%{len(self._table)}")
        return self._numbers[asked]


def _place(node: fx.Node) -> int:
    return node.meta["place"]


def _here(tensor: Tensor) -> Tensor | None:
    """Shards are parts of a value."""
    if tensor.is_meta or type(tensor).__name__ == "DTensor":
        return None
    return tensor.detach().to(CPU)


def _known(result: fx.Node, real: dict[fx.Node, Tensor | None]) -> Known:
    ordered = sorted(ancestors([result]), key=_place)
    ops = [node for node in ordered if node.op == "call_function"]
    leaves = [node for node in ordered if node.op != "call_function"]
    if all(leaf in real for leaf in leaves) and not any(is_product(op) or draws(op) for op in ops):
        if any(real[leaf] is None for leaf in leaves):
            return Known(is_plain=True)
        return Known(computed(ordered, real)[result], is_plain=True)
    finite = _if_finite(result, ordered)
    return Known(finite, is_finite=finite is not None)


def _if_finite(result: fx.Node, ordered: Sequence[fx.Node]) -> Tensor | None:
    """A truth about tests of numbers for being finite, or of matrices; None if it is about anything else."""
    tests: dict[fx.Node, Any] = {}
    seen, waiting = set[fx.Node](), [result]
    while waiting:
        node = waiting.pop()
        seen.add(node)
        passed = _passes_test(node)
        if passed is not None:
            tests[node] = torch.full(node_value(node).shape, passed, dtype=node_value(node).dtype)
        elif node.op != "call_function" or node_value(node).dtype != torch.bool:
            return None
        else:
            waiting += tensor_operands(node)
    return computed((node for node in ordered if node in seen), tests)[result]


def _of_a_mask(result: fx.Node) -> tuple[Tensor, fx.Node] | None:
    """A truth about whether any value of one mask is true, and that mask: `mask.any()`, `mask.sum() > 0`, not so."""
    waiting, seen, masks = [result], set[fx.Node](), dict[fx.Node, fx.Node]()
    while waiting:
        node = waiting.pop()
        seen.add(node)
        operands = tensor_operands(node) if node.op == "call_function" else []
        mask = _source(operands[0]) if node.target in _COUNTS else None
        if mask is not None and node_value(mask).dtype == torch.bool:
            masks[node] = mask
        elif not operands or node_value(node).numel() != 1:
            return None
        else:
            waiting += operands
    if len(set(masks.values())) != 1:
        return None
    ordered = sorted(seen, key=_place)
    told = lambda count: {node: torch.full((), count).to(node_value(node).dtype) for node in masks}
    none, one, many = (computed(ordered, told(count))[result].reshape(()) != 0 for count in (0, 1, 2**20))
    return (one, next(iter(masks.values()))) if one == many != none else None


def _source(node: fx.Node) -> fx.Node:
    """Of which it is a view, or the same numbers."""
    while node.op == "call_function" and (is_view(node) or node.target in _COPIES):
        (node,) = tensor_operands(node)
    return node


def _tells_of_matrices(node: fx.Node) -> bool:
    factors = node.args[0] if node.target is operator.getitem else None
    if not isinstance(factors, fx.Node) or factors.target not in _FACTORED:
        return False
    return bool(node.args[1] == len(factors.meta["val"]) - 1)


def _passes_test(node: fx.Node) -> bool | None:
    """What a test of each number for being finite says of finite ones: `isinf`, `x != x`, `abs(x) == inf`; and of sound
    matrices their factors."""
    if node.target in _TESTS or _tells_of_matrices(node):
        return False
    if node.target in _SAME and node.args[0] is node.args[1]:
        return _SAME[node.target]
    number = node.args[1] if node.target in _OTHER else None
    if isinstance(number, float) and math.isinf(number):
        return _OTHER[node.target]
    return None
