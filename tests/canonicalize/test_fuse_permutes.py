from __future__ import annotations

from passes.canonicalize.permutes import FusePermutes
from tests.canonicalize.graphs import applied, ramp, text


def test_permutes_compose() -> None:
    after = applied(FusePermutes(), lambda x: x.permute(1, 2, 0).permute(0, 2, 1), ramp(2, 3, 4))
    assert text(after) == ["permute(x0, [1, 0, 2]) -> [3, 2, 4]"]


def test_a_permute_and_its_inverse_vanish() -> None:
    after = applied(FusePermutes(), lambda x: x.permute(1, 2, 0).permute(2, 0, 1).exp(), ramp(2, 3, 4))
    assert text(after) == ["exp(x0) -> [2, 3, 4]"]
