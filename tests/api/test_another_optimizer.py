"""An optimizer that is named beside a plan, which counts another one or the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard import MeshSpec, find_plan
from tests.api.programs import Axes, data, parallel, refusal, two_linear
from tests.profiles import slow_compute
from tests.ranks import RankPool

PAIR: Axes = (("x", 2),)


def other_optimizer(rank: int, path: str) -> list[str]:
    """Named, as an object, and one that the plan counts; without one."""
    said: list[str] = []
    for make in (lambda _: "sgd", torch.optim.SGD, lambda _: "momentum", lambda _: None):
        model = two_linear()
        given = make(model.parameters())
        said.append(
            refusal(model, lambda m=model, o=given: parallel(m, PAIR, (data()[0],), plan=path, optimizer=o))
        )
    return said


@pytest.mark.parametrize("options", [{}, {"stages": "x", "micro_batches": 2}], ids=["whole", "stages"])
def test_another_optimizer_than_the_plan_s(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    path, given = tmp_path / "plan.json", (data()[0],)
    mesh, asked = MeshSpec({"x": 2}), {"backend": "eager", "optimizer": "momentum", **options}
    find_plan(two_linear(), mesh, given, profile=slow_compute(), **asked).save(path)
    refused = (
        "ShardingError: optimizer is 'sgd', and plan counts the states of 'momentum'\n"
        "  try: optimizer='momentum' or none, or a plan of find_plan(..., optimizer='sgd')"
    )
    for texts in ranks.run(other_optimizer, str(path), world=2):
        assert texts == [refused, refused, "no error", "no error"]
