"""Pages of what came of the zoo: docs/models.md, what is split, and benchmarks/results/models.md, the figures."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.zoo_models.row import ALONE, AS_ONE, HOLDS, NAMED, WRONG, Outcome

_INTRO = """# Models

Which models work, by kinds: {count} small ones with random weights, each planned for 2 x 2 ranks, where splitting pays,
and run on simulated ranks against one process. {holds} hold, of which {with_ranks} were also trained on two ranks;
{named} are refused by an error that names the line and what to do instead. {wrong} are wrong.

`python -m benchmarks.zoo --keep FILE`, then `--pages`, writes this page; [figures](../benchmarks/results/models.md).

- *Split*: the share of parameters that are stored in parts, and what the plan moves in a step.
- *Whole*: the share of a rank's computing in ops that every rank does alike, and the largest of them. Ops in **bold**
  have no [rule](rules.md); others are whole because that is cheaper than moving their operands.
"""
_FIGURES = """# Models: what was measured

How it works: [Models](../../docs/models.md).

    python -m benchmarks.zoo --keep zoo.json --ranks 3

{said}

| model | kind | CPU s to capture and plan | collectives | largest error | trained on 2 ranks |
|---|---|---|---|---|---|
"""


def read(path: Path) -> dict[str, Outcome]:
    """By name; of a model that was run twice the last."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return {one.name: one for one in found}


def keep(path: Path, one: Outcome) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(one)) + "\n")


def models_page(found: Iterable[Outcome]) -> str:
    every = list(found)
    count = Counter(one.state for one in every)
    trained = sum(one.trained == AS_ONE for one in every)
    lines = [
        _INTRO.format(
            count=len(every),
            holds=count[HOLDS] + count[ALONE],
            with_ranks=trained,
            named=count[NAMED],
            wrong=count[WRONG],
        )
    ]
    for kind in dict.fromkeys(one.kind for one in every):
        lines += [f"## {kind.capitalize()}\n", "| model | split | whole |\n|---|---|---|"]
        lines += [f"| {one.name} | {_split(one)} | {_whole(one)} |" for one in every if one.kind == kind]
        lines.append("")
    return "\n".join(lines)


def _split(one: Outcome) -> str:
    if one.state == HOLDS:
        return f"{one.split:.0%}; {', '.join(f'{n} {name}' for name, n in one.moved.items())}"
    return "nothing: whole is faster" if one.state == ALONE else f"{one.state}: {_short(one.note)}"


def _whole(one: Outcome) -> str:
    if one.state not in (HOLDS, ALONE):
        return "-"
    named = [
        *(f"**{name}**" for name in one.unruled),
        *(name for name in one.whole if name not in one.unruled),
    ]
    share = f"{one.whole_share:.0%}" if one.whole_share >= 0 else ""
    return ": ".join(part for part in (share, ", ".join(named)) if part) or "-"


def _short(note: str) -> str:
    """What an error says and advises, without folders."""
    return re.sub(r"/\S*/(?=\w+\.py)", "", note).replace("|", "/")[:400]


def figures_page(found: Sequence[Outcome], said: str) -> str:
    rows = [
        f"| {one.name} | {one.kind} | {one.seconds:.1f} | {sum(one.moved.values())} | {one.error:.0e} | {one.trained or '-'} |"
        for one in found
        if one.state in (HOLDS, ALONE)
    ]
    return _FIGURES.format(said=said) + "\n".join(rows) + "\n"
