"""At a size far from the first, it is said once what another plan would save: where arithmetic has one win."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard import MeshSpec, find_plan
from autoshard.runtime import starting
from autoshard.runtime.starting import FarSizes
from tests.plans.test_crossovers import COMPUTE, SIDE, START, Product, profile


def test_what_the_first_plan_loses_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in `test_where_another_plan_wins`: up to `SIDE` rows are computed whole, and more are split."""
    monkeypatch.setenv("AUTOSHARD_PROGRESS", "1")
    monkeypatch.setattr(starting, "is_worth_it", lambda seconds: True)
    prices = profile(4 * SIDE * SIDE / 2 / (COMPUTE / 4))
    (link,) = prices.links
    prices = replace(prices, links=(replace(link, latency_seconds=COMPUTE / 4 - START / 2),))
    model, rows = Product(), SIDE // 4
    plan = find_plan(model, MeshSpec({"x": 2}), (torch.zeros(rows, SIDE),), profile=prices)
    home: Any = SimpleNamespace(
        settings=SimpleNamespace(tune="background", plan=None),
        plan=plan,
        model=model,
        mesh=SimpleNamespace(get_rank=lambda: 0),
        tunings=[SimpleNamespace(ended=False)],
    )
    far = FarSizes(home)

    def said(times: float) -> str:
        far.seen([(int(times * rows), SIDE)])
        while not far._ended and far._beside is not None and not far._beside.ended:
            time.sleep(0.01)
            far._is_free()
        return capfd.readouterr().err

    assert said(1) == said(16) == ""
    assert far._beside is None  # a better plan may still come
    home.tunings.clear()
    assert said(1.5) == ""
    assert far._beside is None  # not far
    assert said(2) == ""  # no other plan wins
    first = far._beside
    model.eval()
    assert said(16) == ""
    model.train()
    assert far._beside is first
    (line,) = said(16).splitlines()
    size = int(line.split("wins from ")[1].split(" on")[0])
    assert f"at batch {16 * rows} the plan, found at {rows}, takes " in line and abs(size - SIDE) <= 2, line
    assert said(32) == said(64) == ""
