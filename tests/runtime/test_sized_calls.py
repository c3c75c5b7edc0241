"""Calls that differ in sizes alone: captured twice, one program for many, losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard.runtime.session as sessions
from autoshard.runtime.session import Session
from benchmarks import soak
from tests.api.programs import full, parallel
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
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(x + mixed).flatten(0, 1), words.flatten()) / words.shape[1]


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


MODELS = {one.__name__: one for one in (Attending, Branching, Counting)}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double()


def batch(size: tuple[int, int]) -> Tensor:
    return torch.randint(0, WORDS, size, generator=torch.Generator().manual_seed(sum(size)))


Steps = list[list[Tensor]]


def steps(model: nn.Module, sizes: Sequence[tuple[int, int]]) -> Steps:
    """Loss and gradients at each size."""
    found: Steps = []
    for size in sizes:
        model.zero_grad()
        loss = model(batch(size))
        loss.backward()
        found.append([full(loss), *(full(p.grad) for p in model.parameters() if p.grad is not None)])
    return found


def parallel_steps(
    rank: int, name: str, axes: Any, sizes: Sequence[tuple[int, int]], options: dict[str, Any]
) -> tuple[Steps, int, int]:
    """(steps, captures, programs for other sizes)."""
    captures = 0
    capture = sessions.canonical_capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal captures
        captures += 1
        return capture(*args, **kwargs)

    sessions.canonical_capture = counted
    try:
        model = parallel(made(name), axes, (batch(sizes[0]),), **options)
        found = steps(model, sizes)
    finally:
        sessions.canonical_capture = capture
    session = Session.of(model)
    assert session is not None and session.plan is not None
    said = found, captures, session._sized._programs
    if rank == 0:  # which searched
        rows, tokens = sizes[0]
        assert session.plan.step_time_at(batch=rows) == session.plan.step_time
        assert session.plan.memory_at(sequence=4 * tokens) > session.plan.peak_memory
    return said


EVEN = [(8, 6), (4, 9), (6, 5), (8, 12), (12, 7)]
COMPILED = [(8, 6), (4, 9), (6, 5), (6, 5), (2, 7), (10, 3), (5, 4)]
"""Compiled at the third call of the program for all sizes; then rows of single words, and an uneven size."""
UNEVEN = [(8, 6), (5, 9), (7, 5), (3, 7), (2, 4), (1, 6), (4, 1), (11, 13), (7, 7)]


@pytest.mark.parametrize(
    ("name", "world", "sizes", "captures", "programs"),
    [
        ("Counting", 2, EVEN, 2, 1),
        pytest.param("Counting", 2, COMPILED, 2, 3, marks=pytest.mark.slow),
        pytest.param("Attending", 2, COMPILED, 2, 3, marks=pytest.mark.slow),
        pytest.param("Attending", 2, EVEN, 2, 1, marks=pytest.mark.slow),
        pytest.param("Attending", 2, UNEVEN, 6, 5, marks=pytest.mark.slow),
        pytest.param("Attending", 3, UNEVEN, 6, 6, marks=pytest.mark.slow),
        pytest.param("Branching", 2, EVEN, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_at_every_size(
    ranks: RankPool, name: str, world: int, sizes: list[tuple[int, int]], captures: int, programs: int
) -> None:
    wanted = steps(made(name), sizes)
    for found, captured, made_programs in ranks.run(
        parallel_steps,
        name,
        (("dp", world),),
        sizes,
        {"backend": "inductor" if sizes is COMPILED else "eager", "tune": "off"},
        world=world,
    ):
        for size, got, alone in zip(sizes, found, wanted, strict=True):
            for one, other in zip(got, alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=f"at {size}")
        assert captured <= captures and 0 < made_programs <= programs, (captured, made_programs)


@pytest.mark.slow
def test_a_soak_of_changing_sizes_keeps_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--steps", "60", "--ranks", "2", "--plans", "sizes", "--every", "10"]) == 0
    row = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    threads = row[6].split(" to ")
    assert row[:2] == ["sizes", "60"] and threads[0] == threads[1], row
    assert float(row[5]) < 4, row
