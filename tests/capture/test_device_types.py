"""One graph for every device: what a model is traced to depends on the mesh's device type, not on where that is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoshard import MeshSpec, PlanError, ShardingError, find_plan, verify
from autoshard.planning import canonical_capture
from passes.capture.device_view import CUDNN_LAYERS, POLICIES
from passes.compile.bind_device import bind_device
from passes.ir.torch_dispatch import is_autocast_op
from passes.plan.describe import graph_hash
from tests.capture.device_cases import CASES, Applied, case

CUDA = torch.device("cuda")


def traced(model: nn.Module, x: Tensor, device: torch.device | None = None) -> fx.Graph:
    return canonical_capture(model, (x,), {}, device=device).joint.graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_the_same_from_the_cpu_and_from_meta_for_every_device(
    name: str, dtype: torch.dtype
) -> None:
    model, x = case(name).to(dtype), torch.randn(2, 4, 8, dtype=dtype)
    on_cpu = canonical_capture(model, (x,), {}).joint
    from_meta = canonical_capture(model.to("meta"), (x.to("meta"),), {}, device=CUDA).joint
    assert graph_hash(on_cpu) == graph_hash(from_meta)
    # Statistics of half precision are kept in float32 on every device, as GPUs do.
    if name.endswith("_norm") and dtype == torch.bfloat16:
        roots = [n for n in on_cpu.graph.nodes if "sqrt" in str(n.target)]
        assert roots and {n.meta["val"].dtype for n in roots} == {torch.float32}


class Watching(nn.Module):
    """Takes another way on GPUs, and makes tensors wherever its input is, by every means there is."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.mask = torch.ones(8)
        self.note: Any = [].append  # a method in C: its list is outside of what capture puts back

    def forward(self, x: Tensor) -> Tensor:
        self.note((x.device, x.is_cuda, x.is_cpu, self.mix.weight.device.type, torch.cuda.is_available()))
        made = torch.arange(8.0, device=x.device) + torch.zeros(8, device=x.device.type)
        made = made + torch.ones(8).to(x.device) + torch.ones(8).to(x.device.type) + x.new_zeros(8)
        with torch.device(x.device):
            made = made + torch.full((8,), 2.0)
        if x.is_cuda:
            made = made.cuda() * torch.ones(8, device=torch.cuda.current_device()) + torch.ones(8).cuda(0)
        out = self.mix(x) + made + self.mask
        return out.sin() if x.is_cuda else out.cos()


def test_a_model_sees_the_device_of_the_mesh() -> None:
    model, x = Watching(), torch.randn(2, 8)
    on_gpu = {str(n.target) for n in traced(model, x, CUDA).nodes}
    assert "aten.sin.default" in on_gpu and "aten.cos.default" in on_gpu  # the second is the first's gradient
    assert set(model.note.__self__) == {(torch.device("cuda", 0), True, False, "cuda", True)}
    model.note.__self__.clear()
    on_cpu = [
        n for n in traced(model, x).nodes if "aten.cos" in str(n.target) and n.meta["phase"] == "forward"
    ]
    assert on_cpu
    assert set(model.note.__self__) == {(torch.device("cpu"), False, True, "cpu", torch.cuda.is_available())}
    assert torch.ones(1).device.type == "cpu"  # nothing of the view is left


class Cast(nn.Module):
    def __init__(self, device_type: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.device_type, self.dtype = device_type, dtype
        self.up, self.norm, self.scale = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.ones(8))
        self.note: Any = {}.update

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device_type, self.dtype):
            up = self.up(x)
            values = {
                "linear": up,
                "matmul": x @ self.up.weight,
                "einsum": torch.einsum("ab,cb->ac", x, self.up.weight),
                "add": up + up,
                "exp": up.exp(),
                "layer_norm": self.norm(up),
                "softmax": up.softmax(-1),
                "sum": up.sum(),
                "power": up**2,
                "mul": up * self.scale,
                "dot": torch.dot(up[0], self.scale),
                "cross_entropy": F.cross_entropy(up, up.detach().argmax(-1)),
                "norm": up.norm(),
                "attention": F.scaled_dot_product_attention(x[None], x[None], x[None]),
                "double": x.double() @ x.double().T,
            }
            with torch.autocast(self.device_type, enabled=False):
                values["off"] = x @ self.up.weight
        self.note({name: value.dtype for name, value in values.items()})
        return torch.stack([value.float().sum() for value in values.values()]).sum()


