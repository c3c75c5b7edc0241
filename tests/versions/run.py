"""Run the ordinary tests on other versions of torch and Python, and write docs/versions.md: `make versions`.

    python -m tests.versions.run                          # every version below that can be installed
    python -m tests.versions.run --torch 2.11.0 --quick   # one, and of the tests only those that depend most on torch
    python -m tests.versions.run --page                   # the page again, from the runs so far

Every version gets an environment under .venv-versions/, removed after its run unless --keep; what a run found is kept
there as JSON, so that a later run of one version leaves the others' rows. Standard library only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.versions.outcomes import count, read_outcomes
from tests.versions.page import BASE, Failure, VersionRun, page

__all__ = ["VERSIONS", "main"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-versions"
PAGE = ROOT / "docs" / "versions.md"
VERSIONS = (
    (BASE, "3.11"),
    ("2.11.0", "3.12"),
    ("2.12.1", "3.11"),
    ("2.14.1", "3.12"),
    ("2.15.0", "3.13"),
)
"""(torch, Python): the newest patch of each minor version, and each Python at least once."""
STYLE = ("ruff", "pyright", "import-linter")
"""Of the test extra, what no test needs."""
QUICK = tuple(
    f"tests/{folder}" for folder in ("capture", "canonicalize", "rules", "runtime", "api", "training")
)
"""The tests that depend most on torch: what is traced, into which ops, and how it is run."""


def main(words: Sequence[str] | None = None) -> int:
    """0 if everything that ran passed."""
    given = _parser().parse_args(words)
    FOLDER.mkdir(exist_ok=True)
    if not given.page:
        for torch, python in VERSIONS:
            if not given.torch or torch in given.torch:
                run = _run(torch, python, given)
                _file(torch, python).write_text(json.dumps(run.to_json(), indent=1))
    runs = [VersionRun.from_json(json.loads(path.read_text())) for path in FOLDER.glob("*.json")]
    PAGE.write_text(page(runs))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0 if all(run.held for run in runs if run.ran) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", nargs="*", default=[], help="only these versions")
    parser.add_argument("--quick", action="store_true", help="a selection of the tests")
    parser.add_argument("--tests", nargs="*", default=[], help="only these files or folders")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--keep", action="store_true", help="keep the environments, 1 to 6 GB each")
    parser.add_argument("--processes", default="2", help="of pytest (default 2)")
    return parser


def _file(torch: str, python: str) -> Path:
    return FOLDER / f"{torch}-{python}.json"


def _run(torch: str, python: str, given: argparse.Namespace) -> VersionRun:
    print(f"=== torch {torch}, Python {python}", flush=True)
    folder = FOLDER / f"{torch}-{python}"
    facts = {"torch": torch, "date": datetime.date.today().isoformat(), "machine": _machine()}
    interpreter = _interpreter(python)
    note = "no such Python here" if interpreter is None else _make(folder, torch, interpreter)
    if note:
        return VersionRun(**facts, python=python, ran="", counts={}, failures=(), hashes={}, note=note)
    try:
        paths = given.tests or (QUICK if given.quick else ())
        report = _tests(folder, paths, given.processes)
        outcomes = read_outcomes(report)
        return VersionRun(
            **facts,
            python=_output(
                [str(_bin(folder, "python")), "-c", "import platform; print(platform.python_version())"]
            ),
            ran=", ".join(f"`{path}`" for path in paths) or "all",
            counts=count(outcomes),
            failures=tuple(Failure(o.test, o.why) for o in outcomes if o.result in ("failed", "error")),
            hashes=_hashes(folder),
        )
    finally:
        if not given.keep:
            shutil.rmtree(folder)


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}"


def _interpreter(python: str) -> str | None:
    """A Python of that version that starts: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [
        shutil.which(f"python{python}"),
        *map(str, sorted(pyenv.glob(f"{python}.*/bin/python"), reverse=True)),
    ]
    for candidate in found:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


def _make(folder: Path, torch: str, interpreter: str) -> str:
    """Make the environment; "" or why not. One that is there (--keep) is used again."""
    if _bin(folder, "pytest").exists():
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    held = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in held if not line.startswith("torch==")) + "\n")
    pip = [str(_bin(folder, "python")), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    needed = subprocess.run(
        [*pip, f"torch=={torch}", *_needed(), "-c", str(constraints)], capture_output=True, text=True
    )
    if needed.returncode == 0:
        subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
        return ""
    shutil.rmtree(folder)
    return next((line for line in needed.stderr.splitlines() if line.startswith("ERROR")), "pip failed")


def _needed() -> list[str]:
    """What pyproject.toml asks for, torch and the style checkers left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    return [name for name in names if re.split(r"[\[<>=]", name)[0] not in ("torch", *STYLE)]


def _bin(folder: Path, name: str) -> Path:
    return folder / "bin" / name


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _tests(folder: Path, paths: Sequence[str], processes: str) -> Path:
    """Run pytest; its JUnit XML. Failures are what is looked for."""
    report = folder / "report.xml"
    command = [str(_bin(folder, "python")), "-m", "pytest", "-q", "-n", processes, "-p", "no:cacheprovider"]
    log = folder.with_suffix(".log") if not folder.suffix else Path(f"{folder}.log")
    with open(log, "w") as output:
        subprocess.run(
            [*command, f"--junitxml={report}", *paths],
            cwd=ROOT,
            env=_environment(),
            stdout=output,
            stderr=output,
        )
    print(log.read_text().splitlines()[-1], flush=True)
    return report


def _hashes(folder: Path) -> dict[str, str]:
    command = [str(_bin(folder, "python")), "-m", "tests.versions.graph_hashes"]
    return json.loads(_output(command))["hashes"]


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
