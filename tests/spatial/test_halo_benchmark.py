"""Contestants of benchmarks/halo.py train the same: results and gradients against the whole network in one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Plan, Profile
from benchmarks.space.contestants import CONTESTANTS, GRAD_SEED, INPUT_SEED, Contest
from benchmarks.space.networks import SPLIT_DIM, Work
from tests.ranks import RankPool

WORKS = [Work(2, 6, 3, 2, 1), Work(3, 6, 2, 2, 1)]
RANKS = 3


def halos(plan: Plan | None) -> bool:
    assert plan is not None
    return any(layout.has_halo for layouts in plan.planned.layouts.values() for layout in layouts.operands)


def on_rank(rank: int, work: Work) -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("space",))
    contest = Contest(work, mesh, Profile.named("cpu"), "eager")
    network = work.network()
    y = network(work.part(INPUT_SEED, 0, 1))
    y.backward(work.part(GRAD_SEED, 0, 1))
    wanted = [p.grad for p in network.parameters()]
    for name, build in CONTESTANTS.items():
        contestant = build(contest)
        result = contestant.step()
        mine = y if result.shape == y.shape else y.chunk(RANKS, SPLIT_DIM)[rank]
        torch.testing.assert_close(result, mine.detach(), msg=name)
        torch.testing.assert_close(contestant.gradients(), wanted, msg=name)
        assert "space" not in name or halos(contestant.plan)


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS, ids=lambda work: f"{work.space}-d")
def test_contestants_agree(ranks: RankPool, work: Work) -> None:
    assert work.part(INPUT_SEED, 0, 1).shape == work.shape
    ranks.run(on_rank, work, world=RANKS)
