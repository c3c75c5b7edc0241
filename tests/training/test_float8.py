"""Layers that multiply in float8: each operand of a product, on each rank, is bit for bit that of one process; weights
in 8 bits. Tests of torchao and peft run where these are installed."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import MeshSpec, Plan, autoshard, find_plan, verify
from autoshard.planning import canonical_capture
from autoshard.runtime.sharding import shard_of
from autoshard.verification.simulated_step import held_values, rank_programs
from cost_model.errors import CaptureError
from passes.simulate import lockstep
from passes.simulate.lockstep import simulate
from passes.simulate.reference import graph_values, reference_inputs
from tests.profiles import slow_compute
from tests.ranks import RankPool
from tests.training.float8_models import Int8Adapted, Layer, Narrow, Scaled, Standing, in_float8
from tests.training.steps import Run, full, train

aten = torch.ops.aten


def differing(model: nn.Module, plan: Plan, x: Tensor) -> dict[str, list[int]]:
    """Per float8 value of the graph, of its numbers on any rank that are not those of one process how many numbers of
    float8 they are apart. Its products find their operands as CUDA wants them, in rows and in columns."""
    joint = canonical_capture(model, (x,), {}).joint
    values = reference_inputs(joint, model, [x], seed=0)
    whole = {name: value for name, value in graph_values(joint, values)[1].items() if _is_float8(value)}
    programs = [program.local for program in rank_programs(joint, plan)[0]]
    named = dict(zip((node.name for node in joint.placeholders), values, strict=True))
    found: dict[str, list[int]] = {}

    def observe(rank: int, node: fx.Node, value: Tensor) -> None:
        if node.target is aten._scaled_mm.default:
            a, b = (operand.meta["val"] for operand in node.all_input_nodes[:2])
            assert a.is_contiguous() and b.t().is_contiguous() and a.shape[1] % 16 == b.shape[1] % 16 == 0
        for name in (
            one for one, local in programs[rank].values.items() if local == node.name and one in whole
        ):
            part = shard_of(whole[name], plan.planned.layouts[name].results[0], plan.mesh, rank)
            here, there = (x.contiguous().view(torch.uint8).int() for x in (value, part))
            found.setdefault(name, []).extend((here - there)[here != there].abs().tolist())

    shards = [list(held.values()) for held in held_values(named, plan, plan.mesh)]
    simulate([program.module for program in programs], shards, plan.mesh, observe=observe)
    return found


def _is_float8(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 1


@pytest.mark.parametrize(
    ("mesh", "by_row"),
    [
        ({"a": 2}, True),
        ({"a": 2, "b": 2}, False),
        pytest.param({"a": 2, "b": 2}, True, marks=pytest.mark.slow),
        pytest.param({"a": 3}, False, marks=pytest.mark.slow),
    ],
)
def test_operands_are_those_of_one_process(mesh: dict[str, int], by_row: bool) -> None:
    model, x = seeded(Layer, by_row), torch.randn(6, 16, 64)
    plan = find_plan(model, MeshSpec(mesh), (x,), profile=slow_compute())
    assert plan.fallbacks == () and splits(plan) >= {"m", "n"}
    found = differing(model, plan, x)
    assert len(found) > 15
    at_most(0 if "k" not in splits(plan) else 8, found)


def at_most(count: int, found: dict[str, list[int]]) -> None:
    """Where the contracted dim is split, a sum is rounded otherwise (by how much at most is tested in tests/rules), and
    what follows may be the next number of float8."""
    apart = [steps for of_one in found.values() for steps in of_one]
    assert len(apart) <= count and set(apart) <= {1}, found


def seeded(kind: type[nn.Module], by_row: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return in_float8(kind(), by_row)


def splits(plan: Plan) -> set[str]:
    layouts = (ways for name, ways in plan.planned.layouts.items() if name.startswith("_scaled_mm"))
    return {split.factor for ways in layouts for split in ways.splits}


def test_contracted_dim() -> None:
    """It is split where sums of 16 numbers move instead of 512 operands."""
    model, x = seeded(Narrow), torch.randn(32, 16)
    plan = find_plan(model, MeshSpec({"a": 2}), (x,), profile=slow_compute())
    assert "k" in splits(plan), plan.explain()
    at_most(8, differing(model, plan, x))


def test_a_scale_that_is_a_ranks_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results' tolerance, of 8 bits, hides it."""
    model, x = seeded(Narrow), torch.randn(32, 16) * torch.linspace(0.7, 1.0, 32)[:, None]
    plan = find_plan(model, MeshSpec({"a": 2}), (x,), profile=slow_compute())
    assert verify(model, plan, (x,)).ok
    reduced = lockstep._reduce
    own = lambda values, op: values[0].clone() if op == "max" else reduced(values, op)
    monkeypatch.setattr(lockstep, "_reduce", own)
    report = verify(model, plan, (x,))
    assert not report.ok and report.max_error < 0.4
    assert report.first_divergence is not None and report.first_divergence.op == "aten._to_copy.default"


