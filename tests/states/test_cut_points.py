"""Where the forward is cut into parts that are computed again, and what the user's own checkpoints say."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph, node_value
from passes.states.offers import candidates, known_ops, places, users_choice
from tests.states.test_compute_again import Block, joint_of


def test_a_residual_network_is_cut_at_its_residual_stream() -> None:
    joint, _ = joint_of("blocks")
    found = places(joint)
    assert found
    for place in found:
        assert [tuple(node_value(node).shape) for node in place] == [(3, 5, 4)]


def test_what_a_place_keeps_is_no_candidate() -> None:
    joint, _ = joint_of("blocks")
    kept = places(joint)
    free = {node.name for node in candidates(joint, ())}
    left = {node.name for node in candidates(joint, kept)}
    assert left == free - {node.name for place in kept for node in place}


class Skipping(nn.Module):
    """Down and up again, with a skip around what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.c, self.d = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.a(x))
        b = torch.relu(self.b(a))
        for conv in self.middle:
            b = torch.relu(conv(b))
        return self.d(torch.cat([a, torch.relu(self.c(b))], 1))


def test_a_place_holds_the_skips_over_it() -> None:
    joint = canonical_capture(Skipping(), (torch.randn(2, 1, 8, 8),), {}).joint
    assert max(len(place) for place in places(joint)) == 2


class Wrapped(nn.Module):
    def __init__(self, wrapped: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.wrapped, self.reentrant = wrapped, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.wrapped else block(x)
        return x


def _wrapped(wrapped: bool) -> JointGraph:
    return canonical_capture(Wrapped(wrapped), (torch.randn(3, 5, 4),), {}).joint


class Selective(Wrapped):
    """A policy that saves what products make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = partial(create_selective_checkpoint_contexts, products)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


def test_what_a_policy_saves_is_not_computed_again() -> None:
    chosen = {
        str(node.target)
        for joint in [canonical_capture(Selective(True), (torch.randn(3, 5, 4),), {}).joint]
        for node in joint.graph.nodes
        if node.name in users_choice(joint)
    }
    assert "aten.gelu.default" in chosen and "autoshard.contract.default" not in chosen


def test_what_the_user_checkpoints_is_the_inside_of_each_call() -> None:
    assert users_choice(_wrapped(False)) == []
    joint = _wrapped(True)
    chosen = set(users_choice(joint))
    by_name = {node.name: node for node in joint.graph.nodes}
    targets = {str(by_name[name].target) for name in chosen}
    assert {"autoshard.contract.default", "aten.gelu.default"} <= targets
    results = {node.name for node in joint.results if node is not None}
    assert chosen.isdisjoint(results)
    # What one call hands the next is kept: the sum at the end of the first block.
    ends = {node.name for place in places(joint) for node in place if node.meta.get("checkpoint") is not None}
    assert chosen.isdisjoint({name for name in ends if "add" in name and by_name[name].users})


def test_names_of_another_graph_are_left_out() -> None:
    joint, _ = joint_of("blocks")
    assert known_ops(joint, ["gelu", "nothing", "args_0"]) == ["gelu"]
