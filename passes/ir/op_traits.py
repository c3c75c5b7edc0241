"""What an op is: one kind each; and the arguments that it takes, by name. Prices, saving, ordering, events and
verification all read it here.

    kind         its result                                        in a compiled graph
    view         its operand's storage, looked at otherwise        moves no bytes
    pointwise    of one element of each operand                    computed in its readers' loops
    creation     of no operand's elements                          computed in its readers' loops
    indexing     of elements at other places of its operands       computed in its readers' loops
    reduction    sums and extrema                                  reads its producers' loops, stores its result
    product      products, attention, ops of the user's library    a kernel of its own, long enough to hide a transfer
    collective   functional collectives and their waits            a transfer
    opaque       all else: sorts, scans, scatters, pooling         a kernel of its own

Compiled: as Inductor lowers it. The work that an op does is in `passes.ir.op_work`.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import fx

from passes.ir.joint import looks, node_values, repeats, result_index, tensor_operands
from passes.ir.torch_sizes import counts_as


@dataclass(frozen=True)
class SchemaArgument:
    """One argument of an op's schema."""

    name: str
    default: Any


@cache
def schema_arguments(op: Any) -> tuple[SchemaArgument, ...]:
    """Arguments of an OpOverload in order; () for a target without a schema. `_schema` since torch 1.9."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        SchemaArgument(a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments
    )


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the op's schema; defaults where they are not given."""
    given = zip((argument.name for argument in schema_arguments(op)), args, strict=False)
    return {**{a.name: a.default for a in schema_arguments(op)}, **kwargs, **dict(given)}


