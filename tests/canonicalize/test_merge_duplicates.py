from __future__ import annotations

import torch

from passes.canonicalize.normalize_arguments import MergeDuplicates
from tests.canonicalize.graphs import applied, ops, prepared, ramp, text


def test_merge_duplicates() -> None:
    after = applied(MergeDuplicates(), lambda x: x.exp().sin() + x.exp().sin(), ramp(3))
    assert text(after) == ["exp(x0) -> [3]", "sin(exp) -> [3]", "add(sin, sin) -> [3]"]


def test_arguments_that_compare_equal_but_are_not_the_same_are_kept_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x**2) * (x**2.0) + x * 0.0 + x * -0.0

    assert ops(applied(MergeDuplicates(), function, ramp(3))) == {"pow": 2, "mul": 3, "add": 2}


def test_true_and_one_are_not_the_same_number() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + True, x + 1  # bool, int64

    assert ops(applied(MergeDuplicates(), function, torch.tensor([True, False])))["add"] == 2


def test_draws_are_not_duplicates() -> None:
    joint = MergeDuplicates()(prepared(lambda x: torch.rand_like(x) + torch.rand_like(x), ramp(3)))
    assert ops(joint)["rand_like"] == 2


def test_constants_with_dims_stay_apart_and_numbers_merge() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(3), torch.zeros(3), torch.zeros(()), torch.zeros(())
        return torch.cat([x + zeros[2], x - zeros[3], *zeros[:2]])

    after = applied(MergeDuplicates(), function, ramp(3))
    shapes = [line.rpartition(" -> ")[2] for line in text(after) if line.startswith("full")]
    assert sorted(shapes) == ["[3]", "[3]", "[]"]


def test_a_backward_op_merges_into_its_forward_twin() -> None:
    after = applied(MergeDuplicates(), lambda x: x.exp(), ramp(3), grads=True)
    assert ops(after) == {"exp": 1, "mul": 1}


def test_what_a_forward_reads_is_of_the_forward_whichever_twin_stands_first() -> None:
    joint = prepared(lambda x: x.exp().sin() * x.exp(), ramp(3))
    first, second = (node for node in joint.graph.nodes if "exp" in str(node.target))
    first.meta["phase"], second.meta["phase"] = "backward", "forward"
    after = MergeDuplicates()(joint)
    (left,) = (node for node in after.graph.nodes if node.users and "exp" in str(node.target))
    assert left is first and left.meta["phase"] == "forward"
