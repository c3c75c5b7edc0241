"""Run what needs GPUs and write benchmarks/results/gpu-results.md: `make gpu`, or `python -m benchmarks.gpu`.

    make gpu PYTHON=python3                            # a Python that has torch: nothing is installed
    make gpu ARGS='--jobs 6'                           # tests in six processes, where pytest-xdist is there
    make gpu ARGS='--nccl-tests all_reduce.txt'        # also: the profile against what nccl-tests printed here
    python -m benchmarks.gpu --tests tests/cuda/test_attention.py --no-figures --out page.md

Needs torch, pytest and the packages of pyproject.toml. Ends with 1 if a test or a figure failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_page import Figure, Machine, page
from tests.versions.outcomes import Outcome, read_outcomes

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
TEST_SECONDS, FIGURE_SECONDS = 5400, 900
FIGURES = {
    "Step against torch.compile": "step",
    "Memory, predicted and allocated": "memory",
    "Within less and less memory": "limits",
    "Kernels and phases, predicted and measured": "kernels",
    "Step of three models, predicted from timed kernels": "prediction",
    "Rates of this GPU beside the nominal profile": "rates",
}
"""Title -> figure of `benchmarks.gpu_figures`."""


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    outcomes = _tests(given.tests, given.jobs)
    figures = [] if given.no_figures or not torch.cuda.is_available() else list(_figures(given.nccl_tests))
    given.out.write_text(page(_machine(), outcomes, figures))
    bad = [outcome for outcome in outcomes if outcome.result in ("failed", "error")]
    print(f"wrote {given.out}: {len(outcomes)} tests, {len(bad)} failed")
    return 1 if bad or not outcomes or any(figure.failed for figure in figures) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", nargs="*", default=["tests/cuda"], help="which (default: all)")
    parser.add_argument(
        "--jobs", type=int, help="processes that run tests (needs pytest-xdist; default: one, without)"
    )
    parser.add_argument("--no-figures", action="store_true", help="tests only")
    parser.add_argument(
        "--nccl-tests", type=Path, help="what an all_reduce_perf of nccl-tests printed on this machine"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-results.md")
    return parser


def _machine() -> Machine:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"torch": torch.__version__, "Python": platform.python_version()}
    if gpus:
        nccl = torch.cuda.nccl.version()
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl))}
        versions |= {"cuDNN": str(torch.backends.cudnn.version()), "driver": _driver()}
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Machine(when, gpus, versions)


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def _tests(paths: Sequence[str], jobs: int | None) -> list[Outcome]:
    """`pytest -m cuda`, with no plugin that a machine may lack: pyproject.toml's options name pytest-xdist's.
    pytest-benchmark, where it is there, warns of pytest-xdist, and a warning is an error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", "-p", "no:logging"]
        command += ["-p", "no:benchmark", *(["-n", str(jobs)] if jobs else [])]
        command += ["-o", "addopts=--import-mode=importlib -ra --strict-markers", f"--junitxml={report}"]
        try:
            subprocess.run([*command, *paths], cwd=ROOT, env=_environment(), timeout=TEST_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"the tests took more than {TEST_SECONDS} s and were stopped", file=sys.stderr)
        return read_outcomes(report) if report.exists() else []


def _figures(nccl_tests: Path | None) -> Iterator[Figure]:
    """Each in a process of its own: a GPU that one leaves full or broken is not the next one's."""
    for title, name in FIGURES.items():
        yield _figure(title, ["benchmarks.gpu_figures", name])
    count = torch.cuda.device_count()
    if count > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
        yield _figure("Step on all GPUs, by part", [*launcher, "benchmarks.gpu_figures", "parts"])
        if nccl_tests is not None:
            arguments = ["nccl-tests", "--file", str(nccl_tests.resolve())]
            yield _figure("Profile against nccl-tests", [*launcher, "benchmarks.gpu_figures", *arguments])


def _figure(title: str, module: Sequence[str]) -> Figure:
    command = [sys.executable, "-m", *module]
    shown = " ".join(["python", "-m", *module])
    print(f"=== {shown}", flush=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=FIGURE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Figure(title, shown, f"stopped after {FIGURE_SECONDS} s", failed=True)
    failed = done.returncode != 0
    text = done.stdout + ("\n".join(done.stderr.splitlines()[-10:]) if failed else "")
    print(text, flush=True)
    return Figure(title, shown, text, failed)


if __name__ == "__main__":
    sys.exit(main())
