"""Constants, ranges and random numbers: what reads no tensor, so that it can be made in any layout."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

import passes.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::uniform)
from cost_model.errors import CaptureError
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.ir.graph_pass import GraphPass, OpPass, emit, erase_dead, int_at, tensor_at
from passes.ir.graph_pass import replace as replace_node
from passes.ir.graph_properties import NO_DEAD_CODE, of_ops
from passes.ir.joint import GraphInput, JointGraph
from passes.ir.op_traits import draws, named_arguments
from passes.ir.torch_compat import fake_mode_of

aten = torch.ops.aten


def _creates_otherwise(node: fx.Node) -> str | None:
    plain = node.target in (aten.full.default, aten.arange.start_step)
    if not plain:
        return "a constant or a range in other words" if node.target in {*FILLS, *RANGES} else None
    return None if {"dtype", "device"} <= set(node.kwargs) else "leaves dtype or device to a default"


PLAIN_CREATIONS = of_ops("constants are `full`, ranges `arange.start_step`", _creates_otherwise)


class NormalizeCreations(OpPass):
    """Make every constant tensor a `full` and every range an `arange.start_step`.

        %z: f32[8, 16] = aten.zeros_like(%x)
        %r: i64[16]    = aten.arange(16)
        ->
        %z: f32[8, 16] = aten.full([8, 16], 0, dtype=float32, device=cpu)
        %r: i64[16]    = aten.arange(0, 16, 1, dtype=int64, device=cpu)

    A creation reads no tensor, so it can be made in any layout for nothing; `zeros_like(%x)` would
    tie it to the layout of %x and keep %x alive. Uninitialised memory becomes zeros.
    """

    ensures = (PLAIN_CREATIONS,)
    breaks = (NO_DEAD_CODE,)

    def rewrite(self, node: fx.Node) -> None:
        like = node.meta["val"]
        if node.target in FILLS:
            node.args = (list(like.shape), FILLS[node.target](node))
            node.target = aten.full.default
        elif node.target in RANGES:
            given = named_arguments(node.target, node.args, node.kwargs)
            node.args = (given.get("start", 0), given["end"], given.get("step", 1))
            node.target = aten.arange.start_step
        else:
            return
        node.kwargs = {"dtype": like.dtype, "device": like.device}


def _argument(name: str) -> Callable[[fx.Node], Any]:
    return lambda node: named_arguments(node.target, node.args, node.kwargs)[name]


_ZEROS = (
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.zero.default,
)
FILLS: dict[Any, Callable[[fx.Node], Any]] = {
    **dict.fromkeys(_ZEROS, lambda node: 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda node: 1),
    aten.full.default: _argument("fill_value"),
    aten.full_like.default: _argument("fill_value"),
    aten.new_full.default: _argument("fill_value"),
    aten.fill.Scalar: _argument("value"),
    aten.scalar_tensor.default: _argument("s"),
}


RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


NO_GENERATORS = of_ops(
    "nothing draws from a generator", lambda node: "draws from a generator" if draws(node) else None
)


class RandomToUniform(GraphPass):
    """Draw every random number from one `seed` input, by counting instead of by generator state.

        %r: (f32[8, 16], b8[8, 16]) = aten.native_dropout(%x, 0.1, True)
        %y: f32[8, 16] = getitem(%r, 0)
        ->
        %u: f32[8, 16] = uniform([8, 16], [0, 0], [8, 16], %seed, 0)
        %m: b8[8, 16]  = aten.ge(%u, 0.1)
        %s: f32[8, 16] = aten.mul(%x, %m)
        %y: f32[8, 16] = aten.mul(%s, 1.1111)

    An element is a hash of (seed, stream, its global position): replicas agree, shards differ, and
    a seed repeats a run, in any layout. Each draw has its own `stream`, counted in graph order. A
    backward reads the forward's mask; whether to save or redraw it is decided by the phase split.

    A random permutation is the order of as many uniform numbers.

    Ensures: an input of kind "seed" (int64, 0-d) comes last if anything is drawn, and nothing draws from a generator:
    CaptureError for ops that do (multinomial, poisson), since every rank would draw its own numbers.
    """

    requires = (ONE_SPELLING, NO_DEAD_CODE)
    ensures = (NO_GENERATORS,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        drawn = [
            n for n in joint.graph.nodes if n.target is aten.native_dropout.default or n.target in _TABLE
        ]
        if drawn:
            joint, seed = _with_seed(joint, like=drawn[0])
            source = _Source(seed, itertools.count())
            for node in drawn:
                if node.target is aten.native_dropout.default:
                    _native_dropout(source, node)
                else:
                    replace_node(node, _cast(node, _TABLE[node.target](source, node)))
        for node in [n for n in joint.graph.nodes if n.target is aten.native_dropout_backward.default]:
            grad, mask, scale = node.args
            replace_node(node, _scaled(node, emit(node, aten.mul.Tensor, grad, mask), scale))
        erase_dead(joint.graph)
        for node in joint.graph.nodes:
            _refuse_generators(node)
        return joint


@dataclass(frozen=True)
class _Source:
    seed: fx.Node
    streams: Iterator[int]

    def uniform(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """f32 in [0, 1) of `shape`, before `node`."""
        offset = [0] * len(shape)
        target = torch.ops.autoshard.uniform.default
        return emit(node, target, shape, offset, shape, self.seed, next(self.streams))

    def uniform_like(self, node: fx.Node) -> fx.Node:
        return self.uniform(node, list(node.meta["val"].shape))

    def normal_like(self, node: fx.Node) -> fx.Node:
        """Box-Muller: sqrt(-2 log(1 - u)) cos(2 pi v)."""
        u, v = self.uniform_like(node), self.uniform_like(node)
        radius = emit(node, aten.sqrt.default, _scaled(node, _log(node, u), -2.0))
        angle = emit(node, aten.cos.default, _scaled(node, v, 2.0 * math.pi))
        return emit(node, aten.mul.Tensor, radius, angle)


def _with_seed(joint: JointGraph, like: fx.Node) -> tuple[JointGraph, fx.Node]:
    kinds = [given.kind for given in joint.inputs]
    if "seed" in kinds:
        return joint, joint.placeholders[kinds.index("seed")]
    placeholders = joint.placeholders
    mode = fake_mode_of(like.meta["val"])
    first_op = placeholders[-1].next if placeholders else next(iter(joint.graph.nodes))
    with joint.graph.inserting_before(first_op):
        seed = joint.graph.placeholder("seed")
    seed.target = seed.name
    seed.meta |= {"phase": "forward", "module": "", "source": ""}
    value = like.meta["val"]
    device = (value[0] if isinstance(value, (tuple, list)) else value).device
    with mode:
        seed.meta["val"] = torch.empty((), dtype=torch.int64, device=device)
    return replace(joint, inputs=(*joint.inputs, GraphInput("seed", "seed"))), seed


def _log(node: fx.Node, u: fx.Node) -> fx.Node:
    """log(1 - u)."""
    return emit(node, aten.log1p.default, emit(node, aten.neg.default, u))


def _scaled(node: fx.Node, x: fx.Node, factor: Any) -> fx.Node:
    return x if factor == 1 else emit(node, aten.mul.Tensor, x, factor)


def _cast(node: fx.Node, x: fx.Node) -> fx.Node:
    """`x` in the dtype of `node`."""
    dtype = node.meta["val"].dtype
    return x if x.meta["val"].dtype == dtype else emit(node, aten._to_copy.default, x, dtype=dtype)


def _named(node: fx.Node, *names: str) -> list[Any]:
    found = named_arguments(node.target, node.args, node.kwargs)
    return [found[name] for name in names]


def _native_dropout(source: _Source, node: fx.Node) -> None:
    x, p, train = tensor_at(node), cast(float, node.args[1]), node.args[2]
    value = node.meta["val"][0]
    shape = list(value.shape)
    if train is False or p == 0:
        mask = emit(node, aten.full.default, shape, True, dtype=torch.bool, device=value.device)
        result = x
    else:
        mask = emit(node, aten.ge.Scalar, source.uniform(node, shape), p)
        kept = emit(node, aten.mul.Tensor, x, mask)
        result = _scaled(node, kept, 0.0 if p == 1 else 1.0 / (1.0 - p))
    for item in list(node.users):
        replace_node(item, (result, mask)[int_at(item, 1)])


def _bernoulli(source: _Source, node: fx.Node) -> fx.Node:
    """1 with probability p, a number or the operand's own values."""
    (p,) = _named(node, "self" if node.target is aten.bernoulli.default else "p")
    less = aten.lt.Tensor if isinstance(p, fx.Node) else aten.lt.Scalar
    return emit(node, less, source.uniform_like(node), p)


