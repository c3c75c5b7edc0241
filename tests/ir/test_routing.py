"""How unevenly rows go to experts: what is taken, and what the fullest rank has."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Plan, ShardingError, find_plan
from passes.ir.routing import BALANCED, Choice, Routing, checked_routing
from tests.profiles import slow_compute
from tests.runtime.test_experts import EXPERTS, WIDTH, Experts

ROWS = 2 * 5 * 6
"""Two experts for each of 5 x 6 tokens."""


def test_of_all_rows_those_of_the_fullest_rank() -> None:
    assert checked_routing(None) is checked_routing(1) is BALANCED
    assert checked_routing([2, 1, 1]).shares == (0.5, 0.25, 0.25)
    assert Routing(1.5).share([3, 3]) == 0.75 and Routing(9.0).share([3, 3]) == 1.0
    uneven = checked_routing([3, 1, 4, 0, 1, 1])
    assert math.isclose(uneven.share([3, 3]), 0.8) and math.isclose(uneven.share([2, 2, 2]), 0.4)
    assert math.isclose(uneven.share([2, 1, 2, 1]), 0.4)
    # Ranks with 4 and 2 experts.
    assert [one.reckoned(60, 6, 4) for one in (BALANCED, Routing(1.5), uneven)] == [40, 45, 48]


@pytest.mark.parametrize("wrong", [0.5, math.inf, True, "even", [], [0, 0], [1, -1], [1, "2"]], ids=str)
def test_what_is_no_routing_is_refused(wrong: Any) -> None:
    with pytest.raises(ShardingError, match=r"routing is (.|\n)*try: 1.5, for half as many rows again"):
        checked_routing(wrong)


@pytest.mark.parametrize(
    ("groups", "ways"), [((1, 1), 4), ((1, 4), 2), ((1, 4), 8), ((2, 4), 2), ((2, 4), 8), ((3, 4), 4)]
)
def test_ranks_that_a_token_reaches(groups: tuple[int, int], ways: int) -> None:
    """The mean over all ways to have 2 of 8 experts, within so many of so many groups of neighbours."""
    chosen, count = groups
    size, reached = 8 // count, list[int]()
    for picked in itertools.combinations(range(count), chosen):
        may_have = [group * size + one for group in picked for one in range(size)]
        reached += [len({e * ways // 8 for e in pair}) for pair in itertools.combinations(may_have, 2)]
    choice = Choice(2, 8, groups)
    assert choice.ranks(ways) == pytest.approx(sum(reached) / len(reached))
    assert Choice.of(f"sum{choice}") == choice


def test_a_token_travels_once_to_a_rank_a_host_or_an_expert() -> None:
    """To ranks 0 and 1 of one host and 2 and 3 of another; within a host, to its ranks."""
    for once, copies in ((1, Choice(2, 8).ranks(4)), (2, Choice(2, 8).ranks(2)), (0, 2.0)):
        choice = Routing(once=once).choice(2, 8)
        assert Choice.of(f"routed{choice}") == choice
        assert choice.copies(range(4)) == pytest.approx(copies)
    assert Choice(2, 8, once=4).copies(range(4)) == Choice(2, 8).ranks(4)


def planned(routing: Any, model: Any = None) -> Plan:
    """Experts split over two ranks."""
    batch = torch.zeros(5, 6, WIDTH, dtype=torch.float64)
    pins = {} if model else {"up": [Shard(0)], "down": [Shard(0)]}
    given: dict[str, Any] = {
        "constraints": pins,
        "profile": slow_compute(1),
        "backend": "eager",
        "routing": routing,
    }
    return find_plan(model or Experts().double(), MeshSpec({"ep": 2}), (batch,), **given)


def products(plan: Plan) -> float:
    return sum(node.seconds for node in plan.planned.nodes if node.op in ("routed_mm", "routed_outer"))


def test_time_and_memory_are_those_of_the_fullest_rank() -> None:
    """Five of six rows come to the first of two ranks: 5/3 of what is so where experts are equally loaded."""
    even, uneven = planned(None), planned([20, 20, 10, 5, 3, 2])
    for plan in (even, uneven):
        found = [node for node in plan.planned.nodes if node.op == "routed_mm"]
        assert all(product.results[0].layout.partial == (("ep", "routed"),) for product in found)
    assert uneven.step_time > even.step_time
    assert even.memory is not None and uneven.memory is not None
    rows = [{one.value for one in plan.memory.at_peak if one.op} for plan in (even, uneven)]  # type: ignore[union-attr]
    assert any(f"[{ROWS // 2}, " in value for value in rows[0])
    assert any(f"[{ROWS * 5 // 6}, " in value for value in rows[1])
    assert uneven.peak_memory > even.peak_memory
    assert "expert parallel (experts equally loaded)" in str(even)
    assert "expert parallel (time and memory for 1.67 times the rows of equal loads)" in str(uneven)


def test_products_take_as_many_times_as_long(tmp_path: Path) -> None:
    even, half_more = planned(None), planned(1.5)
    assert 1.3 < products(half_more) / products(even) < 1.5  # weights are read as before
    half_more.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").origin.routing == (1.5,)
    # What the plan for equal loads is there.
    assert even.at(routing=1.5).peak_memory == even.memory_at(routing=[3, 3, 3, 1, 1, 1]) > even.peak_memory
    assert products(even.at(routing=1.5)) == products(half_more)
    assert even.at().peak_memory == even.peak_memory == half_more.memory_at(routing=1)


@pytest.mark.parametrize(
    ("routing", "model", "said"),
    [
        ([1, 2], None, f"routing has rows of 2 experts, and the model has {EXPERTS}"),
        (2.0, torch.nn.Linear(WIDTH, WIDTH).double(), "the model has no products with experts"),
    ],
)
def test_a_model_with_other_experts_is_refused(routing: Any, model: Any, said: str) -> None:
    with pytest.raises(ShardingError, match=re.escape(said)):
        planned(routing, model)
