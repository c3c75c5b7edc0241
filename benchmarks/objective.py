"""Is the plan that the search proves fastest the fastest on the timeline? Its objective, its step, and its rivals.

    python -m benchmarks.objective                                          # all models; hours
    python -m benchmarks.objective --model llama-3-8b --layers 8            # on its meshes
    python -m benchmarks.objective --model unet --mesh dp=64 --changes 50
    python -m benchmarks.objective --random 0 20 --changes 30               # 20 small models, meshes and profiles drawn
    python -m benchmarks.objective --check                                  # small models, as CI does

Models are on `meta`, prices those of a profile: no GPU, no process group. Rivals are plans pinned to the families of
docs/patterns.md (of random models the search's own families), plans found as if the machine overlapped otherwise, and
random changes of one layer; all are judged by the timeline of the program that would run, under the true prices.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from autoshard import InfeasibleError, MeshSpec, Profile
from autoshard.call_ends import output_layouts
from autoshard.plan.task import CallLayouts, Task
from autoshard.planner.plan_command import parse_mesh
from autoshard.planning import canonical_capture
from benchmarks.rivals.cases import NETWORKS
from benchmarks.rivals.drawn import drawn
from benchmarks.rivals.rivals import GROUPS, Contest, Rival, contest
from cost_model.memory import parse_bytes
from passes.capture import Captured

DIFFERENCE = 0.02
"""Share of the step by which the objective may differ from it."""
FASTER = 0.01
"""Share of the step by which a rival may be faster."""

NAMED = ("pinned", "assumed", "changed")
"""Groups of rivals of the models with names, whose pins are the families."""

MESHES: Sequence[dict[str, int]] = ({"dp": 32, "tp": 8}, {"dp": 8, "tp": 8}, {"dp": 64}, {"dp": 256})
CASES: Sequence[Sequence[str]] = (
    ("--model", "llama-3-8b", "--layers", "8"),
    ("--model", "llama-3-8b"),
    ("--model", "gpt2-xl", "--memory-limit", "none"),
    ("--model", "vit-large", "--memory-limit", "none"),
    ("--model", "llama-3-70b", "--memory-limit", "160GB"),
    ("--model", "unet", "--memory-limit", "none", "--mesh", "dp=64"),
)
CHECKED: Sequence[Sequence[str]] = (
    ("--model", "llama-3-8b", "--layers", "1", "--mesh", "dp=64", "--changes", "3"),
    (
        "--model",
        "vit-large",
        "--layers",
        "1",
        "--mesh",
        "dp=4,tp=2",
        "--memory-limit",
        "none",
        "--groups",
        "pinned",
    ),
)

_COLUMNS = (
    "model",
    "mesh",
    "cost, ms",
    "step, ms",
    "cost to step",
    "bound, ms",
    "gap",
    "rivals",
    "the fastest",
    "ratio",
)
HEADER = f"| {' | '.join(_COLUMNS)} |\n{'| --- ' * len(_COLUMNS)}|"


def main() -> None:
    arguments = _parser().parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(HEADER, flush=True)
    if arguments.check:
        _check()
        return
    cases = CASES if arguments.model is None else [sys.argv[1:]]
    wrong: list[str] = []
    if arguments.random is not None:
        first, count = arguments.random
        for number in range(first, first + count):
            wrong += _of_drawn(number, arguments.changes, arguments.time_limit)
        print("", *wrong, f"{len(wrong)} of {count}", sep="\n")
        return
    for case in cases:
        for title, found in _contests(_parser().parse_args(case)):
            wrong += failures(title, found)
    print("", *wrong, sep="\n")


def _check() -> None:
    """Rows of `CHECKED`, two at a time; the program ends with what is wrong."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        wrong: list[str] = []
        for rows, problems in pool.map(_checked, CHECKED):
            print(rows, end="", flush=True)
            wrong += problems
    if wrong:
        sys.exit("\n".join(wrong))


