"""Run every rank's graph in one process, in lockstep at the collectives.

Each rank's graph runs until it reaches a collective; when all ranks of its group wait at the same
one, the group exchanges and goes on. Sums are taken in rank order. A group is named by its mesh axes,
"axes:dp,tp": the same graph names the group of whichever rank runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from cost_model.mesh import MeshSpec, simulated_group_axes, simulated_group_name
from passes.ir.process_state import autocast_off
from passes.ops.collective_ops import exchange_rows
from passes.simulate.reference import seeded_call

Observer = Callable[[int, fx.Node, Any], None]

c10d = torch.ops._c10d_functional


class LockstepError(AssertionError):
    """The ranks' graphs disagree: for real, they would hang or exchange garbage."""


@dataclass(frozen=True)
class _Call:
    """A collective that a rank waits at. args: those after the tensor and before the group."""

    node: fx.Node
    tensor: Tensor
    args: tuple[Any, ...]
    axes: tuple[str, ...]

    def __str__(self) -> str:
        op = getattr(self.node.target, "_opname", str(self.node.target))
        given = "".join(f", {a}" for a in self.args)
        size = "x".join(map(str, self.tensor.shape)) or "scalar"
        return f"%{self.node.name} = {op}[{','.join(self.axes)}]({self.tensor.dtype} {size}{given})"


_Rank = Generator[_Call, Tensor, tuple[Any, ...]]


@autocast_off()
def simulate(
    graphs: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    mesh: MeshSpec,
    observe: Observer | None = None,
) -> list[tuple[Any, ...]]:
    """The outputs of every rank's graph, run together; a value is freed after its last use.

    graphs, inputs: one per rank. observe(rank, node, value) is called once for every node that is
    run, in each rank's order (not for placeholders' or the output's own node).

    Raises LockstepError, naming the nodes, where ranks of a group reach different collectives.
    """
    assert len(graphs) == len(inputs) == mesh.device_count, (len(graphs), len(inputs), str(mesh))
    run = _Lockstep(mesh, [_run_rank(r, graphs[r], inputs[r], observe) for r in range(len(graphs))])
    with torch.no_grad():
        return run.finish()


def _run_rank(rank: int, graph: fx.GraphModule, inputs: Sequence[Any], observe: Observer | None) -> _Rank:
    interpreter = fx.Interpreter(graph)
    interpreter.args_iter = iter(inputs)
    env = interpreter.env
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _EXCHANGES:
            env[node] = yield _call(interpreter, node)
        elif node.op == "call_function" and node.target is c10d.wait_tensor.default:
            env[node] = env[node.args[0]]
        else:
            env[node] = seeded_call(node, interpreter.run_node)
        if observe is not None and node.op not in ("placeholder", "output"):
            observe(rank, node, env[node])
        if node.op == "output":
            result = env[node]
            return tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for used in interpreter.user_to_last_uses.get(node, ()):
            del env[used]
    raise AssertionError("graph has no output node")


def _call(interpreter: fx.Interpreter, node: fx.Node) -> _Call:
    args, kwargs = interpreter.fetch_args_kwargs_from_env(node)
    tensor, *rest, group = (*args, *kwargs.values())
    if not isinstance(group, str) or not group.startswith(simulated_group_name(())):
        raise LockstepError(f"%{node.name}: {group!r} is not a simulated group, such as 'axes:dp,tp'")
    # As on ranks, whose collectives send an operand in order however a kernel laid it out.
    return _Call(node, tensor.contiguous(), tuple(rest), simulated_group_axes(group))


@dataclass
class _Lockstep:
    mesh: MeshSpec
    ranks: list[_Rank]
    waiting: dict[int, _Call] = field(default_factory=dict)
    results: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def finish(self) -> list[tuple[Any, ...]]:
        for rank in range(len(self.ranks)):
            self.resume(rank, None)
        while self.waiting:
            ready = self.ready_groups()
            if not ready:
                self.fail()
            for group in ready:
                for rank, received in zip(group, self.exchange(group), strict=True):
                    self.resume(rank, received)
        return [self.results[rank] for rank in range(len(self.ranks))]

    def resume(self, rank: int, received: Tensor | None) -> None:
        """Run `rank` to its next collective, or to its end."""
        self.waiting.pop(rank, None)
        try:
            step = next(self.ranks[rank]) if received is None else self.ranks[rank].send(received)
            self.waiting[rank] = step
        except StopIteration as end:
            self.results[rank] = end.value

    def ready_groups(self) -> list[tuple[int, ...]]:
        """Groups whose every rank waits for just that group."""
        groups = {self.mesh.group(rank, call.axes): call.axes for rank, call in self.waiting.items()}
        return [
            group
            for group, axes in groups.items()
            if all(rank in self.waiting and self.waiting[rank].axes == axes for rank in group)
        ]

    def exchange(self, group: tuple[int, ...]) -> list[Tensor]:
        calls = [self.waiting[rank] for rank in group]
        exchange = _EXCHANGES[calls[0].node.target]
        for rank, call in zip(group, calls, strict=True):
            if call.node.target is not calls[0].node.target or call.tensor.dtype != calls[0].tensor.dtype:
                raise LockstepError(_disagreement("collectives", group[0], calls[0], rank, call))
        return exchange(group, calls)

    def fail(self) -> None:
        """No group can go on: name two ranks of one group that wait for different things."""
        for rank, call in self.waiting.items():
            for other in self.mesh.group(rank, call.axes):
                if other not in self.waiting:
                    raise LockstepError(f"rank {rank} waits at {call}\n  but rank {other} has finished")
                if self.waiting[other].axes != call.axes:
                    raise LockstepError(_disagreement("groups", rank, call, other, self.waiting[other]))
        raise AssertionError("unreachable: some group was ready")


