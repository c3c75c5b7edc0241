"""Every command of README and docs: its arguments are some that it takes, and those that are quick run in their
smallest form."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from typing import Any

import pytest

from autoshard import cli
from benchmarks import planning
from tests.structure.source_tree import ROOT
from tests.structure.test_docs import PAGES

_MODULE = re.compile(r"python3? (?:-m ((?:benchmarks|tests)\.[\w.]+)|(benchmarks/\w+\.py))([^`\n|]*)")
_AUTOSHARD = re.compile(
    r"(?:^    |`|&& |bin/|-m )autoshard ((?:demo|plan|show|diff|verify|profile|report)\b[^`\n]*)",
    re.MULTILINE,
)
_MAKE = re.compile(r"`make ([a-z-]+)`")
_PLACES = {"N": "1"}
"""What a page writes for a number of the reader's."""

Command = tuple[str, ...]
"""A file, and its arguments; or those of `autoshard`."""

_SMALLEST = (
    ("benchmarks/bubbles.py", "--pieces", "4"),
    ("benchmarks/fuzz_readers.py", "--cases", "10"),
    ("benchmarks/guards.py", "--ranks", "2", "--steps", "5"),
    ("benchmarks/step_time.py", "--backend", "eager", "--model", "mlp", "--steps", "2", "--warmup", "1"),
    ("benchmarks/memory.py", "--world", "1", "2", "--width", "64", "--hidden", "64"),
    ("benchmarks/kinds.py", "--layers", "1", "--width", "96"),
    ("benchmarks/fuzz_bounds.py", "--cases", "1"),
    ("benchmarks/policies.py", "--problem", "pinned", "--policy", "turned"),
    ("benchmarks/walk.py",),
    ("benchmarks/long_context.py", "--tokens", "64", "--ranks", "1"),
    ("benchmarks/context.py", "--ranks", "2", "--tokens", "64", "--steps", "2", "--budget", "0"),
    (
        "benchmarks/experts.py",
        *(
            "--ranks",
            "2",
            "--tokens",
            "64",
            "--width",
            "32",
            "--hidden",
            "32",
            "--steps",
            "2",
            "--budget",
            "0",
        ),
    ),
    ("tests/fuzz/__main__.py", "--cases", "1"),
    ("tests/spatial/test_window_rules.py", "1"),
    ("tests/spatial/test_more_window_rules.py", "1"),
    ("tests/spatial/test_moving_rules.py", "1"),
    ("tests/spatial/test_neighborhood.py", "1"),
)
"""Seconds to a minute each. What measures hosts, trains models in turn or needs a GPU takes longer."""


def _words(text: str) -> Command:
    return tuple(_PLACES.get(word, word) for word in shlex.split(text, comments=True))


def _texts() -> list[str]:
    """Of all pages, lines that go on joined."""
    return [re.sub(r"\\\n\s*", "", page.read_text()) for page in PAGES]


def module_commands() -> list[Command]:
    found: dict[Command, None] = {}
    for text in _texts():
        for module, path, rest in _MODULE.findall(text):
            path = path or module.replace(".", "/") + ".py"
            if not (ROOT / path).exists():
                path = path.removesuffix(".py") + "/__main__.py"
            found[path, *_words(rest)] = None
    return list(found)


def cli_commands() -> list[Command]:
    """Without arguments one is only named, but for the demo."""
    found = [_words(rest) for text in _texts() for rest in _AUTOSHARD.findall(text)]
    return list(dict.fromkeys(words for words in found if len(words) > 1 or words == ("demo",)))


class _Read(Exception):
    """Arguments were read, and nothing more is to be done."""


def _run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python PATH WORDS`, in this process. A command may end, with nothing wrong."""
    monkeypatch.setattr(sys, "argv", [*command])
    try:
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end where their arguments were read."""
    real = argparse.ArgumentParser.parse_args

    def read(self: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        real(self, *args, **options)
        raise _Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)


def test_commands_are_found() -> None:
    paths = {path for path, *_ in module_commands()}
    assert {"benchmarks/planning.py", "benchmarks/cluster/__main__.py", "benchmarks/memory.py"} <= paths
    assert ("benchmarks/planning.py", "--sweep", "--time-limit", "300") in module_commands()
    assert (
        "profile",
        "--read",
        "all_reduce.txt",
        "--base",
        "h100",
        "--out",
        "cluster.json",
    ) in cli_commands()


@pytest.mark.parametrize("command", [*module_commands(), *_SMALLEST], ids=" ".join)
def test_a_module_takes_its_arguments(
    command: Command, monkeypatch: pytest.MonkeyPatch, read_only: None
) -> None:
    if "parse_args" not in (ROOT / command[0]).read_text():
        pytest.skip("it reads its arguments by hand")
    with pytest.raises(_Read):
        _run(command, monkeypatch)


@pytest.mark.parametrize("words", cli_commands(), ids=" ".join)
def test_autoshard_takes_its_arguments(words: Command, read_only: None) -> None:
    with pytest.raises(_Read):
        cli.main(words)


def test_targets_of_make_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert not {name for text in _texts() for name in _MAKE.findall(text)} - {*targets}


_SMALL = ("--layers", "1", "--mesh", "dp=2", "--batch", "2", "--sequence", "16")


@pytest.mark.parametrize(
    "command", [("benchmarks/planning.py", *_SMALL), ("benchmarks/race.py", "--list")], ids=" ".join
)
def test_what_is_quick_runs(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(command, monkeypatch)
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_sweep_of_planning_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "SWEEP", (_SMALL,))
    monkeypatch.setattr(sys, "argv", ["planning", "--sweep"])
    planning.main()
    *_, header, line, row = capsys.readouterr().out.splitlines()
    assert header.count("|") == line.count("|") == row.count("|") and "failed" not in row


@pytest.mark.slow
@pytest.mark.parametrize("command", _SMALLEST, ids=" ".join)
def test_what_takes_longer_runs(command: Command) -> None:
    path, *words = command
    module = path.removesuffix(".py").replace("/", ".")
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
