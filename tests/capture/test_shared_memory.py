"""Tensors of a model that share memory: refused, with both names, where a step changes one; nothing else is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_model.errors import CaptureError
from passes.capture import capture
from passes.capture.model_state import overlap

FLAT = torch.arange(48.0)


def _bytes(tensor: Tensor) -> set[int]:
    """Every byte of every element, by hand."""
    size = tensor.element_size()
    places = itertools.product(*map(range, tensor.shape))
    starts = [
        tensor.data_ptr() + size * sum(i * s for i, s in zip(p, tensor.stride(), strict=True)) for p in places
    ]
    return {start + i for start in starts for i in range(size)}


def test_overlap_is_exact() -> None:
    square = FLAT.view(6, 8)
    views = [
        FLAT, square, square.t(), square[:3], square[3:], square[:, :4], square[:, 4:], square[::2], square[1::2],
        square[:, 2:6].t(), FLAT[5:6], FLAT[5], FLAT[:1].expand(4), FLAT.view(torch.float64)[2:4], FLAT[0:0],
        FLAT.view(torch.int16)[1::2], FLAT.view(torch.int16)[::2], square.diagonal(), FLAT.clone(),
        FLAT.as_strided((3, 2), (7, 3), 4),
    ]  # fmt: skip
    for a, b in itertools.combinations(views, 2):
        wanted = bool(_bytes(a) & _bytes(b))
        assert (a.numel() > 0 and b.numel() > 0 and overlap(a, b)) == wanted, (a.shape, b.shape)


def test_overlap_on_meta() -> None:
    flat = torch.empty(8, device="meta")
    assert overlap(flat[:5], flat[4:]) and not overlap(flat[:4], flat[4:])
    assert not overlap(flat, torch.empty(8, device="meta"))


class Two(nn.Module):
    """Two weights, of which some share memory with each other or with what is beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("kept", torch.zeros(4))
        self.register_buffer("part", torch.zeros(4))
        self.kept: Tensor
        self.part: Tensor
        self.note: Any = None
        self.held: list[Tensor] = []
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.kept.add_(1)
        x = x + self.kept.sum() + self.part.sum()
        x = x if self.note is None else x + self.note.sum()
        return self.b(self.a(x)) + sum(t.sum() for t in self.held)


def _data(m: Two) -> None:
    m.b.weight.data = m.a.weight.data


def _parameter(m: Two) -> None:
    m.b.weight = nn.Parameter(m.a.weight.data)


def _transposed(m: Two) -> None:
    m.b.weight = nn.Parameter(m.a.weight.detach().t())


def _overlapping(m: Two) -> None:
    flat = torch.randn(24)
    m.a.weight, m.b.weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[8:].view(4, 4))


def _one_frozen(m: Two) -> None:
    _data(m)
    m.b.weight.requires_grad_(False)


def _buffer(m: Two) -> None:
    m.part = m.a.weight.detach()[1]


def _written(m: Two) -> None:
    m.kept, m.writes = torch.zeros(8)[::2], True
    m.part = m.kept[:2]


def _attribute(m: Two) -> None:
    m.note = m.a.weight.detach()[:, 1]


def _attribute_of_buffer(m: Two) -> None:
    m.note, m.writes = m.kept[1:], True


def _listed(m: Two) -> None:
    m.held = [m.b.weight.detach()[2:]]


@pytest.mark.parametrize("on_meta", [False, True], ids=["real", "meta"])
def test_what_overlaps_is_refused_by_both_names(on_meta: bool) -> None:
    refused: list[tuple[Callable[[Two], None], str]] = [
        (_data, "parameter b.weight shares memory with parameter a.weight"),
        (_parameter, "parameter b.weight shares memory with parameter a.weight"),
        (_transposed, "parameter b.weight shares memory with parameter a.weight"),
        (_overlapping, "parameter b.weight shares memory with parameter a.weight"),
        (_one_frozen, "parameter b.weight shares memory with parameter a.weight"),
        (_buffer, "buffer part shares memory with parameter a.weight"),
        (_written, "buffer part shares memory with buffer kept"),
        (_attribute, "attribute note shares memory with parameter a.weight"),
        (_attribute_of_buffer, "attribute note shares memory with buffer kept"),
        (_listed, r"tensor held\[0\] shares memory with parameter b.weight"),
    ]
    for make, message in refused[: 7 if on_meta else None]:
        with torch.device("meta" if on_meta else "cpu"):
            model = Two()
            make(model)
        with pytest.raises(CaptureError, match=message + r"(.|\n)*try: "):
            capture(model, (torch.randn(2, 4),), {})


def test_what_does_not_overlap_or_change_is_not_refused() -> None:
    model = Two()
    flat = torch.randn(4, 8)
    model.a.weight, model.b.weight = nn.Parameter(flat[:, ::2]), nn.Parameter(flat[:, 1::2])
    model.kept = torch.zeros(16)[::2]
    model.part, model.note, model.held = model.kept[2:], model.kept, [model.kept[1:]]
    capture(model, (torch.randn(2, 4),), {})
    model.b.weight = model.a.weight  # tied, as torch does it
    assert capture(model, (torch.randn(2, 4),), {}).aliases == {"a.weight": ("b.weight",), "kept": ("note",)}
    _data(model)
    model.requires_grad_(False)
    capture(model, (torch.randn(2, 4),), {})
