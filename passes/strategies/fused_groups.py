"""Fused groups: an op that a compiler stores, with all that it computes in the same loop and stores nowhere.

The model prices each op of a group alone (`passes.strategies.pricing.fused_traffic`): memory traffic, and next to no
arithmetic. A group can be compiled and timed as one kernel, which is what a program runs. What groups that were timed
are told by is their form, the same in the global graph and in a rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from passes.ir.joint import tensor_operands
from passes.ir.op_traits import alias_chain, draws, fuses, is_reduction, is_view, op_kind, storage_root
from passes.strategies.kernel_keys import dtype_of, kernel_form, may_be_timed
from passes.strategies.pricing import OpTraffic, TrafficModel, fused_traffic, traffic_model

__all__ = ["FusedGroup", "fused_group", "grouped_traffic", "timed_traffic_model"]

MOST_OPS = 32
"""In one loop. Inductor stores what would take more. [torch._inductor.config.realize_opcount_threshold: 30]"""
_TURNING = ("aten.permute.", "aten.transpose.", "aten.t.")
"""Views by which a loop reads in another order, and whose arguments hold on every rank."""


@dataclass(frozen=True)
class FusedGroup:
    """ops: of one loop, each after what it reads, views between them included; the last is the one that is stored.
    operands: tensors that the loop reads, as its ops read them, each once."""

    ops: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]

    @property
    def inner(self) -> Iterator[fx.Node]:
        """The ops that are computed and stored nowhere."""
        return (node for node in self.ops[:-1] if not is_view(node))

    @property
    def form(self) -> str:
        """As `kernel_form` of an op alone: equal for groups that differ by sizes only."""
        words: dict[fx.Node, str] = {}
        written: list[str] = []
        for node in self.ops:
            root = storage_root(node)
            if is_view(node) and not str(node.target).startswith(_TURNING):
                words[node] = words[root]
                continue
            words[node] = f"%{len(written)}"
            written.append(_form(node, lambda n: words.get(n) or dtype_of(n)))
        return "; ".join(written)


def fused_group(node: fx.Node) -> FusedGroup | None:
    """The group whose last op `node` is, in a graph of either kind; None where it is none, or cannot be run by itself
    on invented values."""
    if not (fuses(node) or is_reduction(node)) or draws(node):
        return None
    ops: dict[fx.Node, None] = {}
    operands: dict[fx.Node, None] = {}
    few = _collect(node, ops, operands)
    if not (few and operands and all(_in_loop(n) or may_be_timed(n, fused=False) for n in ops)):
        return None
    return FusedGroup(tuple(ops), tuple(operands))


def grouped_traffic(node: fx.Node) -> OpTraffic:
    """As `fused_traffic`, with the form of the group of an op that is stored."""
    flow = fused_traffic(node)
    group = fused_group(node) if flow.writes else None
    return flow if group is None else replace(flow, group=group.form)


def timed_traffic_model(backend: str) -> TrafficModel:
    """`traffic_model`, for prices that know what was timed."""
    model = traffic_model(backend)
    return grouped_traffic if model is fused_traffic else model


def _collect(
    node: fx.Node, ops: dict[fx.Node, None], operands: dict[fx.Node, None], most: int = MOST_OPS
) -> bool:
    """Whether the loop of `node`, which `ops` and `operands` then hold, is of few enough ops."""
    for operand in tensor_operands(node):
        *views, root = alias_chain(operand)
        if not _is_inner(root):
            operands[operand] = None
        elif root not in ops and (most <= 1 or not _collect(root, ops, operands, most - 1)):
            return False
        else:
            ops.update(dict.fromkeys(reversed(views)))
    ops[node] = None
    return len(ops) <= MOST_OPS


def _is_inner(node: fx.Node) -> bool:
    """What puts the parts of a collective in order (meta "turn") is in the price of the collective."""
    return fuses(node) and "turn" not in node.meta and not fused_traffic(node).writes


def _in_loop(node: fx.Node) -> bool:
    """What is no kernel alone, and runs in any loop."""
    return op_kind(node) in ("view", "creation")


def _form(node: fx.Node, word: Callable[[fx.Node], str]) -> str:
    """Creations have sizes among their arguments."""
    if op_kind(node) == "creation":
        return f"{node.target}: {dtype_of(node)}"
    return kernel_form(node, word)
