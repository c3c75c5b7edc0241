"""`autoshard plan`: of a model on a mesh, of as many GPUs in the best shape, or beside a framework's configuration.

And what commands have in common: kinds of arguments, and the model that one names.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.progress import stages_of
from cost_model.errors import InfeasibleError, ShardingError, checked_seconds, titled, type_of
from cost_model.memory import format_seconds, parse_bytes
from cost_model.mesh import MeshSpec

if TYPE_CHECKING:
    from autoshard.plan.plan import Plan
    from autoshard.planner.configuration import Configuration
    from autoshard.planner.priced_runs import Run, Workload


def add_plan(commands: Any) -> None:
    """`autoshard plan`, and its options."""
    plan = commands.add_parser("plan", help="find the plan of a model, offline")
    add_model(plan, nargs="?")
    plan.add_argument("--hf", type=Path, help="in place of a model: a folder or config.json of transformers")
    plan.add_argument("--batch", type=positive, help="sequences of a step, of all ranks (with --hf)")
    plan.add_argument("--sequence", type=positive, help="tokens of each (with --hf; default: the longest)")
    plan.add_argument("--mesh", type=parse_mesh, help="axis=size,..., such as dp=32,tp=8")
    plan.add_argument("--gpus", type=positive, help="so many devices, in the best of a few shapes of a mesh")
    plan.add_argument(
        "--torchtitan", type=Path, metavar="TOML", help="what this configuration runs, and better"
    )
    plan.add_argument(
        "--megatron", metavar="ARGUMENTS", help="the same of arguments of Megatron-LM, in quotes"
    )
    plan.add_argument(
        "--accelerate", type=Path, metavar="YAML", help="the same of a configuration of accelerate"
    )
    plan.add_argument("--device", default="cuda", help="device type of the mesh (default cuda)")
    plan.add_argument("--profile", help="a profile's path, or a shipped one's name")
    plan.add_argument("--memory-limit", help='per device, such as "70GB"')
    plan.add_argument("--micro-batches", type=micro_batches, default=1, help="pieces of a batch, or auto")
    plan.add_argument("--stages", help="the mesh axis that holds stages of a pipeline, or auto")
    plan.add_argument("--seconds", type=float, default=600.0, help="for each search (default 600)")
    add_autocast(plan)
    plan.add_argument("--output", "-o", type=Path, help="where to save the plan (JSON)")
    plan.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    _check(arguments)
    configuration = _configuration(arguments)
    if configuration is None and arguments.hf is None and arguments.gpus is None:
        plan = _of_mesh(arguments)
        print(plan.explain(), end="")
    else:
        plan = _sheet(arguments, configuration)
    if arguments.output is not None:
        plan.save(arguments.output)
        print(f"saved {arguments.output}")
    return 0


_FRAMEWORKS = ("torchtitan", "megatron", "accelerate")


def _check(arguments: argparse.Namespace) -> None:
    """ShardingError for options that exclude each other, and a limit that is no number of bytes or lacks its unit."""
    checked_seconds(arguments.seconds, "--seconds")
    given = {name for name, value in vars(arguments).items() if value is not None}
    if "memory_limit" in given:
        bare = str(arguments.memory_limit).strip()
        # Fewer bytes hold no model, so such a number is one of GB.
        if parse_bytes(bare) < 1_000_000 and bare[-1] in "0123456789.":
            raise ShardingError(f'--memory-limit {bare} is so many bytes\n  try: --memory-limit "{bare}GB"')
    frameworks = [name for name in _FRAMEWORKS if name in given]
    if arguments.micro_batches == 1:
        given -= {"micro_batches"}
    excluded = {
        "model": ["hf", "batch", "sequence"],
        "gpus": ["stages", "autocast"],
        "hf": ["stages", "autocast"],
    }
    excluded |= {name: ["mesh", "micro_batches", "stages", "autocast", *_FRAMEWORKS] for name in frameworks}
    excluded["gpus"] += [] if frameworks else ["mesh"]
    for name, others in excluded.items():
        for other in others:
            if name in given and other in given and name != other:
                said = "a model" if name == "model" else f"--{name}"
                raise ShardingError(
                    f"--{other.replace('_', '-')} does not go with {said}\n  try: one of them"
                )


def _of_mesh(arguments: argparse.Namespace) -> Plan:
    from autoshard.planning import find_plan

    if arguments.mesh is None or arguments.model is None:
        raise ShardingError(
            "autoshard plan needs a model and where it runs\n"
            "  try: autoshard plan module:function --mesh dp=32,tp=8, or --hf config.json --batch 64 --gpus 64"
        )
    model, example_inputs = load_model(arguments.model)
    return find_plan(
        model,
        MeshSpec(arguments.mesh, device_type=arguments.device),
        example_inputs,
        profile=arguments.profile,
        memory_limit=arguments.memory_limit,
        micro_batches=arguments.micro_batches,
        stages=arguments.stages,
        time_limit=arguments.seconds,
        autocast=autocast(arguments),
    )


def _configuration(arguments: argparse.Namespace) -> Configuration | None:
    given = [name for name in _FRAMEWORKS if getattr(arguments, name) is not None]
    if not given:
        return None
    from autoshard.planner import readers

    return getattr(readers, given[0])(getattr(arguments, given[0]), arguments.gpus)


def _sheet(arguments: argparse.Namespace, configuration: Configuration | None) -> Plan:
    asked = _workload(arguments, configuration)
    for subject, text in asked.lines():
        _say(subject, text)
    if configuration and configuration.taken and arguments.hf is None and arguments.model is None:
        _say("taken", ", ".join(configuration.taken))
    if configuration is None:
        run, plan = _best(asked, _shapes(arguments), [arguments.micro_batches])
        _say("autoshard", asked.words(run))
        print(plan, end="")
        return plan
    return _beside(asked, replace(configuration, batch=asked.batch))


def _say(subject: str, text: str) -> None:
    print(titled(subject, text), flush=True)


def _none(error: InfeasibleError) -> str:
    return f"no plan: {str(error).splitlines()[0]}"


def _stage(asked: Workload, stage: str) -> AbstractContextManager[Any]:
    """Says on the way what takes long."""
    step = f"{asked.batch} x {asked.sequence} on {asked.gpus}"
    return stages_of(0, f"autoshard plan, {asked.model.name}, {step}")(stage)


def _workload(arguments: argparse.Namespace, configuration: Configuration | None) -> Workload:
    import torch

    from autoshard.planner.priced_runs import GivenModel, Machine, MetaModel, Workload
    from autoshard.planning import load_profile

    devices = configuration.gpus if configuration else arguments.gpus or _count(arguments.mesh)
    mesh = MeshSpec({"dp": devices}, device_type=arguments.device)
    given = arguments.hf or (configuration.model if configuration else None)
    optimizer = "adamw" if arguments.model else "adamw, fp32 master"
    profile = load_profile(arguments.profile, mesh)
    machine = Machine(profile, arguments.device, arguments.memory_limit, optimizer, arguments.seconds)
    if arguments.model is not None:
        model, inputs = load_model(arguments.model)
        args, kwargs = inputs if isinstance(inputs[-1], dict) and len(inputs) == 2 else (inputs, {})
        found = GivenModel(model, tuple(args), dict(kwargs))
        return Workload(found, found.batch, 0, machine, devices)
    if given is None:
        named = configuration.named if configuration else ""
        what = f"{named} is of no known sizes" if named else "it is not said of which model"
        raise ShardingError(f"{what}\n  try: --hf DIR_OR_CONFIG.json, or module:function")
    of_meta = MetaModel.of(given, torch.bfloat16)
    said = configuration or argparse.Namespace(batch=0, sequence=0)
    batch, sequence = arguments.batch or said.batch, arguments.sequence or said.sequence or of_meta.longest
    if not batch:
        raise ShardingError("it is not said how many sequences a step has\n  try: --batch 64")
    return Workload(of_meta, batch, sequence, machine, devices)


def _count(mesh: Mapping[str, int] | None) -> int:
    if mesh is None:
        raise ShardingError("it is not said on how many devices\n  try: --gpus 64, or --mesh dp=32,tp=8")
    return MeshSpec(mesh).device_count


def _shapes(arguments: argparse.Namespace) -> list[dict[str, int]]:
    """Of the mesh: as asked, or all devices in one axis, and with 2, 4 or 8 neighbours in a second."""
    if arguments.mesh is not None:
        return [arguments.mesh]
    inner = [size for size in (2, 4, 8) if arguments.gpus % size == 0 and arguments.gpus > size]
    return [{"dp": arguments.gpus}, *({"dp": arguments.gpus // size, "tp": size} for size in inner)]


def _best(asked: Workload, shapes: list[dict[str, int]], pieces: list[int | str]) -> tuple[Run, Plan]:
    """On the shape of the mesh where it is fastest; of several a line each. Raises the first's InfeasibleError."""
    from autoshard.planner.priced_runs import best_run

    found: list[tuple[Run, Plan]] = []
    reasons: list[InfeasibleError] = []
    for shape in shapes:
        words = ",".join(f"{axis}={size}" for axis, size in shape.items())
        try:
            with _stage(asked, f"planning {words}"):
                found.append(best_run(asked, shape, pieces))
            said = asked.words(found[-1][0])
        except InfeasibleError as error:
            reasons.append(error)
            said = _none(error)
        if len(shapes) > 1:
            _say(words, said)
    if not found:
        raise reasons[0]
    return min(found, key=lambda one: one[0].seconds)


