"""The `autoshard` command: demo, plan, show, diff, verify, profile, report."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from cost_model.errors import AutoshardError, ShardingError
from cost_model.mesh import MeshSpec


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 when it reports a difference or an error, 2 for bad usage."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except AutoshardError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{type(error).__name__}: {error}\n  try: another path, or its permissions", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoshard", description="Run a PyTorch model in parallel by its best plan."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_demo(commands)
    _add_plan(commands)
    _add_show(commands)
    _add_diff(commands)
    _add_verify(commands)
    _add_profile(commands)
    _add_report(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo", help="train a small GPT in one process, by hand on 2 ranks, and by autoshard"
    )
    demo.add_argument("--ranks", type=positive, default=2)
    demo.add_argument("--steps", type=positive, default=8)
    demo.add_argument(
        "--backend",
        help="inductor, eager, or any torch.compile backend (default: inductor on GPUs, eager on CPUs, "
        "where compiling takes longer than the demo)",
    )
    demo.add_argument("--output", type=Path, help="a drawing of the plan (.html, .svg); none if not given")
    demo.add_argument("--graph", action="store_true", help="print the planned graph as well")
    demo.set_defaults(command=_demo)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="find the plan of a model, offline")
    _add_model(plan)
    plan.add_argument("--mesh", required=True, type=parse_mesh, help="axis=size,..., such as dp=32,tp=8")
    plan.add_argument("--device", default="cuda", help="device type of the mesh (default cuda)")
    plan.add_argument("--profile", help="a profile's path, or a shipped one's name")
    plan.add_argument("--memory-limit", help='per device, such as "70GB"')
    plan.add_argument("--micro-batches", type=micro_batches, default=1, help="pieces of a batch, or auto")
    plan.add_argument("--stages", help="the mesh axis that holds stages of a pipeline, or auto")
    _add_autocast(plan)
    plan.add_argument("--output", "-o", type=Path, help="where to save the plan (JSON)")
    plan.set_defaults(command=_plan)


def _add_show(commands: Any) -> None:
    show = commands.add_parser("show", help="print or draw a saved plan")
    show.add_argument("plan", type=Path)
    show.add_argument("--graph", action="store_true", help="the whole graph in text form")
    show.add_argument("--node", help="explain one node, parameter or module")
    show.add_argument(
        "--draw", type=Path, help="draw to .svg, .dot, .html, .json or .graphml; with stages .json is a trace"
    )
    show.set_defaults(command=_show)


def _add_diff(commands: Any) -> None:
    diff = commands.add_parser("diff", help="compare two saved plans")
    diff.add_argument("plan", type=Path)
    diff.add_argument("other", type=Path)
    diff.set_defaults(command=_diff)


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser("verify", help="simulate every rank of a plan and compare with the model")
    _add_model(verify)
    verify.add_argument("plan", type=Path)
    _add_autocast(verify)
    verify.set_defaults(command=_verify)


def _add_profile(commands: Any) -> None:
    from autoshard.profiling.command import add_profile

    add_profile(commands, parse_mesh)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="under torchrun: train for a few steps, and print predicted against measured",
        epilog="torchrun --nproc-per-node 4 -m autoshard report train:small --plan plan.json",
    )
    _add_model(report)
    report.add_argument("--plan", type=Path, help="a saved plan; without one, it is searched for --mesh")
    report.add_argument("--mesh", type=parse_mesh, help="axis=size,..., such as dp=2,tp=4")
    report.add_argument("--device", default="cuda", help="device type of --mesh (default cuda)")
    report.add_argument(
        "--profile", help="prices of the prediction: a profile's path, or a shipped one's name"
    )
    report.add_argument("--backend", default="inductor", help="inductor, eager, or any torch.compile backend")
    report.add_argument("--steps", type=positive, default=20, help="steps to run (default 20)")
    report.add_argument("--warmup", type=count, default=3, help="of them not counted (default 3)")
    report.add_argument(
        "--write-profile", type=Path, help="where to save the profile, corrected by what was measured"
    )
    report.set_defaults(command=_report)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="module:function; the function returns (model, example_inputs) and may use the meta device",
    )


def _add_autocast(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--autocast", choices=["bfloat16", "float16"], help="as under torch.autocast of the mesh's devices"
    )


def _autocast(arguments: argparse.Namespace) -> Any:
    import torch

    return None if arguments.autocast is None else getattr(torch, arguments.autocast)


def count(text: str) -> int:
    """An integer from 0; argparse's error for anything else."""
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of steps or ranks")
    return int(text)


