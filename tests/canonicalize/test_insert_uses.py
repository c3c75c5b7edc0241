from __future__ import annotations

import torch

from passes.canonicalize.insert_uses import InsertUses
from passes.canonicalize.normalize_arguments import MergeDuplicates
from passes.ir.graph_pass import copy_joint, run_passes
from tests.canonicalize.graphs import applied, assert_same, prepared, ramp, text


def test_two_readers_share_a_use() -> None:
    after = applied(InsertUses(), lambda x: x.exp() + x.sin(), ramp(3))
    assert text(after) == ["use(x0) -> [3]", "exp(use) -> [3]", "sin(use) -> [3]", "add(exp, sin) -> [3]"]


def test_one_reader_that_reads_twice_needs_none() -> None:
    assert text(applied(InsertUses(), lambda x: x * x, ramp(3))) == ["mul(x0, x0) -> [3]"]


def test_the_returned_tuple_is_no_reader() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, y.sin()

    assert not any(line.startswith("use") for line in text(applied(InsertUses(), function, ramp(3))))


def test_each_phase_has_its_own_use() -> None:
    x = ramp(3)
    joint = prepared(lambda x: x.exp() * x.sin(), x, grads=True)
    before = run_passes(copy_joint(joint), [MergeDuplicates()])
    after = copy_joint(InsertUses()(copy_joint(before)))
    uses = [n for n in after.graph.nodes if n.target is torch.ops.autoshard.use.default]
    assert sorted((n.args[0].name, n.meta["phase"]) for n in uses) == [
        ("exp", "backward"),
        ("tangent_0", "backward"),
        ("x0", "forward"),
    ]
    for use in uses:
        assert len(use.users) >= 2
        assert {user.meta["phase"] for user in use.users} == {use.meta["phase"]}
    assert_same(before, after, [x])


def test_one_result_of_several_is_a_value() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, _ = x.topk(2)
        return values.exp() + values.sin()

    after = applied(InsertUses(), function, ramp(4))
    assert "use(getitem) -> [2]" in text(after)


def test_a_number_needs_no_use() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(())
        return (x + zero).exp() - (x * zero)

    assert not any(line.startswith("use(full") for line in text(applied(InsertUses(), function, ramp(4))))
