"""Check: a plan made with a CPU build of torch is loaded and run by 4 ranks over NCCL.

    python -m tests.mock_cuda.checks.laptop [FAMILY:KIND...]

LAPTOP_PYTHON is the other environment's Python; it plans without this library and without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mock_cuda.checks.families import example
from tests.mock_cuda.checks.launch import ROOT, run_logged, torchrun
from tests.mock_cuda.checks.report import Report

CASES = tuple(
    f"{family}:{kind}" for kind in ("bfloat16", "autocast") for family in ("llama", "gpt2", "vit", "unet")
)
# What makes a process see the imitation.
_IMITATION = ("LD_PRELOAD", "LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH")


def plan(case: str, path: str) -> None:
    """On the laptop: find and save."""
    import torch

    from autoshard import MeshSpec, find_plan

    assert not torch.cuda.is_available()
    made = example(*case.split(":"))
    mesh = MeshSpec({"dp": 2, "tp": 2}, device_type="cuda")
    find_plan(made.model, mesh, (made.args, made.kwargs), profile="h100", backend="eager").save(path)


def _plan_on_laptop(case: str, path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in _IMITATION}
    command = [os.environ["LAPTOP_PYTHON"], "-m", "tests.mock_cuda.checks.laptop", "plan", case, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def main() -> None:
    if sys.argv[1:2] == ["plan"]:
        plan(sys.argv[2], sys.argv[3])
        return
    report = Report()
    for case in sys.argv[1:] or CASES:
        with (
            report.case(f"{case.replace(':', ' ')} planned on a laptop"),
            tempfile.TemporaryDirectory() as folder,
        ):
            path = Path(folder) / "plan.json"
            _plan_on_laptop(case, path)
            arguments = ["--model", case, "--mesh", "2,2", "--plan", str(path), "--steps", "1"]
            output, agreement = run_logged(torchrun(4, "-m", "tests.mock_cuda.checks.train", *arguments))
            print(f"  {agreement}; {output.splitlines()[-1]}")
    report.exit()


if __name__ == "__main__":
    main()