def _checked(case: Sequence[str]) -> tuple[str, list[str]]:
    """What the case prints, and what is wrong with it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = io.StringIO()
    with contextlib.redirect_stdout(rows):
        found = [failures(*each) for each in _contests(_parser().parse_args(case))]
    return rows.getvalue(), [line for lines in found for line in lines]


def failures(title: str, found: Contest) -> list[str]:
    """What is against the promise, in sentences."""
    lines = [f"{title}: {r.group} {r.name} cannot be lowered: {r.problem}" for r in found.rivals if r.problem]
    if abs(found.difference) > DIFFERENCE:
        lines.append(f"{title}: the cost differs from the step by {found.difference:+.1%}")
    if found.fastest is not None and found.ratio < 1.0 - FASTER:
        lines.append(
            f"{title}: {found.fastest.group} {found.fastest.name} takes {found.ratio:.3f} of its step"
        )
    return lines


def row(model: str, mesh: MeshSpec, found: Contest) -> str:
    plan, fastest = found.plan, found.fastest
    timed = sum(rival.seconds is not None for rival in found.rivals)
    cells = [model, _size(mesh), _ms(plan.cost), _ms(plan.step_time), f"{found.difference:+.2%}"]
    cells += [_ms(plan.lower_bound), f"{plan.gap:.2%}", str(timed)]
    cells += ["none", ""] if fastest is None else [f"{fastest.group}: {fastest.name}", f"{found.ratio:.4f}"]
    return "| " + " | ".join(cells) + " |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.3f}"


def _of_drawn(number: int, changes: int, time_limit: float) -> list[str]:
    """The row of a model drawn at random, printed, and the first thing that is against the promise."""
    case = drawn(number)
    mesh, device = MeshSpec(case.mesh, case.device_type), torch.device(case.device_type)
    captured = canonical_capture(case.model, case.inputs, {}, device=device)
    call, profile = CallLayouts({}, output_layouts(captured, mesh, None)), Profile.load(case.profile)
    task = Task(captured, profile, mesh, call, {}, None, case.backend, time_limit)
    found = contest(None, task, changes)
    print(row(case.title, mesh, found), flush=True)
    return failures(f"{number}: {case.title}, {_size(mesh)}", found)[:1]


def _contests(arguments: argparse.Namespace) -> Iterator[tuple[str, Contest]]:
    network = NETWORKS[arguments.model]
    layers = arguments.layers or network.layers
    dtype = getattr(torch, arguments.dtype)
    call = network.call(arguments.batch or network.batch, network.sequence, dtype)
    captured = canonical_capture(network.build(layers, dtype), (), call, device=torch.device("cuda"))
    for sizes in arguments.mesh or MESHES:
        mesh, title = MeshSpec(sizes, device_type="cuda"), f"{arguments.model}, {layers} layers"
        begin = time.perf_counter()
        try:
            task = _task(arguments, captured, mesh)
            found = contest(network, task, arguments.changes, groups=arguments.groups, note=_note)
        except InfeasibleError as error:
            print(f"| {title} | {_size(mesh)} | {str(error).splitlines()[0]} |", flush=True)
            continue
        print(row(title, mesh, found), flush=True)
        print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        yield f"{title}, {_size(mesh)}", found


def _task(arguments: argparse.Namespace, captured: Captured, mesh: MeshSpec) -> Task:
    limit = None if arguments.memory_limit == "none" else parse_bytes(arguments.memory_limit)
    call = CallLayouts({}, output_layouts(captured, mesh, None))
    profile = Profile.load(arguments.profile)
    return Task(captured, profile, mesh, call, {}, limit, "inductor", arguments.time_limit)


def _note(rival: Rival) -> None:
    seconds = rival.problem or "does not fit" if rival.seconds is None else f"{rival.seconds * 1e3:.2f} ms"
    print(f"{rival.group}: {rival.name}: {seconds}", file=sys.stderr, flush=True)


def _size(mesh: MeshSpec) -> str:
    return " x ".join(map(str, mesh.sizes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=tuple(NETWORKS), help="default: all of the table")
    parser.add_argument("--layers", type=int, help="of the model's layers; default: all")
    parser.add_argument(
        "--mesh", type=parse_mesh, action="append", help="such as dp=32,tp=8; may be repeated"
    )
    parser.add_argument("--batch", type=int, help="samples; default: the model's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--memory-limit", default="70GB", help='per device, such as "70GB"; "none"')
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for each search")
    parser.add_argument("--changes", type=int, default=200, help="random changes of one layer")
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=GROUPS,
        default=NAMED,
        help="of rivals; default: pinned, assumed, changed",
    )
    parser.add_argument(
        "--random",
        type=int,
        nargs=2,
        metavar=("FIRST", "COUNT"),
        help="models drawn by these numbers instead",
    )
    parser.add_argument("--check", action="store_true", help="small models; fails where a rival is faster")
    return parser


if __name__ == "__main__":
    main()
