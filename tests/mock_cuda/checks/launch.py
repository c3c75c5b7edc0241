"""Run a job or a command, and read what its processes logged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cuda_logs.agreement import Agreement, check_logs
from tests.cuda_logs.logs import read_logs

__all__ = ["ROOT", "run", "run_logged", "torchrun"]

ROOT = Path(__file__).parents[3]
# Said of a process group whose device torch has to guess.
_DEVICE_WARNINGS = ("device_id", "Guessing device ID", "using the device under current context")


def torchrun(ranks: int, *command: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command,
    ]  # fmt: skip


def run(
    command: Sequence[str], *, folder: Path = ROOT, timeout: int = 1200, more: Mapping[str, str] | None = None
) -> str:
    """Its output. AssertionError, with the end of it, for a status other than 0 or a warning about device ids."""
    environment = {**os.environ, **(more or {})}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"status {done.returncode} of {' '.join(command)}\n{done.stdout[-6000:]}"
    warned = [line for line in done.stdout.splitlines() if any(text in line for text in _DEVICE_WARNINGS)]
    assert not warned, "\n".join(warned[:4])
    return done.stdout


def run_logged(
    command: Sequence[str], *, timeout: int = 1200, more: Mapping[str, str] | None = None
) -> tuple[str, Agreement]:
    """The output, and what `check_logs` finds; AssertionError for the first problems."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "nccl"
        output = run(command, timeout=timeout, more={"MOCK_LOG": str(prefix), **(more or {})})
        agreement = check_logs(read_logs(prefix))
    assert not agreement.problems, "\n".join(agreement.problems[:8])
    assert agreement.communicators, "no NCCL call was logged"
    return output, agreement
