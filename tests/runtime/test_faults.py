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
    "skips optimizer.step() once, with sharded parameters": (["rank 1 has made "] * 3),
    "zero_grad forgotten once": (["parameter up.weight is not the same on rank 1 as on rank 0"] * 3),
    "other inputs, where ValueError skips a batch": (["input args[0] is not the same on rank 1"] * 3),
    "killed, with a default timeout of sockets": (["rank 1 has died", "", "rank 1 has died"]),
    "killed, beside a server of the script's own": (["rank 1 has died", "", "rank 1 has died"]),
    "rank 0 killed while memory is shared": (["", "rank 0 ", "rank 0 "]),
}
"""fault -> what each rank says, "" if nothing is asked of it."""


@pytest.mark.parametrize("fault", SAID)
def test_every_rank_ends_and_says_why(fault: str) -> None:
    ended = run_fault(fault, 3)
    for rank, (end, text) in enumerate(zip(ended, SAID[fault], strict=True)):
        assert end.code not in (None, 0), f"rank {rank} went on\n{end.output}"
        assert text in end.said, f"rank {rank}\n{end.output}"
