"""Which of an op's tensors go through memory where torch runs a model neither compiled nor taken apart."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from passes.ir.joint import first_value, tensor_operands
from passes.ir.op_traits import fuses, is_product, is_reduction, is_view, storage_root
from passes.ir.op_work import reads_values
from passes.strategies.traffic import OpTraffic


def uncompiled_traffic(node: fx.Node) -> OpTraffic:
    """The model as torch runs it, neither compiled nor taken apart: what capture makes of one line of one module, in
    one phase, is one of torch's own kernels (a norm, a softmax, a loss). It reads what comes from elsewhere once
    and stores what is read elsewhere; products and all else that does not fuse read and store everything, but that a
    bias is added within its product.

    For predictions of runs of others: a model written so that each line is one call.
    """
    if is_view(node):
        return OpTraffic((False,) * len(tensor_operands(node)), writes=False)
    line = _line(node)
    reads = tuple(
        read and (line is None or (_line(storage_root(operand)) != line and _reads_first(node, operand)))
        for operand, read in zip(tensor_operands(node), reads_values(node), strict=True)
    )
    return OpTraffic(reads, writes=line is None or any(_line(user) != line for user in _readers(node)))


def _line(node: fx.Node) -> tuple[object, ...] | None:
    """What nodes of one kernel of torch have in common; None: the node is a kernel of its own."""
    if not (fuses(node) or is_reduction(node) or _has_bias(node)):
        return None
    line = _place(node)
    return line if line[-1] else None


def _place(node: fx.Node) -> tuple[object, ...]:
    return tuple(node.meta.get(key) for key in ("phase", "module", "source"))


def _has_bias(node: fx.Node) -> bool:
    """Whether a bias is added to a product where it is called, and nothing else reads it."""
    if not is_product(node):
        return False
    readers = list(_readers(node))
    return (
        len(readers) == 1
        and readers[0].target is torch.ops.aten.add.Tensor
        and _place(readers[0]) == _place(node)
        and any(first_value(operand).ndim == 1 for operand in tensor_operands(readers[0]))
    )


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads the value, directly or through views."""
    for user in node.users:
        yield from _readers(user) if is_view(user) else (user,)


def _reads_first(node: fx.Node, operand: fx.Node) -> bool:
    """Whether `node`, among the nodes of one line that read a value, is the one for which it is counted."""
    line = _line(node)
    return next(reader for reader in _readers(storage_root(operand)) if _line(reader) == line) is node
