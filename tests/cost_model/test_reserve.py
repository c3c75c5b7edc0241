"""What CUDA's context and the communicators take of a device, by hand."""

from __future__ import annotations

import pytest

from cost_model.memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    NETWORK_BYTES,
    PAIR_BYTES,
    PEER_BYTES,
    communicators,
    reserve_bytes,
)
from cost_model.mesh import MeshSpec

CUBE = MeshSpec({"a": 2, "b": 4, "c": 8}, device_type="cuda")


@pytest.mark.parametrize(
    ("axes", "used", "wanted"),
    [
        ({"x": 8}, [("x",)], [("x",)]),
        ({"x": 1}, [], []),
        # An axis of one rank is none: these three name the same ranks.
        ({"a": 1, "b": 4}, [("b",), ("a", "b")], [("b",)]),
        ({"a": 2, "b": 4}, [], [("a", "b"), ("a",), ("b",)]),
        ({"a": 2, "b": 4}, [("a", "b"), ("b",)], [("a", "b"), ("a",), ("b",)]),
        ({"a": 2, "b": 1, "c": 4}, [("a", "b"), ("b", "c")], [("a", "c"), ("a",), ("c",)]),
    ],
)
def test_communicators(
    axes: dict[str, int], used: list[tuple[str, ...]], wanted: list[tuple[str, ...]]
) -> None:
    assert communicators(MeshSpec(axes, device_type="cuda"), used) == tuple(wanted)
    assert communicators(MeshSpec(axes), used) == ()


def test_seven_on_three_axes_in_one_order() -> None:
    pairs = [("b", "c"), ("a", "c"), ("a", "b")]
    seven = (("a", "b", "c"), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"))
    assert communicators(CUBE, pairs) == seven == communicators(CUBE, pairs[::-1])
    assert communicators(CUBE, [("c", "b")])[4:] == (("b", "c"),)


def test_bytes() -> None:
    pair = MeshSpec({"x": 2}, device_type="cuda")
    assert reserve_bytes(MeshSpec({"x": 8})) == 0
    assert reserve_bytes(MeshSpec({"x": 1}, device_type="cuda")) == CONTEXT_BYTES
    assert reserve_bytes(pair) == CONTEXT_BYTES + PAIR_BYTES
    every_plan = CONTEXT_BYTES + PAIR_BYTES + 3 * COMMUNICATOR_BYTES
    assert reserve_bytes(CUBE) == every_plan
    # Messages to one, to seven over NVLink, and to more, the others over one buffer of the network.
    assert reserve_bytes(pair, {("x",): 1}) == CONTEXT_BYTES + PAIR_BYTES + PEER_BYTES
    assert reserve_bytes(CUBE, {("c",): 7}) == every_plan + 7 * PEER_BYTES
    many = every_plan + COMMUNICATOR_BYTES + 7 * PEER_BYTES + NETWORK_BYTES
    assert reserve_bytes(CUBE, {("b", "c"): 31, ("a",): 0}) == many


def test_ranks_of_other_machines_are_out_of_reach() -> None:
    """Eight ranks a machine: those along "b" are 8 apart, those along "a" 32."""
    every_plan = reserve_bytes(CUBE)
    assert reserve_bytes(CUBE, {("b",): 3}) == every_plan + NETWORK_BYTES
    assert reserve_bytes(CUBE, {("a",): 1}) == every_plan + NETWORK_BYTES
    # Of ranks 0, 4, 8, 12 the first two are of one machine.
    halves = MeshSpec({"host": 4, "gpu": 4}, device_type="cuda")
    known = reserve_bytes(halves)
    assert reserve_bytes(halves, {("host",): 3}) == known + PEER_BYTES + NETWORK_BYTES
    assert reserve_bytes(halves, {("gpu",): 3}) == known + 3 * PEER_BYTES
