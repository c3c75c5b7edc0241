"""What commands have in common: kinds of arguments, and the model that one names."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from typing import Any

from cost_model.errors import ShardingError


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
