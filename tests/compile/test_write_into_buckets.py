"""Buckets that are computed where they are sent from: the same values, and nothing copied that need not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.compile.bind_device import WriteIntoBuckets
from passes.ir.graph_pass import run_rank_passes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ROWS = 128
"""Of what is large enough not to be copied: 128 x 256 float32 are 128 KiB."""


def sent(bucket: Tensor) -> Tensor:
    """Stands for a collective and its wait where the graph runs."""
    return bucket.clone()


def written(function: Callable[..., Tensor], *values: Tensor) -> Counter[str]:
    """Ops of the graph of `function`, whose clones are made all-reduces; checked to give the same values."""
    module = make_fx(function, tracing_mode="fake")(*values)
    wanted = module(*values)
    graph = module.graph
    for node in graph.nodes:
        if node.target is aten.clone.default:
            node.target, node.args = c10d.all_reduce.default, (*node.args, "sum", "axes:a")
            with graph.inserting_after(node):
                wait = graph.call_function(c10d.wait_tensor.default, (node,))
            wait.meta = dict(node.meta)
            node.replace_all_uses_with(wait, lambda user, wait=wait: user is not wait)
    module = run_rank_passes(module, [WriteIntoBuckets()])
    names = Counter(str(node.target) for node in graph.nodes if node.op == "call_function")
    for node in graph.nodes:
        if node.target is c10d.all_reduce.default:
            node.target, node.args = aten.clone.default, node.args[:1]
        elif node.target is c10d.wait_tensor.default:
            node.target = aten.alias.default
    module.recompile()
    found = module(*values)
    assert torch.equal(found, wanted)
    return names


def operands(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(shape, generator=generator) for shape in ((ROWS, 64), (64, 256), (512,)))
    return a.to(dtype), b.to(dtype), c.to(dtype)


def flat(x: Tensor) -> Tensor:
    return aten.view.default(x, [x.numel()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_and_sums_are_computed_in_the_bucket(dtype: torch.dtype) -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        product, total = a @ b, torch.sum(b, [0])
        return sent(aten.cat.default([flat(product), total]))

    ops = written(step, *operands(dtype=dtype))
    assert ops["aten.mm.out"] == ops["aten.sum.IntList_out"] == ops["aten.empty.memory_format"] == 1
    assert ops["aten.cat.default"] == ops["aten._foreach_copy_.default"] == ops["aten.mm.default"] == 0


def test_batches_of_products_and_products_with_a_bias() -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        batches = torch.bmm(a.view(2, ROWS // 2, 64), b.view(2, 64, 128))
        return sent(aten.cat.default([flat(batches), flat(torch.addmm(c[:256], a, b)), flat(a * a)]))

    ops = written(step, *operands())
    assert ops["aten.bmm.out"] == ops["aten.addmm.out"] == ops["aten.mul.out"] == 1
    assert not ops["aten.cat.default"]


def test_what_cannot_be_written_is_copied_with_one_op() -> None:
    """An input, what has another reader, and what begins between two vectors: 3 float32 behind the start."""

    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        product, shared = a @ b, a * 2
        parts = [flat(product), c, flat(shared), c[:3], flat(a + 1)]
        return sent(aten.cat.default(parts)) + shared.sum()

    large = (torch.randn(512, 64), *operands()[1:])
    ops = written(step, *large)
    assert ops["aten.mm.out"] == ops["aten._foreach_copy_.default"] == 1
    assert not ops["aten.add.out"] and not ops["aten.mul.out"] and not ops["aten.cat.default"]


def test_a_bucket_of_little_stays_one_copy() -> None:
    """Each copy of its own would take an interpreter longer than all of these together."""

    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return sent(aten.cat.default([flat(a[:2] @ b), c, c[:5], c[:6]]))

    assert written(step, *operands())["aten.cat.default"] == 1


def test_scaled_by_numbers() -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        scaled = aten.mul.Tensor(a, 0.5), aten.add.Tensor(b, a[:64, :1], alpha=2)
        return sent(aten.cat.default([flat(aten.mul.Tensor(a @ b, a[:, :1])), *map(flat, scaled)]))

    ops = written(step, torch.randn(512, 64), *operands()[1:])
    assert ops["aten.mul.out"] == 2 and ops["aten.add.out"] == 1


def test_what_is_turned_or_not_flat_or_not_sent_stays() -> None:
    def turned(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return sent(aten.cat.default([aten.reshape.default((a @ b).t(), [ROWS * 256]), c]))

    def rows(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return sent(aten.cat.default([a @ b, a @ b]))

    def kept(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return aten.cat.default([flat(a @ b), flat(a @ b)]) + 1

    def twice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        part = flat(a @ b)
        return sent(aten.cat.default([part, part]))

    for step in (turned, rows, kept, twice):
        assert written(step, *operands())["aten.cat.default"] == 1


def test_a_bucket_that_two_read_stays() -> None:
    graph = fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    product = graph.call_function(aten.mm.default, (a, b))
    view = graph.call_function(aten.view.default, (product, [ROWS * 256]))
    bucket = graph.call_function(aten.cat.default, ([view, view],))
    started = graph.call_function(c10d.all_reduce.default, (bucket, "sum", "axes:a"))
    wait = graph.call_function(c10d.wait_tensor.default, (started,))
    graph.output((wait, bucket))
    for node, shape in ((a, (ROWS, 64)), (b, (64, 256)), (product, (ROWS, 256)), (view, (ROWS * 256,))):
        node.meta["val"] = torch.empty(shape)
    for node in (bucket, started, wait):
        node.meta["val"] = torch.empty(2 * ROWS * 256)
    module = WriteIntoBuckets()(fx.GraphModule({}, graph))
    assert bucket in list(module.graph.nodes)
