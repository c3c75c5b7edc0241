"""Check: the commands and the examples run where there are GPUs.

python -m tests.mock_cuda.checks.commands [NAME...]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.mock_cuda.checks.launch import ROOT, run, torchrun
from tests.mock_cuda.checks.report import Report

# torch's own cache of device memory: `report` asks it for peaks.
CACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": ""}


def _demo(folder: Path) -> None:
    run(
        [
            sys.executable,
            "-m",
            "autoshard",
            "demo",
            "--steps",
            "2",
            "--backend",
            "eager",
            "--output",
            "autoshard-demo.svg",
        ],
        folder=folder,
    )
    assert (folder / "autoshard-demo.svg").exists()


def _profile(folder: Path) -> None:
    out = folder / "measured.json"
    arguments = ["profile", "--mesh", "dp=2,tp=2", "--budget", "5", "--out", str(out)]
    run(torchrun(4, "-m", "autoshard", *arguments), folder=folder, more=CACHED)
    assert out.exists()


def _report(folder: Path) -> None:
    arguments = ["tests.mock_cuda.checks.commands:gpt", "--mesh", "dp=2,tp=2", "--profile", "h100"]
    arguments += ["--backend", "eager", "--steps", "4", "--warmup", "1"]
    assert "predicted" in run(torchrun(4, "-m", "autoshard", "report", *arguments), more=CACHED)


def _train_gpt(folder: Path) -> None:
    script = str(ROOT / "examples" / "train_gpt.py")
    # Through Inductor four ranks of it take half an hour on two cores; `jobs` and `inductor` do that with smaller ones.
    run(torchrun(4, script, "--steps", "2", "--tp", "2", "--backend", "eager"), folder=folder)


def _checkpoint(folder: Path) -> None:
    script = str(ROOT / "examples" / "checkpoint.py")
    for action, ranks in (("save", 2), ("load", 3)):
        assert action in run(torchrun(ranks, script, action, str(folder / "saved")), folder=folder)


def _pin_and_explain(folder: Path) -> None:
    run([sys.executable, str(ROOT / "examples" / "pin_and_explain.py")], folder=folder)


def _plan_offline(folder: Path) -> None:
    run([sys.executable, str(ROOT / "examples" / "plan_offline.py")], folder=folder)
    assert (folder / "gpt-plan.json").exists()


def _losses(name: str) -> Callable[[Path], None]:
    def check(folder: Path) -> None:
        script = str(ROOT / "examples" / name)
        assert "losses" in run(torchrun(2, script, "--steps", "2", "--backend", "eager"), folder=folder)

    return check


def _train_llama3(folder: Path) -> None:
    script = str(ROOT / "examples" / "train_llama3.py")
    for stop in ("1", "2"):
        run(torchrun(4, script, "--stop", stop, "--every", "1", "--backend", "eager"), folder=folder)


COMMANDS: dict[str, Callable[[Path], None]] = {
    "autoshard demo": _demo,
    "autoshard profile": _profile,
    "autoshard report": _report,
    "examples/train_gpt.py": _train_gpt,
    "examples/checkpoint.py": _checkpoint,
    "examples/train_llama3.py": _train_llama3,
    "examples/triton_kernel.py": _losses("triton_kernel.py"),
    "examples/with_accelerate.py": _losses("with_accelerate.py"),
    "examples/with_lightning.py": _losses("with_lightning.py"),
    "examples/with_trainer.py": _losses("with_trainer.py"),
    "examples/pin_and_explain.py": _pin_and_explain,
    "examples/plan_offline.py": _plan_offline,
}


def gpt() -> tuple[object, object]:
    """The demo's model and a batch, for `autoshard report`."""
    from autoshard.demo import GPT, GPTConfig, batches

    return GPT(GPTConfig()), batches(GPTConfig(), 8, 1)[0]


def main() -> None:
    report = Report()
    left = {path.name for path in (ROOT / "examples").glob("*.py")} - {
        name.split("/")[-1] for name in COMMANDS
    }
    with report.case("every example has a check"):
        assert not left, left
    for name in sys.argv[1:] or COMMANDS:
        with report.case(name), tempfile.TemporaryDirectory() as folder:
            COMMANDS[name](Path(folder))
    report.exit()


if __name__ == "__main__":
    main()
