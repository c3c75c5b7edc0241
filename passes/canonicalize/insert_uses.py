"""The last passes of the pipeline: causal masks are marked, and readers of a value share one use of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import passes.ops.attention_op  # pyright: ignore[reportUnusedImport]  (registers autoshard::attention)
import passes.ops.registration  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::use)
from passes.canonicalize.attention_operands import documents_of, is_constant, is_same_in_order
from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING
from passes.canonicalize.permutes import PRODUCTS_ARE_CONTRACTS
from passes.ir.graph_pass import GraphPass, erase_dead, tensor_at
from passes.ir.graph_properties import NO_DEAD_CODE, NO_USES, Property, described
from passes.ir.joint import JointGraph, ancestors, node_value, tensor_operands
from passes.ir.op_traits import is_pointwise, is_use, when_read
from passes.ir.torch_sizes import SizesLost, computed, counts_as, sizes_in, with_sizes
from passes.ops.routed_ops import READ_ROWS
from passes.rules.core.rule_registry import rule_for

aten = torch.ops.aten

_MASKS = {
    torch.ops.autoshard.attention.default: 3,
    torch.ops.autoshard.attention_backward.default: 4,
}
"""Attention -> the position of its mask. Behind it come, at the end, is_causal and scale."""

_LARGEST, _LARGEST_WHOLE = 2**22, 2**25
"""Elements of a tensor that is computed here at once; of a larger one a block of queries after the other is, where it
is pointwise. What finds packed sequences by their positions is not, and has a number for each token of the batch."""


class MarkCausalMasks(GraphPass):
    """Say of an attention that it is causal, or causal within a window, in place of a mask that is computed from
    constants and says just that.

        %m: b8[1, 1, 64, 64] = aten.le(%key_positions, %query_positions)    // of two aranges
        %o = autoshard.attention(%q, %k, %v, %m, False, 0.125)
        ->
        %o = autoshard.attention(%q, %k, %v, None, True, 0.125)             // with 9 as the last argument where query i
                                                                            // sees no key before i - 8

    Kernels that know what is hidden have fewer products, and nothing is left of the mask.

    Of a mask that says of which document queries and keys are, the numbers of documents are left
    (`passes.canonicalize.attention_operands`).
    """

    requires = (ONE_SPELLING,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        found: dict[fx.Node, tuple[Any, ...] | None] = {}
        for node in list(joint.graph.nodes):
            mask = _mask_of(node)
            if mask is not None:
                if mask not in found:
                    found[mask] = _said_by(joint.graph, mask, node)
                said = found[mask]
                if said is not None:
                    *operands, _, scale = (None if arg is mask else arg for arg in node.args)
                    causal, *more = said
                    node.args = (*operands, causal, scale, *more)
        if any(said is not None for said in found.values()):
            erase_dead(joint.graph)
        return joint


def _said_by(graph: fx.Graph, mask: fx.Node, reader: fx.Node) -> tuple[Any, ...] | None:
    """What attention is told instead of the mask, but for the scale: whether it is causal, and what comes last."""
    window = _window_of(graph, mask)
    if window is not None:
        return (True, window) if window else (True,)
    documents = documents_of(graph, mask, _window_of)
    return None if documents is None else (documents.is_causal, 0, *documents.numbers(reader))


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Of an attention of which only the mask says which keys are seen."""
    position = _MASKS.get(node.target)  # type: ignore[arg-type]
    if position is None or node.kwargs or node.args[-2] is True:
        return None
    mask = node.args[position]
    return mask if isinstance(mask, fx.Node) else None


