"""Rules found by running an op: the written rule is found again, and a rule that does not hold is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cost_model.errors import ShardingError
from passes.rules.check.discover import discover_rule
from passes.rules.check.trial import call_node
from passes.rules.core.rule_registry import RuleTable, rule_for
from tests.rules.registered import Draw, aten, first_error

D = Draw(0)
MATRIX, OTHER = D.floats(4, 5), D.floats(5, 6)


@pytest.mark.parametrize(
    ("op", "args", "rule"),
    [
        (aten.mm.default, (MATRIX, OTHER), "a b, b c -> a c; b: sum; linear: 0; linear: 1"),
        (
            aten.bmm.default,
            (D.floats(3, 4, 5), D.floats(3, 5, 6)),
            "a b d, a d c -> a b c; d: sum; linear: 0; linear: 1",
        ),
        (aten.add.Tensor, (MATRIX, D.floats(4, 5)), "a b, a b -> a b; linear: 0 1"),
        (aten.add.Tensor, (MATRIX, D.floats(5)), "a b, b -> a b; linear: 0 1"),
        (aten.mul.Tensor, (MATRIX, D.floats(4, 1)), "a b, a 1 -> a b; linear: 0; linear: 1"),
        (aten.exp.default, (MATRIX,), "a b -> a b"),
        (aten.sum.dim_IntList, (MATRIX, [1]), "a b -> a; b: sum; linear: 0"),
        (aten.amax.default, (MATRIX, [0]), "b a -> a; b: max"),
        (aten.cumsum.default, (MATRIX, 1), "a b -> a c; b: whole; linear: 0"),
        (aten.sort.default, (MATRIX,), "a b -> a c, a d; b: whole"),
        (aten.permute.default, (D.floats(3, 4, 5), [2, 0, 1]), "a b c -> c a b; linear: 0"),
        (aten.embedding.default, (MATRIX, D.ints(4, 6)), "b a, c -> c a; b: whole; linear: 0"),
        (
            aten.addmm.default,
            (D.floats(6), MATRIX, OTHER),
            "b, a c, d b -> a b; c: whole; d: whole; linear: 0 1; linear: 0 2",
        ),
    ],
)
def test_known_rules_are_found(op: object, args: tuple[object, ...], rule: str) -> None:
    found = discover_rule(op, args)  # type: ignore[arg-type]
    assert same(found, rule), found


def same(a: str, b: str) -> bool:
    """Equal but for the names of factors."""

    def renamed(text: str) -> str:
        head, *notes = text.split("; ")
        letters: dict[str, str] = {}
        for word in head.replace(",", " ").replace("->", " ").split():
            if word != "1":
                letters.setdefault(word, chr(ord("A") + len(letters)))

        def swap(part: str) -> str:
            return "".join(letters.get(c, c) for c in part)

        return "; ".join(
            [swap(head), *sorted(n if n.startswith("linear") else f"{swap(n[0])}{n[1:]}" for n in notes)]
        )

    return renamed(a) == renamed(b)


@torch.library.custom_op("discover_test::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Softmax over t of b t d, weighted by d, summed over d."""
    return (x.softmax(1) * weight).sum(-1)


def test_what_is_found_can_be_registered() -> None:
    op = torch.ops.discover_test.mix.default
    node = call_node(op, (D.floats(4, 3, 5), D.floats(5)))
    table = RuleTable()
    table.register(op, discover_rule(op, (D.floats(4, 3, 5), D.floats(5))))
    rule = rule_for(node, table)
    assert len(rule.splittable) == 2
    assert list(rule.reductions.values()) == ["sum"]
    assert rule.linear == (frozenset({1}),)
    assert first_error(node, rule) is None


@torch.library.custom_op("discover_test::pairs", mutates_args=())
def pairs(x: torch.Tensor) -> torch.Tensor:
    """Neighbours two by two: two even shards would do, three would not."""
    return x.view(-1, 2).flip(1).reshape(-1)


def test_a_coincidence_of_two_shards_is_dropped() -> None:
    found = discover_rule(torch.ops.discover_test.pairs.default, (D.floats(8),))
    assert found == "a -> b; a: whole; linear: 0"


@pytest.fixture
def not_a_tensor() -> Iterator[object]:
    yield lambda x: 3


def test_refusals(not_a_tensor: object) -> None:
    with pytest.raises(ShardingError, match="it returns int, not tensors"):
        discover_rule(not_a_tensor, (MATRIX,))  # type: ignore[arg-type]
    many = [torch.ones([2] * 8, dtype=torch.float64) for _ in range(6)]
    with pytest.raises(ShardingError, match="assignments of dims to try"):
        discover_rule(lambda *xs: xs[0], many)
