"""Products with experts in a rank's program: rows are sorted once for those that follow each other."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from passes.canonicalize import canonicalize
from passes.capture import capture
from passes.compile.bind_device import expand_ops
from passes.ir.op_traits import is_use
from passes.ir.op_work import global_flops
from passes.lower.own_rows import with_sorted_rows
from passes.ops.routed_ops import READ_ROWS, routed_mm


class Experts(nn.Module):
    """Two products with a gate between, weighed and added up by token."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 10).double())
        self.down = nn.Parameter(torch.randn(3, 5, 4).double())

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = x[:, :, None, :].expand(*ids.shape, 4)
        gate, up = routed_mm(rows, self.up, ids, 0, 3).chunk(2, -1)
        return (
            (routed_mm(torch.tanh(gate) * up, self.down, ids, 0, 3) * weights[..., None])
            .sum(2)
            .square()
            .mean()
        )


def _inputs(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weights = torch.rand(batch, 3, 2, dtype=torch.float64, requires_grad=True)
    return torch.randn(batch, 3, 4, dtype=torch.float64), torch.randint(0, 3, (batch, 3, 2)), weights


def _graph(batch: int = 2) -> fx.GraphModule:
    module = canonicalize(capture(Experts(), _inputs(batch), {}).joint).module
    for node in list(module.graph.nodes):
        if is_use(node):  # lowering drops them
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            module.graph.erase_node(node)
    return module


def _count(module: fx.GraphModule, *names: str) -> list[int]:
    targets = [str(node.target) for node in module.graph.nodes]
    return [sum(name in target for target in targets) for name in names]


def _run(module: fx.GraphModule, batch: int = 2, ids: tuple[int, int] = (0, 3)) -> list[Tensor]:
    torch.manual_seed(1)
    expanded = expand_ops(module)
    values = []
    for node in expanded.graph.find_nodes(op="placeholder"):
        look = node.meta["val"]
        integers = torch.randint(*ids, look.shape)
        values.append(torch.randn(look.shape, dtype=look.dtype) if look.dtype.is_floating_point else integers)
    return [x for x in fx.Interpreter(expanded).run(*values) if isinstance(x, Tensor)]


def test_the_backward_reads_rows_and_ids_as_the_forward() -> None:
    """By one use of each: what was sent to the ranks of experts is kept."""
    graph = canonicalize(capture(Experts(), _inputs(), {}).joint).module.graph
    first, *_ = (node for node in graph.nodes if node.target in READ_ROWS)
    rows, _, ids = first.all_input_nodes
    outer = [node for node in graph.nodes if "routed_outer" in str(node.target) and rows in node.args]
    assert is_use(rows) and is_use(ids) and len(outer) == 1
    backward = [node for node in graph.nodes if node.target in READ_ROWS and node.meta["phase"] == "backward"]
    assert len(backward) == 4 and all(node.args[-3] is ids for node in backward)


def test_one_sort_and_one_way_there_and_back_in_each_direction() -> None:
    plain = _graph()
    made = with_sorted_rows(plain)
    assert _count(plain, "routed_mm", "routed_outer", "grouped_mm", "sort.") == [3, 2, 0, 0]
    # x and the weights are data: one way there, and one back, in the forward, and in the backward one there
    assert _count(made, "routed", "grouped_mm", "aten.sort.", "aten.index.Tensor") == [0, 5, 1, 3]
    for got, wanted in zip(_run(made), _run(plain), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


def test_sorted_rows_are_as_many_operations() -> None:
    """12 rows: 4 x 10 and 5 x 4 in the forward; in the backward 4 x 5 for the rows, and both for the weights."""
    made = with_sorted_rows(_graph())
    products = [global_flops(node) for node in made.graph.nodes if "grouped_mm" in str(node.target)]
    assert sorted(products) == [480.0, 480.0, 480.0, 960.0, 960.0]


def test_one_row_and_none() -> None:
    for batch in (1, 0):
        plain = _graph(batch)
        for got, wanted in zip(_run(with_sorted_rows(plain)), _run(plain), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13, equal_nan=True)


def test_a_graph_without_experts_is_left_alone() -> None:
    module = canonicalize(capture(nn.Linear(4, 4), (torch.randn(2, 4),), {}).joint).module
    assert with_sorted_rows(module) is module


def test_a_rank_with_some_experts_has_the_rows_of_these() -> None:
    """As a part of the order, in forward and backward; rows of others are 0 where they are put back."""
    plain = _graph()
    for node in plain.graph.nodes:
        if node.target in READ_ROWS:
            node.args, node.meta["experts"] = (*node.args[:-2], 1, 3), 6
    made = with_sorted_rows(plain)
    assert _count(made, "routed", "own_rows", "sum_rows", "add_rows") == [0, 0, 0, 1]
    assert _count(made, "own_places", "grouped_mm") == [1, 5]
    products = [node for node in made.graph.nodes if "grouped_mm" in str(node.target)]
    # 12 rows of 6 equally loaded experts, of which the rank has 3
    rows = [(node.args[0].meta["val"].shape, node.args[1].meta["val"].ndim) for node in products]  # type: ignore[union-attr]
    assert [shape[0] if ndim == 3 else shape[1] for shape, ndim in rows] == [6] * 5
    for experts in ((0, 6), (1, 4), (2, 3), (0, 1), (5, 6)):
        for got, wanted in zip(_run(made, ids=experts), _run(plain, ids=experts), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)
