"""Convolution: batch and channels split; space is whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.rules.assemble import assemble
from passes.rules.emit import again, argument, aten, constant, first_part, global_tensor, is_empty
from passes.rules.empty import empty_safe
from passes.rules.opcall import OpCall
from passes.rules.pointwise import linear_sets
from passes.rules.rule import Dim, LocalContext, OpRule

__all__ = ["convolution", "convolution_backward"]


@dataclass(frozen=True)
class _Dims:
    """Dims of a convolution's tensors. Groups g are the major part of the channels: g may be split,
    and then a group's own channels i and o not. Without groups g is 1, and i and o may be."""

    input: tuple[Dim, ...]
    weight: tuple[Dim, ...]
    output: tuple[Dim, ...]
    channels: tuple[Dim, ...]
    sizes: dict[str, int]
    whole: tuple[str, ...]

    @staticmethod
    def of(call: OpCall) -> _Dims:
        weight = call.tensor("weight")
        groups, space = int(call["groups"]), ((),) * (weight.ndim - 2)
        before, after = weight.shape[0] // groups, weight.shape[1]
        inner, outer = (before, after) if call["transposed"] else (after, before)
        kernel: tuple[Dim, ...] = (("g", "i"), ("o",)) if call["transposed"] else (("g", "o"), ("i",))
        return _Dims(
            input=(("n",), ("g", "i"), *space),
            weight=(*kernel, *space),
            output=(("n",), ("g", "o"), *space),
            channels=(("g", "o"),),
            sizes={"g": groups, "i": inner, "o": outer},
            whole=("i", "o") if groups > 1 else (),
        )


@empty_safe
def convolution(call: OpCall) -> OpRule:
    """n (g i) *x, (g o) i *k, (g o) -> n (g o) *y; i: sum

    With i split, one rank adds the bias.
    """
    named = _Dims.of(call)
    linear = ("input", "weight") if call["bias"] is None else ("input bias", "weight bias")
    return assemble(
        call.shapes,
        [named.input, named.weight, named.channels][: len(call.operands)],
        [named.output],
        sizes=named.sizes,
        reductions={"i": "sum"},
        whole=named.whole,
        linear=linear_sets(call, *linear),
        localize=_convolution,
    )


def _convolution(ctx: LocalContext) -> fx.Node:
    if first_part(ctx, "i"):
        return again(ctx, groups=_groups(ctx))
    return again(ctx, groups=_groups(ctx), bias=None)


def _groups(ctx: LocalContext) -> int:
    if not ctx.is_split("g"):
        return int(argument(ctx, "groups"))
    low, high = ctx.interval("g")
    return high - low


@empty_safe
def convolution_backward(call: OpCall) -> OpRule:
    """n (g o) *y, n (g i) *x, (g o) i *k -> n (g i) *x, (g o) i *k, (g o); n: sum; o: sum

    The second result lacks n, the first lacks o. A result masked out has no dims.
    """
    named = _Dims.of(call)
    wanted = [named.input, named.weight, named.channels]
    results = [dims if info is not None else () for dims, info in zip(wanted, call.results, strict=True)]
    reductions = {"n": "sum"} if len(named.whole) else {"n": "sum", "o": "sum"}
    return assemble(
        call.shapes,
        [named.output, named.input, named.weight],
        results,
        sizes=named.sizes,
        reductions=reductions,
        whole=named.whole,
        linear=linear_sets(call, "grad_output"),
        localize=_convolution_backward,
    )


def _convolution_backward(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
    mask = argument(ctx, "output_mask")
    if is_empty(ctx, "i"):  # only the bias's gradient needs no input channels
        total = ctx.call(aten.sum.dim_IntList, argument(ctx, "grad_output"), _all_but_channels(ctx))
        return (*(constant(ctx, 0, i) if mask[i] else None for i in (0, 1)), total)
    changes: dict[str, Any] = {"groups": _groups(ctx)}
    if argument(ctx, "bias_sizes") is not None and mask[2]:
        changes["bias_sizes"] = ctx.result_shape(2)
    return again(ctx, **changes)


def _all_but_channels(ctx: LocalContext) -> list[int]:
    return [d for d in range(global_tensor(ctx, "grad_output").ndim) if d != 1]
