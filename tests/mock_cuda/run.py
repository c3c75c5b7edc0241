"""Every check on the imitated CUDA machine, each in processes of its own, and a table of what they said.

    python tests/mock_cuda/run.py --venv .venv-cuda --laptop .venv/bin/python [PART...]

Needs nothing but Python: the checks run in the environment `--venv`. Exits with 1 if any case fails, and with 2, before
any is run, where a package of either environment is not of the version that constraints.txt names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREFIX = "case:"  # of tests/mock_cuda/checks/report.py
TIMEOUT_SECONDS = 3000


@dataclass(frozen=True)
class Part:
    """Processes that run beside each other do so two at a time; `alone`: they start many ranks, so one at a time."""

    name: str
    module: str
    processes: tuple[tuple[str, ...], ...] = ((),)
    capability: str = "90"
    alone: bool = False


FAMILIES = (
    ("llama", "gpt2"),
    ("bert", "vit"),
    ("mixtral", "t5"),
    ("gemma", "encoder"),
    ("unet", "recurrent"),
)
COMPILED = (("llama:autocast", "unet:bfloat16"), ("gpt2:bfloat16", "vit:float32"))
PARTS = (
    Part("imitation", "imitation"),
    Part("graphs", "graphs", FAMILIES),
    Part("inductor-8.0", "inductor", COMPILED, "80"),
    Part("inductor-9.0", "inductor", COMPILED, "90"),
    Part("portability", "portability"),
    Part("jobs", "jobs", alone=True),
    Part("devices", "devices", alone=True),
    Part("commands", "commands", alone=True),
    Part("laptop", "laptop", alone=True),
)


NEEDED = ("torch", "numpy", "networkx", "highspy", "transformers", "accelerate", "lightning", "pytest")
"""Of constraints.txt, what has to be there; others have to be of its versions where they are."""
_VERSIONS = """
import importlib.metadata as m, json, torch
print(json.dumps({"cuda": torch.version.cuda, "of": {d.name.lower(): d.version for d in m.distributions()}}))
"""


def differing(python: str, *, cuda: bool) -> list[str]:
    """What of an environment is not as tested, a line each. cuda: it has the CUDA build of torch, or else the CPU's."""
    asked = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True)
    if asked.returncode:
        return [f"{python}: torch cannot be imported: {asked.stderr.strip()[-300:]}"]
    said = json.loads(asked.stdout)
    return [
        f"{python}: {line}" for line in differences(said["of"], (ROOT / "constraints.txt").read_text())
    ] + ([] if bool(said["cuda"]) == cuda else [f"{python}: torch is {'no' if cuda else 'a'} CUDA build"])


def differences(installed: dict[str, str], constraints: str) -> list[str]:
    """installed: name in lower case -> version. A local part of a version ("+cpu") is no difference."""
    lines: list[str] = []
    for name, wanted in re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE):
        version = installed.get(name.lower())
        if version is None and name in NEEDED:
            lines.append(f"{name} is not installed; {wanted} is what constraints.txt names")
        elif version is not None and version.partition("+")[0] != wanted:
            lines.append(f"{name} is {version}; {wanted} is what constraints.txt names")
    return lines


@dataclass(frozen=True)
class Case:
    name: str
    passed: bool
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """Of one process. died: it did not get to its end."""

    part: str
    cases: tuple[Case, ...]
    seconds: float
    died: str


def run_process(part: Part, arguments: tuple[str, ...], venv: Path, laptop: str, logs: Path) -> Outcome:
    start = time.perf_counter()
    wrapper = ROOT / "tests" / "mock_cuda" / "with-mock-cuda"
    command = [
        str(wrapper),
        str(venv),
        str(venv / "bin" / "python"),
        "-m",
        f"tests.mock_cuda.checks.{part.module}",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MOCK_CC": part.capability,
        "LAPTOP_PYTHON": laptop,
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }
    log = logs / f"{part.name}{'-'.join(('', *arguments)).replace(':', '-')}.log"
    died = ""
    with log.open("w") as output:
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            died = f"not done after {TIMEOUT_SECONDS} s"
        else:
            died = f"status {done.returncode}" if done.returncode not in (0, 1) else ""
    text = log.read_text(errors="replace")
    cases = tuple(_case(line) for line in text.splitlines() if line.startswith(PREFIX))
    if not died and (not cases or (done.returncode == 1 and all(case.passed for case in cases))):
        died = "no result"
    outcome = Outcome(part.name, cases, time.perf_counter() - start, died)
    _print_outcome(outcome, log, text)
    return outcome


def _case(line: str) -> Case:
    _, outcome, seconds, name = line.split(" ", 3)
    return Case(name, outcome == "passed", float(seconds))


def _print_outcome(outcome: Outcome, log: Path, text: str) -> None:
    for case in outcome.cases:
        print(
            f"{outcome.part:14} {case.name:60} {'passed' if case.passed else 'FAILED':6} {case.seconds:7.1f} s"
        )
    if outcome.died:
        print(f"{outcome.part:14} DIED: {outcome.died}; {log} ends:\n{text[-3000:]}")
    elif not all(case.passed for case in outcome.cases):
        print(f"{'':14} see {log}")
    sys.stdout.flush()


def run_part(part: Part, venv: Path, laptop: str, logs: Path) -> list[Outcome]:
    with ThreadPoolExecutor(1 if part.alone else 2) as pool:
        return list(pool.map(lambda a: run_process(part, a, venv, laptop, logs), part.processes))


def table(outcomes: list[Outcome], seconds: dict[str, float]) -> str:
    rows = [f"{'part':14} {'cases':>6} {'failed':>7} {'seconds':>8}  outcome"]
    for part in seconds:
        mine = [outcome for outcome in outcomes if outcome.part == part]
        failed = sum(not case.passed for outcome in mine for case in outcome.cases)
        died = sum(bool(outcome.died) for outcome in mine)
        count = sum(len(outcome.cases) for outcome in mine)
        verdict = f"DIED ({died})" if died else "FAILED" if failed else "passed"
        rows.append(f"{part:14} {count:6} {failed:7} {seconds[part]:8.0f}  {verdict}")
    rows.append(f"{'total':14} {sum(len(o.cases) for o in outcomes):6} {'':7} {sum(seconds.values()):8.0f}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, required=True, help="environment with the CUDA build of torch")
    parser.add_argument("--laptop", required=True, help="Python of an environment with a CPU build of torch")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "mock-cuda")
    parser.add_argument("parts", nargs="*", help=", ".join(part.name for part in PARTS))
    arguments = parser.parse_args()
    laptop = os.path.abspath(arguments.laptop)
    wrong = differing(str(arguments.venv.absolute() / "bin" / "python"), cuda=True) + differing(
        laptop, cuda=False
    )
    if wrong:
        print(
            "\n".join(wrong)
            + "\n  try: rm -r .venv-cuda .venv, and make mock-cuda, which installs what is tested"
        )
        return 2
    arguments.logs.mkdir(parents=True, exist_ok=True)
    wanted = [part for part in PARTS if not arguments.parts or part.name in arguments.parts]
    outcomes: list[Outcome] = []
    seconds: dict[str, float] = {}
    for part in wanted:
        start = time.perf_counter()
        outcomes += run_part(part, arguments.venv.absolute(), laptop, arguments.logs)
        seconds[part.name] = time.perf_counter() - start
    print("\n" + table(outcomes, seconds))
    return int(any(o.died or not all(case.passed for case in o.cases) for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
