"""Whether ranks update alike."""

from __future__ import annotations

from autoshard.watching.sums import Updated, unlike


def test_steps_and_numbers_that_differ_are_named() -> None:
    same = {0: {"lr of group 0": 0.1, "betas[0] of group 0": 0.9}}
    assert unlike({0: Updated(3, same), 1: Updated(3, same)}) is None
    found = unlike({0: Updated(3, same), 1: Updated(3, same), 2: Updated(2, same)})
    assert found is not None and "rank 2 has made 2 steps of optimizers, rank 0 3\n" in found
    other = {0: {"lr of group 0": 0.1, "betas[0] of group 0": 0.8}}
    found = unlike({0: Updated(3, same), 1: Updated(3, other)})
    assert (
        found is not None and "betas[0] of group 0 of optimizer 0 is 0.8 on rank 1, 0.9 on rank 0\n" in found
    )


def test_rounding_and_optimizers_that_one_rank_has_freed_are_no_difference() -> None:
    mine = Updated(3, {0: {"lr of group 0": 0.1}, 1: {"lr of group 0": 0.3}})
    assert unlike({0: mine, 1: Updated(3, {1: {"lr of group 0": 0.3 * (1 + 1e-9)}})}) is None
