"""What happens when one of several ranks fails or differs: seconds until all have ended, and what each says.

    python -m benchmarks.faults                  # all faults, on 3 ranks; prints Markdown
    python -m benchmarks.faults --ranks 4 --only killed

Every fault runs in real processes over gloo on this machine, without a launcher that would end the others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.fault_cases import mark
from benchmarks.fault_drift import CASES

__all__ = ["Ended", "free_port", "main", "run_fault"]

LIMIT_SECONDS = 60.0
START_SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended. seconds: after the fault. code: of its process, None if it had to be killed.
    said: its last error, "" if there was none. output: all that it printed."""

    seconds: float
    code: int | None
    said: str
    output: str


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a rank hung or all of them were silent."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--after", default="", help="faults after the one of this name")
    given = parser.parse_args(words)
    print(f"| fault, on {given.ranks} ranks | seconds | what the odd rank says | what the others say |")
    print("| --- | --- | --- | --- |", flush=True)
    bad = 0
    names = list(CASES)
    for name in (n for n in names[names.index(given.after) + 1 if given.after else 0 :] if given.only in n):
        ended = run_fault(name, given.ranks)
        odd = 0 if ("rank 0 " in name and "while rank 0" not in name) or name.endswith("rank 0") else 1
        others = sorted({_short(e.said) for rank, e in enumerate(ended) if rank != odd})
        seconds = max(e.seconds for e in ended)
        print(f"| {name} | {seconds:.1f} | {_short(ended[odd].said)} | {' / '.join(others)} |", flush=True)
        bad += any(e.code is None for e in ended) or not any(e.said for e in ended)
    return 1 if bad else 0


def run_fault(name: str, ranks: int, limit_seconds: float = LIMIT_SECONDS) -> list[Ended]:
    """One fault; how each rank ended, by rank. A rank that has not within `limit_seconds` of the fault is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.fault_drift"])
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(rank) for rank in range(ranks)]
        for path in paths:
            path.touch()
        processes = [
            context.Process(target=_rank_main, args=(name, rank, ranks, port, str(path)))
            for rank, path in enumerate(paths)
        ]
        for process in processes:
            process.start()
        begun = time.monotonic()
        ends: dict[int, float] = {}
        while (
            len(ends) < ranks
            and time.monotonic() - (_fault_at(paths) or begun + START_SECONDS) < limit_seconds
        ):
            ends |= {
                r: time.monotonic() for r, p in enumerate(processes) if r not in ends and not p.is_alive()
            }
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.join()
        at = _fault_at(paths) or begun
        return [
            _ended(
                None if rank not in ends else max(0.0, ends[rank] - at), process.exitcode, path.read_text()
            )
            for rank, (process, path) in enumerate(zip(processes, paths, strict=True))
        ]


def _fault_at(paths: Sequence[Path]) -> float | None:
    """When the last mark was made, None before all ranks have begun."""
    marks = [
        [line[4:] for line in path.read_text().splitlines() if line.startswith("at: ")] for path in paths
    ]
    return max(float(mine[-1]) for mine in marks) if all(marks) else None


def _ended(seconds: float | None, code: int | None, output: str) -> Ended:
    lines = [line for line in output.splitlines() if not line.startswith("at: ")]
    starts = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    said = "\n".join(lines[starts[-1] :]).removeprefix("error: ") if starts else ""
    return Ended(
        LIMIT_SECONDS if seconds is None else seconds, None if seconds is None else code, said, output
    )


def _rank_main(name: str, rank: int, ranks: int, port: int, path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    import torch

    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where a shell started this in the background
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mark()
    try:
        CASES[name](rank)
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}")
        sys.last_value = error  # as the interpreter does for an error that nobody catches
        sys.exit(1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _short(said: str) -> str:
    return (said.splitlines()[0][:150] if said else "nothing").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
