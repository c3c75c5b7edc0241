"""Ops that are alike but for strides, by which they take another time: each has its own price, whoever asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoshard.plan.task import Task, search_plan
from autoshard.planning import canonical_capture
from cost_model.timed import KernelKey, KernelWork, TimedKernel, TimedPrices
from passes.ir.joint import tensor_operands
from passes.ir.op_work import class_key, kernel_form, kernel_key, operand_orders
from passes.layout.layout import Layout, NodeLayouts
from passes.rules.core.rule_registry import rule_for
from passes.search.strategy_space import SpaceBuilder
from passes.strategies.prices import strategy_seconds
from tests.refine.tasks import task

SHORT, LONG = 1e-6, 1.0


class Turned(nn.Module):
    """Products of tensors of one shape, as they lie and turned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.sin(x * self.weight)
        b = torch.sin(x * self.weight).transpose(1, 2) * x
        return (a * b).sum() + (a.transpose(1, 2) * b.transpose(1, 2).exp()).sum()


def turned_task() -> tuple[Task, KernelKey]:
    """Products of one shape were timed as they lie, and turned, for which they take far longer: as a rank has them
    that has all of them."""
    torch.manual_seed(0)
    captured = canonical_capture(Turned(), (torch.randn(4, 8, 8),), {})
    products = [n for n in captured.joint.graph.nodes if str(n.target) == "aten.mul.Tensor"]
    turned = next(n for n in products if operand_orders(n) == ((0, 2, 1), (0, 1, 2)))
    alike = {operand_orders(n): n for n in products if class_key(n) == class_key(turned)}
    assert len(alike) > 1
    work = KernelWork(256.0, 3072.0, "float32", None, 1024.0)
    keys = [kernel_key(n, kernel_form(n), lambda _: (4, 8, 8)) for n in alike.values()]
    long = kernel_key(turned, kernel_form(turned), lambda _: (4, 8, 8))
    timed = tuple(TimedKernel(key, work, LONG if key == long else SHORT) for key in keys)
    return replace(task(), captured=captured, timed=TimedPrices(timed)), long


def test_the_search_prices_every_op_as_if_it_were_the_only_one() -> None:
    one, key = turned_task()
    prices = one.prices
    space = SpaceBuilder(one.joint, prices, one.boundary).built()
    long = 0
    for node in one.joint.graph.nodes:
        if node.op != "call_function" or node.name not in space.names:
            continue
        place = space.names.index(node.name)
        strategies, costs = space.strategies[place], space.problem.node_costs[place]
        own = strategy_seconds(
            node, rule_for(node), strategies, prices.traffic(node), one.mesh, prices.compute
        )
        assert costs == pytest.approx(own), node
        assert [prices.op_seconds(node, strategy) for strategy in strategies] == pytest.approx(own), node
        form = kernel_form(node)
        whole = kernel_key(node, form, lambda i, n=node: tensor_operands(n)[i].meta["val"].shape)
        long += whole == key and max(own) == pytest.approx(LONG)
    assert long


def test_layouts_that_ops_share_say_nothing_of_their_strides() -> None:
    one, _ = turned_task()
    products = [n for n in one.joint.graph.nodes if str(n.target) == "aten.mul.Tensor"]
    alike = {operand_orders(n): n for n in products if len(tensor_operands(n)) == 2}
    layouts = NodeLayouts((Layout.replicated(3),) * 2, (Layout.replicated(3),))
    seconds = [one.prices.op_seconds(n, layouts) for n in alike.values()]
    assert {SHORT, LONG} <= set(seconds)


def test_such_a_graph_has_a_plan() -> None:
    """Counted again by its records it takes what the search said: anything else is an error of `search_plan`."""
    one, _ = turned_task()
    plan = search_plan(one)
    assert 0.0 < plan.lower_bound <= plan.cost
