"""The race as Markdown: one table over the scenarios, then one for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.racing.results import EQUAL, Entry, Result

__all__ = ["details", "goals", "summary"]

_PREDICTED = "modelled | predicted | error"
RATIO_GOAL, GOOD_RATIO, PREDICTION_GOALS = 1.0, 0.8, (0.10, 0.20)


def summary(results: Sequence[Result]) -> str:
    """One line a scenario: autoshard against the best hand-written way."""
    lines = [
        f"| scenario | best by hand | step | autoshard | ratio | race=3 | {_PREDICTED} | picked the best |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_summary_line(result) for result in results),
    ]
    return "\n".join(lines)


def _summary_line(result: Result) -> str:
    ours, best = result.ours, result.best_hand_written
    if ours is None or best is None:
        return f"| {result.scenario} | {result.error or 'did not run'} | | | | | | | | |"
    picked = "yes" if result.picked_the_best else "no: " + result.ran("pinned")[0].name
    cells = [
        result.scenario,
        best.title,
        _ms(best.median),
        _ms(ours.median),
        f"{result.ratio:.2f}{' (tie)' if result.tie else ''}",
        "" if result.raced_ratio is None else f"{result.raced_ratio:.2f}",
        _ms(ours.modelled),
        _ms(ours.predicted),
        _percent(ours.prediction_error),
        picked,
    ]
    return f"| {' | '.join(cells)} |"


def goals(results: Sequence[Result]) -> str:
    """The goals of the race and whether they are met, as a list."""
    ratios = [result.ratio for result in results if result.ratio is not None]
    won = [r.ratio <= RATIO_GOAL or r.tie for r in results if r.ratio is not None]
    raced = [r.raced_ratio for r in results if r.raced_ratio is not None]
    errors = [r.ours.prediction_error for r in results if r.ours and r.ours.prediction_error is not None]
    picked = [result.picked_the_best for result in results if result.ours]
    count = len(results)
    difference = max((result.loss_error for result in results), default=0.0)
    wrong = [f"{result.scenario}: {entry.name}" for result in results for entry in result.wrong]
    lines = [
        f"- ratio at most {RATIO_GOAL}: {sum(r <= RATIO_GOAL for r in ratios)} of {count} scenarios, "
        f"or a tie (quartiles overlap): {sum(won)}; with race=3 {sum(r <= RATIO_GOAL for r in raced)}",
        f"- ratio at most {GOOD_RATIO}: {sum(r <= GOOD_RATIO for r in ratios)} of {count} (goal: a third)",
        *(
            f"- predicted within {goal:.0%}: {sum(abs(e) <= goal for e in errors)} of {count}"
            for goal in PREDICTION_GOALS
        ),
        f"- its own plan the fastest of those it priced, or within {EQUAL:.0%}: "
        f"{sum(bool(p) for p in picked)} of {count}",
        f"- largest relative difference of a loss from one process: {difference:.1e}",
        *([f"- **another loss, so not ranked: {', '.join(wrong)}**"] if wrong else []),
    ]
    return "\n".join(lines)


def details(result: Result) -> str:
    """All contestants of a scenario, fastest first, and the plans."""
    limit = "" if result.memory_limit is None else f" At most {_mb(result.memory_limit)} a rank."
    head = f"### {result.scenario}\n\n{result.workload}; {result.fabric}: {result.why}.{limit}\n"
    return "\n".join([head, *_table(result), "", *_plans(result), *_settings(result)]).rstrip() + "\n"


def _table(result: Result) -> Iterator[str]:
    yield f"| contestant | median step | quartiles | processor | {_PREDICTED} | state a rank |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for entry in sorted(result.entries, key=lambda e: e.median if e.seconds else float("inf")):
        yield _line(entry, result)


def _line(entry: Entry, result: Result) -> str:
    if not entry.seconds:
        return f"| {entry.name} | {entry.error or 'did not run'} | | | | | | |"
    low, high = entry.quartiles
    over = "" if result.fits(entry) else " (over the limit)"
    wrong = "" if result.trains_alike(entry) else f" (another loss, off by {result.loss_error_of(entry):.1e})"
    cells = [
        (f"**{entry.title}**" if entry.kind == "autoshard" else entry.title) + wrong,
        _ms(entry.median),
        f"{1e3 * low:.0f}, {1e3 * high:.0f}",
        _ms(entry.cpu),
        _ms(entry.modelled),
        _ms(entry.predicted),
        _percent(entry.prediction_error),
        _mb(entry.state_bytes) + over,
    ]
    return f"| {' | '.join(cells)} |"


def _plans(result: Result) -> Iterator[str]:
    for entry in result.entries:
        if entry.plan:
            yield f"- {entry.name}: {entry.plan}"


def _settings(result: Result) -> Iterator[str]:
    for entry in result.entries:
        if entry.tried:
            tried = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in entry.tried.items())
            yield f"- {entry.name}, settings tried: {tried}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f} ms"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.0f}%"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"
