"""Which of an op's tensors go through memory: in a compiled program, with the ops that run as one kernel, and where
torch runs a model neither compiled nor taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from passes.ir.joint import first_value, tensor_operands
from passes.ir.op_traits import (
    alias_chain,
    draws,
    fuses,
    is_collective,
    is_either,
    is_product,
    is_reduction,
    is_use,
    is_view,
    numel,
    op_kind,
    op_name,
    reads_shape_only,
    storage_root,
)
from passes.ir.op_work import dtype_of, kernel_form, may_be_timed


@dataclass(frozen=True)
class OpTraffic:
    """Which of an op's tensors go through memory; the rest stay in the registers of a fused loop.

    reads: per operand; writes: whether the results are stored. group: what is computed in the same loop, by which it
    was timed (`passes.strategies.traffic`); "": nothing, or it is not known. runs: in how many phases it is computed.
    """

    reads: tuple[bool, ...]
    writes: bool
    group: str = ""
    runs: int = 1


TrafficModel = Callable[[fx.Node], OpTraffic]
"""How the compiled graph moves an op's tensors."""


def eager_traffic(node: fx.Node) -> OpTraffic:
    """Every op that is no view reads its operands and stores its results."""
    moves = not is_view(node)
    return OpTraffic(tuple(moves and read for read in reads_values(node)), writes=moves)


def fused_traffic(node: fx.Node) -> OpTraffic:
    """Fusion as Inductor does it: a pointwise op reads what a non-fusing op stored, and is itself
    stored only where something that cannot fuse with it reads it, or the other phase, which computes it again where
    that reads no more bytes (`passes.states.compute_again`)."""
    if is_view(node):
        return OpTraffic((False,) * len(tensor_operands(node)), writes=False)
    reads = tuple(
        read and not _is_in_loop(storage_root(operand), node)
        for operand, read in zip(tensor_operands(node), reads_values(node), strict=True)
    )
    writes = _writes(node)
    once = writes or _phase(node) == "backward"  # of which the forward reads nothing
    return OpTraffic(reads, writes, runs=1 if once else max(1, len(_run_in(node))))


def _writes(node: fx.Node) -> bool:
    # A draw fuses, but hashing an index takes about as long as storing the result.
    return not fuses(node) or node.target is torch.ops.autoshard.uniform.default or _is_stored(node)


def _is_in_loop(operand: fx.Node, reader: fx.Node) -> bool:
    """Whether it is computed where it is read. What one phase stored for the other is read."""
    return fuses(operand) and (_phase(operand) == _phase(reader) or not _writes(operand))


def _phase(node: fx.Node) -> str | None:
    return node.meta.get("phase")


def _run_in(node: fx.Node) -> set[str | None]:
    """The phases in which an op runs that is stored nowhere: those of its readers, as far as a loop goes."""
    found: set[str | None] = set()
    seen, stack = {node}, [node]
    while stack and len(seen) <= MOST_OPS:
        for user in stack.pop().users:
            if _phase(user) != _phase(node) or (_writes(user) and not is_view(user)):
                found.add(_phase(user))
            elif user not in seen:
                seen.add(user)
                stack.append(user)
    return found | ({_phase(node)} if stack else set())


def _is_stored(node: fx.Node) -> bool:
    for user in node.users:
        if is_either(user) and user.args[0] is node:  # stored or not: the search has yet to say
            continue
        if user.op == "output":
            return True
        if _phase(user) != _phase(node) and not _is_made_of_less(storage_root(node)):
            return True
        if is_view(user):
            if _is_stored(user):
                return True
        elif not fuses(user) and not is_reduction(user):
            return True
    return False


STORED_ALONE = 1.25
"""Bytes that may be saved instead of one that would be stored for the backward alone. torch's own partitioner of
forward and backward weighs these twice [torch/_functorch/partitioners.py, get_node_weight]; a quarter is for memory."""


def _is_made_of_less(node: fx.Node) -> bool:
    """Whether what its loop reads is saved instead of it."""
    read = _read_by_loop(node)
    if read is None or not _are_little(read, node):
        return False
    made = sum(_nbytes(root) for root in read if root.op == "call_function")
    return made <= STORED_ALONE * _nbytes(node)


