"""Functions that torch takes as arguments (`torch.cond`, `scan`, flex attention, ...), as the plain ops they stand for.

Torch hands such functions to Dynamo, which cannot look into a trace that already runs. Written out, they are split
and priced by the rules of their ops: a cond as both branches and a choice, loops as their steps, flex attention as
masked attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cost_model.errors import UnsupportedOpError
from passes.capture.operator_calls import scaled_dot_product
from passes.capture.torch_shortcuts import reentrant_checkpoints_called
from passes.ir.torch_dispatch import (
    compiled_as_written,
    flex_without_kernel,
    higher_order_answered,
    indexed_by_tensors,
)
from passes.ops.attention_choice import expand_heads

_MOST_STEPS = 1024
"""A longer loop makes a graph that takes minutes to plan."""


@contextmanager
def nested_calls_written_out() -> Generator[None]:
    """Inside, functions that `torch.compile` made run as they are written, reentrant checkpoints too, and
    higher-order ops as plain ops."""
    answers = {
        "cond": _cond,
        "while_loop": _while_loop,
        "scan": _scan,
        "associative_scan": _associative_scan,
        "map_impl": _map,
        "flex_attention": _flex_attention,
    }
    with ExitStack() as stack:
        stack.enter_context(reentrant_checkpoints_called())
        stack.enter_context(compiled_as_written())
        stack.enter_context(higher_order_answered(answers))
        stack.enter_context(flex_without_kernel())
        yield


def _cond(pred: Any, on_true: Callable[..., Any], on_false: Callable[..., Any], operands: Any) -> Any:
    """Both branches, and of each result the one that `pred` chooses.

    The gradient that leaves the other branch is zero, also where that branch has none there (1 / 0)."""
    if not isinstance(pred, Tensor):
        return on_true(*operands) if pred else on_false(*operands)
    pred = pred.reshape(())
    with _Branch(pred):
        ours, spec = pytree.tree_flatten(on_true(*operands))
    with _Branch(pred.logical_not()):
        others, other_spec = pytree.tree_flatten(on_false(*operands))
    if spec != other_spec or [_form(x) for x in ours] != [_form(x) for x in others]:
        raise UnsupportedOpError(
            "torch.cond: its branches return results of other shapes or dtypes, "
            f"{[_form(x) for x in ours]} and {[_form(x) for x in others]}\n"
            "  try: let both return the same"
        )
    chosen = [
        torch.where(pred, a, b) if isinstance(a, Tensor) else a for a, b in zip(ours, others, strict=True)
    ]
    return pytree.tree_unflatten(chosen, spec)


def _form(x: Any) -> Any:
    return (list(x.shape), x.dtype) if isinstance(x, Tensor) else x


class _Branch(TorchFunctionMode):
    """What a branch reads of outside, its operands and what it closes over, as `_Taken` gives it."""

    def __init__(self, taken: Tensor) -> None:
        super().__init__()
        self._taken = taken
        self._made: dict[int, Any] = {}
        self._read: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        self._check_written(func, args, named)
        args, named = pytree.tree_map_only(Tensor, self._inside, (args, named))
        result = func(*args, **named)
        for leaf in pytree.tree_leaves(result):
            self._made[id(leaf)] = leaf
        return result

    def _inside(self, x: Tensor) -> Tensor:
        if id(x) in self._made or not x.requires_grad or not torch.is_grad_enabled():
            return x
        if id(x) not in self._read:
            self._read[id(x)] = x, _Taken.apply(x, self._taken)
        return self._read[id(x)][1]

    def _check_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.startswith("__")) or name == "__setitem__"
        written = kwargs.get("out", args[0] if writes and args else None)
        if isinstance(written, Tensor) and id(written) not in self._made:
            raise UnsupportedOpError(
                f"torch.cond: a branch changes a tensor of outside in place ({name})\n"
                "  try: return the new value from both branches, and assign it after torch.cond"
            )


class _Taken(torch.autograd.Function):
    """[x], [] bool -> x; its gradient is zero where the branch that reads it is not taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: Tensor) -> Tensor:
        ctx.save_for_backward(taken)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (taken,), (gradient,) = ctx.saved_tensors, gradients
        return torch.where(taken, gradient, torch.zeros_like(gradient)), None


def _while_loop(
    goes_on: Callable[..., Any],
    body: Callable[..., Any],
    carried: Sequence[Any],
    more: Sequence[Any],
    **_: Any,
) -> Any:
    values, steps = tuple(carried), 0
    while bool(goes_on(*values, *more)):
        if steps == _MOST_STEPS:
            raise _too_long("torch.while_loop", f"more than {_MOST_STEPS:,}")
        values, steps = tuple(body(*values, *more)), steps + 1
    return values


