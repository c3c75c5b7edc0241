"""A program in symbols is, at any sizes that it is for, what lowering those gives, node by node."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from autoshard.plan.plan_fits import runnable
from autoshard.planning import canonical_capture, find_plan
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.sized_code import Lowered, SizedPhases
from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.size_names import SizeNames
from passes.ir.sized_graph import SizedJoint, same_nodes
from passes.ir.torch_sizes import SizeSymbols, evaluation, symbolic_sizes
from passes.lower.rank_program import RankProgram, rank_program
from tests.profiles import slow_compute
from tests.runtime.test_sized_calls import batch, made

MESH = MeshSpec({"dp": 2})
SIZES = [(8, 6), (4, 9), (12, 7), (6, 32), (7, 5), (5, 12), (3, 6), (2, 7)]


@pytest.mark.parametrize(
    ("constraints", "hint", "holds_for"),
    [
        ({"*": [Replicate()]}, (4, 9), 4),
        pytest.param({"*": [Replicate()]}, (5, 12), 2, marks=pytest.mark.slow),
        pytest.param({"*": [Shard(0)]}, (4, 9), 4, marks=pytest.mark.slow),
        pytest.param({"*": [Shard(0)]}, (7, 5), 2, marks=pytest.mark.slow),
    ],
)
def test_a_program_in_symbols_is_what_lowering_gives(
    constraints: Any, hint: tuple[int, int], holds_for: int
) -> None:
    """holds_for: how many of the sizes at least, on each rank."""
    model = made("Attending")
    plan = find_plan(
        model, MESH, (batch((8, 6)),), profile=slow_compute(), backend="eager", constraints=constraints
    )
    names = SizeNames.of([(8, 6)], [(4, 9)])
    symbolic = names.symbolic((4, 9))
    captured = canonical_capture(model, (batch((4, 9)),), {}, sizes=symbolic)
    joint = SizedJoint(symbolic.symbols, names.count, captured.joint)

    def lowered(graph: Any, rank: int) -> RankProgram:
        with runnable(plan):
            ((whole, planned),) = plan.of_pieces(graph)
            program = rank_program(whole, planned, MESH, rank, simulated_groups(MESH)).joined()
            _ = program.phases
        return program

    for rank in range(MESH.device_count):
        with symbolic_sizes():
            symbols = SizeSymbols(hint)
            program = lowered(joint.at(hint, symbols), rank)
            code = SizedPhases(Lowered([program], 1, CallEnds((), ())), symbols)
        evaluate = evaluation(2, code.holds, code.codes)
        assert evaluate(hint) is not None
        known = [size for size in SIZES if evaluate(size) is not None]
        assert len(known) >= holds_for, (rank, known)
        for size in known:
            found, wanted = code.graphs(evaluate(size) or [])[0], lowered(joint.at(size), rank).phases
            assert found.backward is not None and wanted.backward is not None
            assert same_nodes(found.forward.graph, wanted.forward.graph), size
            assert same_nodes(found.backward.module.graph, wanted.backward.module.graph), size
