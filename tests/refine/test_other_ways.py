"""What could take the place of a plan's all-reduces is timed beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.plan.task import Task
from autoshard.refine.rounds import Rounds
from autoshard.refine.time_work import TimedStore
from autoshard.refine.timed_cases import other_ways
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout
from passes.predict.step_work import CollectiveCase
from tests.refine.tasks import task

GRID = MeshSpec({"x": 2, "y": 2})


def reduced(axes: str, nbytes: int, seconds: float) -> CollectiveCase:
    return CollectiveCase("all_reduce", tuple(axes), nbytes, seconds)


def test_two_of_equal_size_over_other_axes_could_be_one() -> None:
    found = other_ways([reduced("y", 64, 2.0), reduced("x", 64, 1.0), reduced("x", 128, 4.0)], GRID)
    assert found == [reduced("xy", 64, 3.0)]


def test_one_over_two_axes_could_be_two() -> None:
    gathered = CollectiveCase("all_gather", ("x", "y"), 64, 1.0)
    assert other_ways([reduced("xy", 64, 3.0), gathered], GRID) == [
        reduced("x", 64, 3.0),
        reduced("y", 64, 3.0),
    ]


def test_what_takes_longest_comes_first_and_what_is_there_is_left_out() -> None:
    have = [reduced("xy", 64, 3.0), reduced("x", 64, 1.0), reduced("xy", 128, 5.0)]
    assert other_ways(have, GRID) == [reduced("x", 128, 5.0), reduced("y", 128, 5.0), reduced("y", 64, 3.0)]


def test_axes_are_in_the_order_of_the_mesh() -> None:
    mesh = MeshSpec({"x": 2, "y": 2, "z": 2})
    found = other_ways([reduced("z", 64, 1.0), reduced("xy", 64, 1.0)], mesh)
    assert found[0] == reduced("xyz", 64, 2.0)


def test_a_start_times_them_though_no_rival_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Rounds, "_rivals", lambda _: ())
    rounds = Rounds(data_parallel(), TimedStore({"machines": "invented"}), lambda *_: 1000.0)
    own = {(each.axes, each.nbytes) for each in rounds.plan.collectives if each.kind == "all_reduce"}
    (nbytes,) = {nbytes for axes, nbytes in own if axes == ("x", "y") and nbytes >= 4 * 16 * 64}
    asked = {(c.axes, c.nbytes) for c in rounds.wanted() if isinstance(c, CollectiveCase)}
    assert not own & {(("x",), nbytes), (("y",), nbytes)}
    assert {(("x",), nbytes), (("y",), nbytes), (("x", "y"), nbytes)} <= asked


def data_parallel() -> Task:
    """Gradients of two weights, [16, 64] each, that are summed over both axes."""
    one = task(4096, GRID)
    ndims = {"0.weight": 2, "0.bias": 1, "2.weight": 2, "2.bias": 1}
    return replace(one, pins={name: Layout.replicated(ndim) for name, ndim in ndims.items()})
