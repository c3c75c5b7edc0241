"""Layouts against torch.chunk and hand arithmetic."""

import itertools

import pytest
import torch

from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout, chunk_sizes, nested_sizes


@pytest.mark.parametrize("length", [0, 1, 2, 5, 7, 32, 97])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_chunk_sizes_are_torch_chunks(length: int, parts: int) -> None:
    expected = [len(c) for c in torch.arange(length).chunk(parts)] if length else []
    sizes = chunk_sizes(length, parts)
    assert [s for s in sizes if s] == [e for e in expected if e]
    assert len(sizes) == parts


def test_thirty_two_over_three() -> None:
    assert chunk_sizes(32, 3) == (11, 11, 10)


def test_nested_sizes_chunk_every_part() -> None:
    assert nested_sizes(10, (3, 2)) == (2, 2, 2, 2, 1, 1)
    assert nested_sizes(64, (3,), unit=16) == (32, 32, 0)


def test_intervals_tile_the_dim() -> None:
    mesh = MeshSpec({"dp": 2, "tp": 3})
    layout = Layout((("tp", "dp"), ()))
    shape = (11, 4)
    spans = {layout.interval(shape, mesh, 0, rank) for rank in range(6)}
    covered = list(itertools.chain.from_iterable(range(lo, hi) for lo, hi in sorted(spans)))
    assert covered == list(range(11))
    # tp is major: chunks of 4, 4, 3, each halved over dp. Rank 4 is dp=1, tp=1: the second half of [4, 8).
    assert layout.interval(shape, mesh, 0, 4) == (6, 8)


def test_default_sizes_are_normalised_away() -> None:
    mesh = MeshSpec({"tp": 3})
    assert Layout.of((32,), mesh, [("tp",)], sizes=[(11, 11, 10)]) == Layout((("tp",),))
    assert Layout.of((32,), mesh, [("tp",)], sizes=[(10, 11, 11)]).sizes == ((10, 11, 11),)


def test_text_form() -> None:
    mesh = MeshSpec({"sp": 3, "tp": 2})
    layout = Layout.of((97, 8), mesh, [("sp",), ()], [("tp", "sum")], [(33, 33, 31), None])
    assert layout.format((97, 8), "f32") == "f32[97@sp, 8]+tp:sum"
    uneven = Layout.of((97, 8), mesh, [("sp",), ()], (), [(31, 33, 33), None])
    assert uneven.format((97, 8), "f32") == "f32[97@sp{31,33,33}, 8]"


def test_mesh_groups_are_row_major() -> None:
    mesh = MeshSpec({"dp": 2, "tp": 4})
    assert mesh.group(5, ("tp",)) == (4, 5, 6, 7)
    assert mesh.group(5, ("dp",)) == (1, 5)
    assert mesh.group(0, ("tp", "dp")) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert mesh.linear_index(6, ("tp", "dp")) == 5


def test_unknown_axis_is_named() -> None:
    with pytest.raises(ShardingError, match="no axis 'pp'\n  try: one of its axes, 'dp', 'tp'"):
        MeshSpec({"dp": 2, "tp": 4}).size("pp")