def _scan(
    combine: Callable[..., Any],
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    """carries and results [steps, ...] of `combine` on `xs` [steps, ...], one after the other."""
    carry, results = list(init), []
    for step in range(_steps("scan", xs)):
        made = list(combine(*carry, *(x[step] for x in xs), *additional_inputs))
        carry = made[: len(carry)]
        results.append(made[len(carry) :])
    return (*carry, *(torch.stack(list(column)) for column in zip(*results, strict=True)))


def _associative_scan(
    combine: Callable[..., Any], xs: Sequence[Tensor], additional_inputs: Sequence[Any] = ()
) -> Any:
    results = [[x[0] for x in xs]]
    for step in range(1, _steps("associative_scan", xs)):
        results.append(list(combine(*results[-1], *(x[step] for x in xs), *additional_inputs)))
    return tuple(torch.stack(list(column)) for column in zip(*results, strict=True))


def _map(function: Callable[..., Any], xs: Sequence[Tensor], more: Sequence[Any]) -> Any:
    made = [function(*(x[step] for x in xs), *more) for step in range(_steps("map", xs))]
    leaves = [pytree.tree_leaves(one) for one in made]
    columns = [torch.stack(list(column)) for column in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(columns, pytree.tree_structure(made[0]))


def _steps(name: str, xs: Sequence[Tensor]) -> int:
    steps = xs[0].shape[0]
    if steps > _MOST_STEPS:
        raise _too_long(name, f"{steps:,}")
    return steps


def _too_long(name: str, steps: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{name}: {steps} steps, each of which would be nodes of its own\n"
        f"  try: at most {_MOST_STEPS:,} steps, or ops on the whole sequence (cumsum, attention, a convolution)"
    )


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any], block_mask: Sequence[Any],
    scale: float, kernel_options: Any = None, score_buffers: Sequence[Any] = (), mask_buffers: Sequence[Any] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """[b, h, s, d], [b, g, t, d], [b, g, t, e] -> [b, h, s, e], and of each row of scores log2 of the sum of its
    exponentials and the highest, over ln 2, as torch's `flex_attention` hands them on.

    As where torch has no kernel, `block_mask` counts by its function, not by its blocks. Without `score_mod` it is
    attention with a mask; what nobody uses of the rest is no part of the graph."""
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    key, value = (expand_heads(x, query.shape[1]) for x in (key, value))
    places = [torch.arange(n, device=query.device) for n in (*query.shape[:3], key.shape[2])]
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(precise) @ key.to(precise).transpose(-2, -1) * scale
    mask: Tensor | None = None
    with indexed_by_tensors():
        unchanged = _is_identity(score_mod, scores, score_buffers)
        if not unchanged:
            scores = _for_each(score_mod, (0,), score_buffers)(scores, *places, *score_buffers)
        if block_mask[-1] is not noop_mask:
            mask = _mask(block_mask[-1], places, mask_buffers)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    if unchanged:
        out = scaled_dot_product(query, key, value, mask, scale=scale)
    else:
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        out = weights.to(query.dtype) @ value
    return out, scores.logsumexp(-1) / math.log(2.0), scores.amax(-1) / math.log(2.0)


def _for_each(
    function: Callable[..., Any], first: tuple[int, ...], more: Sequence[Any], axes: Sequence[int] = range(4)
) -> Callable[..., Any]:
    """`function` of (a score, if first,) batch, head, query, key for all of them, [b, h, s, t], or for those in `axes`
    only."""
    for axis in reversed(axes):
        places = tuple(0 if axis == i else None for i in range(4))
        function = torch.func.vmap(function, in_dims=(*first, *places, *(None for _ in more)))
    return function


def _mask(function: Callable[..., Any], places: Sequence[Tensor], more: Sequence[Any]) -> Tensor:
    """[b or 1, h or 1, s, t]: one where it does not depend on the batch or head, over which `vmap` then expands."""
    strides = _for_each(function, (), more)(*places, *more).stride()
    axes = [axis for axis in range(4) if axis > 1 or strides[axis]]
    given = [place if axis in axes else place[0] for axis, place in enumerate(places)]
    mask = _for_each(function, (), more, axes)(*given, *more)
    for axis in {0, 1}.difference(axes):
        mask = mask.unsqueeze(axis)
    return mask


def _is_identity(score_mod: Callable[..., Any], scores: Tensor, more: Sequence[Any]) -> bool:
    score, place = scores.new_zeros(()), torch.zeros((), dtype=torch.int64, device=scores.device)
    return score_mod(score, *(place,) * 4, *more) is score