def slice_ends(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Where `x[start:end]` begins and ends in a dim of `size`, which may be a symbol as they may."""

    def within(at: int) -> int:
        return min(at, size) if at >= 0 else max(at + size, 0)

    low = 0 if start is None else within(start)
    return low, size if end is None or end == sys.maxsize else max(within(end), low)


def written_arguments(key: str) -> tuple[str, ...]:
    """Arguments that "namespace::op.overload" writes to; of "namespace::op" those that every overload writes to.

    () for an op that does not exist yet. `is_write` since torch 1.9.
    """
    namespace, _, rest = key.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    names = [] if packet is None else packet.overloads()
    ops = [getattr(packet, n) for n in names if overload in ("", n)]
    written = [[a.name for a in op._schema.arguments if a.is_write] for op in ops]
    return tuple(written[0]) if written and all(written) else ()


def op_signature(node: fx.Node) -> Hashable:
    """Equal for two ops if all that a rule's builder and the prices read is: the op, every tensor operand and result in
    shape and dtype, and every other argument in type, value and place. Names, strides and readers do not count.
    """
    return node.target, node.meta.get("rows"), looks((node.args, node.kwargs, node_values(node)), _shape)


def _shape(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.dtype


OpKind = Literal["view", "pointwise", "creation", "indexing", "reduction", "product", "collective", "opaque"]


def _names(namespace: str, names: str) -> frozenset[str]:
    return frozenset(f"{namespace}.{name}" for name in names.split())


# Views whose schema does not say so. `use` is dropped by lowering; `either` is in graphs that are searched only; a
# `piece` is where a program is given a part of a tensor.
_VIEWS = frozenset({"aten._unsafe_view", "autoshard.use", "autoshard.either", "autoshard.piece"})
_CREATIONS = (
    _names(
        "aten",
        """full full_like zeros zeros_like ones ones_like empty empty_like new_zeros new_ones new_full new_empty
        arange scalar_tensor""",
    )
    | _names("prims", "iota")
    | _names("autoshard", "uniform")
)
# Pointwise by what they compute, though torch does not tag every overload of them so.
_POINTWISE = _names(
    "aten",
    """_to_copy copy lift_fresh_copy fill masked_fill where rsub floor_divide hardswish elu_backward
    leaky_relu_backward hardswish_backward hardsigmoid_backward hardtanh_backward softplus_backward mish_backward
    hardshrink_backward softshrink_backward""",
) | _names("autoshard", "own_rows")
# `embedding` is none of them: torch's partitioner saves what was looked up in a table and does not look again.
_INDEXING = _names(
    "aten", "cat constant_pad_nd flip roll gather index _unsafe_index index_select tril triu repeat"
) | _names("autoshard", "circular_pad")
_REDUCTIONS = _names(
    "aten",
    "sum mean prod amax amin max min any all argmax argmin var std var_mean logsumexp linalg_vector_norm",
) | _names("autoshard", "sum_rows")
_PRODUCTS = _names(
    "aten", "mm bmm addmm baddbmm mv dot _scaled_mm _int_mm convolution convolution_backward"
) | _names(
    "autoshard",
    """contract routed_mm routed_outer grouped_mm attention attention_backward neighborhood_attention
    neighborhood_attention_backward""",
)
_COLLECTIVES = ("_c10d_functional.", "autoshard_c10d_functional.", "autoshard_rows_c10d_functional.")
# The first of these namespaces are torch's and ours; "<" begins the name of a function of Python's.
_KNOWN = ("aten.", "prims.", "autoshard", "<")

# A reduction is computed again only if it reads at most this many times what it writes, as in torch.compile's
# partitioner: beyond that, saving the small result beats reading the large operand again.


def op_kind(node: fx.Node) -> OpKind | None:
    """The kind of an op of the graph; None of a placeholder or the output."""
    if node.op != "call_function":
        return None
    found = _SAID.get(id(node.target))
    return _said(node.target)[1] if found is None else found[1]


def op_name(node: fx.Node) -> str:
    """ "aten.add.Tensor"; "" of a placeholder or the output."""
    return _said(node.target)[2] if node.op == "call_function" else ""


def _said(target: Any) -> tuple[Any, OpKind, str]:
    """An op, its kind and its name. Planning asks millions of times: torch hashes and prints an op slowly."""
    found = _SAID.get(id(target))
    if found is None:
        name = str(target)
        found = _SAID[id(target)] = target, _kind_of(target, name), name
    return found


_SAID: dict[int, tuple[Any, OpKind, str]] = {}
"""By the id of an op, which it keeps."""


def _kind_of(target: Any, full: str) -> OpKind:
    name = full.rpartition(".")[0]
    if target is operator.getitem or name in _VIEWS or getattr(target, "is_view", False):
        return "view"
    if full.startswith(_COLLECTIVES):
        return "collective"
    if name in _PRODUCTS or not full.startswith(_KNOWN):
        return "product"
    if name in _CREATIONS:
        return "creation"
    if name in _POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ()):
        return "pointwise"
    if name in _INDEXING:
        return "indexing"
    return "reduction" if name in _REDUCTIONS else "opaque"


def is_view(node: fx.Node) -> bool:
    """Ops that move no bytes: their result aliases their operand's storage, or is one of an op's results."""
    return op_kind(node) == "view"


READ_AS_BYTES = frozenset((torch.ops.aten.view_as_complex.default, torch.ops.aten.view.dtype))
"""Ops that read their operand's memory as elements of another type: it must lie in order, whatever its strides in a
canonical graph."""


def is_pointwise(node: fx.Node) -> bool:
    """One result, whose every element depends on one (broadcast) element of each operand."""
    return op_kind(node) == "pointwise" and isinstance(node.meta.get("val"), torch.Tensor)


def is_product(node: fx.Node) -> bool:
    """Ops that take long enough to hide a collective behind: products, attention, convolutions, and
    any op of a library of the user's."""
    return op_kind(node) == "product"


def is_reduction(node: fx.Node) -> bool:
    """Reductions read their producers' loops: sum(x * y) never stores the product."""
    return op_kind(node) == "reduction"


def is_collective(node: fx.Node) -> bool:
    """Functional collectives and their waits."""
    return op_kind(node) == "collective"


def fuses(node: fx.Node) -> bool:
    """Whether a compiler computes the node inside its readers' loops, never writing it to memory.

    True for pointwise, creation and indexing ops (Inductor's pointwise kernels), false for
    reductions, products and everything opaque.
    """
    return op_kind(node) in ("pointwise", "creation", "indexing")


def is_cheap(node: fx.Node) -> bool:
    """Whether the backward may run `node` again: local, and fused into its readers by a compiler.

    What fuses, views, and reductions of little input. Never collectives, products, attention, convolutions, sorts,
    scans or anything unknown.
    """
    if is_reduction(node):
        read = max((numel(n) for n in node.all_input_nodes), default=0)
        return read <= 4 * numel(node)
    return fuses(node) or is_view(node)


def is_use(node: fx.Node) -> bool:
    """`autoshard::use`: stands for all readers of its operand in one phase."""
    return node.target is torch.ops.autoshard.use.default


def is_either(node: fx.Node) -> bool:
    """`autoshard::either`: a value as it was kept, or as it was computed again (`passes.states.offers`)."""
    return op_name(node) == "autoshard.either.default"


def is_piece(node: fx.Node) -> bool:
    """`autoshard::piece`: the part of a tensor that one piece of a batch reads."""
    return op_name(node) == "autoshard.piece.default"


def is_collect(node: fx.Node) -> bool:
    """`autoshard::collect`: what one piece of a batch adds to the whole."""
    return op_name(node) == "autoshard.collect.default"


def read_repeats(node: fx.Node, operand: fx.Node) -> int:
    """How often in a step an operand is brought to an op, or to the end: what pieces of a batch are parts of, once."""
    if node.op == "output":
        return repeats(result_index(operand)[0]) if is_of_piece(operand) else 1
    return 1 if is_piece(node) else repeats(node)


def when_run(node: fx.Node) -> dict[str, object]:
    """The meta that says when an op runs, or what a stage of a pipeline is given; none if nothing is in pieces."""
    return {key: node.meta[key] for key in ("runs", "repeats") if key in node.meta}


def is_of_piece(node: fx.Node) -> bool:
    """Whether the value is made for each piece, and is not what the pieces leave together."""
    producer, _ = result_index(node)
    return producer.meta.get("runs") == "piece" and not is_collect(producer)


def when_read(node: fx.Node, group: Sequence[fx.Node]) -> dict[str, object]:
    """The meta that says when the readers of a value run, where a batch is run in pieces: what a piece reads through a
    `use` or makes is read in it, what it leaves behind after it."""
    if not any("runs" in reader.meta for reader in group):
        return {}
    if node.op == "placeholder" and not is_of_piece(node):
        return {"runs": "before", "repeats": 1}
    if is_collect(node):
        return {"runs": "after", "repeats": 1}
    return when_run(group[0] if is_use(node) else node)


def is_cast(node: fx.Node) -> bool:
    """Copies in another dtype, or on another device."""
    return node.target is torch.ops.aten._to_copy.default


def draws(node: fx.Node) -> bool:
    """Whether an op takes numbers from the global generator: a permutation, a draw from a distribution."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags


_AT_PLACES = _names(
    "aten", "index_put _unsafe_index_put index_add scatter scatter_add scatter_reduce index_copy"
)


def writes_at_places(node: fx.Node) -> bool:
    """Whether an operand says at which places of the first the last is written."""
    return op_name(node).rpartition(".")[0] in _AT_PLACES


def is_zeros(node: fx.Node) -> bool:
    """A tensor of zeros that an op makes."""
    return node.target is torch.ops.aten.full.default and bool(node.args[1] == 0)


def reads_shape_only(node: fx.Node) -> bool:
    """Creations after the likeness of an operand: `zeros_like`, `new_full`. None of its elements is read."""
    if op_kind(node) != "creation":
        return False
    name = op_name(node)
    return "_like." in name or ".new_" in name


def is_whole_view(node: fx.Node) -> bool:
    """The result aliases the operand and has at least as many elements: saving it saves the operand."""
    if not is_view(node) or node.target is operator.getitem or "val" not in node.meta:
        return False
    return isinstance(node.meta["val"], torch.Tensor) and numel(node) >= numel(node.all_input_nodes[0])


def alias_chain(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, and while it is a view what it views: nodes that share storage if nothing is redistributed."""
    yield node
    while is_view(node):
        producer, _ = result_index(node)
        node = producer if producer is not node else tensor_operands(node)[0]
        yield node


def storage_root(node: fx.Node) -> fx.Node:
    """The node at the end of `alias_chain`: the owner of the storage."""
    while is_view(node):
        producer, _ = result_index(node)
        node = producer if producer is not node else node.all_input_nodes[0]
    return node


_ROUNDED = _names(
    "aten",
    """add sub mul div rsub reciprocal sqrt rsqrt exp exp2 expm1 log log1p log2 tanh sigmoid erf gelu gelu_backward
    silu silu_backward tanh_backward sigmoid_backward pow sin cos sum mean var var_mean std prod cumsum softmax _softmax
    _log_softmax _softmax_backward_data _log_softmax_backward_data logsumexp native_layer_norm native_group_norm
    native_batch_norm addcmul addcdiv lerp norm linalg_vector_norm _fft_r2c _fft_c2r _fft_c2c index_add scatter_add
    index_put embedding_dense_backward avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    upsample_bilinear2d grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
    _cdist_forward _cdist_backward _embedding_bag _embedding_bag_backward cholesky cholesky_inverse cholesky_solve
    triangular_solve geqrf ormqr linalg_cross linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex linalg_ldl_factor_ex
    linalg_lu linalg_lu_solve linalg_ldl_solve linalg_qr _linalg_svd _linalg_eigh linalg_eig _linalg_eigvals
    linalg_matrix_exp linalg_householder_product linalg_pinv linalg_solve_triangular""",
)


def rounds(node: fx.Node) -> bool:
    """Products and other ops that round. Others select, move or compare: their results stay equal to what they got."""
    return is_product(node) or op_name(node).rpartition(".")[0] in _ROUNDED


def numel(node: fx.Node) -> int:
    """How many values a node holds, as sizes in symbols count: for choices."""
    value = node.meta.get("val")
    values: Sequence[object] = value if isinstance(value, (tuple, list)) else (value,)
    return counts_as(sum(math.prod(v.shape) for v in values if isinstance(v, torch.Tensor)))


def neutral(op: str, dtype: torch.dtype) -> float | bool:
    """What leaves a reduction as it is: 0, or the least or greatest value of `dtype`."""
    if op == "sum":
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max
