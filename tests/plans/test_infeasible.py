"""What is said where nothing fits a memory limit: what lives at the peak, and what else to try, by arithmetic."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.checkpoint import checkpoint

from autoshard import InfeasibleError, MeshSpec, Plan, find_plan
from cost_model.memory import enough_bytes, format_bytes, parse_bytes
from tests.profiles import slow_compute

WIDTH = 256
PINS = {"blocks.*.weight": [Replicate()]}


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Body(nn.Module):
    """Behind a small input blocks of a product up, GELU and a product down."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x.square().mean()


def planned(mesh: MeshSpec, rows: int, *, checkpointed: bool = False, **options: Any) -> Plan:
    with torch.device("meta"):
        model, x = Body(checkpointed), torch.empty(rows, 8)
    return find_plan(model, mesh, (x,), profile=slow_compute(), **options)


def refused(mesh: MeshSpec, rows: int, **options: Any) -> str:
    with pytest.raises(InfeasibleError) as caught:
        planned(mesh, rows, **options)
    return str(caught.value)


def nbytes_of(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([KMG]?)B", text).groups()  # type: ignore[union-attr]
    return float(number) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[unit]


def test_what_lives_at_the_peak_by_kind_and_module() -> None:
    mesh, rows = MeshSpec({"dp": 2}), 8192
    free = planned(mesh, rows)
    text = refused(mesh, rows, memory_limit=free.peak_memory // 8)
    found = re.search(r"the smallest plan that was judged holds (\S+) at (\w+), in the (\w+):\n", text)
    assert found and nbytes_of(found[1]) <= 1.001 * free.peak_memory
    kinds = dict(re.findall(r"^    (\w+) +([\d.]+[KMG]?B)  ", text, re.MULTILINE))
    assert sum(map(nbytes_of, kinds.values())) == pytest.approx(nbytes_of(found[1]), rel=1e-3)
    assert re.search(r"^    (kept|again) .*blocks\.(0-1|[01])\.", text, re.MULTILINE)
    assert "try: memory_limit=" in text and 'try as well: micro_batches="auto"' in text


class Normed(nn.Module):
    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if statistics else nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))).square().mean()


@pytest.mark.parametrize(
    ("statistics", "given", "said"),
    [
        (True, 1, None),  # statistics of the batch need it whole
        (True, "auto", None),
        (False, 1, 'micro_batches="auto"'),
        (False, 4, "micro_batches=6, or"),  # of six samples there are no more pieces
        (False, 6, None),
    ],
)
def test_more_pieces_are_said_where_the_batch_can_be_cut_into_them(
    statistics: bool, given: int | str, said: str | None
) -> None:
    with pytest.raises(InfeasibleError) as error:
        find_plan(
            Normed(statistics),
            MeshSpec({"dp": 2}),
            (torch.randn(6, WIDTH),),
            profile=slow_compute(),
            backend="eager",
            memory_limit=1000,
            micro_batches=given,
        )
    text = str(error.value)
    assert "the smallest plan that was judged holds" in text
    assert "micro_batches" not in text if said is None else f"try as well: {said}" in text


def test_the_limit_that_is_said_to_do_is_what_the_smallest_plan_holds() -> None:
    """Written in four digits, and not below."""
    for nbytes in (1, 999, 1000, 1001, 12_341, 123_409, 999_999, 55_944_001, 80_000_000_001, 10**12 + 1):
        assert nbytes <= parse_bytes(enough_bytes(nbytes)) <= nbytes + max(1, nbytes // 1000)
    for nbytes in (1, 999, 1000, 12_340, 123_400, 80_000_000_000):
        assert enough_bytes(nbytes) == format_bytes(nbytes)


@pytest.mark.slow
def test_the_axis_that_must_grow_least_and_by_how_much() -> None:
    """Activations are all there is to speak of, and dp splits them: twice the ranks hold half."""
    mesh, rows = MeshSpec({"dp": 2}), 2**20
    free = planned(mesh, rows)
    text = refused(mesh, rows, memory_limit=free.peak_memory // 10)
    found = re.search(
        r"a mesh with dp=(\d+) in place of dp=2: of this plan each device would hold about (\S+)", text
    )
    held = re.search(r"judged holds (\S+) at", text)
    assert found and held
    times = int(found[1]) / 2
    assert nbytes_of(held[1]) / times <= free.peak_memory / 10 < 1.05 * nbytes_of(held[1]) / (times / 2)
    assert nbytes_of(found[2]) == pytest.approx(nbytes_of(held[1]) / times, rel=0.05)
    limit = int(1.1 * nbytes_of(found[2]))
    assert planned(MeshSpec({"dp": int(found[1])}), rows, memory_limit=limit).peak_memory <= limit


def test_pins_that_hold_what_is_missing_are_named() -> None:
    """Few rows: parameters, gradients and states are all there is. Split they are a quarter."""
    mesh = MeshSpec({"dp": 4})
    free = planned(mesh, 8, constraints=PINS)
    state = (
        4 * 4 * 2 * 2 * 4 * WIDTH * WIDTH
    )  # two blocks of two weights, with gradient and two states, float32
    assert state < free.peak_memory < 1.2 * state
    text = refused(mesh, 8, memory_limit=free.peak_memory // 2, constraints=PINS)
    assert "without the pins of blocks.0.0.weight, blocks.0.2.weight, blocks.1.0.weight and 1 more in" in text
    found = re.search(r"split over all axes they take (\S+) less, which is enough", text)
    assert found and nbytes_of(found[1]) <= 0.75 * state
    assert planned(mesh, 8, memory_limit=free.peak_memory // 2).peak_memory <= free.peak_memory // 2


def test_what_the_model_computes_again_may_be_chosen() -> None:
    mesh, rows = MeshSpec({"dp": 2}), 8192
    free = planned(mesh, rows, checkpointed=True, recompute="user")
    text = refused(mesh, rows, checkpointed=True, recompute="user", memory_limit=free.peak_memory // 4)
    assert 'try as well: recompute="auto"' in text and "the smallest plan that was judged holds" in text


def test_what_a_stage_needs_counts_the_pieces_in_flight() -> None:
    """And what is enough for the first stage may not be for the others."""
    given: dict[str, Any] = {"stages": "pp", "micro_batches": 4, "schedule": "gpipe", "recompute": "user"}
    mesh = MeshSpec({"pp": 2})
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), Mean()), torch.randn(64, 16)
    peak = find_plan(model, mesh, (x,), profile=slow_compute(), **given).peak_memory
    with pytest.raises(InfeasibleError) as caught:
        find_plan(model, mesh, (x,), profile=slow_compute(), memory_limit=peak // 2, **given)
    said = str(caught.value)
    assert "for the 3 other pieces in flight" in said
    fits = re.search(r"memory_limit=(\S+), within which that plan of this stage is; other stages may", said)
    holds = re.search(r"the smallest plan that was judged holds (\S+) at", said)
    assert fits and holds and nbytes_of(fits[1]) > nbytes_of(holds[1])
