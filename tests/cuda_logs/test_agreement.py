"""The checker of NCCL logs finds each way in which ranks can disagree, on logs written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_logs.agreement import Agreement, check_logs
from tests.cuda_logs.logs import parse_log, read_logs

Line = dict[str, Any]


def _init(rank: int, size: int = 2, comm: str = "w") -> Line:
    return {"call": "init", "comm": comm, "size": size, "rank": rank}


def _split(parent_rank: int, key: int, comm: str = "w/0:0", turn: int = 0) -> Line:
    return {
        "call": "split", "parent": "w", "turn": turn, "parent_rank": parent_rank, "comm": comm, "key": key,
    }  # fmt: skip


def _call(kind: str, rank: int, count: int = 8, root: int = -1, comm: str = "w", **other: Any) -> Line:
    line = {"call": kind, "comm": comm, "rank": rank, "count": count, "dtype": "f32", "op": "", "root": root}
    return {**line, "thread": 1, **other}


_START: Line = {"call": "group_start", "thread": 1}
_END: Line = {"call": "group_end", "thread": 1}


def _checked(*logs: Sequence[Line]) -> Agreement:
    return check_logs([parse_log(f"p{i}", [json.dumps(line) for line in log]) for i, log in enumerate(logs)])


def _both(first: Sequence[Line], second: Sequence[Line]) -> tuple[str, ...]:
    return _checked([_init(0), *first], [_init(1), *second]).problems


def test_equal_sequences_agree() -> None:
    def log(rank: int) -> list[Line]:
        return [_init(rank), _call("all_reduce", rank, op="sum"), _call("broadcast", rank, root=0)]

    agreement = _checked(log(0), log(1))
    assert agreement.problems == ()
    assert str(agreement) == "1 communicators (1 of 2 ranks by init), 2 all_reduce, 2 broadcast"


def test_another_order_count_type_op_or_root_is_named() -> None:
    ours = _call("all_reduce", 0, op="sum")
    for other, text in (
        (_call("all_reduce", 1, count=9, op="sum"), "all_reduce f32[9] sum"),
        (_call("all_reduce", 1, op="sum", dtype="bf16"), "all_reduce bf16[8] sum"),
        (_call("all_reduce", 1, op="max"), "all_reduce f32[8] max"),
        (_call("broadcast", 1, root=1), "broadcast f32[8] root 1"),
    ):
        expected = f"communicator w: collective 0 is all_reduce f32[8] sum on rank 0, {text} on rank 1"
        assert _both([ours], [other]) == (expected,)


def test_a_rank_that_stops_early() -> None:
    problems = _both([_call("all_gather", 0), _call("all_gather", 0)], [_call("all_gather", 1)])
    assert problems == ("communicator w: collective 1 is all_gather f32[8] on rank 0, none on rank 1",)


def test_messages_match_in_order_and_size() -> None:
    pair = [_START, _call("send", 0, root=1), _call("recv", 0, count=4, root=1), _END]
    back = [_START, _call("recv", 1, root=0), _call("send", 1, count=4, root=0), _END]
    assert _both(pair, back) == ()
    both = _checked([_init(0), *pair], [_init(1), *back])
    assert (both.messages, both.collectives) == (4, 0)
    short = [_START, _call("recv", 1, count=7, root=0), _call("send", 1, count=4, root=0), _END]
    assert _both(pair, short) == (
        "communicator w: message 0 from rank 0 to rank 1: send to 1 f32[8], recv from 0 f32[7]",
    )
    assert _both(pair[1:2], []) == (
        "communicator w: message 0 from rank 0 to rank 1: send to 1 f32[8], nothing received",
    )


def test_sends_to_each_other_hang_unless_grouped() -> None:
    def log(rank: int) -> list[Line]:
        return [_call("send", rank, root=1 - rank), _call("recv", rank, root=1 - rank)]

    assert _both(log(0), log(1)) == (
        "in the order issued, p0 waits for ever at step 0: send to 1 f32[8] on w",
        "in the order issued, p1 waits for ever at step 0: send to 0 f32[8] on w",
    )
    assert _both([_START, *log(0), _END], [_START, *log(1), _END]) == ()


def test_two_communicators_in_two_orders_hang() -> None:
    def log(rank: int, order: str) -> list[Line]:
        return [_init(rank, comm="v"), *(_call("all_reduce", rank, comm=comm) for comm in order)]

    assert _both(log(0, "vw"), log(1, "vw")) == ()
    assert _both(log(0, "vw"), log(1, "wv")) == (
        "in the order issued, p0 waits for ever at step 0: all_reduce f32[8] on v",
        "in the order issued, p1 waits for ever at step 0: all_reduce f32[8] on w",
    )


def test_groups_of_two_threads_may_interleave() -> None:
    def log(rank: int) -> list[Line]:
        send, recv = _call("send", rank, root=1 - rank), _call("recv", rank, root=1 - rank)
        return [_START, send, _call("all_reduce", rank, thread=2), recv, _END]

    process = parse_log("p", [json.dumps(line) for line in log(0)])
    assert [[call.kind for call in step] for step in process.steps] == [["all_reduce"], ["send", "recv"]]
    assert _both(log(0), log(1)) == ()


def test_members_of_a_communicator() -> None:
    assert _checked([_init(0)]).problems == ("communicator w: ranks [0] of 2 were made",)
    assert _checked([_init(0)], [_init(0)]).problems == (
        "communicator w: rank 0 is there twice",
        "communicator w: ranks [0] of 2 were made",
    )
    assert _both([_call("all_reduce", 0, comm="x")], []) == ("calls on communicator x, which nobody made",)


def test_splits_are_counted_and_joined_by_all() -> None:
    def log(rank: int) -> list[Line]:
        part = f"w/0:{rank // 2}"
        return [_init(rank, size=4), _split(rank, rank % 2, part), _call("all_reduce", rank % 2, comm=part)]

    agreement = _checked(*map(log, range(4)))
    assert agreement.problems == ()
    assert str(agreement).startswith("3 communicators (1 of 4 ranks by init, 2 of 2 ranks by split), 4 all_")
    absent = _both([_split(0, 0)], [])
    assert absent == ("communicator w: ranks [1] do not join split 0",)
    # A rank that is in no part joins the split all the same.
    assert _both([_split(0, 0)], [_split(1, 0, comm="")]) == ()


def test_logs_are_read_from_files(tmp_path: Path) -> None:
    for rank in range(2):
        lines = [_init(rank), _call("all_reduce", rank, op="sum")]
        (tmp_path / f"job.{rank}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "other.1").write_text("not of this job")
    assert check_logs(read_logs(tmp_path / "job")).collectives == 2


def test_what_is_no_log_is_not_read_and_what_is_no_call_is_named(tmp_path: Path) -> None:
    (tmp_path / "nccl.12").write_text(json.dumps(_init(0, size=1)) + "\n")
    (tmp_path / "nccl.so").write_bytes(b"\x7fELF\xe5")
    assert [process.name for process in read_logs(tmp_path / "nccl")] == ["nccl.12"]
    (tmp_path / "nccl.13").write_text(json.dumps(_init(0)) + "\n1234 is cut\n")
    with pytest.raises(ValueError, match=r"^nccl\.13, line 2 is no call \(Extra data.*\): '1234 is cut'$"):
        read_logs(tmp_path / "nccl")
