"""A fault of one rank ends all, and says which rank and what. The whole table is `python -m benchmarks.faults`."""

from __future__ import annotations

import pytest

from benchmarks.faults import run_fault

SAID = {
    "a plan's path that does not exist": (["cannot read plan '/nowhere/plan.json'"] * 3),
    "killed before autoshard": (["rank 1 has ended before it called autoshard", "", ""]),
    "rank 0 killed in training": (["", "rank 0 ", "rank 0 "]),
    "the loader raises": (
        ["rank 1 has ended with OSError: no such file", "no such file", "rank 1 has ended with OSError"]
    ),
    "another shape later": (["planning a new kind of call (args[0] float32[6, 12])"] * 3),
    "other inputs at first": (["input args[0] is not the same on rank 1 as on rank 0"] * 3),
    "eval on one rank": (["the ranks do different things in turn "] * 3),
}
"""fault -> what each rank says, "" if nothing is asked of it."""


@pytest.mark.parametrize("fault", SAID)
def test_every_rank_ends_and_says_why(fault: str) -> None:
    ended = run_fault(fault, 3)
    for rank, (end, text) in enumerate(zip(ended, SAID[fault], strict=True)):
        assert end.code not in (None, 0), f"rank {rank} went on\n{end.output}"
        assert text in end.said, f"rank {rank}\n{end.output}"
