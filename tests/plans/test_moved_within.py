"""Within a memory limit transfers hold less at once: smaller buckets, less ahead, fewer reductions pending."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Plan, find_plan, verify
from autoshard.plan.answer import BestSoFar
from autoshard.plan.families import Variant
from autoshard.plan.judged import Judged, judged_within
from autoshard.plan.search_with_states import StatesWithin
from passes.predict.prediction import KINDS, MemoryStep

MESH = MeshSpec({"ranks": 4})
X = torch.randn(16, 32)


def layers() -> nn.Module:
    """Small weights: split, they travel in buckets."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)))


def planned(memory_limit: int | None = None, recompute: str = "auto") -> Plan:
    return find_plan(
        layers(),
        MESH,
        X,
        profile="cpu",
        backend="eager",
        memory_limit=memory_limit,
        recompute=recompute,
        constraints={"*": [Shard(0)]},
    )


def members(plan: Plan) -> int:
    """Transfers of the plan's largest bucket."""
    turns = list(plan.planned.turns.values())
    return max((turns.count(turn) for turn in turns), default=0)


@pytest.fixture(scope="module")
def free() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def short(free: Plan) -> Plan:
    """Without other states, and without plans of families and others on the way: some of them are faster here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatesWithin, "_known", lambda *_: None)
        patch.setattr(BestSoFar, "or_better", lambda _, found: found)
        return planned(free.peak_memory * 85 // 100, recompute="user")


def test_without_a_limit_prices_decide(free: Plan) -> None:
    assert free.moved_nbytes is None and members(free) > 1


def test_within_a_limit_less_is_moved_at_once(free: Plan, short: Plan) -> None:
    assert short.memory_limit is not None and short.peak_memory <= short.memory_limit
    assert short.moved_nbytes is not None and members(short) < members(free)
    assert short.step_time > free.step_time


def test_explain_and_a_file_say_so(free: Plan, short: Plan) -> None:
    assert "memory is short: transfers" in short.explain() and "memory is short" not in free.explain()
    again = Plan.from_json(short.to_json())
    assert again == short and again.moved_nbytes == short.moved_nbytes


def test_its_program_is_right(short: Plan) -> None:
    verify(layers(), short, X)


def test_its_step_is_predicted_again_as_it_is(short: Plan) -> None:
    """For what a plan is asked afterwards: with as little in flight as it has."""
    assert short.again is not None
    assert short.again.step_seconds(short, Variant()) == pytest.approx(short.step_time)


@dataclass(frozen=True)
class Transfers:
    """Stand-in for prices, and for a plan lowered by them: `kept` bytes, and what is in transfers at once, of which a
    single one holds `single`. The fewer, the slower."""

    kept: int
    single: int
    moved_nbytes: float = 800

    def holding(self, nbytes: int) -> Transfers:
        return replace(self, moved_nbytes=nbytes)

    @property
    def peak(self) -> MemoryStep:
        moved = max(self.single, int(self.moved_nbytes))
        return MemoryStep(
            0, "forward", "x", tuple(moved if k == "moved" else self.kept * (k == "kept") for k in KINDS)
        )

    @property
    def seconds(self) -> float:
        return 1.0 / (1.0 + self.moved_nbytes)


@pytest.mark.parametrize(
    ("kept", "single", "limit", "held"),
    [
        pytest.param(1000, 0, 1800, [800], id="fits"),
        pytest.param(1000, 0, 1500, [800, 500], id="as much less as is missing"),
        pytest.param(1000, 470, 1450, [800, 450], id="a single transfer holds more"),
        pytest.param(1000, 0, 1400, [800, 0, 200], id="far over it, whether none at once do first"),
        pytest.param(1000, 0, 900, [800, 0], id="all of them are not enough"),
    ],
)
def test_transfers_hold_as_much_less_as_is_missing(
    kept: int, single: int, limit: int, held: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[float]()

    def lowered(joint: Any, assignment: Any, prices: Transfers, predict: Any) -> Any:
        tried.append(prices.moved_nbytes)
        step = SimpleNamespace(peak=prices.peak, seconds=prices.seconds)
        return Judged(cast(Any, None), cast(Any, prices), cast(Any, step))

    monkeypatch.setattr("autoshard.plan.judged.judged", lowered)
    monkeypatch.setattr("autoshard.plan.judged.StepInOrders", lambda joint: SimpleNamespace(predicted=None))
    over = lambda one: one.peak.nbytes - limit
    best = judged_within(cast(Any, None), {}, cast(Any, Transfers(kept, single)), over)
    assert tried[: len(held)] == held and len(tried) <= len(held) + 1
    assert best.peak.nbytes == kept + max(single, int(tried[-1]))
