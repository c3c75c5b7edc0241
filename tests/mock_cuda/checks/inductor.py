"""Check: graphs of rank 0 compile through Inductor for the device, run, and give what their fakes say.

python -m tests.mock_cuda.checks.inductor FAMILY...
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, fx

from passes.compile.compile_graph import compile_graph
from tests.mock_cuda.checks.families import example
from tests.mock_cuda.checks.graphs import differences, fake_mesh, real
from tests.mock_cuda.checks.rank_phases import rank_phases
from tests.mock_cuda.checks.report import Report


def check(module: fx.GraphModule) -> list[str]:
    """What is wrong with the results of one compiled phase."""
    call = compile_graph(module, "inductor")
    fakes = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    results = call([real(fake) for fake in fakes])
    nodes = next(iter(reversed(module.graph.nodes))).args[0]
    assert isinstance(nodes, (tuple, list))
    return [
        f"result {node.name}: {text}"
        for node, value in zip(nodes, results, strict=True)
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)
        for text in differences(value, node.meta["val"])
    ]


def main() -> None:
    report, mesh = Report(), fake_mesh()
    major, minor = torch.cuda.get_device_capability()
    for case in sys.argv[1:]:
        family, kind = case.split(":")
        with report.case(f"{family} {kind} compute capability {major}.{minor}"):
            phases = rank_phases(example(family, kind), mesh, (0,))
            wrong = [f"{name}: {text}" for name, module in phases.items() for text in check(module)]
            assert not wrong, "\n".join(wrong[:12])
    report.exit()


if __name__ == "__main__":
    main()
