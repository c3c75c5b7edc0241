"""Race autoshard's plans against hand-written parallelism on emulated clusters, in one run.

    python -m benchmarks.race                                # all scenarios, eager
    python -m benchmarks.race --scenarios wide-fast,gpt-fast --rounds 5
    python -m benchmarks.race --list

For each fabric: an emulated cluster is made (benchmarks/cluster), a profile measured on it, and the scenarios of
the fabric run, each in fresh ranks. Writes race.json, race.md and, with matplotlib, two pictures into --out;
benchmarks/results/race.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.cluster import Cluster, ClusterError
from benchmarks.racing.results import Result
from benchmarks.racing.scenarios import FABRICS, SCENARIOS, Scenario
from benchmarks.racing.table import details, goals, summary

__all__ = ["main"]

WORKER = ("-m", "benchmarks.racing.worker")
SCENARIO_SECONDS = 2700.0  # a scenario that takes longer hangs


def main(words: Sequence[str] | None = None) -> int:
    """Run the race; 1 if a scenario failed."""
    given = _parser().parse_args(words)
    if given.list:
        for scenario in SCENARIOS.values():
            print(
                f"{scenario.name:16} {FABRICS[scenario.fabric].text}; {scenario.workload.text}: {scenario.why}"
            )
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        results = _run(_chosen(given.scenarios), given)
    except ClusterError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 1 if any(result.error or result.wrong for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--scenarios", help="names with commas between; all without it")
    parser.add_argument("--contestants", help="names with commas between; all without it")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each contestant")
    parser.add_argument("--compile", action="store_true", help="Inductor for all; eager for all without it")
    parser.add_argument(
        "--profile", help="a file or a shipped name for all fabrics, instead of measuring each"
    )
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for measuring each fabric")
    parser.add_argument("--out", type=Path, default=Path("race-results"), help="folder for what is written")
    parser.add_argument("--list", action="store_true", help="list the scenarios")
    return parser


def _chosen(names: str | None) -> list[Scenario]:
    if names is None:
        return list(SCENARIOS.values())
    unknown = [name for name in names.split(",") if name not in SCENARIOS]
    if unknown:
        raise SystemExit(f"no scenario {', '.join(unknown)}\n  try: {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in names.split(",")]


def _run(scenarios: list[Scenario], given: argparse.Namespace) -> list[Result]:
    """Fabric by fabric; everything so far is written after each scenario."""
    results: list[Result] = []
    for fabric in dict.fromkeys(scenario.fabric for scenario in scenarios):
        with FABRICS[fabric].cluster() as cluster:
            profile = given.profile or _measured(cluster, fabric, given)
            for scenario in scenarios:
                if scenario.fabric == fabric:
                    results.append(_raced(cluster, scenario, profile, given))
                    _write(results, given)
    return results


def _measured(cluster: Cluster, fabric: str, given: argparse.Namespace) -> str:
    """The file of a profile measured now on the cluster."""
    path = given.out / f"profile-{fabric}.json"
    _say(f"{fabric}: measuring for {given.budget:g} s")
    cluster.run(
        [*WORKER, "profile", "--budget", str(given.budget), "--out", str(path)],
        timeout=120 + 3 * given.budget,
    )
    return str(path)


def _raced(cluster: Cluster, scenario: Scenario, profile: str, given: argparse.Namespace) -> Result:
    path = given.out / f"{scenario.name}.json"
    path.unlink(missing_ok=True)
    options = ["--scenario", scenario.name, "--profile", profile, "--rounds", str(given.rounds)]
    options += ["--backend", "inductor" if given.compile else "eager", "--out", str(path)]
    if given.contestants:
        options += ["--only", given.contestants]
    start = time.perf_counter()
    try:
        cluster.run([*WORKER, "race", *options], timeout=SCENARIO_SECONDS)
        result = Result.from_json(json.loads(path.read_text()))
    except ClusterError as error:
        result = _failed(scenario, str(error))
    spent = time.perf_counter() - start
    ratio = "no result" if result.ratio is None else f"ratio {result.ratio:.2f}"
    _say(f"{scenario.name}: {ratio}, {spent:.0f} s")
    return result


def _failed(scenario: Scenario, why: str) -> Result:
    fabric, workload = FABRICS[scenario.fabric].text, scenario.workload.text
    return Result(scenario.name, fabric, workload, scenario.why, scenario.memory_limit, error=why)


def _write(results: list[Result], given: argparse.Namespace) -> None:
    about = _about(given)
    data = {"about": about, "results": [result.to_json() for result in results]}
    (given.out / "race.json").write_text(json.dumps(data, indent=1) + "\n")
    head = f"{about['date']}, {about['machine']}, torch {about['torch']}, `{about['command']}`."
    parts = [head, summary(results), goals(results), *(details(r) for r in results if not r.error)]
    (given.out / "race.md").write_text("\n\n".join(parts))
    if importlib.util.find_spec("matplotlib"):
        from benchmarks.racing.plots import draw_predictions, draw_steps

        draw_steps(results, given.out / "race-steps.svg")
        draw_predictions(results, given.out / "race-predictions.svg")


def _about(given: argparse.Namespace) -> dict[str, Any]:
    """When, where and how."""
    return {
        "date": date.today().isoformat(),
        "command": "python -m benchmarks.race " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {_memory_gb():.0f} GB",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compile": bool(given.compile),
        "rounds": given.rounds,
        "fabrics": {name: dataclasses.asdict(fabric) for name, fabric in FABRICS.items()},
    }


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
