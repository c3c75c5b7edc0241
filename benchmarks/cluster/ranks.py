"""Starts a program on so many ranks: of this machine, or each a host of an emulated cluster."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.cluster import Cluster

__all__ = ["Launch", "add_options", "answer", "launcher"]

TIMEOUT_SECONDS = 1800.0

Launch = Callable[[Sequence[str]], None]
"""Runs `["-m", module, argument, ...]` on all ranks until all have ended."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of a benchmark whose ranks measure prices first, and are started by the same module."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", help="of each rank's link, on an emulated cluster: 300mbit")
    parser.add_argument(
        "--budget", type=float, default=10.0, help="seconds in which prices are measured; 0: nominal"
    )
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # for what ranks are told


@contextlib.contextmanager
def launcher(ranks: int, rate: str | None, latency: str | None = None) -> Generator[Launch]:
    """rate, latency: of each rank's link; without them the ranks are this machine's, at its loopback.

    Raises what `Cluster` does; of its own ranks `subprocess.SubprocessError` where one fails.
    """
    if rate is None and latency is None:
        yield lambda program: _run_here(ranks, program)
        return
    with Cluster(ranks, 1, rate, latency=latency) as cluster:
        yield lambda program: cluster.run(program, timeout=TIMEOUT_SECONDS)


def answer(launch: Launch, program: Sequence[str], options: Mapping[str, Any]) -> Any:
    """What rank 0 of a program writes as JSON where `--out` says. options: by name; None is left out."""
    words = [str(word) for name, x in options.items() if x is not None for word in (f"--{name}", x)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        launch([*program, *words, "--out", str(path)])
        return json.loads(path.read_text())


def _run_here(ranks: int, program: Sequence[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*command, *program], env=env, check=True, timeout=TIMEOUT_SECONDS)
