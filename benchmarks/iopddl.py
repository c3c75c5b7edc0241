"""The search core on problems of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (google/iopddl).

    python benchmarks/iopddl.py FOLDER [--only A,B] [--time-limit SECONDS]

FOLDER holds `*.json` or `*.json.gz`, each one problem: see `read_problem`. A `BEST.csv` beside them, if there is one,
gives each problem's time limit and best known cost (columns instance, seconds, best_contest_cost, proven_optimum).
The time limit counts from the start of reading the file.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from passes.solver.problem import Array, Infeasible, Problem
from passes.solver.solve import solve

IMPOSSIBLE = 1e18
"""Costs from here on stand for what is impossible."""
DEFAULT_SECONDS = 60.0


@dataclass(frozen=True)
class Best:
    """What is known of a problem: its time limit, and the best or optimal cost, if any."""

    seconds: float = DEFAULT_SECONDS
    cost: float | None = None


def read_problem(path: Path) -> Problem:
    """`problem` of the JSON: nodes {intervals, costs, usages}, edges {nodes, costs (row-major)}, usage_limit."""
    raw = path.read_bytes()
    data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    data = data.get("problem", data)
    nodes, edges = data["nodes"], data["edges"]
    costs = tuple(_costs(vector) for vector in nodes["costs"])
    distinct: dict[tuple[int, bytes], Array] = {}
    matrices: list[Array] = []
    for (i, j), flat in zip(edges["nodes"], edges["costs"], strict=True):
        matrix = _costs(flat).reshape(len(costs[i]), len(costs[j]))
        matrices.append(distinct.setdefault((len(matrix), matrix.tobytes()), matrix))
    limit = data.get("usage_limit")
    return Problem(
        node_costs=costs,
        edges=tuple((int(i), int(j)) for i, j in edges["nodes"]),
        edge_costs=tuple(matrices),
        intervals=tuple((int(start), int(end)) for start, end in nodes["intervals"]),
        usages=tuple(np.array(usage, dtype=np.float64) for usage in nodes["usages"]),
        limit=None if limit is None else float(limit),
    )


def _costs(values: Sequence[float]) -> Array:
    array = np.array(values, dtype=np.float64)
    return np.where(array >= IMPOSSIBLE, np.inf, array)


def read_best(folder: Path) -> dict[str, Best]:
    path = folder / "BEST.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, Best] = {}
    for row in rows:
        known = [float(row[key]) for key in ("best_contest_cost", "proven_optimum") if row.get(key)]
        found[row["instance"]] = Best(float(row.get("seconds") or DEFAULT_SECONDS), min(known, default=None))
    return found


def problem_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(short name, path): the name is what follows the last dash of the file's."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".json", ".json.gz")):
            yield path.name.removesuffix(".gz").removesuffix(".json").rsplit("-", 1)[-1], path


def run(name: str, path: Path, best: Best) -> str:
    """One line of the table."""
    start, cpu = time.monotonic(), time.process_time()
    problem = read_problem(path)
    size = f"| {name} | {len(problem.node_costs):,} | {len(problem.edges):,} |"
    left = best.seconds - (time.monotonic() - start)
    try:
        solution = solve(problem, time_limit=max(0.0, left))
    except Infeasible as reason:
        return (
            f"{size} none: {reason.kind} | | | | | {time.monotonic() - start:.1f} | | {best.seconds:.0f} | |"
        )
    seconds = time.monotonic() - start
    assert problem.limit is None or problem.peak(solution.choice)[0] <= problem.limit
    known = "" if best.cost is None else f"{best.cost:.0f}"
    ratio = "" if best.cost is None else f"{solution.cost / best.cost:.4f}"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{size} {solution.cost:.0f} | {known} | {ratio} | {solution.lower_bound:.0f} | {solution.gap:.2%} | "
        f"{seconds:.1f} | {time.process_time() - cpu:.1f} | {best.seconds:.0f} | {memory:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The search core on the problems of the iopddl contest.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="names of problems, separated by commas", default="")
    parser.add_argument("--time-limit", type=float, help="seconds, instead of the contest's")
    arguments = parser.parse_args()
    only = {name for name in arguments.only.split(",") if name}
    bests = read_best(arguments.folder)
    print("| problem | nodes | edges | cost | best | ratio | lower bound | gap | clock | CPU | limit | GB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name, path in problem_files(arguments.folder):
        if only and name not in only:
            continue
        best = bests.get(name, Best())
        limit = best.seconds if arguments.time_limit is None else arguments.time_limit
        print(run(name, path, Best(limit, best.cost)), flush=True)


if __name__ == "__main__":
    main()
