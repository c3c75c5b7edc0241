"""Copies of forward ops in the backward: the same numbers, and no value of the forward kept for them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph, ops_by_phase
from passes.ir.op_traits import storage_root
from passes.lower.phases import split_phases
from passes.micro_batches.cut_batch import cut_batch
from passes.simulate.reference import graph_values, reference_inputs
from passes.states.compute_again import compute_again, copied_ops, runs_again
from passes.states.offers import candidates


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = lambda y: y.unflatten(-1, (2, 4)).transpose(1, 2)
        q, k = heads(self.q(x)), heads(self.k(x))
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True).sum((1, 3))


class FusedAttending(nn.Module):
    """Queries, keys and values are views of one product, which they share."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 3, 4)).permute(3, 0, 2, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum((1, 3))


MODELS = {
    "blocks": (lambda: nn.Sequential(Block(4), Block(4)), (3, 5, 4)),
    "attention": (Attending, (2, 6, 8)),
    "fused attention": (FusedAttending, (2, 6, 8)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)
        ),
        (3, 2, 8, 8),
    ),
}


def joint_of(name: str) -> tuple[JointGraph, list[torch.Tensor]]:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(shape, dtype=torch.float64)
    joint = canonical_capture(model, (x,), {}).joint
    return joint, reference_inputs(joint, model, [x], seed=1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_the_same_numbers(name: str, share: float) -> None:
    joint, values = joint_of(name)
    draw = random.Random(f"{name} {share}")
    names = [node.name for node in candidates(joint, ()) if draw.random() < share]
    again = compute_again(joint, names)
    copies = copied_ops(node.name for node in again.graph.nodes)
    assert share < 1.0 or set(copies) & set(names)
    wanted, _ = graph_values(joint, values)
    found, _ = graph_values(again, values)
    for one, other in zip(found, wanted, strict=True):
        assert one is None and other is None if one is None or other is None else torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_the_backward_reads_nothing_that_is_computed_again(name: str) -> None:
    joint, _ = joint_of(name)
    names = {node.name for node in candidates(joint, ())}
    again = compute_again(joint, names)
    forward, backward = ops_by_phase(again)
    read = {storage_root(operand).name for node in backward for operand in node.all_input_nodes}
    assert read.isdisjoint(names & {n.name for n in forward})


def test_copies_run_in_the_backward_and_are_not_saved() -> None:
    joint, _ = joint_of("blocks")
    again = compute_again(joint, [node.name for node in candidates(joint, ())])
    phases = split_phases(again.module, again.inputs, again.outputs)
    assert phases.backward is not None
    late = {node.name for node in phases.backward.module.graph.nodes if node.op == "call_function"}
    copies = [node for node in again.graph.nodes if runs_again(node)]
    assert sum(node.name.startswith(("contract", "gelu")) for node in copies) >= 3
    assert {node.name for node in copies} <= late
    assert {node.name for node in copies}.isdisjoint(node.name for node in phases.forward.graph.nodes)


def test_the_graph_given_is_left_and_copying_twice_changes_nothing() -> None:
    joint, _ = joint_of("blocks")
    before = str(joint.graph)
    names = [node.name for node in candidates(joint, ())]
    again = compute_again(joint, names)
    assert str(joint.graph) == before
    assert compute_again(again, copied_ops(node.name for node in again.graph.nodes)) is again
    assert compute_again(joint, []) is joint


def test_a_weight_is_read_once_for_an_op_that_runs_again_and_its_gradient() -> None:
    joint, _ = joint_of("blocks")
    again = compute_again(joint, [node.name for node in candidates(joint, ())])
    _, backward = ops_by_phase(again)
    late = set(backward)
    weights = [
        n for n, spec in zip(again.placeholders, again.inputs, strict=True) if spec.name.endswith("up.weight")
    ]
    for weight in weights:
        assert len([user for user in weight.users if user in late]) == 1


def test_views_of_a_copy_are_copied() -> None:
    joint, _ = joint_of("attention")
    again = compute_again(joint, [node.name for node in candidates(joint, ())])
    copies = copied_ops(node.name for node in again.graph.nodes)
    assert any(name.startswith(("reshape", "permute")) for name in copies)


def test_views_of_a_value_that_is_shared_are_copied() -> None:
    """Else queries, keys and values kept their product for the backward, whatever the limit."""
    joint, _ = joint_of("fused attention")
    again = compute_again(joint, [node.name for node in candidates(joint, ())])
    assert sum(name.startswith("select") for name in copied_ops(n.name for n in again.graph.nodes)) == 3


def test_a_piece_gathers_a_weight_once_for_what_runs_again_and_its_gradient() -> None:
    """Pieces share the weight as it is stored; in the backward of each both read one use of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    joint = cut_batch(canonical_capture(model, (torch.randn(6, 4),), {}).joint, 2)
    again = compute_again(joint, [node.name for node in candidates(joint, ())])
    nodes = {node.name: node for node in again.graph.nodes}
    weight, product = nodes["_2_weight"], nodes["contract_1_again"]
    (stored,) = weight.users
    (gathered,) = [operand for operand in product.all_input_nodes if stored in operand.all_input_nodes]
    assert (stored.meta["runs"], gathered.meta["runs"], gathered.meta["phase"]) == (
        "before",
        "piece",
        "backward",
    )
    assert len(gathered.users) == 2 and len(stored.users) == 2  # the forward's product reads it too
