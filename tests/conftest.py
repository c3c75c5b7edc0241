"""Fixtures shared by all tests: `ranks`, a pool of rank processes, `golden`, expected text, and `command`."""

from __future__ import annotations

import itertools
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Read when torch or transformers are first imported, so set here, before any test module is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("AUTOSHARD_PROGRESS", "0")
os.environ.setdefault("AUTOSHARD_VERIFY", "1")
# Plans and profiles of earlier runs are no part of a test; ranks inherit it.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="autoshard-cache-")

import torch

from tests.garbage import collect_seldom
from tests.golden import Golden
from tests.ranks import RankPool

Command = Callable[..., tuple[int, str, str]]

THINNED = (
    "api",
    "attention",
    "canonicalize",
    "capture",
    "compile",
    "micro_batches",
    "plans",
    "predict",
    "redistribution",
    "refine",
    "reporting",
    "rules",
    "runtime",
    "schedule",
    "scripts",
    "search",
    "spatial",
    "stages",
    "states",
    "training",
    "verification",
)
KEPT_OF = 64
"""Of so many cases of one test in these areas CI runs one. With one of sixteen it took 23 minutes on a slow machine."""
LONGEST = ("training", "company")
"""Their tests start first: one of them as the last would leave the other core idle."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files with what the tests got"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `pytest -n`, what makes network namespaces stays in one process: clean-up of one run is not another's.
    So do tests that share a fixture of their module, or what a helper of the tests caches: it is made once.

    Of the many cases of one test in areas that are thinned one of `KEPT_OF` is kept, by their names, and the first.
    """
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(here).parts[0] not in LONGEST)
    seen: set[str] = set()
    for item in items:
        area = item.path.relative_to(here).parts[0]
        if area in ("cluster", "race"):
            item.add_marker(pytest.mark.xdist_group("namespaces"))
        elif kept := _kept_for_several(item):
            item.add_marker(pytest.mark.xdist_group(kept))
        test = item.nodeid.partition("[")[0]
        if area in THINNED and test in seen and zlib.crc32(item.nodeid.encode()) % KEPT_OF:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


def _kept_for_several(item: pytest.Item) -> str | None:
    """The module whose functools.cache the item's module uses, or the item's own if it has a fixture of its module."""
    assert isinstance(item, pytest.Function)
    cached = (value for value in vars(item.module).values() if hasattr(value, "cache_info"))
    homes = sorted(value.__module__ for value in cached if value.__module__.startswith("tests."))
    if homes:
        return homes[0]
    fixtures = itertools.chain(*item._fixtureinfo.name2fixturedefs.values())
    own = any(fixture.scope == "module" for fixture in fixtures)
    return str(item.path.relative_to(Path(__file__).parent)) if own else None


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`autoshard WORDS...`: (exit status, what it prints, what it prints as errors)."""
    from autoshard.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small tensors: threads cost more than they give, and the ranks need the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _seldom_collected() -> None:
    """Here all modules of tests are imported."""
    collect_seldom()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(fn, *args, world=4)`: fn(rank, *args) on 4 processes with gloo. See tests/ranks.py."""
    with RankPool() as pool:
        yield pool


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden.check(text, "name.txt")` compares with tests/<area>/golden/name.txt."""
    return Golden(request.path.parent / "golden", bool(request.config.getoption("--update-golden")))
