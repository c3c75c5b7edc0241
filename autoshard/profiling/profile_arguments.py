"""The command line of `autoshard profile`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m autoshard profile --mesh dp=2,tp=2 --out cluster.json --plot cluster.svg
  torchrun --nproc-per-node 4 -m autoshard profile --mesh dp=2,tp=2 --check cluster.json
  autoshard profile                  # one rank: kernels only
  autoshard profile --read all_reduce.txt all_gather.json --base h100 --out cluster.json   # of nccl-tests
  autoshard profile --list           # the shipped profiles
  autoshard profile cluster.json     # print one
"""


def add_profile(commands: Any, parse_mesh: Callable[[str], Mapping[str, int]]) -> None:
    """Add the command to argparse's subparsers."""
    profile = commands.add_parser(
        "profile",
        help="measure the machines it is started on, check a profile against them, or print one",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile.add_argument("name", nargs="?", help="print this profile (a path, or a shipped one's name)")
    profile.add_argument("--list", action="store_true", help="print the shipped profiles")
    profile.add_argument("--check", metavar="PROFILE", help="measure a few points of this profile again")
    profile.add_argument(
        "--read", metavar="FILE", nargs="+", type=Path, help="take the collectives from outputs of nccl-tests"
    )
    profile.add_argument("--base", default="h100", help="with --read: the profile that gives all else")
    profile.add_argument("--rank-stride", type=int, help="with --read: distance of the ranks on your mesh")
    profile.add_argument("--mesh", type=parse_mesh, help="axis=size,...; default: one axis of all ranks")
    profile.add_argument("--device", help="device type (default: cuda if there is a GPU, else cpu)")
    profile.add_argument("--budget", type=float, help="seconds to measure (default 60; 15 to check)")
    profile.add_argument("--out", "-o", type=Path, help="where to save the measured profile (JSON)")
    profile.add_argument("--plot", type=Path, help="draw its curves to .svg or .png (needs matplotlib)")
    profile.set_defaults(command=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    from cost_model.profile import Profile

    if arguments.list or arguments.name is not None:
        names = Profile.names() if arguments.list else [arguments.name]
        print("\n\n".join(Profile.load(name).summary() for name in names))
        return 0
    if arguments.read is not None:
        from autoshard.profiling.command import read_outputs

        return read_outputs(arguments.read, arguments.base, arguments.rank_stride, arguments.out)
    return _measure_or_check(arguments)


def _measure_or_check(arguments: argparse.Namespace) -> int:
    import torch

    from autoshard.profiling.command import ProfileOptions, check_profile, measure_profile
    from cost_model.profile import Profile

    options = ProfileOptions(
        mesh=arguments.mesh,
        device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        budget=arguments.budget,
        out=arguments.out,
        plot=arguments.plot,
        argv=("autoshard", *sys.argv[1:]),
    )
    if arguments.check is not None:
        return check_profile(Profile.load(arguments.check), options)
    return measure_profile(options)