def _beside(asked: Workload, configuration: Configuration) -> Plan:
    """What the configuration runs, how far that is from the best plan, and the framework's own best. Raises the
    InfeasibleError of a search that found no plan, when all else is said."""
    from autoshard.planner.priced_runs import configured_run

    with _stage(asked, f"pricing {configuration}"):
        run = configured_run(asked, configuration)
    _say("runs", f"{configuration.framework}: {configuration}")
    _say("step", asked.words(run))
    try:
        plan = _compared(asked, configuration, run)
    except InfeasibleError as error:
        plan = error
        _say("autoshard", _none(error))
    runs = [(configuration, run), *_others(configuration, asked)]
    fitting = [one for one in runs if asked.fits(one[1])]
    if fitting:
        other, better = min(fitting, key=lambda one: one[1].seconds)
        _say("better", f"{configuration.changes(other)}: {asked.words(better)}")
    else:
        _say("better", f"no division of {configuration.framework} fits that was tried")
    if configuration.unread:
        _say("not read", ", ".join(configuration.unread))
    if isinstance(plan, InfeasibleError):
        raise plan
    return plan


def _compared(asked: Workload, configuration: Configuration, run: Run) -> Plan:
    """The best plan, and how far the configuration's run is from it."""
    sizes = {"dp": configuration.gpus // configuration.tensor, "tp": configuration.tensor}
    shape = {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}
    pieces = configuration.pieces(asked.batch)
    best, plan = _best(asked, [shape], [pieces, "auto"] if asked.fits(run) else ["auto"])
    _say("autoshard", asked.words(best))
    bound = ""
    if best.bound and plan.micro_batches == pieces:  # it is of plans in as many
        above = run.seconds / best.bound - 1.0
        bound = f", {above:+.1%} against the bound {format_seconds(best.bound)}"
    _say("distance", f"{run.seconds / best.seconds - 1.0:+.1%} of a step against autoshard's{bound}")
    return plan


def _others(configuration: Configuration, asked: Workload) -> Iterator[tuple[Configuration, Run]]:
    """Other divisions as the framework runs them; of each the one that fits and computes least again."""
    from autoshard.planner.priced_runs import configured_run

    done: set[int] = set()
    for other in configuration.others():
        if other.tensor in done or other == configuration or not asked.model.recomputes(other.recompute):
            continue
        with suppress(InfeasibleError, ShardingError):  # heads or a batch that are not divided so
            with _stage(asked, f"pricing {other}"):
                run = configured_run(asked, other)
            if asked.fits(run):
                done.add(other.tensor)
            yield other, run


def add_model(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """nargs: "?" where another option may say it."""
    parser.add_argument(
        "model",
        nargs=nargs,
        help="module:function; the function returns (model, example_inputs) and may use the meta device",
    )


def add_autocast(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--autocast", choices=["bfloat16", "float16"], help="as under torch.autocast of the mesh's devices"
    )


def autocast(arguments: argparse.Namespace) -> Any:
    """The dtype that was asked for, or None."""
    import torch

    return None if arguments.autocast is None else getattr(torch, arguments.autocast)


def count(text: str) -> int:
    """An integer from 0; argparse's error for anything else."""
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number")
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
            f"{reference} returned {type_of(built)}; it must return (model, example_inputs)\n"
            "  try: return model, (x,)"
        )
    return built


def _said(error: BaseException) -> str:
    """What the user's code raised, and at which of its lines."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
