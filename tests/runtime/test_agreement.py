"""All ranks go on or all raise, and the message says who and what."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.watching.agreement import agree, collectively, everyones, from_first
from cost_model.errors import CaptureError, PlanError, ProfileError, ShardingError
from passes.micro_batches.cut_batch import Uncut
from tests.ranks import RankPool


def message(fn: Callable[[], object]) -> str:
    """What `fn` raised, as "Class: text", or "no error"."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def agreement(rank: int, odd: int | None) -> str:
    mesh = init_device_mesh("cpu", (3,))
    print_ = {"torch": "2.13", "graph": "bbb" if rank == odd else "aaa", "plan": "ccc"}
    return message(lambda: agree(mesh, print_))


def test_ranks_that_agree_go_on(ranks: RankPool) -> None:
    assert ranks.run(agreement, None, world=3) == ["no error"] * 3


def test_ranks_that_disagree_all_raise(ranks: RankPool) -> None:
    expected = (
        "PlanError: the ranks are about to run different programs\n"
        "  graph: 'bbb' on rank 1, 'aaa' on rank 0\n"
        "  try: the same code, inputs and library versions on every rank"
    )
    assert ranks.run(agreement, 1, world=3) == [expected] * 3


def fail(rank: int, bad: int, error: Exception) -> int:
    if rank == bad:
        raise error
    return rank


def collective(rank: int, bad: int, error: Exception) -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    first = message(lambda: collectively(mesh, lambda: fail(rank, bad, error)))
    # And they still talk afterwards.
    return [first, str(collectively(mesh, lambda: fail(rank, -1, error)))]


def test_an_error_on_one_rank_is_an_error_on_all(ranks: RankPool) -> None:
    got = ranks.run(collective, 1, ValueError("no room"), world=3)
    other = "PlanError: rank 1 failed: ValueError: no room"
    assert got == [[other, "0"], ["ValueError: no room", "1"], [other, "2"]]


def test_errors_of_our_own_keep_their_class(ranks: RankPool) -> None:
    got = ranks.run(collective, 2, CaptureError("a graph break at model.py:3"), world=3)
    other = "CaptureError: a graph break at model.py:3\n  raised on rank 2"
    assert [first for first, _ in got] == [other, other, "CaptureError: a graph break at model.py:3"]


def test_a_kind_that_one_module_knows_is_the_public_one_elsewhere(ranks: RankPool) -> None:
    got = ranks.run(collective, 2, Uncut("a batch of 3"), world=3)
    other = "InfeasibleError: a batch of 3\n  raised on rank 2"
    assert [first for first, _ in got] == [other, other, "Uncut: a batch of 3"]


def test_an_error_that_ends_all_is_not_one_of_an_argument() -> None:
    """`except ValueError: continue` skips a batch that is not right, not the end of the other ranks."""
    assert issubclass(autoshard.RankError, autoshard.AutoshardError)
    assert not issubclass(autoshard.RankError, ValueError)
    assert all(issubclass(kind, ValueError) for kind in (ShardingError, ProfileError, PlanError))


def first(rank: int, bad: bool) -> str:
    mesh = init_device_mesh("cpu", (2,))
    if bad:
        return message(lambda: from_first(mesh, lambda: fail(rank, 0, KeyError("x"))))
    return str(from_first(mesh, lambda: {"made on": rank}))


def test_rank_0_decides(ranks: RankPool) -> None:
    assert ranks.run(first, False, world=2) == ["{'made on': 0}"] * 2
    assert ranks.run(first, True, world=2) == ["KeyError: 'x'", "PlanError: rank 0 failed: KeyError: 'x'"]


def meanwhile(rank: int) -> tuple[str, list[int]]:
    done: list[int] = []
    mesh = init_device_mesh("cpu", (3,))
    return from_first(mesh, lambda: f"made on {rank}", meanwhile=lambda: done.append(rank)), done


def test_the_others_have_something_to_do_meanwhile(ranks: RankPool) -> None:
    assert ranks.run(meanwhile, world=3) == [("made on 0", []), ("made on 0", [1]), ("made on 0", [2])]


def all_values(rank: int) -> list[int]:
    return everyones(init_device_mesh("cpu", (3,)), rank * 10)


def test_everyone_hears_everyone(ranks: RankPool) -> None:
    assert ranks.run(all_values, world=3) == [[0, 10, 20]] * 3


def late(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    if rank == 1:
        return "absent"
    return message(lambda: collectively(mesh, lambda: None, timeout=timedelta(seconds=0.3)))


def test_a_rank_that_does_not_come_is_named(ranks: RankPool) -> None:
    waiting, _ = ranks.run(late, world=2)
    assert waiting.startswith("RankError: ranks 1 did not come within 0 s for a check\n")


def test_alone_there_is_nobody_to_ask() -> None:
    class Alone:
        def size(self) -> int:
            return 1

    mesh = Alone()
    agree(mesh, {"x": "y"})  # type: ignore[arg-type]
    assert collectively(mesh, lambda: 3) == from_first(mesh, lambda: 3) == 3  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="mine"):
        collectively(mesh, lambda: fail(0, 0, PlanError("mine")))  # type: ignore[arg-type]
