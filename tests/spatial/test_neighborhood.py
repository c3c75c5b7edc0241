"""Neighbourhood attention: the op against loops over positions, its gradient against a dense masked softmax, its rule
against the whole op on random uneven splits.

`CASES` is small for CI; `python -m tests.spatial.test_neighborhood 2000` runs as many as one likes.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autoshard.neighborhood import na1d, na2d, na3d
from cost_model.errors import ShardingError, UnsupportedOpError
from passes.compile.bind_device import expand_ops
from passes.ir.op_work import arithmetic_kind, global_flops
from passes.rules.check.trial import call_node
from passes.rules.core.rule_registry import rule_for
from passes.rules.windowed.patches import NeighborhoodWindow
from tests.spatial.test_window_rules import Case, mismatch, tensor

ops = torch.ops.autoshard
CASES = 60

Window = tuple[int, int, int, bool]
"""length, kernel, dilation, is_causal"""


def keys_of(query: int, window: Window) -> list[int]:
    """What `query` sees, by definition: of its group the run of `kernel` keys that starts nearest to the one that
    lies kernel // 2 before it; causal, those up to itself."""
    length, kernel, dilation, is_causal = window
    group = list(range(query % dilation, length, dilation))
    at = group.index(query)
    if is_causal:
        return group[max(0, at + 1 - kernel) : at + 1]
    start = min(range(len(group) - kernel + 1), key=lambda s: abs(s - (at - kernel // 2)))
    return group[start : start + kernel]


def random_window(rng: random.Random, length: int, most: int) -> Window:
    dilation = rng.randint(1, min(3, length))
    return length, rng.randint(1, min(most, length // dilation)), dilation, rng.random() < 0.3


def random_windows(rng: random.Random, longest: Sequence[int] = (101, 23, 9)) -> list[Window]:
    """One per dim of space."""
    space = rng.choice([1, 1, 2, 2, 3])
    most = 9 if space < 3 else 4
    return [random_window(rng, rng.randint(1, longest[space - 1]), most) for _ in range(space)]


def random_operands(rng: random.Random, windows: Sequence[Window]) -> list[Tensor]:
    batch, heads, lengths = rng.randint(1, 2), rng.randint(1, 2), [w[0] for w in windows]
    return [tensor(rng, batch, *lengths, heads, last) for last in (3, 3, rng.randint(1, 3))]


def geometry(windows: Sequence[Window]) -> list[Any]:
    """The op's arguments after q, k and v."""
    lengths, kernels, dilations, causal = (list(each) for each in zip(*windows, strict=True))
    origin = [0] * len(windows)
    return [kernels, dilations, causal, 0.7, lengths, origin, origin]


def by_loops(q: Tensor, k: Tensor, v: Tensor, windows: Sequence[Window], scale: float) -> Tensor:
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for place in itertools.product(*(range(w[0]) for w in windows)):
        seen = list(itertools.product(*(keys_of(i, w) for i, w in zip(place, windows, strict=True))))
        for b, h in itertools.product(range(q.shape[0]), range(q.shape[-2])):
            weights = [math.exp(scale * float(q[(b, *place, h)] @ k[(b, *other, h)])) for other in seen]
            total = sum(
                (w * v[(b, *other, h)] for w, other in zip(weights, seen, strict=True)),
                torch.zeros(v.shape[-1], dtype=v.dtype),
            )
            out[(b, *place, h)] = total / sum(weights)
    return out


def densely(q: Tensor, k: Tensor, v: Tensor, windows: Sequence[Window], scale: float) -> Tensor:
    """All scores, those not seen masked: [b,*s,h,e]."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for window in windows:
        one = torch.zeros(window[0], window[0], dtype=torch.bool)
        for i in range(window[0]):
            one[i, keys_of(i, window)] = True
        mask = torch.kron(mask, one)
    flat = [x.flatten(1, len(windows)) for x in (q, k, v)]
    scores = torch.einsum("bshd,bthd->bhst", *flat[:2]) * scale
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("bhst,bthe->bshe", weights, flat[2]).reshape(*q.shape[:-1], v.shape[-1])


@pytest.mark.parametrize("seed", range(40))
def test_values_and_gradients(seed: int) -> None:
    rng = random.Random(seed)
    windows = random_windows(rng, (20, 6, 4))
    operands = [x.requires_grad_() for x in random_operands(rng, windows)]
    out = ops.neighborhood_attention(*operands, *geometry(windows))
    with torch.no_grad():
        torch.testing.assert_close(out, by_loops(*operands, windows, 0.7), rtol=1e-12, atol=1e-12)
    tangent = tensor(rng, *out.shape)
    wanted = torch.autograd.grad(densely(*operands, windows, 0.7), operands, tangent)
    found = torch.autograd.grad(out, operands, tangent)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(300))
def test_a_window_reads_just_what_its_queries_see(seed: int) -> None:
    rng = random.Random(seed)
    window = random_window(rng, rng.randint(1, 60), 9)
    reads = NeighborhoodWindow(*window).reads
    for _ in range(10):
        lo, hi = sorted(rng.randint(0, window[0]) for _ in range(2))
        seen = {key for query in range(lo, hi) for key in keys_of(query, window)}
        assert reads(lo, hi) == ((min(seen), max(seen) + 1) if seen else (0, 0)), window


def attention(rng: random.Random) -> Case:
    windows = random_windows(rng)
    return ops.neighborhood_attention.default, [*random_operands(rng, windows), *geometry(windows)]


def attention_gradient(rng: random.Random) -> Case:
    op, (q, k, v, *rest) = attention(rng)
    tangent = tensor(rng, *op(q, k, v, *rest).shape)
    return ops.neighborhood_attention_backward.default, [tangent, q, k, v, *rest]


SWEPT: Sequence[Callable[[random.Random], Case]] = (attention, attention_gradient)


@pytest.mark.parametrize("make", SWEPT, ids=lambda make: make.__name__)
def test_random_splits(make: Callable[[random.Random], Case]) -> None:
    wrong = [problem for seed in range(CASES) if (problem := mismatch(make, seed)) is not None]
    assert not wrong, f"{len(wrong)} of {CASES}\n" + "\n".join(wrong[:5])


def test_what_may_be_split() -> None:
    rng = random.Random(0)
    windows: list[Window] = [(5, 3, 1, False), (6, 2, 2, True)]
    q = tensor(rng, 2, 5, 6, 3, 4)
    rule = rule_for(call_node(ops.neighborhood_attention.default, [q, q, q, *geometry(windows)]))
    assert rule.splittable == ("b", "y0", "y1", "h")
    gradient = call_node(ops.neighborhood_attention_backward.default, [q, q, q, q, *geometry(windows)])
    assert rule_for(gradient).linear == (frozenset({0}),)


def node_of(windows: Sequence[Window]) -> fx.Node:
    return call_node(
        ops.neighborhood_attention.default,
        [*random_operands(random.Random(1), windows), *geometry(windows)],
    )


def test_operations() -> None:
    """2 heads x 7 x 8 queries x 3 x 4 keys x 5 numbers, 2 products of 2 operations forward and 5 backward."""
    q = torch.zeros(1, 7, 8, 2, 5)
    arguments = geometry([(7, 3, 1, False), (8, 4, 2, False)])
    forward = call_node(ops.neighborhood_attention.default, [q, q, q, *arguments])
    backward = call_node(ops.neighborhood_attention_backward.default, [q, q, q, q, *arguments])
    volume = 2 * 7 * 8 * 3 * 4 * 5
    assert (global_flops(forward), global_flops(backward)) == (4 * volume, 10 * volume)
    assert {arithmetic_kind(node, lambda _: ()) for node in (forward, backward)} == {"attention"}


def test_expanded_for_a_compiler() -> None:
    node = node_of([(7, 3, 2, True), (8, 4, 1, False)])
    node.graph.output(node)
    wanted = node.meta["val"]
    inputs = [n.meta["val"] for n in node.graph.nodes if n.op == "placeholder"]
    expanded = expand_ops(fx.GraphModule(torch.nn.Module(), node.graph))
    assert "autoshard" not in expanded.code
    torch.testing.assert_close(expanded(*inputs), wanted)


def test_as_torch_wants_ops() -> None:
    windows: list[Window] = [(5, 2, 2, False), (4, 3, 1, True)]
    q, k, v = (x.requires_grad_() for x in random_operands(random.Random(3), windows))
    arguments = geometry(windows)
    torch.library.opcheck(ops.neighborhood_attention.default, (q, k, v, *arguments))
    grad = torch.randn_like(ops.neighborhood_attention(q, k, v, *arguments)).detach()
    detached = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(ops.neighborhood_attention_backward.default, (grad, *detached, *arguments))


@pytest.mark.parametrize(("attend", "space"), [(na1d, 1), (na2d, 2), (na3d, 3)])
def test_with_nattens_arguments(attend: Callable[..., Tensor], space: int) -> None:
    """The default scale is that of head_dim 4: 1/2; three heads share a key's."""
    rng = random.Random(space)
    sizes = [6, 5, 4][:space]
    q, k, v = (tensor(rng, 2, *sizes, heads, 4) for heads in (3, 1, 1))
    windows: list[Window] = [(n, 2, 2, True) for n in sizes]
    wanted = by_loops(q, k.expand(q.shape), v.expand(q.shape), windows, 0.5)
    torch.testing.assert_close(attend(q, k, v, 2, dilation=2, is_causal=True), wanted)
    whole = attend(q, k, v, sizes, is_causal=[False] * space)
    everywhere = densely(q, k.expand(q.shape), v.expand(q.shape), [(n, n, 1, False) for n in sizes], 0.5)
    torch.testing.assert_close(whole, everywhere)


def test_in_half_precision() -> None:
    rng = random.Random(0)
    x = tensor(rng, 1, 9, 2, 4)
    found = na1d(*(x.bfloat16() for _ in range(3)), 3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), na1d(x, x, x, 3), rtol=2e-2, atol=2e-2)


X = torch.zeros(1, 6, 7, 2, 4)
WRONG = [
    ((X, X, X, 3), {"stride": 2}, UnsupportedOpError, "na2d: stride 2 is not supported"),
    ((X, X, X, (3, 4)), {"dilation": (1, 2)}, ShardingError, "kernel_size 4 x dilation 2 is more than the 7"),
    ((X, X, X, (3, 4, 5)), {}, ShardingError, "kernel_size (3, 4, 5) has 3 entries for 2 dims"),
    ((X, X, X, 0), {}, ShardingError, "kernel_size 0 and dilation 1 in dim 0"),
    ((X[0], X[0], X[0], 3), {}, ShardingError, "where [batch, x, y, heads, head_dim] is wanted"),
    ((X, X[:, :5], X, 3), {}, ShardingError, "differ in batch, space or head_dim"),
    ((X[..., :1, :], X, X, 3), {}, ShardingError, "1 heads of query, 2 of key and 2 of value"),
    ((X, X.double(), X, 3), {}, ShardingError, "one floating dtype and one device"),
]


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "message"), WRONG, ids=lambda v: v if type(v) is str else ""
)
def test_what_is_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as raised:
        na2d(*args, **kwargs)
    assert message in str(raised.value)


if __name__ == "__main__":
    count = int(sys.argv[1])
    for make in SWEPT:
        found = [problem for seed in range(count) if (problem := mismatch(make, seed)) is not None]
        print(f"{make.__name__}: {len(found)} of {count} wrong", *found[:3], sep="\n  ", flush=True)
