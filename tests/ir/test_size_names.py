"""Which dims of a call's tensors a name is of."""

from __future__ import annotations

import pytest

from cost_model.errors import ShardingError
from passes.ir.size_names import named_dims, resized_shapes

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("shapes", "sizes", "wanted"),
    [
        ([(4, 16), (4, 16)], {"batch": 8, "sequence": 32}, [(8, 32), (8, 32)]),  # tokens, labels
        ([(4, 16, 64), ()], {"sequence": 7}, [(4, 7, 64), ()]),  # features, a number
        ([(4, 16), (16, 16)], {"sequence": 5}, [(4, 5), (5, 5)]),  # a mask of all samples
        ([(4, 16), (4, 1, 16, 16)], {"sequence": 5, "batch": 1}, [(1, 5), (1, 1, 5, 5)]),
        ([(4, 16), (4,)], {"batch": 3, "sequence": 2}, [(3, 2), (3,)]),  # a class each
        ([(16, 16)], {"sequence": 2}, [(16, 2)]),
        (
            [(2, 3, 8, 8), (2, 8, 8)],
            {"height": 6},
            [(2, 3, 6, 8), (2, 6, 8)],
        ),  # an image, a class of each pixel
        ([(2, 3, 8, 8), (2,)], {"width": 4, "batch": 0}, [(0, 3, 8, 4), (0,)]),
        ([(), (4, 16), (6, 9)], {"batch": 5}, [(), (5, 16), (6, 9)]),
    ],
    ids=str,
)
def test_a_name_is_of_the_dims_that_are_one_size(
    shapes: list[Shape], sizes: dict[str, int], wanted: list[Shape]
) -> None:
    assert resized_shapes(shapes, sizes) == tuple(wanted)


def test_no_dim_has_two_names() -> None:
    for shapes in [[(4, 4), (4, 4)], [(2, 2, 2, 2), (2, 2)], [(8,), (8, 8)]]:
        dims = [dim for known in named_dims(shapes).values() for dim in known]
        assert len(dims) == len(set(dims))


def test_what_no_tensor_has_is_an_error() -> None:
    with pytest.raises(ShardingError, match=r"name 'height'.*\n  try: 'batch' or 'sequence'"):
        resized_shapes([(4, 16)], {"height": 3})
    with pytest.raises(ShardingError, match="a name in sizes is 'rows'"):
        resized_shapes([(4, 16)], {"rows": 3})
    with pytest.raises(ShardingError, match="the size of 'batch' is"):
        resized_shapes([(4, 16)], {"batch": -1})
