"""What torch's own kernels read and store, of a model of one call a line."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoshard.planning import canonical_capture
from passes.ir.joint import node_value, node_values, tensor_operands
from passes.strategies.traffic import eager_traffic, uncompiled_traffic

ROWS, WIDTH = 8, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        x = F.layer_norm(x, (WIDTH,), self.scale)
        x = F.gelu(x)
        return F.linear(x, self.weight)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def forward_nodes(model: nn.Module | None = None) -> list[fx.Node]:
    joint = canonical_capture(model or Model(), (torch.ones(ROWS, WIDTH),), {}).joint
    return [n for n in joint.graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"]


def moved(nodes: list[fx.Node]) -> tuple[int, int]:
    """Numbers loaded and stored."""
    loaded = stored = 0
    for node in nodes:
        flow = uncompiled_traffic(node)
        loaded += sum(
            node_value(n).numel() for n, read in zip(tensor_operands(node), flow.reads, strict=True) if read
        )
        stored += sum(v.numel() for v in node_values(node) if v is not None) if flow.writes else 0
    return loaded, stored


def test_a_norm_is_one_kernel() -> None:
    """It loads x and the scale, and stores y and, for the backward, mean and deviation of each row."""
    nodes = forward_nodes()
    (line,) = {n.meta["source"] for n in nodes if str(n.target) == "aten.rsqrt.default"}
    norm = [n for n in nodes if n.meta["source"] == line]
    assert len(norm) > 8
    loaded, stored = moved(norm)
    whole = ROWS * WIDTH
    assert loaded == whole + WIDTH
    assert whole <= stored <= 2 * whole + 2 * ROWS


def test_calls_of_other_lines_go_through_memory() -> None:
    (gelu,) = [n for n in forward_nodes() if n.target is torch.ops.aten.gelu.default]
    assert uncompiled_traffic(gelu) == eager_traffic(gelu)
    assert moved([gelu]) == (ROWS * WIDTH, ROWS * WIDTH)


def test_products_move_everything() -> None:
    products = [n for n in forward_nodes() if n.target is torch.ops.autoshard.contract.default]
    assert len(products) == 2
    assert moved(products) == (2 * (ROWS * WIDTH + WIDTH * WIDTH), 2 * ROWS * WIDTH)


def test_a_bias_is_added_within_its_product() -> None:
    """It is loaded beside the operands, and the sum alone is stored."""
    assert moved(forward_nodes(Biased())) == (ROWS * WIDTH + WIDTH * WIDTH + WIDTH, ROWS * WIDTH)
