"""Head and loss in pieces over tokens compute what they do whole, and make nothing that is as large as the logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.planning import canonical_capture
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph
from passes.micro_batches.cut_batch import cut_batch
from passes.micro_batches.cut_head import cut_head
from passes.simulate.reference import graph_values, reference_inputs
from tests.micro_batches.whole_step import step_in_pieces

WORDS, LENGTH = 50, 7

Loss = Callable[[Tensor, Tensor], Tensor]


class Speaker(nn.Module):
    """Two layers, then a head of many words; its loss alone is returned."""

    def __init__(
        self, loss: Loss, *, words: int = WORDS, tied: bool = False, bias: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, 6), nn.LayerNorm(6)
        self.up, self.down, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(drop)
        self.head = nn.Linear(6, words, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.loss = loss

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.loss(self.head(self.drop(x)), ids)


def mean(z: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), ids.flatten())


def some(z: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), ids.flatten(), ignore_index=3, label_smoothing=0.1)


def total(z: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), ids, reduction="sum")


def shifted(z: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def padded(z: Tensor, ids: Tensor) -> Tensor:
    """As transformers' models for causal language modelling do."""
    targets = F.pad(ids, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(z.float().view(-1, WORDS), targets.reshape(-1))


def weighted(z: Tensor, ids: Tensor) -> Tensor:
    losses = F.cross_entropy(z.flatten(0, 1), ids.flatten(), reduction="none")
    mask = (ids.flatten() % 2).double()
    return (losses * mask).sum() / (mask.sum() + 1.0) + 1e-3 * z.logsumexp(-1).square().mean()


def many(z: Tensor, ids: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, F.one_hot(ids, WORDS).double())


LOSSES = (mean, some, total, shifted, padded, weighted, many)


def graph_and_values(model: nn.Module, ids: Tensor) -> tuple[JointGraph, list[Tensor]]:
    joint = canonical_capture(model, (ids,), {}).joint
    return joint, reference_inputs(joint, model, [ids], seed=1)


def assert_same(joint: JointGraph, cut: JointGraph, values: list[Tensor], tolerance: float = 1e-12) -> None:
    wanted, _ = graph_values(joint, values)
    found, _ = graph_values(cut, values)
    for end, one, other in zip(joint.outputs, found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), end


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_numbers_of_the_whole(loss: Loss, count: int) -> None:
    torch.manual_seed(0)
    # Of slices along tokens samples are cut.
    joint, values = graph_and_values(Speaker(loss).double(), torch.randint(0, WORDS, (6, LENGTH)))
    assert_same(joint, cut_head(joint, count), values, 1e-5 if loss is padded else 1e-12)


@pytest.mark.parametrize("options", [{"tied": True}, {"bias": True}, {"drop": 0.4}])
def test_tied_biased_and_dropped(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    joint, values = graph_and_values(
        Speaker(mean, **options).double(),  # type: ignore[arg-type]
        torch.randint(0, WORDS, (3, LENGTH)),
    )
    assert_same(joint, cut_head(joint, 3), values)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_large_is_whole(loss: Loss) -> None:
    joint, _ = graph_and_values(Speaker(loss).double(), torch.randint(0, WORDS, (3, LENGTH)))
    cut = cut_head(joint, 3)
    largest = lambda graph: max(
        node.meta["val"].numel()
        for node in graph.graph.nodes
        if node.op == "call_function" and node.meta["val"].shape[1:2] != (6,)  # but gradients of weights
    )
    assert largest(joint) == 3 * LENGTH * WORDS
    # Of the 7 tokens of every sample the first piece has 3; where a slice reads along them it has a sample of the 3.
    assert largest(cut) == (1 * LENGTH * WORDS if loss is shifted else 3 * 3 * WORDS)
    assert cut.head_pieces == 3 and cut.pieces == 1


def test_the_first_dim_of_samples_stays_whole() -> None:
    joint, _ = graph_and_values(Speaker(mean).double(), torch.randint(0, WORDS, (8, LENGTH)))
    logits = [n for n in cut_head(joint, 2).graph.nodes if str(n.target).startswith("autoshard.contract")]
    shapes = {tuple(n.meta["val"].shape) for n in logits if WORDS in n.meta["val"].shape}
    assert shapes == {(8, 4, WORDS), (8, 3, WORDS), (WORDS, 6)}


def test_a_batch_in_pieces_with_its_head_in_pieces() -> None:
    torch.manual_seed(0)
    joint, values = graph_and_values(Speaker(some).double(), torch.randint(0, WORDS, (5, LENGTH)))
    tangent = next(i for i, spec in enumerate(joint.inputs) if spec.kind == "tangent")
    values[tangent] = torch.ones_like(values[tangent])
    wanted, _ = graph_values(joint, values)
    first = cut_batch(cut_head(joint, 3), 2)
    found = step_in_pieces((first, *first.others), values)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None and other is not None and torch.allclose(one, other, rtol=1e-11, atol=1e-12)


class Returned(Speaker):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.head(self.embed(ids))
        return self.loss(logits, ids), logits


class Wide(nn.Module):
    """What is largest is in the midst of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 6), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_what_has_no_head_is_refused() -> None:
    ids = torch.randint(0, WORDS, (3, LENGTH))
    returned, _ = graph_and_values(Returned(mean).double(), ids)
    wide = canonical_capture(Wide(), (torch.randn(3, 7, 6),), {}).joint
    for joint in (returned, wide):
        with pytest.raises(InfeasibleError, match=r"head in 2 pieces: .*\n  try: micro_batches, or a model"):
            cut_head(joint, 2)


def test_more_pieces_than_tokens_are_refused() -> None:
    joint, _ = graph_and_values(Speaker(mean), torch.randint(0, WORDS, (1, 3)))
    with pytest.raises(InfeasibleError, match="head in 5 pieces"):
        cut_head(joint, 5)