def _disagreement(what: str, rank: int, call: _Call, other: int, other_call: _Call) -> str:
    return (
        f"ranks {rank} and {other} wait at different {what}:\n"
        f"  rank {rank}: {call}\n  rank {other}: {other_call}"
    )


def _same(what: str, group: Sequence[int], calls: Sequence[_Call], facts: Sequence[Any]) -> None:
    for rank, call, fact in zip(group, calls, facts, strict=True):
        if fact != facts[0]:
            raise LockstepError(_disagreement(what, group[0], calls[0], rank, call))


def _reduce(tensors: Sequence[Tensor], op: str) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op in ("sum", "avg"):
            total += tensor
        elif op in ("max", "min"):
            total = torch.maximum(total, tensor) if op == "max" else torch.minimum(total, tensor)
        else:
            raise LockstepError(f"unknown reduction {op!r}")
    return total / len(tensors) if op == "avg" else total


def _check_count(group: Sequence[int], call: _Call, count: int) -> None:
    if count != len(group):
        raise LockstepError(f"{call}: the group has {len(group)} ranks")


def _all_reduce(group: Sequence[int], calls: Sequence[_Call]) -> list[Tensor]:
    _same("reductions", group, calls, [(call.args, call.tensor.shape) for call in calls])
    total = _reduce([call.tensor for call in calls], calls[0].args[0])
    return [total.clone() for _ in calls]


def _all_gather(group: Sequence[int], calls: Sequence[_Call]) -> list[Tensor]:
    _same("sizes", group, calls, [(call.args, call.tensor.shape) for call in calls])
    _check_count(group, calls[0], calls[0].args[0])
    gathered = torch.cat([call.tensor for call in calls])
    return [gathered.clone() for _ in calls]


def _reduce_scatter(group: Sequence[int], calls: Sequence[_Call]) -> list[Tensor]:
    _same("sizes", group, calls, [(call.args, call.tensor.shape) for call in calls])
    op, count = calls[0].args
    _check_count(group, calls[0], count)
    if calls[0].tensor.shape[0] % count:
        raise LockstepError(f"{calls[0]}: dim 0 does not divide by {count}")
    total = _reduce([call.tensor for call in calls], op)
    return [part.clone() for part in total.chunk(count)]


def _all_to_all(group: Sequence[int], calls: Sequence[_Call]) -> list[Tensor]:
    for rank, call in zip(group, calls, strict=True):
        into, out = call.args
        if len(out) != len(group) or len(into) != len(group) or sum(out) != call.tensor.shape[0]:
            raise LockstepError(f"rank {rank}: {call}: split sizes do not fit {len(group)} ranks")
        for sender, sends in enumerate(calls):
            if sends.args[1][group.index(rank)] != into[sender]:
                raise LockstepError(_disagreement("split sizes", group[sender], sends, rank, call))
    pieces = [call.tensor.split(list(call.args[1])) for call in calls]
    _same("shapes", group, calls, [call.tensor.shape[1:] for call in calls])
    return [torch.cat([sent[i] for sent in pieces]) for i in range(len(calls))]


def _exchange_rows(group: Sequence[int], calls: Sequence[_Call]) -> list[Tensor]:
    """An all-to-all of sizes that are told as ends. What no rank sends is 0."""
    sizes = lambda ends: torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    counted = [replace(call, args=(sizes(call.args[2]), sizes(call.args[1]))) for call in calls]
    sent = [replace(call, tensor=call.tensor[: sum(call.args[1])]) for call in counted]
    missing = [len(call.args[0]) - sum(told.args[0]) for call, told in zip(calls, counted, strict=True)]
    arrived = zip(_all_to_all(group, sent), missing, strict=True)
    return [torch.cat([rows, rows.new_zeros(count, *rows.shape[1:])]) for rows, count in arrived]


_EXCHANGES: Mapping[Any, Callable[[Sequence[int], Sequence[_Call]], list[Tensor]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
    exchange_rows: _exchange_rows,
}
