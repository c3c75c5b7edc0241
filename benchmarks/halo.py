"""What splitting a network in space costs: autoshard's plan, gathering, and halos exchanged by hand, in one run.

    python -m benchmarks.halo                                        # 4 local ranks
    python -m benchmarks.halo --size 128 256 512 --ranks 2 4         # growth with both
    python -m benchmarks.halo --rate 300mbit                         # each rank a host of an emulated cluster
    python -m benchmarks.halo --memory --space 3 --size 96 --ranks 1 2 4

A step is forward and backward of convolutions of kernel 3; contestants take their steps in turn. Prints Markdown: the
median step of the slowest rank, bytes that the busiest rank sends in one, and the ratio to isend/irecv. With
--memory the bytes of all tensors at the peak of a step, against the first of --ranks. Linux only (it reads /proc).
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from benchmarks.cluster import ClusterError, Launch, answer, launcher
from benchmarks.space.worker import add_work_options, work_of
from benchmarks.step_cells import milliseconds, taken_on

__all__ = ["main"]

WORKER = ("-m", "benchmarks.space.worker")
BY_HAND = "isend/irecv"


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a run failed."""
    given = _parser().parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    print(_about(given), flush=True)
    try:
        (_memory_table if given.memory else _time_tables)(given)
    except (ClusterError, subprocess.SubprocessError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.halo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--rate", help="of each rank's link, on an emulated cluster: 300mbit")
    parser.add_argument(
        "--latency", help="one way out of a rank, on an emulated cluster: 200us (needs netem)"
    )
    parser.add_argument("--memory", action="store_true", help="peak memory instead of step times")
    add_work_options(parser, "+")
    return parser


def _time_tables(given: argparse.Namespace) -> None:
    for ranks in given.ranks:
        with launcher(ranks, given.rate, given.latency) as launch:
            for size in given.size:
                rows = _measured(launch, "times", given, size)
                print("\n".join(_time_table(rows, f"{work_of(given, size).text}, {ranks} ranks")), flush=True)


def _time_table(rows: Sequence[dict[str, Any]], title: str) -> Iterator[str]:
    medians = {row["name"]: statistics.median(row["seconds"]) for row in rows}
    yield f"\n{title}:\n"
    yield f"| | median step | quartiles | sent per rank | to {BY_HAND} | gradients differ by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        median, quartiles = milliseconds(row["seconds"])
        ratio = f"{medians[row['name']] / medians[BY_HAND]:.2f}" if BY_HAND in medians else ""
        yield (
            f"| {row['name']} | {median} ms | {quartiles} | {row['sent'] / 1e3:.1f} kB | {ratio} "
            f"| {row['difference']:.0e} |"
        )
    yield from (f"\n{row['name']}'s plan: {row['plan']}" for row in rows if row["plan"])


def _memory_table(given: argparse.Namespace) -> None:
    for size in given.size:
        print(
            f"\n{work_of(given, size).text}:\n\n| ranks | peak of a rank | of the first | of its share | plan |"
        )
        print("| --- | --- | --- | --- | --- |")
        first: tuple[int, float] | None = None
        for ranks in given.ranks:
            with launcher(ranks, given.rate, given.latency) as launch:
                found = _measured(launch, "memory", given, size)
            first = first or (ranks, found["peak"])
            part = found["peak"] / first[1]
            share = part * ranks / first[0]
            print(
                f"| {ranks} | {found['peak'] / 1e6:.0f} MB | {part:.3f} | {share:.2f} | {found['plan']} |",
                flush=True,
            )


def _measured(launch: Launch, task: str, given: argparse.Namespace, size: int) -> Any:
    options = {name: getattr(given, name) for name in ("space", "channels", "layers", "batch", "rounds")}
    options |= {name: getattr(given, name) for name in ("backend", "profile", "budget", "only")}
    return answer(launch, (*WORKER, task), {"size": size, **options})


def _about(given: argparse.Namespace) -> str:
    command = "python -m benchmarks.halo " + " ".join(sys.argv[1:])
    return f"{taken_on()}, {given.backend}, `{command}`."


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
