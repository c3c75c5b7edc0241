"""docs/versions.md from the runs of `tests.versions.run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Failure", "VersionRun", "page"]

BASE = "2.13.0"
"""The version that CI tests and that the others' graphs are compared with."""


@dataclass(frozen=True)
class Failure:
    """A test that did not pass, and the first line of why."""

    test: str
    why: str


@dataclass(frozen=True)
class VersionRun:
    """One version of torch on one of Python. ran: what was run, in words; "" if it could not be installed.

    counts: result -> tests. hashes: graph -> hash, from `tests.versions.graph_hashes`. note: why nothing ran.
    """

    torch: str
    python: str
    date: str
    machine: str
    ran: str
    counts: Mapping[str, int]
    failures: Sequence[Failure]
    hashes: Mapping[str, str]
    note: str = ""

    @property
    def held(self) -> bool:
        """Everything that was run passed."""
        return bool(self.ran) and not self.failures and self.counts.get("passed", 0) > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> VersionRun:
        return VersionRun(**{**data, "failures": tuple(Failure(**f) for f in data["failures"])})


def page(runs: Sequence[VersionRun]) -> str:
    """The page, oldest torch first."""
    ordered = sorted(runs, key=lambda run: ([int(p) for p in run.torch.split("+")[0].split(".")], run.python))
    return "\n".join([*_head(), *_table(ordered), *_failures(ordered), *_graphs(ordered)]) + "\n"


def _head() -> Iterator[str]:
    yield "# Versions of torch and Python"
    yield ""
    yield "Written by `make versions`; do not edit. Each row is an environment of its own, with the other packages as"
    yield f"in `constraints.txt`, on CPU with gloo. torch {BASE} is what CI tests. The README promises what held here."
    yield ""


def _table(runs: Sequence[VersionRun]) -> Iterator[str]:
    yield "| torch | Python | ran | passed | failed | skipped | graphs as on " + BASE + " | date, machine |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for run in runs:
        if not run.ran:
            yield f"| {run.torch} | {run.python} | not run: {run.note} | | | | | {run.date}, {run.machine} |"
            continue
        counts = [run.counts.get("passed", 0), len(run.failures), run.counts.get("skipped", 0)]
        cells = [run.torch, run.python, run.ran, *counts, _agreement(run, runs)]
        yield f"| {' | '.join(map(str, cells))} | {run.date}, {run.machine} |"
    yield ""


def _base(runs: Sequence[VersionRun]) -> Mapping[str, str]:
    return next((run.hashes for run in runs if run.torch.split("+")[0] == BASE and run.hashes), {})


def _different(run: VersionRun, base: Mapping[str, str]) -> list[str]:
    return sorted(name for name, value in run.hashes.items() if base.get(name) != value)


def _agreement(run: VersionRun, runs: Sequence[VersionRun]) -> str:
    base = _base(runs)
    if not run.hashes or not base:
        return "not compared"
    return f"{len(run.hashes) - len(_different(run, base))} of {len(run.hashes)}"


def _failures(runs: Sequence[VersionRun]) -> Iterator[str]:
    """Those of one version grouped by what was raised; a long group by its files."""
    for run in runs:
        if not run.failures:
            continue
        yield f"## Failed with torch {run.torch} on Python {run.python}"
        yield ""
        groups: dict[str, list[str]] = {}
        for failure in run.failures:
            groups.setdefault(failure.why, []).append(failure.test)
        for why, tests in sorted(groups.items(), key=lambda group: -len(group[1])):
            yield f"- {_names(tests)}: `{why[:200].replace('`', chr(39))}`"
        yield ""


def _names(tests: Sequence[str]) -> str:
    if len(tests) <= 3:
        return ", ".join(f"`{test}`" for test in tests)
    files = Counter(test.split("::")[0] for test in tests)
    return f"{len(tests)} tests (" + ", ".join(f"`{name}` {n}" for name, n in files.items()) + ")"


def _graphs(runs: Sequence[VersionRun]) -> Iterator[str]:
    yield "## One graph on all versions"
    yield ""
    yield "`python -m tests.versions.graph_hashes` captures usual models and layers (Hugging Face's, a ViT, a U-Net,"
    yield "convolutional and recurrent layers, norms, attention, losses), each for GPUs in float32, in bfloat16 and"
    yield "under autocast, and for CPUs in float32 (no GPU is needed), and hashes the canonical graph. A plan made with"
    yield "one version runs with another where they agree."
    yield ""
    base = _base(runs)
    compared = [run for run in runs if base and run.hashes and run.torch.split("+")[0] != BASE]
    for run in compared:
        different = _different(run, base)
        text = "all agree" if not different else "differ: " + ", ".join(different)
        yield f"- torch {run.torch}, Python {run.python}: {text}."
    if not compared:
        yield "- No other version was compared."
