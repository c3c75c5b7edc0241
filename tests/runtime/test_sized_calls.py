"""Calls that differ in sizes alone: captured twice, one program for many, losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch.distributed.tensor import Shard

import autoshard.runtime.session as sessions
from autoshard import MeshSpec, Plan, find_plan
from autoshard.runtime.session import Session
from benchmarks import soak
from tests.api.programs import full, parallel, refusal
from tests.plans.test_other_sizes import Net
from tests.ranks import RankPool

WIDTH, WORDS = 8, 32


class Attending(nn.Module):
    """A word model of one layer, with a size as a number: the loss counts by length."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = self.attention(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(x + mixed).flatten(0, 1), words.flatten()) / words.shape[1]

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Near(Attending):
    """Within a window, in blocks where a sequence is long."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, (before >= 0) & (before < 5))


class Counting(nn.Module):
    """Words by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.words(words)).logsumexp(-1).sum() / words.shape[1]


class Branching(Attending):
    """What it does depends on a size."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) * (2.0 if words.shape[0] > 6 else 1.0)


class Seeing(nn.Module):
    """Half the size and back, over one image."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.near(x).relu()
        back = F.interpolate(self.down(x), size=x.shape[2:], mode="bilinear")
        return (x - back).square().mean()


MODELS = {one.__name__: one for one in (Attending, Branching, Counting, Near, Seeing)}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double()


def batch(size: tuple[int, ...]) -> Tensor:
    """Words [rows, tokens], or an image [1, 2, height, width]."""
    generator = torch.Generator().manual_seed(sum(size))
    if len(size) == 4:
        return torch.randn(size, generator=generator, dtype=torch.float64)
    return torch.randint(0, WORDS, size, generator=generator)


Steps = list[list[Tensor]]
Part = Callable[[Tensor], Tensor]


def steps(model: nn.Module, sizes: Sequence[tuple[int, ...]], part: Part = lambda x: x) -> Steps:
    """Loss and gradients at each size. part: what a rank passes."""
    found: Steps = []
    for size in sizes:
        model.zero_grad()
        loss = model(part(batch(size)))
        loss.backward()
        found.append([full(loss), *(full(p.grad) for p in model.parameters() if p.grad is not None)])
    return found


@contextmanager
def counted_captures() -> Generator[list[None]]:
    """As long as there were captures."""
    captures: list[None] = []
    capture = sessions.canonical_capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        captures.append(None)
        return capture(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "canonical_capture", counted)
        yield captures


def parallel_steps(
    rank: int, name: str, axes: Any, sizes: Sequence[tuple[int, ...]], options: dict[str, Any]
) -> tuple[Steps, int, int, int]:
    """(steps, captures, programs for other sizes, and how many of these before any step)."""
    with counted_captures() as captures:
        split = "in_placements" in options
        part: Part = lambda x: x.chunk(axes[0][1], 2)[rank] if split else x
        example = part(batch(sizes[0]))
        if options.pop("marked", False):
            mark_dynamic(example, [0, 1])
        model = parallel(made(name), axes, (example,), **options)
        session = Session.of(model)
        assert session is not None
        assert session.plan is not None
        nodes = [one for stage in session.plan.stages for one in stage.planned.layouts.values()]
        assert any(one.has_halo for node in nodes for one in (*node.operands, *node.results)) == split
        at_once = session._sized._programs
        found = steps(model, sizes, part)
    said = found, len(captures), session._sized._programs, at_once
    if rank == 0 and not split:  # which searched
        rows, tokens = sizes[0]
        assert session.plan.step_time_at(batch=rows) == session.plan.step_time
        assert session.plan.memory_at(sequence=4 * tokens) > session.plan.peak_memory
    return said


EVEN = [(8, 6), (4, 9), (6, 5), (8, 12), (12, 7)]
AGAIN = [(8, 6), (4, 9), *[(6, 5)] * 4]
"""Compiled at the third call of the program for all sizes."""
IMAGES = [(1, 2, *plane) for plane in ((24, 16), (32, 24), (48, 20), (40, 9), (33, 16), (50, 13))]
COMPILED = [(8, 6), (4, 9), (6, 5), (6, 5), (2, 7), (10, 3), (5, 4)]
"""The same; then rows of single words, and an uneven size."""
UNEVEN = [(8, 6), (5, 9), (7, 5), (3, 7), (2, 4), (1, 6), (4, 1), (11, 13), (7, 7)]
PIECES = [(8, 6), (12, 9), (16, 5)]
"""Even ones; uneven ones, of a single row, and fewer rows than pieces."""
UNEVEN_PIECES = [*PIECES, (9, 4), (10, 5), (3, 7), (4, 6), (2, 4), (7, 3), (1, 5), (13, 2)]
STAGES = {"micro_batches": 3, "stages": "dp"}


