"""Many small models of many kinds: captured, planned where splitting pays, verified, and trained on ranks.

    python -m benchmarks.zoo                                  # all, prints a table
    python -m benchmarks.zoo --models Llama Mamba --ranks 1     # also trained on 2 gloo ranks
    python -m benchmarks.zoo --keep zoo.jsonl --ranks 3         # a third of them trained; kept, to go on from
    python -m benchmarks.zoo --kinds experts --ranks 1 --on 2 2 --steps 10 --close 1e-12
    python -m benchmarks.zoo --keep benchmarks/zoo_models/kept.jsonl --pages 2026-11-28

The last writes docs/models.md and benchmarks/results/models.md of what is kept there.

Random weights, float64, one or two layers. Prices are of a CPU whose kernels are 100 times slower: there it pays to
split even these. Every plan is run in lockstep on simulated ranks of a 2 x 2 mesh, forward and backward, against the
model in one process. Each model has a process of its own and a limit of time. Exits with 1 if any result differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard import MeshSpec, Plan, find_plan, verify
from benchmarks.zoo_models import ROWS
from benchmarks.zoo_models.page import figures_page, keep, models_page, read
from benchmarks.zoo_models.prices import LIMIT, prices
from benchmarks.zoo_models.row import (
    ALONE,
    CRASH,
    HOLDS,
    LATE,
    NAMED,
    RAW,
    WRONG,
    Outcome,
    Row,
    state_of,
    words_of,
)
from benchmarks.zoo_models.training import RATE, Training, trained

MESH = MeshSpec({"x": 2, "y": 2})


def examined(row: Row, training: Training | None = None) -> Outcome:
    """In this process. training: None: none."""
    begin = time.process_time()
    try:
        model, call = row.made()
    except Exception as error:
        return Outcome(row.name, row.kind, RAW, note=f"cannot be made: {words_of(error)}")
    try:
        plan = find_plan(model, MESH, call, profile=prices(), backend="eager", time_limit=LIMIT, gap=0.1)
        seconds = time.process_time() - begin
        report = verify(model, plan, call)
    except Exception as error:
        return Outcome(row.name, row.kind, state_of(error), note=words_of(error))
    state = WRONG if not report.ok else HOLDS if plan.collectives else ALONE
    share, whole = _whole(plan)
    found = Outcome(
        row.name,
        row.kind,
        state,
        "" if report.ok else " ".join(str(report).split()),
        _split_share(model, plan),
        dict(Counter(one.name for one in plan.collectives)),
        share,
        whole,
        [name.removesuffix(".default").removeprefix("autoshard.") for name in plan.fallbacks],
        seconds,
        report.max_error,
    )
    return replace(found, trained=trained(row, training)) if training and report.ok else found


def _split_share(model: nn.Module, plan: Plan) -> float:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    split = sum(
        n for name, n in sizes.items() if any(not p.is_replicate() for p in plan.parameters.get(name, ()))
    )
    return split / max(sum(sizes.values()), 1)


def _whole(plan: Plan) -> tuple[float, list[str]]:
    """The share of a rank's computing that is in ops which are not split, and the three kinds that take longest."""
    seconds: Counter[str] = Counter()
    for record in plan.records:
        if record.operands and not any(split.axes for split in record.splits):
            seconds[record.op] += record.seconds  # type: ignore[assignment]
    total = sum(record.seconds for record in plan.records) or 1.0
    return seconds.total() / total, [op for op, one in seconds.most_common(3) if one > 0.002 * total]


def _alone(row: Row, training: Training | None, end: Any) -> None:
    warnings.simplefilter("ignore")
    end.send(examined(row, training))


def in_process(row: Row, training: Training | None, limit: float) -> Outcome:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_alone, args=(row, training, theirs))
    process.start()
    theirs.close()
    try:
        found = (
            ours.recv()
            if ours.poll(limit)
            else Outcome(row.name, row.kind, LATE, note=f"more than {limit:g} s")
        )
    except EOFError:
        process.join()
        found = Outcome(row.name, row.kind, CRASH, note=f"ended with {process.exitcode}")
    process.kill()
    process.join()
    return found


def line(one: Outcome) -> str:
    cells = (
        one.name, one.kind, one.state, sum(one.moved.values()), f"{one.split:.0%}", f"{one.whole_share:.0%}",
        ", ".join(one.whole), ", ".join(one.unruled) or "-", f"{one.seconds:.1f}", f"{one.error:.0e}", one.trained,
        one.note[:500].replace("|", "/"),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--ranks", type=int, metavar="N", help="train each N-th model on ranks too")
    parser.add_argument("--on", type=int, nargs="+", default=[2], help="sizes of the mesh of those ranks")
    parser.add_argument("--steps", type=int, default=3, help="of training")
    parser.add_argument("--close", type=float, default=1e-5, help="losses may differ by, relative")
    parser.add_argument("--rate", type=float, default=RATE, help="of learning")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a model")
    parser.add_argument(
        "--keep", type=Path, help="a file to which outcomes are added; what it has is not run again"
    )
    parser.add_argument(
        "--pages", nargs="*", help="write both pages from the file; words that say when and where it ran"
    )
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    _quiet()
    known = read(given.keep) if given.keep else {}
    if given.pages is not None:
        _write_pages([known[row.name] for row in ROWS if row.name in known], " ".join(given.pages))
        return 0
    rows = [row for row in ROWS if given.models is None or row.name in given.models]
    rows = [row for row in rows if given.kinds is None or row.kind in given.kinds]
    found: list[Outcome] = []
    examined(
        next(row for row in ROWS if row.name == "two towers")
    )  # what is imported and tried once, is so for all
    for row in rows:
        ranks = bool(given.ranks) and ROWS.index(row) % given.ranks == 0
        if (
            row.name in known
            and known[row.name].state in (HOLDS, NAMED)
            and (known[row.name].trained or not ranks)
        ):
            continue
        training = Training(tuple(given.on), given.steps, given.close, given.rate) if ranks else None
        found.append(in_process(row, training, given.limit))
        if given.keep:
            keep(given.keep, found[-1])
        print(line(found[-1]), flush=True)
    print(dict(Counter(one.state for one in found)), file=sys.stderr)
    return int(any(one.state == WRONG for one in found))


def _write_pages(found: Sequence[Outcome], said: str) -> None:
    top = Path(__file__).parents[1]
    (top / "docs" / "models.md").write_text(models_page(found))
    (top / "benchmarks" / "results" / "models.md").write_text(figures_page(found, said))


def _quiet() -> None:
    os.environ["AUTOSHARD_PROGRESS"] = "0"
    import transformers

    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    sys.exit(main())
