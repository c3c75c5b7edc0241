"""A fused group by itself computes what its ops do, as often as it is asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture, find_plan
from cost_model.mesh import MeshSpec, simulated_group_axes, simulated_groups
from cost_model.timed import KernelKey, KernelWork
from passes.compile import single_kernel
from passes.compile.compile_graph import compile_graph
from passes.compile.single_kernel import compile_group, kernel_graph, repeated_kernel
from passes.lower.rank_program import rank_program
from passes.predict.step_work import KernelCase, OpCall, Operand, TensorLook, step_work
from tests.profiles import slow_compute

CPU = torch.device("cpu")
ROWS = TensorLook((4, 6), (6, 1), torch.float32)
COLUMN = TensorLook((4, 1), (1, 1), torch.float32)

EXP_OF_DIFFERENCE = (
    OpCall("aten.sub.Tensor", (Operand(0), Operand(1)), {}),
    OpCall("aten.exp.default", (Operand(2),), {}),
    OpCall("aten.sum.dim_IntList", (Operand(3), [1]), {}),
)


def case(*calls: OpCall, looks: tuple[TensorLook, ...], cold: tuple[bool, ...] = ()) -> KernelCase:
    key, work = KernelKey("", ()), KernelWork(0.0, 0.0, "float32")
    held = cold or (False,) * len(looks)
    return KernelCase(key, work, calls, looks, held, 0.0, step_nbytes=2**20, fused=True)


def test_it_computes_what_its_ops_do() -> None:
    one = case(*EXP_OF_DIFFERENCE, looks=(ROWS, COLUMN))
    x, largest = torch.rand(4, 6), torch.rand(4, 1)
    (found,) = compile_graph(kernel_graph(one, CPU), "inductor")([x, largest])
    torch.testing.assert_close(found, torch.exp(x - largest).sum(1))


class Noted:
    """A compiled program that notes its inputs."""

    def __init__(self) -> None:
        self.inputs: list[list[int]] = []
        self.compiled: list[str] = []

    def compile(self, module: torch.fx.GraphModule, backend: str) -> object:
        self.compiled.append(backend)

        def program(inputs: list[torch.Tensor]) -> tuple[torch.Tensor]:
            self.inputs.append([value.data_ptr() for value in inputs])
            return (torch.empty(2**16),)

        return program


def test_every_call_runs_the_program_once_and_reads_what_is_cold_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Noted()
    monkeypatch.setattr(single_kernel, "compile_graph", noted.compile)
    wide = TensorLook((2**16,), (1,), torch.float32)
    one = case(
        OpCall("aten.add.Tensor", (Operand(0), Operand(1)), {}), looks=(wide, wide), cold=(True, False)
    )
    repeated_kernel(one, 3, CPU, "some")()
    assert noted.compiled == ["some"]
    assert len(noted.inputs) == 3
    cold, hot = zip(*noted.inputs, strict=True)
    assert len(set(cold)) == 3 and len(set(hot)) == 1


def test_what_the_compiler_refuses_is_refused_before_it_is_timed() -> None:
    with pytest.raises(Exception, match="broadcast"):
        repeated_kernel(
            case(
                OpCall("aten.add.Tensor", (Operand(0), Operand(1)), {}),
                looks=(ROWS, TensorLook((5,), (1,), torch.float32)),
            ),
            1,
            CPU,
            "inductor",
        )


def test_groups_of_a_program_can_be_built() -> None:
    """Creations, casts, views and reductions included: what a group stores looks as in the program."""
    mesh = MeshSpec({"x": 2})
    model = nn.Sequential(
        nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)
    )
    inputs = (torch.randint(32, (4, 8)),)
    plan = find_plan(model, mesh, inputs, profile=slow_compute(), backend="inductor")
    joint = canonical_capture(model, inputs, {}).joint
    phases = rank_program(joint, plan.planned, mesh, 0, simulated_groups(mesh)).usual()
    work = step_work(phases, prices_of(slow_compute(), mesh, "inductor"), simulated_group_axes)
    groups = [one for one in work.kernels if one.fused]
    assert len(groups) > 8
    for one in groups:
        assert kernel_graph(one, CPU).graph.output_node().args[0]
    compile_group(max(groups, key=lambda one: len(one.calls)), CPU, "inductor")