def _window_of(graph: fx.Graph, mask: fx.Node) -> int | None:
    """How many keys up to its own each query sees, 0 for all of them; None if `mask` says anything else, or is not
    computed from constants.

    With sizes in symbols this is asked at smaller or larger ones: where a mask is a part of that of larger sizes, a
    causal one, or one of a window, is so at all smaller sizes too, and another one at no larger sizes. How far that was
    seen is noted.
    """
    made = ancestors([mask])
    if min(mask.meta["val"].shape[-2:]) < 2 or not all(map(is_constant, made)):
        return None
    ordered = [node for node in graph.nodes if node in made]
    sizes = sizes_in([(node.args, tuple(node_value(node).shape)) for node in ordered])
    counted = [(size, counts_as(size)) for size in sizes]
    if not sizes:
        return _window_at(ordered, mask, ())
    if not all(map(_is_part_of_larger, ordered)):
        if _window_at(ordered, mask, counted) is None:
            return None  # a mask that is read is right at all sizes
        raise SizesLost("whether a mask is the causal one depends on sizes")
    long = sizes_in([node.args for node in ordered if node.target is aten.arange.start_step])

    def window_at(scaled: Callable[[int], int]) -> int | None:
        return _window_at(ordered, mask, [(size, scaled(n) if size in long else 2) for size, n in counted])

    window = window_at(int)
    steps: list[Callable[[int], int]]
    if window is not None:
        steps = [lambda n: max(2 * n, 1024), lambda n: max(n, 128), lambda n: max(n, 16)]
        most = next((step for step in steps if window_at(step) == window), int)
        return window if all(window < size <= most(counts_as(size)) for size in long) else None
    steps = [lambda n: 2, lambda n: min(n, 16), lambda n: min(n, 128), lambda n: min(n, 1024)]
    least = next((step for step in steps if window_at(step) is None), int)
    return None if all(size >= least(counts_as(size)) for size in long) else 0


def _is_part_of_larger(node: fx.Node) -> bool:
    """Whether elements of the node's value are those at the same places of what it is at larger sizes."""
    if node.target is aten.arange.start_step:
        start, end, step = node.args
        ends = sizes_in([end])
        return not sizes_in([start, step, *(end - size for size in ends)]) and len(ends) < 2
    if node.target is aten.reshape.default:
        return is_same_in_order(node, tensor_at(node))
    if node.target in (aten.permute.default, aten.expand.default):
        return True
    creates = node.target is aten.full.default
    return (creates or is_pointwise(node) or is_use(node)) and not sizes_in(
        [node.args[creates:], node.kwargs]
    )


def _window_at(ordered: Sequence[fx.Node], mask: fx.Node, sizes: Sequence[tuple[Any, int]]) -> int | None:
    """`_window_of` at these sizes. ordered: what `mask` is computed by."""
    shapes = {node: with_sizes(tuple(node_value(node).shape), sizes) for node in ordered}
    queries, keys = shapes[mask][-2:]
    counts = {node: math.prod(shapes[node]) for node in ordered}
    whole = max((counts[node] for node in ordered if not is_pointwise(node) and not is_use(node)), default=0)
    if whole > _LARGEST_WHOLE:
        return None
    large = [node for node in ordered if counts[node] > max(_LARGEST, whole)]
    with torch.no_grad():
        small = computed([node for node in ordered if node not in large], {}, sizes)
        step = max(1, _LARGEST // (4 * keys)) if large else queries  # what fits in a processor's cache
        read = {operand for node in large for operand in node.all_input_nodes if operand not in large}
        alike = {node: _of_one_sample(small[node]) for node in read}
        if any(value is None for value in alike.values()):
            return None
        ends, seen = [], []
        for begin in range(0, queries, step):
            count = min(step, queries - begin)
            block = _block(large, alike, queries, begin, count)[mask] if large else small[mask]
            ends.append(min(begin + count, keys))
            seen.append(_keys_seen(block, begin))
            if not seen[-1]:
                return None
    if seen != [min(end, seen[-1]) for end in ends]:
        return None
    if seen[-1] == ends[-1]:
        return 0
    return seen[-1] if queries == keys else None


def _of_one_sample(value: Tensor) -> Tensor | None:
    """[..., s, t] -> [s, t] or fewer dims, if it is the same for all samples and heads."""
    while value.ndim > 2:
        if not value.equal(value[:1].expand_as(value)):
            return None
        value = value[0]
    return value


def _block(
    nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any], queries: int, begin: int, count: int
) -> dict[fx.Node, Any]:
    """The values of pointwise `nodes` for `count` queries from `begin` on. values: of what they read."""
    cut = lambda x: x.narrow(-2, begin, count) if x.ndim == 2 and x.shape[0] == queries else x
    return computed(nodes, {node: cut(value) for node, value in values.items()})


