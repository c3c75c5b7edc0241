"""python -m benchmarks.cluster --hosts 2 --ranks 2 --rate 1gbit -- python script.py arguments"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from benchmarks.cluster.cluster import Cluster
from benchmarks.cluster.errors import ClusterError

__all__ = ["main", "parser", "program_of"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    made.add_argument("--hosts", type=int, default=2)
    made.add_argument("--ranks", type=int, default=2, help="per host")
    made.add_argument("--rate", help="of each host's link: 1gbit, or one for each host: 1gbit,10gbit")
    made.add_argument("--rank-rate", help="a link of its own for every rank of a host: one rate, or one each")
    made.add_argument("--latency", help="one way out of a host: 200us")
    made.add_argument("--timeout", type=float, help="seconds after which the program is stopped")
    made.add_argument("program", nargs=argparse.REMAINDER, help="-- python script.py arguments")
    return made


def program_of(words: Sequence[str]) -> list[str]:
    """What torchrun is to start, of a command line: `python x.py`, `python -m x`, `x.py` or any executable."""
    rest = list(words[1:] if words[:1] == ["--"] else words)
    if not rest:
        raise ClusterError("no program to run\n  try: ... -- python script.py")
    if os.path.basename(rest[0]).startswith("python"):
        return rest[1:]
    return rest if rest[0].endswith(".py") or rest[0] == "-m" else ["--no-python", *rest]


def main(words: Sequence[str] | None = None) -> int:
    """Run the program on the cluster; the exit code is 1 if it fails on any host."""
    given = parser().parse_args(words)
    # A terminal that closes, or `kill`, ends the run as Ctrl-C does: by way of the clean-up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        program = program_of(given.program)
        with Cluster(
            given.hosts, given.ranks, _one_or_more(given.rate), _one_or_more(given.rank_rate), given.latency
        ) as cluster:
            cluster.run(program, timeout=given.timeout)
    except ClusterError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _one_or_more(text: str | None) -> str | list[str] | None:
    return text.split(",") if text and "," in text else text


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
