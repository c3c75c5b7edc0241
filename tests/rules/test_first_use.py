"""A user's rule is tried when an op is first asked for it: a wrong one is refused, what cannot be tried is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cost_model.errors import ShardingError
from passes.rules.check.first_use import tried_rule
from passes.rules.core.assemble import assemble, dims
from passes.rules.core.rule import LocalContext, OpCall, OpRule
from passes.rules.core.rule_registry import USER_RULES, register_rule

RAN: list[torch.Size] = []


def op(name: str, run: Callable[..., Tensor], device_types: str | None = None) -> Any:
    def noted(x: Tensor, y: Tensor) -> Tensor:
        RAN.append(x.shape)
        return run(x, y)

    return torch.library.custom_op(f"first_use::{name}", noted, mutates_args=(), device_types=device_types)


def of_eights(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[0] % 8:
        raise ValueError("rows must be a multiple of 8")
    return x * y


def raising(x: Tensor, y: Tensor) -> Tensor:
    if (x < 0).any():
        raise ValueError("x must be positive")
    return x - x.mean(0)


product = op("product", lambda x, y: x @ y)
narrow = op("narrow", lambda x, y: (x.bfloat16() @ y.bfloat16()).to(x.dtype))
center = op("center", lambda x, y: x - x.mean(0) + y)
small = op("small", lambda x, y: 1e-6 * (x - x.mean(0) + y))
eights = op("eights", of_eights)
positive = op("positive", raising)
noise = op("noise", lambda x, y: torch.rand_like(x) + y)
elsewhere = op("elsewhere", lambda x, y: x - x.mean(0) + y, "cuda")
taken = op("taken", lambda x, y: x.index_select(0, y))
eighth = op("eighth", lambda x, y: (x - x.mean(0) + y).to(torch.float8_e4m3fn))
ranged = op("ranged", lambda x, y: x + torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1))


@pytest.fixture(autouse=True)
def _own_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(USER_RULES, "builders", {})
    yield
    RAN.clear()


def called(which: Any, rows: int = 640) -> fx.Node:
    """A node as plans have it: of large tensors that are not there."""
    x, y, result = {
        product: ((rows, 512), (512, 384), (rows, 384)),
        narrow: ((rows, 512), (512, 384), (rows, 384)),
        taken: ((rows, 512), (300,), (300, 512)),
    }.get(which, ((rows, 512),) * 3)
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    nodes.append(graph.call_function(which._opoverload, tuple(nodes)))
    for node, shape in zip(nodes, (x, y, result), strict=True):
        dtype = torch.int64 if shape == (300,) else torch.float32
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return nodes[-1]


REFUSED: dict[str, tuple[Any, str, list[set[int]]]] = {
    "split where it reads all": (center, "b d, b d -> b d", []),
    "in eight bits": (eighth, "b d, b d -> b d", []),
    "of small values": (small, "b d, b d -> b d", []),
    "max for sum": (product, "m k, k n -> m n; k: max", []),
    "linear in both together": (product, "m k, k n -> m n", [{0, 1}]),
    "shapes that do not fit": (product, "m k, j n -> m n; k: sum; j: whole", []),
    "of multiples of 8, linear": (eights, "b d, b d -> b d; b: whole", [{0, 1}]),
    "places of rows": (taken, "v d, i -> i d; v: sum", []),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_rule_is_refused(what: str) -> None:
    which, rule, linear = REFUSED[what]
    register_rule(which, rule, linear=linear)
    node = called(which)
    for _ in range(2):  # every time
        with pytest.raises(
            ShardingError, match=r"the rule of first_use\.\w+\.default, registered at .*, is wrong"
        ):
            tried_rule(node)
    assert all(shape.numel() < 20_000 for shape in RAN)


HOLDS: dict[str, tuple[Any, str, list[set[int]]]] = {
    "a product": (product, "m k, k n -> m n", [{0}, {1}]),
    "in a narrower type": (narrow, "m k, k n -> m n", [{0}, {1}]),
    "of multiples of 8": (eights, "b d, b d -> b d", [{0}, {1}]),
    "whole where it reads all": (center, "b d, b d -> b d; b: whole", [{0, 1}]),
}
NOT_TRIED: dict[str, tuple[Any, str, list[set[int]]]] = {
    "raises on random values": (positive, "b d, b d -> b d", []),
    "random": (noise, "b d, b d -> b d", []),
    "no kernel here": (elsewhere, "b d, b d -> b d", []),
}


@pytest.mark.parametrize("what", HOLDS | NOT_TRIED)
def test_what_holds_and_what_cannot_be_tried_is_not_refused(what: str) -> None:
    which, rule, linear = (HOLDS | NOT_TRIED)[what]
    register_rule(which, rule, linear=linear)
    before = torch.get_rng_state()
    assert tried_rule(called(which)).splittable
    assert torch.equal(torch.get_rng_state(), before)
    count = len(RAN)
    tried_rule(called(which))  # not again
    assert len(RAN) == count
    assert (count > 30) == (what in HOLDS)


def test_it_is_tried_for_every_shape_and_after_every_registration() -> None:
    register_rule(center, "b d, b d -> b d; b: whole")
    for rows in (10, 11, 10):
        tried_rule(called(center, rows))
    once = len(RAN) // 2
    register_rule(center, "b d, b d -> b d; d: whole", trial=False)
    tried_rule(called(center, 10))
    assert len(RAN) == 2 * once
    register_rule(center, "b d, b d -> b d; d: whole")
    with pytest.raises(ShardingError, match="is wrong"):
        tried_rule(called(center, 10))


@pytest.mark.parametrize("uneven", [True, False])
def test_a_localize_that_forgets_uneven_parts_is_refused(uneven: bool) -> None:
    """Rank 1 of 2 begins at half of the rows: of 5 rows at 3."""

    def local(ctx: LocalContext) -> fx.Node:
        low, high = ctx.interval("b")
        start = low if uneven else (high - low) * (low > 0)
        part = ctx.call(ctx.node.target, *ctx.args)  # type: ignore[arg-type]
        return ctx.call(torch.add, part, start)

    def build(call: OpCall) -> OpRule:
        return assemble(call.shapes, [dims("b d"), dims("b d")], [dims("b d")], localize=local)

    register_rule(ranged, build)
    if uneven:
        assert tried_rule(called(ranged)).splittable == ("b", "d")
        return
    with pytest.raises(ShardingError, match=r"\[@x, -\], \[@x, -\] -> \[@x, -\] on mesh \(x=\d\)"):
        tried_rule(called(ranged))