def positive(text: str) -> int:
    """An integer from 1."""
    if not count(text):
        raise argparse.ArgumentTypeError("0 is too few; 1 or more")
    return int(text)


def micro_batches(text: str) -> int | str:
    """An integer from 1, or "auto"."""
    return text if text == "auto" else positive(text)


def parse_mesh(text: str) -> dict[str, int]:
    """ "dp=32,tp=8" -> {"dp": 32, "tp": 8}; argparse's error for anything else."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        sizes = [(name.strip(), int(size)) for name, size in pairs]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mesh; write axis=size,..., such as dp=32,tp=8"
        ) from None
    if len(dict(sizes)) < len(sizes):
        raise argparse.ArgumentTypeError(f"mesh {text!r} names an axis twice")
    return dict(sizes)


def load_model(reference: str) -> tuple[Any, Any]:
    """(model, example_inputs) from "module:function". ShardingError naming what is wrong."""
    module_name, _, function_name = reference.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # of the user's module, whatever it is
        raise ShardingError(
            f"cannot load model {reference!r}: {_said(error)}\n"
            "  try: module:function, with the module importable from here"
        ) from error
    finally:
        sys.path.remove("")
    try:
        built = function()
    except Exception as error:
        raise ShardingError(
            f"{reference} raised {_said(error)}\n"
            "  try: a function without arguments that returns (model, example_inputs)"
        ) from error
    if not isinstance(built, tuple) or len(built) != 2:
        raise ShardingError(
            f"{reference} returned a {type(built).__name__}; it must return (model, example_inputs)\n"
            "  try: return model, (x,)"
        )
    return built


def _said(error: BaseException) -> str:
    """What the user's code raised, and at which of its lines."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _demo(arguments: argparse.Namespace) -> int:
    from autoshard.demo import run_demo

    options = arguments.ranks, arguments.steps, arguments.backend, arguments.output, arguments.graph
    return run_demo(*options)


def _plan(arguments: argparse.Namespace) -> int:
    from autoshard.planning import find_plan

    model, example_inputs = load_model(arguments.model)
    mesh = MeshSpec(arguments.mesh, device_type=arguments.device)
    plan = find_plan(
        model,
        mesh,
        example_inputs,
        profile=arguments.profile,
        memory_limit=arguments.memory_limit,
        micro_batches=arguments.micro_batches,
        stages=arguments.stages,
        autocast=_autocast(arguments),
    )
    print(plan.explain(), end="")
    if arguments.output is not None:
        plan.save(arguments.output)
        print(f"saved {arguments.output}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from autoshard.plan.plan import Plan

    plan = Plan.load(arguments.plan)
    if arguments.draw is not None:
        print(f"drew {plan.draw(arguments.draw)}")
    if arguments.graph:
        print(plan.to_text(), end="")
    elif arguments.draw is None or arguments.node is not None:
        print(plan.explain(arguments.node), end="")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from autoshard.plan.plan import Plan

    print(Plan.load(arguments.plan).diff(Plan.load(arguments.other)), end="")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from autoshard.verification.verify_plan import verify

    model, example_inputs = load_model(arguments.model)
    report = verify(model, arguments.plan, example_inputs, autocast=_autocast(arguments))
    print(report)
    return 0 if report.ok else 1


def _report(arguments: argparse.Namespace) -> int:
    from autoshard.plan.plan_fits import plain_plan
    from autoshard.reporting.report_steps import ReportOptions, run_report

    model, example_inputs = load_model(arguments.model)
    if arguments.plan is not None:
        arguments.plan = plain_plan(arguments.plan, "report")
    given = {field.name: getattr(arguments, field.name) for field in fields(ReportOptions)}
    return run_report(model, example_inputs, ReportOptions(**given))
