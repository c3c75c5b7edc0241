"""Run every case of the table on a CUDA device: host code of torch checks its arguments, and, on a real GPU, numbers.

    python -m tests.attention.run_cases            # on a GPU
    with-mock-cuda VENV python -m tests.attention.run_cases

Each expanded graph is run node by node; every result must look as its fake. Where kernels really compute (a real GPU),
results are compared with plain math in float64. The exit status is the number of cases that failed.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.compile.bind_device import expand_ops
from passes.ops.attention_choice import AttentionCall, chip_of, math_backward, math_forward
from tests.attention.graphs import MASKS, Call, graph_of, kernels_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 5e-3, torch.float64: 1e-9}


def cases() -> Iterator[Call]:
    for dtype, mask, d, (s, t) in itertools.product(
        DTYPES, MASKS, (64, 20, 72, 200, 256, 288), ((64, 64), (50, 77))
    ):
        for causal in (False, True) if mask == "none" else (False,):
            yield Call(dtype, mask, causal, d, s=s, t=t)
    for dtype, order, d in itertools.product(DTYPES, ("bhsd", "sliced", "turned"), (64, 20)):
        yield Call(dtype, d=d, s=50, t=77, order=order)  # type: ignore[arg-type]
    for dtype in DTYPES:
        yield Call(dtype, d=64, e=32)
        yield Call(dtype, "row", s=50, t=1)
        yield Call(dtype, s=1, t=1, causal=True)
        yield Call(dtype, b=70000, h=1, s=1, t=2, d=8)


class _Checked(fx.Interpreter):
    """Every tensor must look as its node's fake says."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        fake = n.meta.get("val")
        if isinstance(result, Tensor) and isinstance(fake, Tensor):
            looks = [
                (
                    tuple(x.shape),
                    [k for size, k in zip(x.shape, x.stride(), strict=True) if size > 1],
                    x.dtype,
                    x.device,
                )
                for x in (result, fake)
            ]
            assert looks[0] == looks[1], f"{n.format_node()}: {looks[0]}, and its fake {looks[1]}"
        return result


def run(call: Call, device: torch.device, computes: bool) -> tuple[str, ...]:
    """The kernels that ran. AssertionError or torch's own error where something is wrong."""
    module = expand_ops(graph_of(call, str(device)))
    operands = [_real(n) for n in module.graph.nodes if n.op == "placeholder"]
    results: Sequence[Tensor] = _Checked(module).run(*operands)
    torch.cuda.synchronize()
    if computes:
        _compare(call, operands, results)
    return kernels_of(module)


def _real(node: fx.Node) -> Tensor:
    """Random numbers where the fake is, laid out and started as it is. A mask hides a whole row."""
    fake: Tensor = node.meta["val"]
    span = sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True)) + 1
    base = torch.randn(fake.storage_offset() + span, device=fake.device)
    base = base > -1 if fake.dtype == torch.bool else base.to(fake.dtype)
    value = base.as_strided(fake.shape, fake.stride(), fake.storage_offset())
    if node.name == "mask" and fake.shape[2] > 1:
        value[:, :, 1] = False if fake.dtype == torch.bool else -torch.inf
    return value


def _compare(call: Call, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    q, k, v, *masks, grad = operands
    mask = masks[0].expand(-1, -1, -1, call.t) if masks else None
    wide = [x.double() for x in (q, k, v)]
    mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    problem = AttentionCall(*wide, mask, call.causal, 0.125)
    out, lse = math_forward(problem)
    wanted = (out, *math_backward(problem, grad.double(), out, lse))
    for name, a, b in zip(("out", "gq", "gk", "gv"), results, wanted, strict=True):
        scale = float(b.abs().max())
        error = float((a.double() - b).abs().max()) / max(scale, 1.0)
        assert error <= TOLERANCE[call.dtype], f"{name} is off by {error:.2e} of its largest value"


def main() -> int:
    device = torch.device("cuda", 0)
    computes = float(torch.ones(4, device=device).sum()) == 4.0  # an imitation's kernels do nothing
    print(
        f"{torch.cuda.get_device_name(0)}, {chip_of(device)}, torch {torch.__version__}, compares: {computes}"
    )
    ran, failed = Counter[tuple[str, ...]](), 0
    for call in cases():
        try:
            ran[run(call, device, computes)] += 1
        except Exception as error:
            failed += 1
            print(f"FAILED {call}: {type(error).__name__}: {str(error)[:400]}")
    for kernels, count in sorted(ran.items()):
        print(f"{count:4} x {', '.join(kernels)}")
    print(f"{sum(ran.values())} cases ran, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 125))
