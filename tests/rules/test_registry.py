"""Lookup, users' rules, and ops without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cost_model.errors import ShardingError
from passes.rules.check.trial import call_node
from passes.rules.core.rule import LocalContext
from passes.rules.core.rule_registry import (
    USER_RULES,
    RuleTable,
    has_rule,
    is_fallback,
    register_rule,
    rule_for,
)
from tests.rules.registered import Draw, aten, first_error


@torch.library.custom_op("rules_test::scale", mutates_args=())
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@torch.library.custom_op("rules_test::tile", mutates_args=())
def tile(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unsqueeze(0).repeat(count, 1)


@torch.library.custom_op("rules_test::peak", mutates_args=())
def peak(x: torch.Tensor) -> torch.Tensor:
    return x.amax(0)


@torch.library.custom_op("rules_test::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@pytest.fixture
def user_rules() -> Iterator[None]:
    before = dict(USER_RULES.builders)
    yield
    USER_RULES.builders.clear()
    USER_RULES.builders.update(before)


NODE = call_node(torch.ops.rules_test.scale.default, (Draw(0).floats(2, 4, 3), Draw(1).floats(3)))


def test_an_unknown_op_is_replicated_and_reported() -> None:
    assert is_fallback(NODE)
    assert not has_rule(NODE.target)  # type: ignore[arg-type]
    assert rule_for(NODE).splittable == ()
    assert first_error(NODE, rule_for(NODE)) is None
    assert not is_fallback(call_node(aten.add.Tensor, (torch.ones(2, 3), torch.ones(2, 3))))


@pytest.mark.parametrize("op", [scale, torch.ops.rules_test.scale, torch.ops.rules_test.scale.default,
                                "rules_test::scale", "rules_test::scale.default"])  # fmt: skip
def test_register(op: object, user_rules: None) -> None:
    register_rule(op, "b t d, d -> b t d", linear=[{0}, {1}])
    assert not is_fallback(NODE)
    rule = rule_for(NODE)
    assert rule.splittable == ("b", "t", "d")
    assert len(rule.linear) == 2
    assert first_error(NODE, rule) is None


def test_an_explicit_table_sees_only_its_own(user_rules: None) -> None:
    register_rule(scale, "b t d, d -> b t d")
    table = RuleTable()
    assert is_fallback(NODE, table)
    table.register(scale, "b t d, d -> b t d; d: whole")
    assert rule_for(NODE, table).splittable == ("b", "t")
    assert rule_for(NODE).splittable == ("b", "t", "d")


def test_a_user_rule_replaces_ours(user_rules: None) -> None:
    add = call_node(aten.add.Tensor, (torch.ones(2, 3), torch.ones(2, 3)))
    register_rule("aten::add", "m n, m n -> m n; n: whole")
    assert rule_for(add).splittable == ("m",)


def test_localize(user_rules: None) -> None:
    def local(ctx: LocalContext) -> torch.fx.Node:
        return ctx.call(ctx.node.target, ctx.args[0], ctx.result_shape()[0])  # type: ignore[arg-type]

    from passes.rules.core.assemble import assemble, dims
    from passes.rules.core.rule import OpCall

    node = call_node(torch.ops.rules_test.tile.default, (Draw(0).floats(3), 4))
    register_rule(tile, lambda call: tiled(call))

    def tiled(call: OpCall):  # type: ignore[no-untyped-def]
        return assemble(call.shapes, [dims("d")], [dims("n d")], localize=local)

    rule = rule_for(node)
    assert rule.splittable == ("n", "d")
    assert first_error(node, rule) is None


def test_a_user_op_never_sees_empty_tensors(user_rules: None) -> None:
    """amax over no elements is an error; on 3 ranks a dim of 4 leaves one rank without any."""
    node = call_node(torch.ops.rules_test.peak.default, (Draw(0).floats(4, 2),))
    register_rule(peak, "a b -> b; a: max")
    assert first_error(node, rule_for(node)) is None


def test_tensors_without_elements_are_whole() -> None:
    rule = rule_for(call_node(aten.add.Tensor, (torch.ones(0, 3), torch.ones(0, 3))))
    assert rule.splittable == ()
    assert rule.linear == ()


def test_refusals(user_rules: None) -> None:
    with pytest.raises(ShardingError, match="has no '->'"):
        register_rule(scale, "b t d, d")
    with pytest.raises(ShardingError, match=r"cannot be linear in operands \[2\]: it has 2 operands"):
        register_rule(scale, "b t d, d -> b t d", linear=[{2}])
    with pytest.raises(ShardingError, match="cannot register a rule for 'scale': not an operator"):
        register_rule("scale", "a -> a")
    with pytest.raises(ShardingError, match="not an operator"):
        register_rule(torch.relu, "a -> a")
    register_rule(scale, "t d, d -> t d")
    with pytest.raises(
        ShardingError, match=r"rules_test.scale.default at scale_default: rule 't d, d -> t d'"
    ):
        rule_for(NODE)


@pytest.mark.parametrize("op", [double_, torch.ops.rules_test.double_, torch.ops.rules_test.double_.default,
                                "rules_test::double_", "rules_test::double_.default"])  # fmt: skip
def test_a_rule_for_an_op_that_writes_to_its_argument_is_refused(op: object, user_rules: None) -> None:
    """Capture wraps such an op in another: the rule would never be asked."""
    with pytest.raises(ShardingError, match=r"it writes to its argument x\n  try: .*mutates_args=\(\)"):
        register_rule(op, "b d -> ")
    for other in ("aten::add_", "aten::add.out"):
        with pytest.raises(ShardingError, match="it writes to its argument"):
            register_rule(other, "b d, b d -> b d")
    register_rule("rules_test::made_later", "b d -> b d")
