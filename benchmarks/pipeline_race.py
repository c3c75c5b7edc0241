"""Race autoshard's pipelines against `torch.distributed.pipelining` and plans without stages, on emulated clusters.

    python -m benchmarks.pipeline_race                                   # both fabrics
    python -m benchmarks.pipeline_race --fabrics slow --schedule 1f1b
    python -m benchmarks.pipeline_race --model gpt --sizes 512 32 512 8 16

`stages="auto"` chooses whether there are stages, and their schedule; those by hand are as many equal stages of the same
model under the same schedule of torch's and as many micro-batches. All take their steps in turn, in one run. Prints
Markdown; docs/pipeline.md says what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.cluster import ClusterError
from benchmarks.racing.scenarios import FABRICS
from benchmarks.racing.stage_worker import add_options
from benchmarks.step_cells import milliseconds

__all__ = ["main", "table"]

WORKER = ("-m", "benchmarks.racing.stage_worker")
TIMEOUT_SECONDS = 900.0


def main(words: Sequence[str] | None = None) -> int:
    """Race and print; 1 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_race", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--fabrics", nargs="+", choices=tuple(FABRICS), default=["slow", "hosts"])
    add_options(parser)
    given = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    print(_about(), flush=True)
    try:
        for name in given.fabrics:
            print("\n".join(table(_raced(name, given), FABRICS[name].text)), flush=True)
    except ClusterError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _raced(name: str, given: argparse.Namespace) -> dict[str, Any]:
    fabric = FABRICS[name]
    options = ["--hosts", str(fabric.hosts), *_options(given)]
    with tempfile.TemporaryDirectory() as folder, fabric.cluster() as cluster:
        path = Path(folder) / "result.json"
        cluster.run([*WORKER, *options, "--out", str(path)], timeout=TIMEOUT_SECONDS)
        return json.loads(path.read_text())


def _options(given: argparse.Namespace) -> Iterator[str]:
    """As the worker reads them."""
    for name, value in vars(given).items():
        if name == "fabrics" or value is None:
            continue
        yield f"--{name}"
        yield from map(str, value if isinstance(value, list) else [value])


def table(result: dict[str, Any], fabric: str) -> Iterator[str]:
    """Markdown lines, fastest first; ratios to the fastest pipeline by hand."""
    rows = sorted(result["rows"], key=lambda row: statistics.median(row["seconds"]))
    by_hand = [statistics.median(row["seconds"]) for row in rows if row["name"].startswith("torch")]
    yield f"\n{result['workload']}; {fabric}; load before {result['load']:.1f}:\n"
    heads = (
        "median step | quartiles | to torch's | processor | modelled | predicted | error | bubble | predicted"
    )
    yield f"| | {heads} | state |"
    yield f"|{' --- |' * 11}"
    for row in rows:
        median = statistics.median(row["seconds"])
        middle, quartiles = milliseconds(row["seconds"], 0)
        predicted = row.get("predicted")
        cells = [
            row["name"],
            f"{middle} ms",
            quartiles,
            f"{median / min(by_hand):.2f}" if by_hand else "",
            f"{1e3 * row['cpu']:.0f} ms",
            f"{1e3 * row['modelled']:.0f} ms" if "modelled" in row else "",
            "" if predicted is None else f"{1e3 * predicted:.0f} ms",
            "" if predicted is None else f"{100 * (predicted / median - 1):+.0f}%",
            f"{row['bubble']:.2f}" if "bubble" in row else "",
            f"{row['predicted_bubble']:.2f}" if "predicted_bubble" in row else "",
            f"{row['state'] / 1e6:.0f} MB",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from (f"- {row['name']}: {row['plan']}" for row in rows if row.get("plan"))
    yield f"- largest relative difference of a loss from one process: {_difference(result):.0e}"


def _difference(result: dict[str, Any]) -> float:
    wanted = result["reference"]
    return max(
        abs(mine / one - 1.0)
        for row in result["rows"]
        for mine, one in zip(row["losses"], wanted, strict=True)
    )


def _about() -> str:
    when = datetime.now().strftime("%Y-%m-%d %H:%M")
    cores = len(os.sched_getaffinity(0))
    command = " ".join(["python -m benchmarks.pipeline_race", *sys.argv[1:]])
    return f"{when}, {platform.machine()}, {cores} cores, torch {torch.__version__}, `{command}`"


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
