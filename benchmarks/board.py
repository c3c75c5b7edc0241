"""The board: every published run that the project knows, as it ran and as it is predicted. Writes docs/board.md.

    python -m benchmarks.board                         # predicts every run, an hour of one core
    python -m benchmarks.board --only Qwen3 --seconds 120
    python -m benchmarks.board --page                  # writes the page of what was predicted before

What was predicted is kept in benchmarks/published/board.json. A row whose figure is still empty in its CSV is predicted
without it, and says so on the board ever after.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.published import DEPTHS, hand_step
from benchmarks.published_parallel import ParallelRow, parallel_rows
from benchmarks.published_rows import ROWS, Row, profile_of, read_rows
from cost_model.errors import InfeasibleError

__all__ = ["FAR", "PAGE", "Entry", "board_page", "configured", "kept", "known_runs", "off"]

KEPT = Path(__file__).parent / "published" / "board.json"
PAGE = Path(__file__).parents[1] / "docs" / "board.md"
SOURCES = {
    "mpt.csv": "mosaicml/llm-foundry, scripts/train/benchmarking",
    "torchtitan.csv": "pytorch/torchtitan, benchmarks",
}


@dataclass(frozen=True)
class Entry:
    """A run on the board. published, predicted: tokens a second of one GPU; None: not known, and why not in `said`.
    nbytes: predicted, of the fullest GPU. ours: of the plan that autoshard finds, in words. blind: predicted before
    its figure was looked at. note: on what was published."""

    run: str
    ran: str
    source: str
    published: float | None
    predicted: float | None
    nbytes: float = 0.0
    said: str = ""
    ours: str = ""
    blind: bool = False
    date: str = ""
    note: str = ""

    @property
    def error(self) -> float | None:
        """predicted / published - 1."""
        return self.predicted / self.published - 1 if self.predicted and self.published else None

    @property
    def key(self) -> tuple[str, str]:
        return self.run, self.ran


@dataclass(frozen=True)
class Run:
    """A published run, and how it is predicted."""

    entry: Entry
    predict: Callable[[Entry, float], Entry]


def known_runs() -> Iterator[Run]:
    for path in ROWS:
        for row in read_rows(path):
            entry = Entry(row.name, row.ran, SOURCES[path.name], row.tokens_per_second, None, note=row.note)
            yield Run(entry, lambda entry, _, row=row: _by_hand(entry, row))
    for row in parallel_rows():
        ran = "; ".join(filter(None, (row.said, row.again)))
        entry = Entry(row.name, ran, row.source, row.rate, None, note=row.note)
        yield Run(entry, lambda entry, seconds, row=row: configured(entry, row, seconds))


def _by_hand(entry: Entry, row: Row) -> Entry:
    step = hand_step(row, profile_of(row), DEPTHS)
    return replace(entry, predicted=row.tokens * row.accumulation / step.total, nbytes=step.nbytes)


def configured(entry: Entry, row: ParallelRow, seconds: float) -> Entry:
    """With what the row's configuration is predicted to take, or why there is no such plan."""
    try:
        run = row.predicted(seconds)
    except InfeasibleError as error:
        return replace(entry, said=str(error).splitlines()[0])
    return replace(entry, predicted=row.rate_of(run), published=row.published(run), nbytes=run.nbytes)


def kept(path: Path = KEPT) -> dict[tuple[str, str], Entry]:
    """What was predicted, by run."""
    entries = [Entry(**one) for one in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
    return {one.key: one for one in entries}


def off(entries: Iterable[Entry]) -> list[float]:
    """|predicted / published - 1| of those that have both."""
    return [abs(one.error) for one in entries if one.error is not None]


FAR = 0.2
"""A prediction so far off is the goal's worst."""


_INTRO = """# The board

Every published run that the project knows, predicted as it ran with the nominal profiles `h100` and `a100`: tokens a
second of one GPU. `python -m benchmarks.board` writes this page; how FSDP's runs are priced, and why some are off, is
under [published runs](../benchmarks/results/benchmarks.md#published-runs), what a configuration of other frameworks
is priced as under [the planner](planner.md#beside-a-configuration).

- *error*: of the prediction against what was published; above 0 the run was slower than predicted.
- *GB*: predicted on the fullest GPU.
- *ours*: the plan that autoshard finds for the same model and batch within the GPU's memory, where one was searched.
- **blind**: predicted before its figure was looked at. All others were known when this was written.
"""


def board_page(entries: Sequence[Entry]) -> str:
    lines = [_INTRO, "| runs | | median error | worst |", "| --- | ---: | ---: | ---: |"]
    groups = {"all": list(entries)}
    for one in entries:
        groups.setdefault(one.source.split(" ")[0].rstrip(","), []).append(one)
    for name, group in groups.items():
        found = off(group)
        if found:
            lines.append(f"| {name} | {len(found)} | {statistics.median(found):.1%} | {max(found):.1%} |")
    lines += ["", "| run | as it ran | published | predicted | error | GB | ours |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    lines += [_line(one) for one in entries]
    far = [one for one in entries if one.note and abs(one.error or 0.0) > FAR]
    lines += ["", *(f"- **{one.run}, {one.ran}**: {one.note}." for one in far)] if far else []
    lines += ["", "Sources: " + "; ".join(dict.fromkeys(one.source for one in entries)) + ".", ""]
    return "\n".join(lines)


def _line(one: Entry) -> str:
    published = "not yet" if one.published is None else f"{one.published:,.0f}"
    blind = " **blind**" if one.blind else ""
    if one.predicted is None:
        return f"| {one.run} | {one.ran} | {published} | - | {one.said} | | {one.ours} |"
    error = "" if one.error is None else f"{one.error:+.1%}"
    cells = (one.run, one.ran, published, f"{one.predicted:,.0f}", error + blind, f"{one.nbytes / 1e9:.1f}")
    return f"| {' | '.join(cells)} | {one.ours} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="runs with these words in their names or how they ran")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each search")
    parser.add_argument("--page", action="store_true", help="predict none")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where predictions are kept")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found, runs = kept(arguments.kept), list(known_runs())
    for one in runs:
        key = one.entry.key
        if not arguments.page and arguments.only in f"{one.entry.run} {one.entry.ran}":
            before = found.get(key)
            date = datetime.now(UTC).strftime("%Y-%m-%d")
            entry = one.predict(one.entry, arguments.seconds)
            blind = entry.published is None or (before is not None and before.blind)
            found[key] = replace(entry, date=date, blind=blind, ours=before.ours if before else "")
            print(_line(found[key]), flush=True)
        if key in found:
            found[key] = replace(found[key], note=one.entry.note)
            arguments.kept.write_text(_json(runs, found), encoding="utf-8")
    arguments.output.write_text(board_page(list(_in_order(runs, found))), encoding="utf-8")


def _in_order(runs: Sequence[Run], found: dict[tuple[str, str], Entry]) -> Iterator[Entry]:
    return (found[one.entry.key] for one in runs if one.entry.key in found)


def _json(runs: Sequence[Run], found: dict[tuple[str, str], Entry]) -> str:
    rows = (json.dumps(asdict(one), ensure_ascii=False) for one in _in_order(runs, found))
    return "[\n" + ",\n".join(rows) + "\n]\n"


if __name__ == "__main__":
    main()
