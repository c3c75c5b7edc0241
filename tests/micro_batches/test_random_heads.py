"""Random losses, meshes, layouts, states, heads in pieces and batches: ranks compute what the unsharded model does.

`pytest -m slow` runs 500 cases.
"""

from __future__ import annotations

import random

import pytest
import torch

from cost_model.mesh import MeshSpec
from passes.micro_batches.cut_batch import cut_batch
from passes.micro_batches.cut_head import cut_head
from passes.simulate.reference import graph_values
from passes.states.compute_again import compute_again
from passes.states.offers import candidates
from tests.micro_batches.test_cut_head import (
    LENGTH,
    LOSSES,
    WORDS,
    Speaker,
    graph_and_values,
    padded,
    shifted,
)
from tests.micro_batches.test_pieces_on_ranks import Chosen, compare, pieces_on_ranks
from tests.micro_batches.test_random_pieces import AXES


def check(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    loss = draw.choice([loss for loss in LOSSES if loss is not padded])  # which computes in float32
    options = {"tied": draw.random() < 0.3, "bias": draw.random() < 0.3, "drop": draw.choice([0.0, 0.3])}
    batch = draw.randrange(3, 7)
    joint, values = graph_and_values(
        Speaker(loss, **options).double(), torch.randint(0, WORDS, (batch, LENGTH))
    )
    wanted, _ = graph_values(joint, values)
    # Where the loss slices along tokens, samples are cut, of which a piece of the batch has fewer.
    most, pieces = (3, 1) if loss is shifted else (LENGTH, draw.choice([1, 1, 2, 3]))
    cut = cut_batch(cut_head(joint, draw.randrange(2, most + 1)), pieces)
    share = draw.choice([0.0, 0.3, 1.0])
    names = [node.name for node in candidates(cut, ()) if draw.random() < share]
    graphs = tuple(compute_again(graph, names) for graph in (cut, *cut.others))
    mesh = MeshSpec(draw.choice(AXES))
    first, ranks = pieces_on_ranks(graphs, mesh, Chosen(f"{seed}", draw.choice([0.0, 0.2])))
    compare(joint, values, wanted, mesh, first, ranks)


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(5))
def test_many_random_cases(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        check(seed)
