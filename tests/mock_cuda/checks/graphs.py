"""Check: the graphs of ranks 0 and 3 on a (2, 2) mesh, run node by node on the device, give what their fakes say.

python -m tests.mock_cuda.checks.graphs [--fakes] FAMILY[:KIND]...

`--fakes` needs no CUDA: torch's fake kernels run in place of the device's.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes.compile.bind_device import expand_ops
from passes.compile.compile_graph import name_collectives
from passes.compile.fuse_eager import FuseEager
from passes.ir.op_traits import is_collective
from passes.ops.attention_table import Chip
from tests.mock_cuda.checks.families import FAMILIES, KINDS, example
from tests.mock_cuda.checks.rank_phases import rank_phases
from tests.mock_cuda.checks.report import Report

__all__ = ["differences", "fake_mesh", "real"]

DEVICE = torch.device("cuda", 0)
FAKE_CHIP = Chip((9, 0), cudnn=91900)


def fake_mesh(device_type: str = "cuda") -> DeviceMesh:
    """(2, 2), without the other ranks."""
    if device_type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    return init_device_mesh(device_type, (2, 2), mesh_dim_names=("dp", "tp"))


def real(fake: Tensor) -> Tensor:
    """Memory for a fake, poison in it."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def differences(value: Any, fake: Any) -> list[str]:
    """How a value differs from its fake. Strides count where a dim has more than one element."""
    if not isinstance(value, Tensor) or not isinstance(fake, Tensor):
        return (
            []
            if isinstance(value, Tensor) == isinstance(fake, Tensor)
            else [f"{type(value)} for {type(fake)}"]
        )
    found = [
        f"{name} {got} where the fake has {expected}"
        for name, got, expected in (
            ("shape", tuple(value.shape), tuple(fake.shape)),
            ("dtype", value.dtype, fake.dtype),
            ("device", value.device, fake.device),
        )
        if got != expected
    ]
    strides = [
        (v, f) for v, f, size in zip(value.stride(), fake.stride(), fake.shape, strict=True) if size > 1
    ]
    if not found and fake.numel() and any(v != f for v, f in strides):
        found.append(
            f"strides {value.stride()} where the fake has {fake.stride()}, shape {tuple(fake.shape)}"
        )
    return found


class CheckedRun(fx.Interpreter):
    """Runs a graph; `problems` says which nodes gave something else than their fakes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.problems: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        found = differences(value, n.meta["val"]) if n.op == "call_function" and "val" in n.meta else []
        if is_collective(n) and "wait" not in str(n.target):
            operands = n.args[0] if isinstance(n.args[0], list) else [n.args[0]]
            found += ["operand not contiguous" for o in operands if not self.env[o].is_contiguous()]
        self.problems += [f"{n.name} = {n.target}: {text}" for text in found]
        return value


def strangers(module: fx.GraphModule) -> list[str]:
    """Nodes that are for a CPU: its kernels, or tensors made there."""
    return [
        f"{node.name} = {node.target}"
        for node in module.graph.nodes
        if node.op == "call_function"
        and (
            "for_cpu" in str(node.target)
            or "mkldnn" in str(node.target)
            or str(node.kwargs.get("device")) == "cpu"
        )
    ]


def check(module: fx.GraphModule, chip: Chip | None) -> list[str]:
    """What is wrong with one rank's phase. chip: that of the device; given, fakes run and no device."""
    expanded = FuseEager()(name_collectives(expand_ops(module, chip)))
    run = CheckedRun(expanded)
    fakes = [node.meta["val"] for node in expanded.graph.nodes if node.op == "placeholder"]
    wrong = [f"input on {fake.device}" for fake in fakes if fake.device != DEVICE]
    with torch.no_grad(), fakes[0].fake_mode if chip else nullcontext():
        run.run(*(fakes if chip else map(real, fakes)))
    return wrong + strangers(expanded) + run.problems


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fakes", action="store_true")
    parser.add_argument("families", nargs="*", default=tuple(FAMILIES))
    arguments = parser.parse_args()
    report, mesh = Report(), fake_mesh("cpu" if arguments.fakes else "cuda")
    for name in arguments.families:
        family, _, one_kind = name.partition(":")
        for kind in [one_kind] if one_kind else KINDS:
            with report.case(f"{family} {kind}"):
                phases = rank_phases(example(family, kind), mesh, (0, 3))
                chip = FAKE_CHIP if arguments.fakes else None
                wrong = [
                    f"{phase}: {text}" for phase, module in phases.items() for text in check(module, chip)
                ]
                assert not wrong, "\n".join(wrong[:12])
    report.exit()


if __name__ == "__main__":
    main()