def test_weights_are_gathered_in_float8() -> None:
    """By FSDP's layouts, of 8 GPUs: one byte of each number, once its scale is the same on all ranks."""
    with torch.device("meta"):
        model = in_float8(Narrow(4096, 14336))
    x = torch.empty(8, 4096, 4096, device="meta", dtype=torch.bfloat16)
    plan = find_plan(model, MeshSpec({"dp": 8}, device_type="cuda"), (x,), profile="h100")
    numbers = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    moved = [c for c in plan.collectives if c.kind == "all_gather" and c.phase == "forward"]
    assert sum(c.nbytes for c in moved) == pytest.approx(numbers, rel=0.01)
    scales = [c for c in plan.collectives if c.kind == "all_reduce" and c.phase == "forward"]
    assert len(scales) >= 2 and all(c.nbytes <= 8 for c in scales)


STEPS = 4


def example() -> tuple[nn.Module, Tensor]:
    return seeded(Narrow), torch.randn(8, 4, 16)


def on_rank(rank: int, backend: str) -> Run:
    model, x = example()
    autoshard(
        model,
        init_device_mesh("cpu", (2,), mesh_dim_names=("a",)),
        (x,),
        profile=slow_compute(),
        backend=backend,
        tune="first",
    )
    losses = train(model, lambda step: model(x.roll(step, 0)), STEPS, 1e-2)
    return Run(losses, full(model), {"splits": splits(cast(Plan, model.autoshard_plan))})


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training_on_two_ranks(ranks: RankPool, backend: str) -> None:
    model, x = example()
    losses = train(model, lambda step: model(x.roll(step, 0)), STEPS, 1e-2)
    for run in ranks.run(on_rank, backend, world=2):
        assert run.losses == pytest.approx(losses, rel=1e-5)
        assert run.info["splits"]
        for name, value in full(model).items():
            torch.testing.assert_close(run.parameters[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_row", [False, True])
def test_torchs_function_for_scaled_products(by_row: bool) -> None:
    model, x = Scaled(by_row), torch.randn(8, 16)
    plan = find_plan(model, MeshSpec({"a": 2}), (x,), profile=slow_compute())
    assert plan.fallbacks == () and splits(plan)
    assert verify(model, plan, (x,)).max_error < 1e-6


def test_int8_weights_with_adapters() -> None:
    torch.manual_seed(0)
    model, x = Int8Adapted(), torch.randn(8, 32)
    plan = find_plan(model, MeshSpec({"a": 2}), (x,), profile=slow_compute())
    assert plan.fallbacks == () and plan.collectives
    report = verify(model, plan, (x,))
    assert report.max_error < 1e-5 and {"grad down_A", "grad up_B"} <= report.errors.keys()


@pytest.mark.parametrize(
    ("trained", "advice"),
    [(False, "unwrap_tensor_subclass"), (True, "a plain one: .*enable_fsdp_float8_all_gather")],
)
def test_parameters_that_stand_for_others(trained: bool, advice: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(Standing(torch.randn(4, 4)), requires_grad=trained)
    with pytest.raises(CaptureError, match=rf"0.weight is of type Standing, .*: held\n.*{advice}"):
        find_plan(model, MeshSpec({"a": 2}), (torch.randn(2, 4),))


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_of_torchao(recipe: str) -> None:
    """By row its products are in bfloat16, and so are sums where the contracted dim is split."""
    training = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model, x = Layer(), torch.randn(4, 16, 64)
    training.convert_to_float8_training(model, config=training.Float8LinearConfig.from_recipe_name(recipe))
    plan = find_plan(model, MeshSpec({"a": 2, "b": 2}), (x,), profile=slow_compute())
    assert plan.fallbacks == () and splits(plan) >= {"m", "n"}
    if "k" not in splits(plan):
        at_most(0, differing(model, plan, x))
    report = verify(model, plan, (x,))
    assert report.max_error < (1e-6 if recipe == "tensorwise" else 2e-2), str(report)


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear")
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_torchao_with_adapters_of_peft(bits: int) -> None:
    quantization, peft = pytest.importorskip("torchao.quantization"), pytest.importorskip("peft")
    unwrap = pytest.importorskip("torchao.utils").unwrap_tensor_subclass
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)), torch.randn(8, 64)
    kind = (
        quantization.Int8WeightOnlyConfig()
        if bits == 8
        else quantization.IntxWeightOnlyConfig(vars(torch)["int4"])
    )
    quantization.quantize_(model, kind)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)
    )
    with pytest.raises(CaptureError, match="unwrap_tensor_subclass"):
        find_plan(model, MeshSpec({"a": 2}), (x,), profile=slow_compute())
    unwrap(model)
    plan = find_plan(model, MeshSpec({"a": 2}), (x,), profile=slow_compute())
    assert plan.fallbacks == () and plan.collectives
    assert verify(model, plan, (x,)).max_error < 1e-5
