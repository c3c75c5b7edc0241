"""The role of each transfer, by hand; most cases are those that prices, turns and a rank's order once told apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph, ops_by_phase, segments, tensor_operands
from passes.ir.op_traits import is_collect
from passes.micro_batches.cut_batch import cut_batch
from passes.plan.transfers import PhaseRoles, TransferRole, hidden_reads
from passes.schedule.overlap import Overlap
from tests.schedule.by_hand import Script, order
from tests.schedule.planned import joint_of

Reads = dict[str, TransferRole]


def roles_of(joint: JointGraph, phase: int) -> Reads:
    """ "reader operand" -> role, of all reads by the ops of a phase."""
    ops = ops_by_phase(joint)[phase]
    roles = PhaseRoles(ops)
    return {f"{n.name} {operand.name}": roles.of(n, operand) for n in ops for operand in tensor_operands(n)}


def hiding(joint: JointGraph) -> set[str]:
    """ "reader operand" of the ops' reads that prices let hide."""
    reads = hidden_reads(joint).hides
    nodes = {n.name: n for n in joint.graph.nodes}
    return {f"{name} {tensor_operands(nodes[name])[i].name}" for name, i in reads if name != "output"}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)) * mask)


@pytest.fixture(scope="module")
def masked() -> JointGraph:
    return joint_of(Masked(), torch.randn(3, 4, requires_grad=True), torch.randn(3, 4))


def test_the_forward_by_hand(masked: JointGraph) -> None:
    assert roles_of(masked, 0) == {
        "contract args_0": "at hand",
        "contract one_weight": "at hand",
        "add contract": "awaited",
        "add one_bias": "at hand",
        "relu add": "awaited",
        "mul relu": "awaited",
        "mul args_1": "at hand",
        "contract_1 mul": "awaited",
        "contract_1 two_weight": "at hand",
        "add_1 contract_1": "ending",
        "add_1 two_bias": "at hand",  # and ending: `add_1` reads it beside what is not at hand
    }


def test_the_backward_by_hand(masked: JointGraph) -> None:
    roles = roles_of(masked, 1)
    assert {read for read, role in roles.items() if role == "awaited"} == {
        "mul_1 contract_2",
        "threshold_backward mul_1",
        "use_1 threshold_backward",
        "contract_4 use_1",
        "contract_5 use_1",
        "sum_2 use_1",  # a reduction takes time of its own
    }
    assert roles["sum_1 use"] == "at hand" and "ending" not in roles.values()


def test_a_gradient_at_hand_is_ending(masked: JointGraph) -> None:
    """The last layer's bias's: nobody needs it early."""
    ops = ops_by_phase(masked)[1]
    roles = PhaseRoles(ops)
    gradient = next(n for n in ops if n.name == "sum_1")
    assert roles.given(gradient) and roles.of(masked.output_node, gradient) == "ending"


def test_what_the_caller_gives_hides_only_behind_a_product(masked: JointGraph) -> None:
    """The mask is read behind the first product. Nothing is computed before the input and the tangent are read."""
    found = hiding(masked)
    assert {"mul args_1", "contract one_weight", "contract_5 args_0"} <= found
    assert not {"contract args_0", "use tangent_0", "contract_2 use", "contract_3 use", "sum_1 use"} & found


def test_the_caller_waits_for_outputs(masked: JointGraph) -> None:
    assert "add_1 contract_1" not in hiding(masked)
    places = [i for i, end in enumerate(masked.outputs) if end.kind == "grad"]
    assert {place for name, place in hidden_reads(masked).hides if name == "output"} == set(places)


class Merged(nn.Module):
    """A product of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ torch.tanh(self.a @ self.b)) @ self.a


def test_a_product_of_parameters_is_awaited() -> None:
    joint = joint_of(Merged(), torch.randn(3, 4))
    roles = roles_of(joint, 0)
    assert roles["tanh contract"] == "awaited" and "tanh contract" not in hiding(joint)


class Tied(nn.Module):
    """A weight that is used twice: its gradient is a sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight) @ self.weight


def test_parts_of_a_gradient_are_ending() -> None:
    joint = joint_of(Tied(), torch.randn(3, 4))
    (total,) = [n for n in ops_by_phase(joint)[1] if "add" in n.name]
    reads = {f"{total.name} {n.name}" for n in tensor_operands(total)}
    roles = roles_of(joint, 1)
    assert len(reads) == 2 and {roles[read] for read in reads} == {"ending"} and reads <= hiding(joint)


def test_what_pieces_add_to_a_gradient_is_ending() -> None:
    """Nothing reads the sum over the pieces in a piece. The last bias's is made of what the caller gives alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    joint = cut_batch(canonical_capture(model, (torch.randn(6, 4),), {}).joint, 2)
    collects = [n for n in joint.graph.nodes if is_collect(n) and n.meta["phase"] == "backward"]
    roles = PhaseRoles(segments(joint).backward)
    assert len(collects) == 4 and {roles.of(n, n.all_input_nodes[0]) for n in collects} == {"ending"}
    hidden = [n for n in collects if (n.name, 0) in hidden_reads(joint).ending]
    assert [n.all_input_nodes[0].name for n in hidden] == ["contract_4", "sum_2", "contract_3"]


def test_what_a_moved_read_brings_is_not_at_hand() -> None:
    s = Script()
    w, x = s.matrix("w"), s.matrix("x")
    s.mm("y", s.relu("view", s.relu("cast", w)), x)
    cast, view, y = ops = [n for n in s.graph.nodes if n.op == "call_function"]
    assert PhaseRoles(ops).of(y, view) == "at hand"
    assert PhaseRoles(ops, {(view, cast)}).of(y, view) == "awaited"


def test_reductions_at_hand_leave_gathers_their_places_in_flight() -> None:
    """Gradients of the last layer's biases, which only the end needs, are no prefetches."""
    s = Script()
    g, h, w, x = (s.matrix(name) for name in "ghwx")
    one, two = s.all_reduce("reduce1", s.relu("r1", g)), s.all_reduce("reduce2", s.relu("r2", h))
    y = s.mm("y", x, x)
    module = s.module(s.mm("z", y, s.all_gather("gather", w)), one, two)
    names = order(Overlap(prefetch=2)(module)).split()
    assert names.index("gather") < names.index("y")
