"""Wrong command lines: usage (status 2) or one named error with a remedy (status 1), no traceback, no file written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoshard.cli import main
from autoshard.version import __version__
from tests.profiles import slow_compute

MODELS = """
import torch

def small():
    return torch.nn.Linear(10, 4), (torch.randn(8, 10),)

def bare():
    return torch.nn.Linear(10, 4)

def raises():
    raise KeyError("weights")

def no_model():
    return 3, (torch.randn(8, 10),)

def no_inputs():
    return torch.nn.Linear(10, 4), None

def other_inputs():
    return torch.nn.Linear(10, 4), (torch.randn(8, 9),)

needs = lambda size: None
number = 7
"""
PLAN = "plan command_models:small --mesh x=2 --device cpu --profile slow.json"

USAGE = """\
nope
plan
plan command_models:small
plan command_models:small --mesh 8
--nope
plan command_models:small --mesh x=two
plan command_models:small --mesh x=2,x=2
PLAN --autocast float32
PLAN --nope
show
show plan.json plan.json
diff plan.json
verify plan.json
verify command_models:small
demo --ranks 0
demo --ranks -1
demo --steps few
demo --ranks 9999999999999999999
report
report command_models:small --steps 0
report command_models:small --warmup -1
profile --budget soon
profile --mesh 3
profile --read
profile --rank-stride far
"""
ERRORS = """\
plan command_models --mesh x=2
plan :small --mesh x=2
plan nowhere:small --mesh x=2
plan .:small --mesh x=2
plan command_models:nope --mesh x=2
plan command_models:bare --mesh x=2
plan command_models:raises --mesh x=2
plan command_models:number --mesh x=2
plan command_models:needs --mesh x=2
plan command_models:no_model --mesh x=2
plan command_models:no_inputs --mesh x=2
plan command_models:other_inputs --mesh x=2 --device cpu --profile slow.json
plan command_models:small --mesh x=0
plan command_models:small --mesh x=-2
plan command_models:small --mesh =2
plan command_models:small --mesh x=99999999999999999999
plan command_models:small --mesh x=2 --device nope
plan command_models:small --mesh x=2 --profile nope
plan command_models:small --mesh x=2 --profile nowhere/profile.json
plan command_models:small --mesh x=2 --profile broken.json
PLAN --memory-limit lots
PLAN --memory-limit=-1GB
PLAN --memory-limit nan
PLAN --memory-limit 1B
PLAN --output nowhere/plan.json
PLAN --output .
show nowhere.json
show broken.json
show deep.json
show .
show slow.json
show good.json --node nope
show good.json --draw plan.nope
show good.json --draw nowhere/plan.svg
show good.json --draw plan
diff good.json nowhere.json
diff broken.json good.json
verify command_models:small nowhere.json
verify command_models:small broken.json
verify command_models:bare good.json
verify command_models:other_inputs good.json
profile nope
profile nowhere.json
profile broken.json
profile good.json
profile --check nope
profile --budget nan
profile --budget -3
profile --device nope
profile --mesh x=0
profile --read nowhere.txt
profile --read broken.json
profile --read broken.json --base nope
profile --out nowhere/profile.json --budget 1 --device cpu
profile --plot curves.nope --budget 1 --device cpu
report command_models:small --mesh x=2 --device cpu
report command_models:small --plan nowhere.json
report command_models:small
report nowhere:small --mesh x=1 --device cpu
"""


def lines(table: str) -> list[str]:
    return [line.replace("PLAN", PLAN) for line in table.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module of models, a plan, a profile and broken files."""
    path = tmp_path_factory.mktemp("command_lines")
    (path / "command_models.py").write_text(MODELS)
    (path / "broken.json").write_text('{"schema": 4, "nodes": [')
    (path / "deep.json").write_text("[" * 5000)
    slow_compute().save(path / "slow.json")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(path)
        assert main([*PLAN.split(), "--output", "good.json"]) == 0
    return path


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("line", ["", *lines(USAGE)])
def test_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2 and "usage: autoshard" in capsys.readouterr().err


def test_commands_and_version_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "{demo,plan,show,diff,verify,profile,report}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"autoshard {__version__}\n"


@pytest.mark.parametrize("line", lines(ERRORS))
def test_named_errors(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.iterdir())
    assert main(line.split()) == 1
    said = capsys.readouterr().err
    assert "Error: " in said and "try: " in said and "Traceback" not in said
    assert sorted(p for p in folder.iterdir() if p.name != "__pycache__") == [
        p for p in before if p.name != "__pycache__"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without GPUs")
@pytest.mark.parametrize("command", ["profile", "report command_models:small --mesh x=1"])
def test_no_gpu(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--device", "cuda"]) == 1
    assert "torch finds none\n  try: " in capsys.readouterr().err


def test_there_are_at_least_80() -> None:
    assert len({*lines(USAGE), *lines(ERRORS)}) >= 80
