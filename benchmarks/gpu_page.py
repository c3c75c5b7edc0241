"""benchmarks/results/gpu-results.md, from what `pytest -m cuda` gives and the figures of `benchmarks.gpu_figures`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.versions.outcomes import Outcome, count

__all__ = ["Figure", "Machine", "page"]


@dataclass(frozen=True)
class Machine:
    """gpus: the names of the GPUs. versions: of what ran, by name. when: date and time, UTC."""

    when: str
    gpus: Sequence[str]
    versions: Mapping[str, str]

    @property
    def text(self) -> str:
        names = sorted(set(self.gpus))
        return ", ".join(f"{list(self.gpus).count(name)} x {name}" for name in names) or "no GPU"


@dataclass(frozen=True)
class Figure:
    """One measurement. command: what ran. text: what it printed, or why it printed nothing."""

    title: str
    command: str
    text: str
    failed: bool = False


def page(machine: Machine, outcomes: Sequence[Outcome], figures: Sequence[Figure]) -> str:
    """The page; without a GPU it says so, and lists what would have run."""
    lines = [*_head(machine), *_outcomes(outcomes), *_noted(outcomes), *_figures(machine, figures)]
    return "\n".join(lines) + "\n"


def _head(machine: Machine) -> Iterator[str]:
    yield "# Results on GPUs"
    yield ""
    yield "Written by `make gpu`; do not edit. The tests are in `tests/cuda`; each says how many GPUs it needs."
    yield ""
    yield (
        f"{machine.when}; {machine.text}; " + ", ".join(f"{n} {v}" for n, v in machine.versions.items()) + "."
    )
    yield ""
    if not machine.gpus:
        yield "**Not run: this machine has no GPU.** The tests below were collected and skipped; no figure is of a GPU."
        yield "What ran on one is in [On GPUs](cuda.md#on-one-h200)."
        yield ""


def _outcomes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "## Tests"
    yield ""
    yield "| tests | passed | failed | skipped | why |"
    yield "| --- | --- | --- | --- | --- |"
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.test.split("[")[0], []).append(outcome)
    for name, group in groups.items():
        counts = count(group)
        failed = counts["failed"] + counts["error"]
        yield f"| `{name}` | {counts['passed']} | {failed} | {counts['skipped']} | {_reasons(group)} |"
    counts = count(outcomes)
    yield f"| all | {counts['passed']} | {counts['failed'] + counts['error']} | {counts['skipped']} | |"
    yield ""
    bad = [outcome for outcome in outcomes if outcome.result in ("failed", "error")]
    if bad:
        yield "Failed:"
        yield ""
        yield from (f"- `{outcome.test}`: {_cell(outcome.why)}" for outcome in bad)
        yield ""


def _reasons(group: Sequence[Outcome]) -> str:
    """Why tests were skipped, the most frequent first."""
    reasons = [_cell(outcome.why) for outcome in group if outcome.result == "skipped"]
    ordered = sorted(set(reasons), key=lambda reason: (-reasons.count(reason), reason))
    shown = "; ".join(ordered[:3])
    return shown if len(ordered) <= 3 else f"{shown}; {len(ordered) - 3} other reasons"


def _cell(text: str) -> str:
    return text.replace("|", "/")[:300]


def _noted(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What tests recorded beside passing."""
    noted = [outcome for outcome in outcomes if outcome.noted]
    if not noted:
        return
    yield "## Noted by tests"
    yield ""
    yield "| test | outcome | noted |"
    yield "| --- | --- | --- |"
    for outcome in noted:
        text = "; ".join(f"{name}: {value}" for name, value in outcome.noted.items())
        yield f"| `{outcome.test.split('::')[-1].replace('|', '/')}` | {outcome.result} | {_cell(text)} |"
    yield ""


def _figures(machine: Machine, figures: Sequence[Figure]) -> Iterator[str]:
    yield "## Figures"
    yield ""
    if not figures:
        yield "None: not run." if not machine.gpus else "None."
    for figure in figures:
        yield f"### {figure.title}{' (failed)' if figure.failed else ''}"
        yield ""
        yield f"`{figure.command}`"
        yield ""
        yield "```"
        yield figure.text.rstrip()
        yield "```"
        yield ""
