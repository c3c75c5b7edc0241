from __future__ import annotations

import torch

from passes.canonicalize.permutes import DropUnitDims, MatmulToContract
from passes.ir.graph_pass import GraphPass, run_passes
from passes.ir.joint import JointGraph
from tests.canonicalize.graphs import applied, ramp, text


def test_a_permute_that_moves_only_units_is_a_reshape() -> None:
    after = applied(DropUnitDims(), lambda x: x.permute(1, 0, 2), ramp(1, 2, 3))
    assert text(after) == ["reshape(x0, [2, 3]) -> [2, 3]", "reshape(reshape, [2, 1, 3]) -> [2, 1, 3]"]


def test_units_are_taken_out_of_a_permute() -> None:
    after = applied(DropUnitDims(), lambda x: x.permute(2, 0, 1), ramp(1, 2, 3))
    assert "permute(reshape, [1, 0]) -> [3, 2]" in text(after)


def test_a_permute_among_permutes_that_keeps_its_units_in_place_stays() -> None:
    after = applied(DropUnitDims(), lambda x: x.permute(0, 2, 1).exp(), ramp(1, 2, 3))
    assert text(after) == ["permute(x0, [0, 2, 1]) -> [1, 3, 2]", "exp(permute) -> [1, 3, 2]"]


def test_a_batch_of_one_is_no_batch() -> None:
    class Both(GraphPass):
        def __call__(self, joint: JointGraph) -> JointGraph:
            return run_passes(joint, [MatmulToContract(), DropUnitDims()])

    after = applied(Both(), torch.bmm, ramp(1, 2, 3), ramp(1, 3, 4))
    assert "contract(reshape, reshape_1, m k, k n -> m n) -> [2, 4]" in text(after)
    assert text(after)[-1] == "reshape(contract, [1, 2, 4]) -> [1, 2, 4]"
