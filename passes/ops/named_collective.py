"""Functional collectives that carry the name of what they serve, so that a profiler can show it.

    %g: f32[64, 16] = _c10d_functional.all_gather_into_tensor(%w, 4, group)
    ->
    %g: f32[64, 16] = autoshard_c10d_functional.all_gather_into_tensor(%w, 4, group, "layers.0.w.weight")

The kernel runs the plain collective; while a profiler records, inside a range of that name. As the name
is an argument of the op, it survives every compiler. The result is waited for by
`_c10d_functional.wait_tensor`, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from cost_model.measure import own_collectives as own
from passes.ir.torch_compat import is_profiling, process_group_named, waited_for_with
from passes.ops.registration import operator

c10d = torch.ops._c10d_functional


def all_to_all(operand: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """What `all_to_all_single` does, whatever the size: empty messages are left out."""
    if operand.device.type != "cpu":
        return c10d.all_to_all_single(operand, list(received), list(sent), group_name)
    return waited_for_with(*own.start_all_to_all(operand, received, sent, process_group_named(group_name)))


def all_gather(operand: Tensor, group_size: int, group_name: str) -> Tensor:
    """What `all_gather_into_tensor` does, without the op that crashes gloo when two are in flight.

    The functional op runs gloo's ALLGATHER_COALESCED. When a collective is done, gloo's two threads both
    assign its name to one std::string of the group (`lastCompletedWorkName`, torch 2.11 to 2.13), and that
    name alone is too long to be stored without a heap buffer, which both threads then free. The variant
    with an output runs the plain all-gather, on NCCL too.
    """
    started = own.all_gather(operand, process_group_named(group_name))
    if started is not None:
        return waited_for_with(*started)
    gathered = operand.new_empty((group_size * operand.shape[0], *operand.shape[1:]))
    return c10d.all_gather_into_tensor_out(operand, group_size, group_name, out=gathered)


def all_reduce(operand: Tensor, op: str, group_name: str) -> Tensor:
    """What `all_reduce` does; may have been waited for."""
    result = own.all_reduce(operand, op, process_group_named(group_name))
    return c10d.all_reduce(operand, op, group_name) if result is None else result


def all_reduce_(operand: Tensor, op: str, group_name: str) -> Tensor:
    """The same in place."""
    result = own.all_reduce(operand, op, process_group_named(group_name), into=operand)
    return c10d.all_reduce_(operand, op, group_name) if result is None else result


def reduce_scatter(operand: Tensor, op: str, group_size: int, group_name: str) -> Tensor:
    """What `reduce_scatter_tensor` does; may have been waited for."""
    result = own.reduce_scatter(operand, op, process_group_named(group_name))
    return c10d.reduce_scatter_tensor(operand, op, group_size, group_name) if result is None else result


# Inductor knows a collective's kernel by "_c10d_functional" in the op's name.
NAMESPACE = "autoshard_c10d_functional"

_SCHEMAS = {
    "all_reduce": "(Tensor input, str reduce_op, str group_name, str serves) -> Tensor",
    "all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name, str serves) -> Tensor(a!)",
    "all_gather_into_tensor": "(Tensor input, int group_size, str group_name, str serves) -> Tensor",
    "reduce_scatter_tensor": (
        "(Tensor input, str reduce_op, int group_size, str group_name, str serves) -> Tensor"
    ),
    "all_to_all_single": (
        "(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name, str serves)"
        " -> Tensor"
    ),
}


def _plain(name: str) -> Any:
    return getattr(torch.ops._c10d_functional, name).default


_RUN: Mapping[str, Callable[..., Tensor]] = {
    "all_gather_into_tensor": all_gather,
    "all_reduce": all_reduce,
    "all_reduce_": all_reduce_,
    "all_to_all_single": all_to_all,
    "reduce_scatter_tensor": reduce_scatter,
}
"""What runs instead of the plain functional collective."""


def _kernel(name: str) -> Callable[..., Any]:
    plain = _RUN.get(name) or _plain(name)
    label = name.removesuffix("_")

    def run(*arguments: Any) -> Any:
        *rest, serves = arguments
        if not is_profiling():
            return plain(*rest)
        with record_function(f"{label}: {serves}"):
            return plain(*rest)

    return run


def _fake(name: str) -> Callable[..., Any]:
    plain = _plain(name)
    return lambda *arguments: plain(*arguments[:-1])


_MADE = {
    name: operator(f"{name}{schema}", _kernel(name), _fake(name), NAMESPACE)
    for name, schema in _SCHEMAS.items()
}

NAMED_BY_NAME: Mapping[str, Any] = {name: op for name, op in _MADE.items() if name[-1] != "_"}
"""Name of a plain functional collective -> the same op with one more argument, the name it serves."""

NAMED: Mapping[Any, Any] = {_plain(name): op for name, op in NAMED_BY_NAME.items()}
"""The same by the plain op."""

ALL_REDUCE_IN_PLACE = _MADE["all_reduce_"]
