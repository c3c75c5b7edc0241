"""Both halves of a backward make what the whole makes, and no op runs in both."""

from __future__ import annotations

import pytest
import torch

from passes.lower.phases import split_backward, split_phases
from passes.stages.stage_graphs import stage_graphs
from tests.stages.stage_models import canonical, random_cut


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "t5", "unet"])
def test_two_halves_are_the_whole(name: str, stage: int) -> None:
    joint, _ = canonical(name)
    graph = stage_graphs(joint, random_cut(joint, 3, 4))[stage]
    backward = split_phases(graph.joint.module, graph.joint.inputs, graph.joint.outputs).backward
    if backward is None:  # nothing in the first few ops is trained
        return
    received = [crossing.name for crossing in graph.received if crossing.gradient]
    halves = split_backward(backward, received)
    assert [backward.gradients[i].name for i in halves.first] == received
    ops = [[n.name for n in m.graph.nodes if n.op == "call_function"] for m in (halves.input, halves.weight)]
    whole = [n.name for n in backward.module.graph.nodes if n.op == "call_function"]
    assert sorted(ops[0] + ops[1]) == sorted(whole)
    torch.manual_seed(0)
    inputs = [_random(n.meta["val"]) for n in backward.module.graph.find_nodes(op="placeholder")]
    first = halves.input(*inputs)
    second = halves.weight(*(inputs[i] for i in halves.given), *first[len(halves.first) :])
    made = dict(zip((*halves.first, *halves.second), (*first[: len(halves.first)], *second), strict=True))
    for i, wanted in enumerate(backward.module(*inputs)):
        assert (made[i] is None) == (wanted is None)
        assert wanted is None or torch.equal(made[i], wanted)


def test_weights_wait_for_nothing_but_weights() -> None:
    """A linear layer in the middle: the first half is one product, the second makes the two gradients."""
    joint, _ = canonical("mlp")
    products = [n.name for n in joint.graph.nodes if str(n.target) == "autoshard.contract.default"]
    graph = stage_graphs(joint, [products[2], products[3]])[1]
    backward = split_phases(graph.joint.module, graph.joint.inputs, graph.joint.outputs).backward
    assert backward is not None
    halves = split_backward(backward, [crossing.name for crossing in graph.received])
    names = lambda module: [
        str(n.target).split(".")[1] for n in module.graph.nodes if n.op == "call_function"
    ]
    assert names(halves.input) == ["tanh_backward", "use", "contract"]
    assert sorted(names(halves.weight)) == ["contract", "sum"]


def _random(like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point():
        return torch.rand(like.shape, dtype=like.dtype) + 0.5
    return torch.zeros(like.shape, dtype=like.dtype)
