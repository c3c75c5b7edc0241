"""The `autoshard` command: demo, plan, show, diff, verify, profile, report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from autoshard.planner.plan_command import (
    add_autocast,
    add_model,
    add_plan,
    autocast,
    count,
    load_model,
    parse_mesh,
    positive,
)
from autoshard.version import __version__
from cost_model.errors import AutoshardError


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
    parser.add_argument("--version", action="version", version=f"autoshard {__version__}")
    commands = parser.add_subparsers(required=True)
    _add_demo(commands)
    add_plan(commands)
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


def _add_show(commands: Any) -> None:
    show = commands.add_parser("show", help="print or draw a saved plan")
    show.add_argument("plan", type=Path)
    show.add_argument("--graph", action="store_true", help="the whole graph in text form")
    show.add_argument("--node", help="explain one node, parameter or module")
    show.add_argument(
        "--draw",
        type=Path,
        help="the report (.html), or a drawing: .svg, .dot, .json or .graphml; with stages .json is a trace",
    )
    show.set_defaults(command=_show)


def _add_diff(commands: Any) -> None:
    diff = commands.add_parser("diff", help="compare two saved plans")
    diff.add_argument("plan", type=Path)
    diff.add_argument("other", type=Path)
    diff.add_argument("--html", type=Path, help="a page with both plans beside each other")
    diff.set_defaults(command=_diff)


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser("verify", help="simulate every rank of a plan and compare with the model")
    add_model(verify)
    verify.add_argument("plan", type=Path)
    add_autocast(verify)
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
    add_model(report)
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


def _demo(arguments: argparse.Namespace) -> int:
    from autoshard.demo import run_demo

    options = arguments.ranks, arguments.steps, arguments.backend, arguments.output, arguments.graph
    return run_demo(*options)


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

    plans = Plan.load(arguments.plan), Plan.load(arguments.other)
    if arguments.html is not None:
        from autoshard.drawing.draw import write_page

        names = arguments.plan.stem, arguments.other.stem
        print(f"drew {write_page(arguments.html, *zip(names, plans, strict=True))}")
    else:
        print(plans[0].diff(plans[1]), end="")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from autoshard.verification.verify_plan import verify

    model, example_inputs = load_model(arguments.model)
    report = verify(model, arguments.plan, example_inputs, autocast=autocast(arguments))
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
