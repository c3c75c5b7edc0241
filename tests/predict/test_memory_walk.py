"""The bytes that a program holds: by hand arithmetic, and beside the bytes that an eager program really has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan
from autoshard.plan.micro_batches import cut_call
from autoshard.planning import canonical_capture
from autoshard.reporting.recorder import SeenWhole
from autoshard.reporting.tracks import held_nbytes, run_peaks
from cost_model.mesh import simulated_groups
from passes.lower.phases import Phases
from passes.lower.rank_program import rank_program
from passes.predict.memory_walk import memory_walk
from passes.predict.prediction import KINDS, LiveValue, MemoryStep, MemoryWalk
from passes.predict.workspaces import workspaces_on
from passes.strategies.traffic import eager_traffic, fused_traffic

ONE = MeshSpec({"dp": 1})


def program(model: nn.Module, x: Tensor, backend: str = "eager", share: float = 1.0) -> Phases:
    """share: of what the plan without a limit holds, within which it is."""
    plan = find_plan(model, ONE, (x,), backend=backend)
    if share < 1.0:
        plan = find_plan(model, ONE, (x,), backend=backend, memory_limit=int(share * plan.peak_memory))
        assert plan.planned.again
    joint = cut_call(canonical_capture(model, (x,), {}), plan.micro_batches, plan.head_pieces).joint
    ours = rank_program(joint, plan.planned, ONE, 0, simulated_groups(ONE))
    phases = ours.joined().usual()
    assert phases.backward is not None
    for module, phase in ((phases.forward, "forward"), (phases.backward.module, "backward")):
        for node in module.graph.nodes:
            node.meta["phase"] = phase
    return phases


def placeholders(module: torch.fx.GraphModule) -> list[Tensor]:
    return [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]


def measured(phases: Phases, backend: str = "eager") -> Mapping[str, int]:
    """Peaks of forward and backward: what torch's allocator was asked for."""
    inputs = [torch.ones(like.shape, dtype=like.dtype) for like in placeholders(phases.forward)]
    return run_peaks(SeenWhole(phases, inputs, backend).run_again, held_nbytes(inputs, (), ()))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = lambda y: y.unflatten(-1, (2, 4)).transpose(1, 2)
        q, k = heads(self.q(x)), heads(self.k(x))
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True).sum((1, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "products": (lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), (128, 16)),
    "attention": (Attending, (256, 64, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16)), (128, 16)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 8, 3),
        ),
        (8, 3, 32, 32),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_predicted_is_alive(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    phases = program(build(), torch.randn(shape))
    walk = memory_walk(phases, eager_traffic, workspaces=workspaces_on("cpu", eager_traffic))
    # An optimizer's states, which nothing holds here.
    states = sum(value.nbytes for value in walk.values if value.kind == "optimizer")
    for phase, most in measured(phases).items():
        predicted = walk.peak_of(phase) - states
        assert 0.85 * most <= predicted <= 1.1 * most, (phase, predicted, most)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classes(nn.Module):
    """The gradient of what the last product makes is as large as that, and is not written over it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(32, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).log_softmax(-1)[:, 0].mean()


@pytest.mark.parametrize(("share", "above"), [(0.8, 1.15), pytest.param(1.0, 1.2, marks=pytest.mark.slow)])
def test_what_is_predicted_of_a_compiled_program_is_alive(share: float, above: float) -> None:
    """Inductor's own order of ops had norms of all layers computed again before the first product of the backward. What
    it writes over what a phase made itself is not known: here the log-softmax over its operand."""
    torch.manual_seed(0)
    phases = program(Classes(), torch.randn(512, 32), "inductor", share)
    walk = memory_walk(phases, fused_traffic, workspaces=workspaces_on("cpu", fused_traffic))
    states = sum(value.nbytes for value in walk.values if value.kind == "optimizer")
    most = max(measured(phases, "inductor").values())
    assert 0.97 * most <= walk.peak.nbytes - states <= above * most


def kinds(step: MemoryStep) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in zip(KINDS, step.by_kind, strict=True) if nbytes}


def test_a_product_and_its_gradients_by_hand() -> None:
    """y = x w.T, float32. x [32, 8], w [4, 8]; the backward makes dw alone, from x and dy [32, 4]."""
    phases = program(nn.Linear(8, 4, bias=False), torch.randn(32, 8))
    x, w, y = 32 * 8 * 4, 4 * 8 * 4, 32 * 4 * 4
    walk = memory_walk(phases, eager_traffic, workspaces=workspaces_on("cpu", eager_traffic))
    held = {"parameters": w, "optimizer": 2 * w, "inputs": x}  # AdamW's two states
    start, forward, backward = (walk.step(place) for place in range(len(walk.steps)))
    assert (start.phase, start.node, kinds(start)) == ("forward", "start", held)
    assert (forward.phase, kinds(forward)) == ("forward", {**held, "working": y})
    # The gradient of y is given.
    assert (backward.phase, kinds(backward)) == ("backward", {**held, "inputs": x + y, "gradients": w})
    assert walk.peak == backward


class TwoOfOne(nn.Module):
    """tanh(x w.T), whose backward reads the tanh, cut in two views: y0 * y1, whose backward reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x).tanh()
        return y[:, :4] * y[:, 4:]


def test_views_that_are_kept_share_their_storage() -> None:
    phases = program(TwoOfOne(), torch.randn(32, 8))
    walk = memory_walk(phases, eager_traffic, workspaces=workspaces_on("cpu", eager_traffic))
    made = [value for value in walk.values if value.kind == "kept"]
    assert {value.op for value in made} == {"tanh"}
    # Once in each phase, and not once for each view.
    assert [value.nbytes for value in made] == [32 * 8 * 4] * 2


def test_the_peak_is_the_first_of_the_largest() -> None:
    steps = (("forward", "start"), ("forward", "a"), ("forward", "b"), ("backward", "c"))
    value = lambda name, nbytes, first, last: LiveValue(
        "working", name, "", name, "u8", (nbytes,), nbytes, first, last
    )
    walk = MemoryWalk(steps, (value("x", 1, 0, 3), value("y", 2, 2, 2), value("z", 2, 3, 3)))
    assert walk.by_kind.sum(axis=1).tolist() == [1, 1, 3, 3]
    assert walk.peak.node == "b" and [v.name for v in walk.alive(2)] == ["x", "y"]
    assert walk.peak_of("forward") == walk.peak_of("backward") == 3 and walk.peak_of("optimizer") == 0
