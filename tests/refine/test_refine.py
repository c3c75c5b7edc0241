"""Two gloo ranks time what they are about to run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import find_plan
from autoshard.arguments import check_choices
from autoshard.refine.refine import may_refine
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from cost_model.timed import TimedPrices
from tests.ranks import RankPool
from tests.refine import programs


def test_timed_once_on_all_ranks_and_read_the_next_time(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks.run(programs.refined, str(tmp_path), "auto", world=2)
    again = ranks.run(programs.refined, str(tmp_path), "auto", False, world=2)
    plans = [plan for plan, *_ in (*first, *again)]
    assert len({plan.fingerprint for plan in plans}) == 1 and plans[0].origin.timed
    assert "timed" in {record.priced for record in plans[1].records}
    assert first[0][1] > 0 and [count for _, count, *_ in again] == [0, 0]
    assert first[0][3] == ["timed"]
    expected = programs.model()(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
    for _, _, output, _ in (*first, *again):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_off_times_nothing(ranks: RankPool, tmp_path: Path) -> None:
    for plan, count, _, files in ranks.run(programs.refined, str(tmp_path), "off", world=2):
        assert count == 0 and files == [] and plan.origin.timed == ""
        assert "unrefined" in plan.explain()


def test_find_plan_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (mine, asks), (theirs, other_asks) = ranks.run(programs.found, str(tmp_path), world=2)
    assert mine == theirs and mine.origin.timed and (asks, other_asks) == (True, False)


@pytest.mark.slow
def test_a_race_is_between_plans_that_were_found_under_what_was_timed(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks.run(programs.raced, str(tmp_path), world=2) == [[True], []]  # rank 0 plans


def test_what_is_timed_and_what_is_left_out(ranks: RankPool) -> None:
    one, two = ranks.run(programs.timed_cases, world=2)
    assert one == two
    assert [kernel.key.shapes for kernel in one.kernels] == [((8, 16), (16, 4))]
    assert [(c.kind, c.group, c.nbytes) for c in one.collectives] == [
        ("all_reduce", ((2, 1),), 4096),
        ("all_gather", ((2, 1),), 4096),
    ]
    assert all(
        seconds > 0 for seconds in (*[k.seconds for k in one.kernels], *[c.seconds for c in one.collectives])
    )


def test_fused_groups_are_compiled_by_one_rank_each_and_timed_by_all(ranks: RankPool) -> None:
    (one, mine), (two, theirs) = ranks.run(programs.timed_groups, world=2)
    assert one == two
    assert [kernel.key.form for kernel in one.kernels] == ["aten.neg.default", "aten.exp.default"]
    assert all(kernel.seconds > 0 and len(kernel.inner) == 1 for kernel in one.kernels)
    assert mine == ["aten.neg.default", "aten.exp.default"] and theirs == ["aten.add.Tensor"]


def test_what_takes_another_time_each_time_is_left_out(ranks: RankPool) -> None:
    assert ranks.run(programs.disturbed, world=2) == [TimedPrices()] * 2


def test_without_time_nothing_is_timed(ranks: RankPool) -> None:
    assert ranks.run(programs.no_time, world=2) == [TimedPrices()] * 2


@pytest.mark.parametrize("refine", ["on", None, True, 3.0])
def test_what_refine_cannot_be(refine: object) -> None:
    with pytest.raises(ShardingError, match=r"refine is .*\n  try: 'auto', or 'off'"):
        check_choices(refine=refine)


def test_offline_plans_are_unrefined() -> None:
    plan = find_plan(programs.model(), MeshSpec({"x": 2}), (torch.ones(8, 16),), refine="auto")
    assert plan.origin.timed == "" and "unrefined: every price is modelled" in plan.explain()


def where_it_may(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    part = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("x",), _init_backend=False)
    return [
        may_refine(mesh, nominal=False),
        may_refine(mesh, nominal=True),
        may_refine(part, nominal=False),
    ]


def test_where_it_may(ranks: RankPool) -> None:
    assert ranks.run(where_it_may, world=2) == [[True, False, False]] * 2
