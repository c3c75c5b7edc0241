"""Attention within a window is what a mask of all queries and keys makes of it, with products of blocks alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from cost_model.errors import UnsupportedOpError
from passes.compile.bind_device import expand_ops
from passes.ops import attention, attention_window
from passes.ops.attention_table import Chip
from tests.attention.graphs import Call, graph_of, kernels_of


def band(queries: int, keys: int, window: int) -> Tensor:
    before = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return ((before >= 0) & (before < window))[None, None]


@pytest.mark.parametrize("seed", range(40))
def test_blocks_are_as_a_mask(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, of random sizes; with keys before the first query, as a rank has them."""
    monkeypatch.setattr(attention_window, "_LEAST_BLOCK", 2)
    draw = random.Random(seed)
    queries, window, more = draw.randint(1, 20), draw.randint(1, 24), draw.choice([0, 0, draw.randint(1, 9)])
    batch, groups, heads = draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 3)
    make = torch.Generator().manual_seed(seed)
    random_like = lambda *shape: torch.randn(shape, generator=make, dtype=torch.float64, requires_grad=True)
    q = random_like(batch, groups * heads, queries, 4)
    k, v = (random_like(batch, groups, queries + more, width) for width in (4, draw.choice([4, 5])))
    got = attention(q, k, v, None, True, 0.5, window)
    wanted = attention(q, k, v, band(queries, queries + more, window), False, 0.5)
    cotangent = torch.randn(got[0].shape, generator=make, dtype=torch.float64)
    gradients = [torch.autograd.grad(out, (q, k, v), cotangent) for out, _ in (got, wanted)]
    torch.testing.assert_close((*got, *gradients[0]), (*wanted, *gradients[1]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("before", "blocks"), [(0, 6), (299, 8)], ids=["whole", "with a halo"])
def test_what_is_multiplied_on_a_gpu(before: int, blocks: int) -> None:
    """Of 1,200 queries of 2 samples: blocks of 150 with 449 keys, and what is before them, which is causal alone."""
    call = Call(torch.bfloat16, causal=True, window=300, s=1200, t=1200 + before)
    module = expand_ops(graph_of(call), Chip((9, 0)))
    head = not before
    assert kernels_of(module) == tuple(
        kernel + back for back in ("", "_backward") for kernel in (*["flash"] * head, "efficient")
    )
    of_q_and_k = [
        tuple(n.args[i].meta["val"].shape for i in (0, 1))
        for n in module.graph.nodes
        if str(n.target).endswith(("flash_attention.default", "efficient_attention.default"))
    ]
    body = (2 * blocks, 4, 150, 64), (2 * blocks, 4, 449, 64)
    assert of_q_and_k == [*[((2, 4, 300, 64),) * 2] * head, body]


def test_what_is_multiplied_of_documents_on_a_gpu() -> None:
    """Of 3,000 causal queries: blocks of 1,024 with the keys before their end."""
    module = expand_ops(
        graph_of(Call(torch.bfloat16, causal=True, s=3000, t=3000, documents=True)), Chip((9, 0))
    )
    assert kernels_of(module) == ("efficient",) * 3 + ("efficient_backward",) * 3
    calls = [n for n in module.graph.nodes if str(n.target).endswith("efficient_attention.default")]
    lengths = [tuple(n.args[i].meta["val"].shape[2] for i in (0, 1)) for n in calls]
    assert lengths == [(1024, 1024), (1024, 2048), (952, 3000)]
    values = [n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert max(x.numel() for x in values if x.dtype == torch.bool) == 952 * 3000


def test_what_documents_are_for() -> None:
    x, ids = torch.randn(1, 1, 4, 8), torch.zeros(1, 1, 4, 1)
    for mask, more in (
        (None, (0, ids)),
        (None, (2, ids, ids)),
        (band(4, 4, 2), (0, ids, ids)),
        (None, (0, ids[:, :, :3], ids)),
    ):
        with pytest.raises(
            UnsupportedOpError, match=r"goes with the other's, no mask.*\n  try: documents written"
        ):
            attention(x, x, x, mask, mask is None, 0.5, *more)


def test_what_a_window_is_for() -> None:
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 3, 8)
    for args in ((q, k, k, None, True), (q, q, q, None, False), (q, q, q, band(4, 4, 2), True)):
        with pytest.raises(
            UnsupportedOpError, match=r"window of 2 is for 4 causal queries.*\n  try: the window written"
        ):
            attention(*args, 0.5, 2)