HALF = {"linear", "matmul", "einsum", "add", "attention"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_of_gpus_is_in_force_for_a_mesh_of_gpus(dtype: torch.dtype) -> None:
    model = Cast("cuda", dtype)
    graph = traced(model, torch.randn(4, 8), CUDA)
    wanted = {name: dtype if name in HALF else torch.float32 for name in model.note.__self__}
    assert model.note.__self__ == {**wanted, "double": torch.float64}
    # Gradients of what was computed in half precision are products in half precision; weights get float32.
    products = [n for n in graph.nodes if "contract" in str(n.target) and n.meta["phase"] == "backward"]
    assert {n.meta["val"].dtype for n in products} >= {dtype}
    (*_, grad) = graph.output_node().args[0]
    assert grad.meta["val"].dtype == torch.float32


@pytest.mark.parametrize("mesh, autocast", [("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_of_another_device_type_casts_nothing(mesh: str, autocast: str) -> None:
    model = Cast(autocast)
    traced(model, torch.randn(4, 8), torch.device(mesh))
    assert {name: t for name, t in model.note.__self__.items() if t != torch.float32} == {
        "double": torch.float64
    }


def test_autocast_around_the_call_is_seen() -> None:
    model = Applied(nn.Identity(), 8)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        graph = traced(model, torch.randn(4, 8), CUDA)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert torch.bfloat16 in {n.meta["val"].dtype for n in graph.nodes if "contract" in str(n.target)}


def test_what_autocast_refuses_is_refused() -> None:
    class Refused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return F.binary_cross_entropy(x.sigmoid(), torch.zeros_like(x))

    with pytest.raises(Exception, match="unsafe to autocast"):
        traced(Refused(), torch.randn(4, 8), CUDA)


def header_lists() -> dict[str, set[str]]:
    """torch's own lists, of the header that it installs: macro -> "op" or "op.overload"."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text().replace("\\\n", " ")
    found: dict[str, set[str]] = {}
    for macro in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        (body,) = re.findall(rf"^#define AT_FORALL_{macro}\(_\)(.*)$", text, re.MULTILINE)
        names = {".".join(re.split(r"\s*,\s*", entry)) for entry in re.findall(r"_\(([^)]*)\)", body)}
        found[macro] = {
            name for name in names if "imname" not in name
        }  # of named tensors, which capture refuses
    return found


def test_the_lists_are_those_of_torch() -> None:
    ours: dict[str, set[str]] = {}
    for name, policy in POLICIES.items():
        if name not in CUDNN_LAYERS and is_autocast_op(name):
            ours.setdefault(policy.__name__, set()).add(name)
    theirs = header_lists()
    assert ours["_lower"] == theirs["LOWER_PRECISION_FP"]
    assert ours["_full"] == theirs["FP32"]
    assert ours["_full_result"] == theirs["FP32_SET_OPT_DTYPE"]
    assert ours["_widest"] == theirs["PROMOTE"]


def test_a_plan_for_gpus_is_made_without_one_and_knows_autocast() -> None:
    x = torch.randn(64, 8)
    mesh = MeshSpec({"dp": 4}, device_type="cuda")
    plan = find_plan(Cast("cuda"), mesh, (x,), profile="h100")
    assert any(r.results[0].dtype == "bf16" for r in plan.records if r.op == "contract")
    plain = find_plan(Cast("cpu"), mesh, (x,), profile="h100")
    assert not any(result.dtype == "bf16" for r in plain.records for result in r.results)


def test_bound_to_a_device_everything_is_there() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8, device="meta")
    made = graph.call_function(
        torch.ops.aten.full.default, ([4, 8], 1.0), {"dtype": torch.float32, "device": torch.device("cpu")}
    )
    made.meta["val"] = torch.empty(8, 4, device="meta").t()
    two = graph.call_function(torch.ops.aten.max.dim, (x, 0))
    two.meta["val"] = (torch.empty(8, device="meta"), None)
    part = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 1, 4))
    part.meta["val"] = torch.empty(4, 8, device="meta")[1:, 2:5]
    graph.output((made, two, part))
    module = bind_device(fx.GraphModule(torch.nn.Module(), graph), torch.device("cuda", 2))
    assert made.kwargs["device"] == torch.device("cuda", 2)
    value = made.meta["val"]
    assert (value.device, tuple(value.shape), value.stride()) == (torch.device("cuda", 2), (4, 8), (1, 4))
    assert two.meta["val"][0].device == torch.device("cuda", 2) and two.meta["val"][1] is None
    value = part.meta["val"]
    assert (tuple(value.shape), value.stride(), value.storage_offset()) == ((3, 3), (8, 1), 10)
    assert "device(type='cuda', index=2)" in module.code


def test_planned_for_calls_under_autocast_and_verified_without_gpus() -> None:
    torch.manual_seed(0)
    model, x = Applied(nn.LayerNorm(8), 8), torch.randn(16, 8)
    mesh = MeshSpec({"dp": 2}, device_type="cuda")
    plan = find_plan(model, mesh, (x,), profile="h100", autocast=torch.bfloat16)
    assert any(r.results[0].dtype == "bf16" for r in plan.records if r.op == "contract")
    assert verify(model, plan, (x,), autocast=torch.bfloat16).ok
    with pytest.raises(PlanError, match="the computation differs") as raised:
        verify(model, plan, (x,))
    # A product forward, and its weight's gradient.
    assert re.search(r"only in the plan: .*2 contract bf16", str(raised.value))
    assert re.search(r"only here: .*2 contract f32", str(raised.value))
    with pytest.raises(ShardingError, match=r"autocast is torch\.int8"):
        find_plan(model, mesh, (x,), autocast=torch.int8)


def test_a_model_that_takes_another_way_on_gpus_is_verified_by_its_own_graph() -> None:
    torch.manual_seed(0)
    model, x = Watching(), torch.randn(4, 8)
    plan = find_plan(model, MeshSpec({"dp": 2}, device_type="cuda"), (x,), profile="h100")
    assert verify(model, plan, (x,)).ok
    plan = find_plan(model, MeshSpec({"dp": 2}), (x,))
    assert verify(model, plan, (x,)).ok
