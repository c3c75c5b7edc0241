"""Private torch APIs are used in a few modules of passes/ir, and nowhere else."""

from __future__ import annotations

import pytest

from tests.structure.private_torch import private_torch_uses
from tests.structure.source_tree import PACKAGES, modules, relative

NAMES = ("compat", "dispatch", "dtensor", "inductor", "sizes", "tracing")
HOMES = tuple(f"passes/ir/torch_{name}.py" for name in NAMES)


def test_private_torch_apis_are_used_at_home_only() -> None:
    found = [
        f"{relative(path)}:{line}: {name}"
        for path in modules(*PACKAGES, "examples", "benchmarks")
        if relative(path) not in HOMES
        for line, name in private_torch_uses(path.read_text())
    ]
    assert not found, f"wrap these in a named function of {' or '.join(HOMES)}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch\ntorch._C.x()", "torch._C"),
        (
            "from torch._inductor.compile_fx import compile_fx_inner",
            "torch._inductor.compile_fx.compile_fx_inner",
        ),
        ("from torch import _decomp", "torch._decomp"),
        (
            "import torch.distributed as dist\ndist._functional_collectives",
            "torch.distributed._functional_collectives",
        ),
        ("from torch import fx\nfx._symbolic_trace.f", "torch.fx._symbolic_trace"),
        ("def f():\n    import torch.fx._x", "torch.fx._x"),
        ("import torch\ntorch.compiler._is_compiling_flag = True", "torch.compiler._is_compiling_flag"),
    ],
)
def test_a_private_use_is_found(source: str, name: str) -> None:
    assert name in [found for _, found in private_torch_uses(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops._c10d_functional.all_reduce.default",
        "from torch.utils import _pytree as pytree\npytree.tree_map(f, x)",
        "import torch\ntorch.__version__",
        "from torch import fx\nfx.Node",
        "self._torch._x",
        "import torch.fx\nnode._private",
    ],
)
def test_a_public_use_is_not(source: str) -> None:
    assert private_torch_uses(source) == []
