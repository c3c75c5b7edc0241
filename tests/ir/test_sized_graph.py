"""A graph captured with symbols for sizes is, at any sizes that it is for, the graph that a capture of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.planning import canonical_capture
from passes.ir.sized_graph import SizedJoint, alike
from passes.ir.torch_sizes import SizesLost, SizeSymbols, SymbolicShapes, evaluation, symbolic_sizes

WIDTH, WORDS = 8, 16
Sizes = tuple[int, int]


class Block(nn.Module):
    """Attention, dropout and a loss over batch [b, t]; a number made of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + torch.arange(words.shape[1]).unsqueeze(-1)
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.drop(x + mixed) @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), words.flatten()) / words.shape[1]


class Experts(nn.Module):
    """The two best of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        value, which = self.gate(x).softmax(-1).topk(2, -1)
        every = torch.einsum("btd,nde->btne", x, self.weights)
        picked = every.gather(2, which.unsqueeze(-1).expand(*which.shape, WIDTH))
        return (picked * value.unsqueeze(-1)).sum(2).pow(2).mean()


class SortedExperts(nn.Module):
    """The same, by rows sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        value, which = self.gate(rows).softmax(-1).topk(2, -1)
        found, order = which.flatten().sort()
        ends = F.one_hot(found, 4).sum(0).cumsum(0).to(torch.int32)
        picked = F.grouped_mm(rows[order // 2], self.weights, offs=ends) * value.flatten()[order, None]
        return picked[order.argsort()].unflatten(0, (-1, 2)).sum(1).pow(2).mean()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.up(x))
        return (x * 2 if x.shape[0] > 4 else x).mean()


class Conv(nn.Module):
    """Over images [b, 3, t, t + 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x)).mean()


class Resizing(nn.Module):
    """Half the size and back, over images [b, 3, t, t + 2]."""

    def __init__(self, **to: float) -> None:
        super().__init__()
        self.down, self.to = nn.Conv2d(3, 4, 3, 2, padding=1), to

    def forward(self, x: Tensor) -> Tensor:
        to: dict[str, Any] = self.to or {"size": x.shape[2:]}
        return F.interpolate(self.down(x), mode="bilinear", **to)[..., 1:-1].mean()


class Masked(nn.Module):
    """Attention whose mask shows the keys that `seen` says."""

    def __init__(self, seen: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.seen = nn.Linear(WIDTH, WIDTH), seen

    def forward(self, x: Tensor) -> Tensor:
        x, place = self.mix(x).unsqueeze(1), torch.arange(x.shape[1])
        mask = self.seen(place.unsqueeze(1), place)
        return F.scaled_dot_product_attention(x, x, x, mask).mean()


def causal() -> nn.Module:
    return Masked(lambda query, key: key <= query)


def near() -> nn.Module:
    """A window of keys: all of them in short sequences."""
    return Masked(lambda query, key: (key <= query) & (key > query - 20))


def nearest() -> nn.Module:
    return Masked(lambda query, key: (key <= query) & (key > query - 4))


def words(size: Sizes) -> Tensor:
    return torch.randint(0, WORDS, size)


def rows(size: Sizes) -> Tensor:
    return torch.randn(*size, WIDTH)


def images(size: Sizes) -> Tensor:
    return torch.randn(size[0], 3, size[1], size[1] + 2)


def symbolic(shape: torch.Size, count: int) -> SymbolicShapes:
    """The first dims, in symbols."""
    symbols = SizeSymbols(shape[:count])
    return SymbolicShapes(symbols, [(*symbols.sizes, *shape[count:])])


@pytest.mark.parametrize(
    ("make", "batch", "serves", "others"),
    [
        (Block, words, [(5, 5), (3, 11)], [(1, 4), (4, 1)]),
        (Experts, rows, [(4, 4), (2, 7)], [(1, 4)]),
        (SortedExperts, rows, [(4, 4), (2, 7)], [(1, 4)]),
        (Branch, rows, [(6, 5), (5, 3)], [(4, 5), (2, 5)]),
        (Resizing, images, [(5, 9), (17, 12)], [(3, 2)]),
        (lambda: Resizing(scale_factor=1.5), images, [(3, 12)], []),
        (causal, rows, [(5, 7), (2, 300)], [(5, 1), (5, 1025)]),
        (near, rows, [(5, 7), (2, 16)], [(5, 1), (5, 19), (2, 21)]),
        (nearest, rows, [(5, 7), (2, 300)], [(5, 1), (5, 4), (2, 1025)]),
    ],
)
def test_at_other_sizes_it_is_what_a_capture_gives(
    make: Callable[[], nn.Module],
    batch: Callable[[Sizes], Tensor],
    serves: list[Sizes],
    others: list[Sizes],
) -> None:
    model, first = make(), batch((6, 10))
    count = first.ndim - (batch is rows)
    sizes = symbolic(first.shape, count)
    sized = SizedJoint(sizes.symbols, count, canonical_capture(model, (first,), {}, sizes=sizes).joint)
    for size in serves:
        found = sized.at(batch(size).shape[:count])
        assert found is not None and alike(found, canonical_capture(model, (batch(size),), {}).joint), size
    assert [sized.at(batch(size).shape[:count]) for size in others] == [None] * len(others)


def test_a_size_that_the_model_fixes_is_a_guard() -> None:
    """Weights say how wide rows and how many channels are."""
    for model, x, wrong in (
        (Branch(), rows((5, 3)), (5, 3, WIDTH + 1)),
        (Conv(), images((5, 6)), (5, 4, 6, 8)),
    ):
        sizes = symbolic(x.shape, x.ndim)
        sized = SizedJoint(sizes.symbols, x.ndim, canonical_capture(model, (x,), {}, sizes=sizes).joint)
        assert sized.at(x.shape) is not None and sized.at(wrong) is None


def test_a_forward_that_asks_for_values_has_no_symbols() -> None:
    class Asks(Branch):
        def forward(self, x: Tensor) -> Tensor:
            if not x.isfinite().all():
                raise ValueError("not finite")
            return super().forward(x)

    x = rows((5, 3))
    with pytest.raises(Exception, match="the forward asks for values") as raised:
        canonical_capture(Asks(), (x,), {}, sizes=symbolic(x.shape, 2))
    assert isinstance(raised.value.__cause__ or raised.value, SizesLost) or "asks for values" in str(
        raised.value
    )


def test_other_graphs_are_not_alike() -> None:
    model = Branch()
    one, two = (canonical_capture(model, (rows(size),), {}).joint for size in ((3, 5), (3, 6)))
    assert alike(one, one) and not alike(one, two)


def test_what_holds_is_a_list_of_conditions() -> None:
    """One that is itself "a or b" says nothing of those before and behind it."""
    double = evaluation(1, ["s0 >= 2", "s0 == 3 or s0 == 4", "s0 != 4"], ["2*s0"])
    assert [double([size]) for size in (1, 3, 4, 5)] == [None, [6], None, None]


def test_no_size_is_that_of_another_graph() -> None:
    """Whatever remembers either would take it for the other: of one name, or always the same."""
    one, two = (SizeSymbols([4, 6]).sizes for _ in range(2))
    with symbolic_sizes():
        assert one[0] == 4 and two[0] == 4  # which is noted of both
        assert str(one[1]) == str(two[1])
        assert {*one, *one} == set(one) and not {*one} & {*two} and 4 not in {*one}
