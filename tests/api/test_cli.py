"""The command line, in process: plan, show, diff, verify, profile."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from autoshard import MeshSpec, Plan, Profile
from autoshard.cli import main
from tests.conftest import Command
from tests.profiles import slow_compute

MODEL = """
import torch

def small():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    return model, (torch.randn(8, 10),)

def other():
    return torch.nn.Linear(10, 4), (torch.randn(8, 10),)

def bare():
    return torch.nn.Linear(10, 4)
"""

_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module to import, with a name of its own: an imported one is not read again."""
    name = f"cli_models_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(MODEL)
    slow_compute().save(tmp_path / "slow.json")
    monkeypatch.chdir(tmp_path)
    return name


def plan_file(command: Command, module: str, name: str, *options: str) -> Path:
    code, out, _ = command(
        "plan",
        f"{module}:small",
        "--mesh",
        "x=3",
        "--device",
        "cpu",
        "--profile",
        "slow.json",
        "-o",
        name,
        *options,
    )
    assert code == 0 and f"saved {name}" in out and "mesh (x=3)" in out
    return Path(name)


def test_plan_show_verify(module: str, command: Command) -> None:
    file = plan_file(command, module, "plan.json")
    plan = Plan.load(file)
    assert plan.mesh == MeshSpec({"x": 3}, "cpu") and plan.collectives
    assert command("show", "plan.json") == (0, plan.explain(), "")
    assert command("show", "plan.json", "--graph") == (0, plan.to_text(), "")
    assert command("show", "plan.json", "--node", "0.weight") == (0, plan.explain("0.weight"), "")
    code, out, _ = command("verify", f"{module}:small", "plan.json")
    assert code == 0 and "verify: ok" in out


def test_show_draws(module: str, command: Command) -> None:
    plan_file(command, module, "plan.json")
    assert command("show", "plan.json", "--draw", "plan.svg") == (0, "drew plan.svg\n", "")
    assert Path("plan.svg").read_text().startswith("<svg")


def test_diff(module: str, command: Command) -> None:
    mine = Plan.load(plan_file(command, module, "a.json"))
    other = Plan.load(plan_file(command, module, "b.json", "--memory-limit", "1MB"))
    assert command("diff", "a.json", "b.json") == (0, mine.diff(other), "")


def test_errors_are_one_message_and_status_one(module: str, command: Command) -> None:
    plan_file(command, module, "plan.json")
    for arguments, message in [
        (("show", "nothing.json"), "PlanError: cannot read plan 'nothing.json'"),
        (("verify", f"{module}:other", "plan.json"), "PlanError: the plan was made for another model"),
        (("plan", f"{module}:missing", "--mesh", "x=2"), "ShardingError: cannot load model"),
        (("plan", "no_such_module_at_all:f", "--mesh", "x=2"), "ShardingError: cannot load model"),
        (("plan", f"{module}:bare", "--mesh", "x=2"), "must return (model, example_inputs)"),
        (("plan", module, "--mesh", "x=2"), "ShardingError: cannot load model"),
        (("plan", f"{module}:small", "--mesh", "x=2", "--memory-limit", "1KB"), "InfeasibleError: "),
        (("plan", f"{module}:small", "--mesh", "x=2", "--profile", "h1000"), "ProfileError: "),
        (("profile", "h1000"), "ProfileError: no shipped profile"),
    ]:
        code, out, err = command(*arguments)
        assert code == 1 and message in err and not out, (arguments, out, err)


@pytest.mark.parametrize("mesh", ["8", "x=", "x=two", "=3", "x=0", "x=2,x=2", ""])
def test_bad_meshes(module: str, command: Command, mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["plan", f"{module}:small", "--mesh", mesh])
    except SystemExit as exit_:
        code = exit_.code
    assert code in (1, 2)
    assert "mesh" in capsys.readouterr().err


def test_profiles_are_listed(command: Command) -> None:
    code, out, _ = command("profile", "--list")
    assert code == 0
    for name in Profile.names():
        assert Profile.named(name).summary() in out
    code, out, _ = command("profile", "h100")
    assert code == 0 and out == Profile.named("h100").summary() + "\n"
    assert "nominal: not measured" in out and "TFLOP/s" in out and "GB/s" in out and "hop" in out


def test_plan_and_verify_under_autocast(module: str, command: Command) -> None:
    path = plan_file(command, module, "cast.json", "--device", "cuda", "--autocast", "bfloat16")
    products = [r for r in Plan.load(path).records if r.op == "contract"]
    assert products and {r.results[0].dtype for r in products} == {"bf16"}
    assert command("verify", f"{module}:small", str(path), "--autocast", "bfloat16")[0] == 0
    code, _, error = command("verify", f"{module}:small", str(path))
    assert code == 1 and "the computation differs" in error