def _keys_seen(mask: Tensor, first: int) -> int:
    """How many keys up to its own every query sees by `mask` [..., queries, keys], of queries from `first` on; before
    the first key there is none. 0 if it says anything else."""
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min
        if bool(((mask != 0) & ~hidden).any()):
            return 0
        mask = ~hidden
    count, last = int(mask.flatten(0, -2)[-1].sum()), min(first + mask.shape[-2], mask.shape[-1])
    seen = torch.ones(mask.shape[-2:], dtype=torch.bool).tril(first)
    seen = seen if count == last else seen.triu(first - count + 1)
    return count if mask.equal(seen.expand_as(mask)) else 0


def _unshared(joint: JointGraph) -> str | None:
    for node in joint.graph.nodes:
        if not _is_value(node) or node.target is torch.ops.autoshard.use.default:
            continue
        for phase in ("forward", "backward"):
            readers = [user for user in node.users if user.meta.get("phase") == phase and user.op != "output"]
            if len(readers) > 1:
                return f"{described(node)}: read in the {phase} by {readers}"
    return None


READERS_SHARE = Property("the readers of a value in one phase read one use of it", _unshared)


class InsertUses(GraphPass):
    """Put one `use` between a value and its readers of a phase, where there are two or more.

        %q: f32[8, 16] = contract(%x, %wq, ...)
        %k: f32[8, 16] = contract(%x, %wk, ...)
        ->
        %u: f32[8, 8]  = use(%x)
        %q: f32[8, 16] = contract(%u, %wq, ...)
        %k: f32[8, 16] = contract(%u, %wk, ...)

    A `use` is the identity: the layout that one phase's readers share. Without it, a value gathered
    for three readers would be priced as three gathers, though it runs as one. A reader that wants
    another layout still redistributes from the use's. The returned tuple is not a reader, and a
    constant (`full`) needs no use: every reader can have it in any layout for nothing.

    What the forward reads through a window the backward often reads through the same (a convolution's input, for
    the weight's gradient). Both then share the forward's use: a halo is kept, and not exchanged again. So it is with
    rows of experts and their ids: where rows were sent, they are kept.

    Last of the pipeline: no other pass looks through a `use`.
    """

    requires = (PRODUCTS_ARE_CONTRACTS, NO_DUPLICATES, NO_DEAD_CODE, NO_USES)
    ensures = (READERS_SHARE,)
    breaks = (NO_DUPLICATES, NO_USES)

    def __call__(self, joint: JointGraph) -> JointGraph:
        order = {node: position for position, node in enumerate(joint.graph.nodes)}
        for node in list(order):
            if _is_value(node):
                _insert(node, order)
        return joint


def _is_value(node: fx.Node) -> bool:
    if node.op not in ("placeholder", "call_function") or node.target is torch.ops.aten.full.default:
        return False
    return isinstance(node.meta["val"], torch.Tensor)


def _insert(node: fx.Node, order: dict[fx.Node, int]) -> None:
    readers = sorted((user for user in node.users if user.op == "call_function"), key=order.__getitem__)
    forward = [reader for reader in readers if reader.meta["phase"] == "forward"]
    backward = [reader for reader in readers if reader.meta["phase"] == "backward"]
    kept: list[fx.Node] = []
    if forward and backward and any(_in_parts(reader, node) for reader in forward):
        kept = [reader for reader in backward if _in_parts(reader, node)]
    for phase, group in (
        ("forward", sorted([*forward, *kept], key=order.__getitem__)),
        ("backward", [reader for reader in backward if reader not in kept]),
    ):
        if len(group) >= 2:
            _share(node, phase, group)


def _share(node: fx.Node, phase: str, group: Sequence[fx.Node]) -> None:
    with node.graph.inserting_before(group[0]):
        use = node.graph.call_function(torch.ops.autoshard.use.default, (node,))
    origin = group[0] if node.op == "placeholder" else node
    use.meta = {"val": node.meta["val"], "phase": phase}
    use.meta.update({key: origin.meta[key] for key in ("module", "source") if key in origin.meta})
    use.meta.update(when_read(node, group))
    for reader in group:
        reader.replace_input_with(node, use)


def _in_parts(reader: fx.Node, node: fx.Node) -> bool:
    """Whether `reader` sees `node` through a window, or as rows or ids of experts."""
    operands = tensor_operands(reader)
    rows = READ_ROWS.get(reader.target)
    if rows is not None and node in (*operands[:rows], operands[-1]):
        return True
    return any(operands[t] is node for t, _ in rule_for(reader).windows if t < len(operands))