@pytest.mark.parametrize(
    ("name", "world", "sizes", "options", "captures", "programs"),
    [
        ("Counting", 2, PIECES, {"micro_batches": 2}, 2, 1),
        ("Counting", 2, [(6, 6), (5, 9), (7, 4)], STAGES, 2, 1),
        pytest.param("Counting", 2, UNEVEN_PIECES, {"micro_batches": 3}, 4, 5, marks=pytest.mark.slow),
        pytest.param("Attending", 3, UNEVEN_PIECES, {"micro_batches": 2}, 4, 5, marks=pytest.mark.slow),
        pytest.param(
            "Attending", 2, UNEVEN_PIECES, {**STAGES, "schedule": "zero_bubble"}, 4, 5, marks=pytest.mark.slow
        ),
        pytest.param(
            "Counting",
            2,
            [*PIECES, *PIECES],
            {**STAGES, "backend": "aot_eager"},
            2,
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Counting",
            2,
            [*PIECES, *PIECES],
            {"micro_batches": 2, "backend": "inductor", "tune": "off"},
            2,
            1,
            marks=pytest.mark.slow,
        ),
        ("Counting", 2, EVEN, {}, 2, 1),
        ("Counting", 2, EVEN[:2], {"dynamic": {"batch", "sequence"}}, 2, 1),
        pytest.param("Counting", 2, EVEN[:2], {"marked": True}, 2, 1, marks=pytest.mark.slow),
        pytest.param("Counting", 2, AGAIN, {"backend": "aot_eager"}, 2, 1, marks=pytest.mark.slow),
        pytest.param(
            "Counting", 2, COMPILED, {"backend": "inductor", "tune": "off"}, 2, 3, marks=pytest.mark.slow
        ),
        pytest.param(
            "Attending", 2, COMPILED, {"backend": "inductor", "tune": "off"}, 2, 3, marks=pytest.mark.slow
        ),
        pytest.param("Attending", 2, EVEN, {}, 2, 1, marks=pytest.mark.slow),
        pytest.param("Attending", 2, UNEVEN, {}, 6, 5, marks=pytest.mark.slow),
        pytest.param("Near", 2, [(4, 280), (8, 300), (6, 333)], {}, 2, 1, marks=pytest.mark.slow),
        pytest.param("Attending", 3, UNEVEN[:5], {}, 2, 4, marks=pytest.mark.slow),
        pytest.param("Seeing", 3, IMAGES, {"in_placements": [Shard(2)]}, 2, 6, marks=pytest.mark.slow),
        pytest.param("Branching", 2, EVEN, {}, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_at_every_size(
    ranks: RankPool,
    name: str,
    world: int,
    sizes: list[tuple[int, ...]],
    options: dict[str, Any],
    captures: int,
    programs: int,
) -> None:
    wanted = steps(made(name), sizes)
    for found, captured, made_programs, at_once in ranks.run(
        parallel_steps,
        name,
        (("dp", world),),
        sizes,
        options,
        world=world,
    ):
        for size, got, alone in zip(sizes, found, wanted, strict=True):
            for one, other in zip(got, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=f"at {size}")
        assert captured <= captures and 0 < made_programs <= programs, (captured, made_programs)
        assert at_once == (1 if "dynamic" in options or "marked" in options else 0)


class Remembering(nn.Module):
    """Each call adds a word to what it is given in a dict, as a growing cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, past: dict[str, Tensor]) -> Tensor:
        past["seen"] = torch.cat([past["seen"], self.words(words)], 1)
        return self.out(past["seen"].logsumexp(1))


@torch.no_grad()
def remembered(model: nn.Module, words: int) -> list[Tensor]:
    """words: at first."""
    past = {"seen": torch.ones(4, words, WIDTH, dtype=torch.float64)}
    found = [model(batch((4, 1)), past) for _ in range(6)]
    return [*found, past["seen"]]


def parallel_memory(rank: int, words: int) -> tuple[list[Tensor], int]:
    torch.manual_seed(3)
    with counted_captures() as captures:
        found = remembered(parallel(Remembering().double(), (("dp", 2),), backend="eager"), words)
    return found, len(captures)


@pytest.mark.parametrize(("words", "wanted_captures"), [(3, 2), (1, 3)])
def test_what_grows_at_every_call_is_captured_twice(
    words: int, wanted_captures: int, ranks: RankPool
) -> None:
    """And once more where it begins with one, as numbers of 1 have no symbol: to compare."""
    torch.manual_seed(3)
    wanted = remembered(Remembering().double(), words)
    for found, captures in ranks.run(parallel_memory, words, world=2):
        assert captures == wanted_captures
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


ROW, PRICES = (torch.zeros(1, 1, 64),), "cpu"
LARGER = {"sequence": (1, 512)}


def free_plan() -> Plan:
    """Of a row, which every rank computes."""
    return find_plan(Net(), MeshSpec({"dp": 2}), ROW, profile=PRICES, backend="eager")


def planned_for(rank: int, limit: int, given: bool, options: dict[str, Any]) -> str | int:
    """What is said, or bytes at the largest size."""
    model, plan = Net(), free_plan() if given else None
    options |= {"plan": plan, "memory_limit": limit, "sizes": LARGER, "profile": PRICES}
    if (said := refusal(model, lambda: parallel(model, (("dp", 2),), ROW, **options))) != "no error":
        return said
    found = model.autoshard_plan
    assert isinstance(found, Plan)
    return found.memory_at(sequence=512) + found.reserve if rank == 0 else 0


def test_a_plan_fits_at_the_largest_size_asked(ranks: RankPool) -> None:
    """Where a rank that holds half of the rows does, and one that holds all does not."""
    most = free_plan().memory_at(sequence=512)
    limit = most * 3 // 4
    for tune in ("first", "background"):
        assert 0 < ranks.run(planned_for, limit, False, {"tune": tune}, world=2)[0] <= limit
    for said in ranks.run(planned_for, limit, True, {}, world=2):
        assert (
            said.startswith("InfeasibleError: plan needs ") and " at sequence 512, and memory_limit" in said
        )
    for said in ranks.run(planned_for, most // 6, False, {"tune": "first"}, world=2):
        assert said.startswith("InfeasibleError: at sequence 512: no plan "), said


@pytest.mark.slow
def test_a_soak_of_changing_sizes_keeps_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--steps", "60", "--ranks", "2", "--plans", "sizes", "--every", "10"]) == 0
    row = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    threads = row[6].split(" to ")
    assert row[:2] == ["sizes", "60"] and threads[0] == threads[1], row
    assert float(row[5]) < 4, row