def _between(source: _Source, node: fx.Node) -> fx.Node:
    low, high = _named(node, "from", "to")
    return emit(node, aten.add.Tensor, _scaled(node, source.uniform_like(node), high - low), low)


def _normal(source: _Source, node: fx.Node) -> fx.Node:
    mean, std = _named(node, "mean", "std")
    return emit(node, aten.add.Tensor, _scaled(node, source.normal_like(node), std), mean)


def _exponential(source: _Source, node: fx.Node) -> fx.Node:
    """-log(1 - u) / rate."""
    (rate,) = _named(node, "lambd")
    return _scaled(node, _log(node, source.uniform_like(node)), -1.0 / rate)


def _randint(source: _Source, node: fx.Node) -> fx.Node:
    """floor(u * (high - low)) + low; u has 24 bits, so ranges up to 2^24 are evenly covered."""
    arguments = named_arguments(node.target, node.args, node.kwargs)
    low, high = arguments.get("low", 0), arguments["high"]
    floor = emit(node, aten.floor.default, _scaled(node, source.uniform_like(node), float(high - low)))
    return emit(node, aten.add.Tensor, floor, float(low))


def _randperm(source: _Source, node: fx.Node) -> fx.Node:
    numbers = source.uniform(node, [int_at(node, 0)])
    return emit(node, operator.getitem, emit(node, aten.sort.stable, numbers, stable=True), 1)


def _refuse_generators(node: fx.Node) -> None:
    if not draws(node):
        return
    where = " ".join(text for text in (node.meta.get("module"), node.meta.get("source")) if text)
    raise CaptureError(
        f"cannot capture: {node.target} draws from a generator{' at ' + where if where else ''}, and each rank would "
        "draw numbers of its own\n  try: draw them outside the model, and pass them as an argument"
    )


_TABLE: dict[Any, Callable[[_Source, fx.Node], fx.Node]] = {
    **dict.fromkeys((aten.bernoulli.p, aten.bernoulli.default), _bernoulli),
    **dict.fromkeys((aten.rand.default, aten.rand_like.default), _Source.uniform_like),
    **dict.fromkeys((aten.randn.default, aten.randn_like.default), _Source.normal_like),
    aten.uniform.default: _between,
    aten.normal_functional.default: _normal,
    aten.exponential.default: _exponential,
    aten.randperm.default: _randperm,
    **dict.fromkeys((aten.randint.default, aten.randint.low), _randint),
    **dict.fromkeys((aten.randint_like.default, aten.randint_like.low_dtype), _randint),
}
"""What takes a draw's place, in any dtype."""
