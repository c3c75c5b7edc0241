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
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from autoshard import MeshSpec, Plan, Profile, autoshard, find_plan, verify
from benchmarks.zoo_models import ROWS
from benchmarks.zoo_models.page import figures_page, keep, models_page, read
from benchmarks.zoo_models.row import ALONE, AS_ONE, CRASH, HOLDS, LATE, NAMED, RAW, WRONG, Call, Outcome, Row
from cost_model.errors import AutoshardError
from passes.capture.operator_calls import GroupedAsCaptured

MESH = MeshSpec({"x": 2, "y": 2})
RATE, SLOWER, LIMIT = 0.05, 100.0, 20.0
"""Of learning; how much slower kernels are; seconds of a search."""


@dataclass(frozen=True)
class Training:
    """On ranks. mesh: its sizes. close: how far apart losses may be, relative."""

    mesh: tuple[int, ...] = (2,)
    steps: int = 3
    close: float = 1e-5


@cache
def prices() -> Profile:
    """The nominal CPU with kernels that are slower and a network that starts at once."""
    cpu = Profile.named("cpu")
    slower = lambda rate: replace(rate, flops_per_second=tuple(one / SLOWER for one in rate.flops_per_second))
    device = replace(
        cpu.device,
        launch_seconds=1e-9,
        memory_bytes_per_second=cpu.device.memory_bytes_per_second / SLOWER,
        matmul=tuple(map(slower, cpu.device.matmul)),
    )
    links = tuple(replace(link, latency_seconds=1e-6) for link in cpu.links)
    return replace(cpu, name="slow kernels", device=device, links=links, collective_launch_seconds=1e-6)


def examined(row: Row, training: Training | None = None) -> Outcome:
    """In this process. training: None: none."""
    begin = time.process_time()
    try:
        model, call = row.made()
    except Exception as error:
        return Outcome(row.name, row.kind, RAW, note=f"cannot be made: {_words(error)}")
    try:
        plan = find_plan(model, MESH, call, profile=prices(), backend="eager", time_limit=LIMIT, gap=0.1)
        seconds = time.process_time() - begin
        report = verify(model, plan, call)
    except Exception as error:
        return Outcome(row.name, row.kind, _state(error), note=_words(error))
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


def _state(error: Exception) -> str:
    return NAMED if isinstance(error, AutoshardError) and "try: " in str(error) else RAW


def _words(error: Exception) -> str:
    if os.environ.get("ZOO_TRACE"):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


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


def _loss(result: Any) -> Tensor:
    """Its own, or squares of all that is returned."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor) and one.requires_grad]
    return torch.stack([one.abs().square().mean() for one in floats]).sum()


def _steps(model: nn.Module, call: Call, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss(model(*call[0], **call[1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(row: Row, training: Training) -> str:
    """On ranks, against one process: "as one process", or what differs."""
    count = math.prod(training.mesh)
    with tempfile.NamedTemporaryFile() as store:
        context = multiprocessing.get_context("fork")
        ends = [context.Pipe() for _ in range(count)]
        ranks = [
            context.Process(target=_rank, args=(rank, store.name, row, training, ends[rank][1]))
            for rank in range(count)
        ]
        for process in ranks:
            process.start()
        found = [ours.recv() if ours.poll(300) else "no answer" for ours, _ in ends]
        for process in ranks:
            process.kill()
            process.join()
    return next((one for one in found if one != AS_ONE), AS_ONE)


def _rank(rank: int, store: str, row: Row, training: Training, end: Any) -> None:
    try:
        sizes, steps = training.mesh, training.steps
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=math.prod(sizes))
        model, call = row.made()
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y", "z")[: len(sizes)])
        parallel = autoshard(
            model,
            mesh,
            profile=prices(),
            refine="off",
            tune="first",
            backend="eager",
            time_limit=LIMIT,
            gap=0.1,
        )
        torch.manual_seed(1)
        losses = _steps(parallel, call, steps)
        wanted, again = _alone_losses(row, 1, steps), _alone_losses(row, 2, steps)
        worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, wanted, strict=True))
        end.send(
            "draws"
            if wanted != again
            else AS_ONE
            if worst < training.close
            else f"losses differ by {worst:.1e}"
        )
    except Exception as error:
        end.send(f"{_state(error)} {_words(error)}")
    time.sleep(600)  # Until the other rank has answered as well.


def _alone_losses(row: Row, seed: int, steps: int) -> list[float]:
    """Of one process."""
    model, call = row.made()
    torch.manual_seed(seed)
    with GroupedAsCaptured():  # in float64, which torch's grouped products do not take
        return _steps(model, call, steps)


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
        training = Training(tuple(given.on), given.steps, given.close) if ranks else None
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