def reads_little(node: fx.Node) -> bool:
    """Whether its loop reads fewer bytes than writing `node` and reading it once moves."""
    read = _read_by_loop(node)
    return read is not None and _are_little(read, node)


def _are_little(read: Sequence[fx.Node], node: fx.Node) -> bool:
    return sum(map(_nbytes, read)) < 2 * _nbytes(node)


def _nbytes(node: fx.Node) -> int:
    return numel(node) * first_value(node).element_size()


def _read_by_loop(node: fx.Node) -> list[fx.Node] | None:
    """What a compiler computes `node` of where it stores nothing that fuses; None where that are more ops than a loop
    has, or it is no loop."""
    if not fuses(node):
        return None
    seen, stack, read = {node}, [node], list[fx.Node]()
    while stack:
        new = dict.fromkeys(map(storage_root, tensor_operands(stack.pop())))
        found = [root for root in new if root not in seen]
        seen.update(found)
        if len(seen) > MOST_OPS:
            return None
        stack += filter(fuses, found)
        read += [root for root in found if not fuses(root)]
    return read


MOST_OPS = 32
"""In one loop. Inductor stores what would take more. [torch._inductor.config.realize_opcount_threshold: 30]"""
_TURNING = ("aten.permute.", "aten.transpose.", "aten.t.")
"""Views by which a loop reads in another order, and whose arguments hold on every rank."""


@dataclass(frozen=True)
class FusedGroup:
    """An op that a compiler stores, with all that it computes in the same loop and stores nowhere.

    The model prices each op of a group alone (`fused_traffic`): memory traffic, and next to no arithmetic. A group can
    be compiled and timed as one kernel, which is what a program runs. What groups that were timed are told by is their
    form, the same in the global graph and in a rank's.

    ops: of one loop, each after what it reads, views between them included; the last is the one that is stored.
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
            if is_view(node) and not op_name(node).startswith(_TURNING):
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
    return fuses(node) and "turn" not in node.meta and not _writes(node)


def _in_loop(node: fx.Node) -> bool:
    """What is no kernel alone, and runs in any loop."""
    return op_kind(node) in ("view", "creation")


def _form(node: fx.Node, word: Callable[[fx.Node], str]) -> str:
    """Creations have sizes among their arguments."""
    if op_kind(node) == "creation":
        return f"{node.target}: {dtype_of(node)}"
    return kernel_form(node, word)


def last_runs(order: Mapping[fx.Node, int], traffic: TrafficModel) -> dict[fx.Node, int]:
    """Node -> the last step at which it runs: its own, or its readers' if nothing of it is stored. order: step by node,
    in order. Views and `use` run with their readers; what an `either` reads is alive through it.

    %a = exp(%x)            // fused into %b and %c: %x is read again for each, and is there until %c has run
    %b = sum(%a)
    ...
    %c = contract(%a, %w)
    """
    found: dict[fx.Node, int] = {}
    for node, step in list(order.items())[::-1]:
        found[node] = step
        if node.op == "call_function" and not _is_there(node, traffic):
            readers = [found[user] for user in node.users if user in found and not is_either(user)]
            found[node] = max([step, *readers])
    return found


def _is_there(node: fx.Node, traffic: TrafficModel) -> bool:
    return is_either(node) or is_collective(node) or (not is_use(node) and traffic(node).writes)


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


_SHAPE_OF_INPUT = ("aten.avg_pool", "aten.reflection_pad", "aten.replication_pad")
"""Ops whose gradients take the input, as operand 1, for its shape."""


def reads_values(node: fx.Node) -> tuple[bool, ...]:
    """Per tensor operand, whether the op reads its elements; of some, creations and gradients only need the shape."""
    count = len(tensor_operands(node))
    if reads_shape_only(node):
        return (False, *(True,) * (count - 1))
    if node.target is torch.ops.aten.convolution_backward.default:
        of_input, *of_others = (bool(wanted) for wanted in cast(Sequence[bool], node.args[10]))
        return (True, any(of_others), of_input)
    name = op_name(node).removesuffix(".default")
    if name.endswith("_backward") and name.startswith(_SHAPE_OF_INPUT):
        return tuple(position != 1 for position in range(count))
    return (True,) * count
