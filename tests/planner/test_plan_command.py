"""`autoshard plan` beside configurations of frameworks, and for the best shape of a mesh."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, Plan, progress
from autoshard.plan.division import Division
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import PipelinePlan
from autoshard.plan.task import Task
from autoshard.planner import priced_runs
from autoshard.planner.configuration import AlongTheCall, Configuration
from autoshard.planner.priced_runs import (
    Call,
    GivenModel,
    Machine,
    MetaModel,
    Run,
    Workload,
    best_run,
    captured_on,
    configured_plan,
    configured_run,
    model_flops,
    priced,
)
from autoshard.planning import canonical_capture
from cost_model.errors import InfeasibleError
from cost_model.memory import format_seconds
from passes.capture import Captured
from passes.ir.op_traits import is_piece
from passes.ir.routing import Routing
from passes.stages.stage_graphs import stage_graphs
from tests.conftest import Command
from tests.profiles import slow_compute, waited_for

MACHINE = Machine(slow_compute(), "cpu", None, "adamw", 60.0)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.up(x).relu())).square().mean()


def given() -> GivenModel:
    with torch.device("meta"):
        return GivenModel(Residual(), (torch.zeros(8, 4, 16),), {})


WAITING = replace(MACHINE, profile=waited_for("h100"), device="cuda")


def planned(
    configuration: Configuration, machine: Machine = WAITING, call: Call | None = None
) -> Plan | PipelinePlan:
    captured = captured_on(call or given().call(8, 0, "none"), machine)
    return configured_plan(captured, configuration, 8, machine)


def collectives(configuration: Configuration) -> Counter[str]:
    plan = planned(configuration)
    return Counter(f"{one.phase} {one.kind}" for one in plan.collectives if one.nbytes > 8)


def test_fsdp_gathers_what_it_reads_and_reduces_gradients() -> None:
    """Two weights and two biases; the first weight's gradient needs no weight."""
    assert collectives(Configuration("accelerate", shard=2)) == {
        "forward all_gather": 4,
        "backward all_gather": 1,
        "backward reduce_scatter": 4,
    }


def test_ddp_reduces_gradients() -> None:
    assert collectives(Configuration("accelerate", replicate=2)) == {"backward all_reduce": 4}


def test_gathers_of_each_piece_cost_more_than_those_of_a_step() -> None:
    """Of 4 micro-batches: ZeRO-3 gathers in each, ZeRO-1 once."""
    each = Configuration("accelerate", shard=2, accumulation=4)
    captured = captured_on(given().call(8, 0, "none"), WAITING)
    runs = [priced(captured, one, 8, WAITING) for one in (each, replace(each, each_piece=False))]
    assert runs[0].seconds > 1.2 * runs[1].seconds


@pytest.mark.parametrize("each_piece", [True, False])
def test_gradients_between_pieces(each_piece: bool) -> None:
    """Of ZeRO-3 those of 2,128 float32 numbers stay split on 2 ranks; reduced once a step, they are whole."""
    plan = planned(Configuration("accelerate", shard=2, accumulation=4, each_piece=each_piece))
    numbers = 16 * 64 + 64 + 64 * 16 + 16
    assert isinstance(plan, Plan) and plan.memory
    collected = [r.results[0].layout for r in plan.records if r.op == "collect" and r.results[0].shape]
    assert len(collected) == 4 and all(bool(layout.partial) != each_piece for layout in collected)
    if each_piece:
        assert plan.memory.by_kind["gradients"] == pytest.approx(4 * numbers / 2, abs=8)


def test_what_is_not_compiled_moves_more() -> None:
    """relu of 4 x 4 x 64 float32 numbers on each of 2 ranks: 4,096 bytes are read and written. Compiled, the bias is
    added by the same kernel."""
    one = Configuration("accelerate", replicate=2, micro_batch=4, compiled=False)
    plan = planned(one, MACHINE)
    (relu,) = (record for record in plan.records if record.op == "aten.relu")
    device = MACHINE.profile.device
    alone = device.launch_seconds + 2 * 4096 / device.memory_bytes_per_second
    assert relu.seconds == pytest.approx(alone, rel=0.01)
    compiled = planned(replace(one, compiled=True), MACHINE)
    assert compiled.step_time < plan.step_time


def test_context_parallelism_splits_the_sequence_and_sums_gradients() -> None:
    one = Configuration("torchtitan", replicate=2, context=2, accumulation=1)
    assert collectives(one)["backward all_reduce"] == 4
    plan = planned(one)
    layouts = {r.name: str(r.results[0].layout) for r in plan.records if r.results}
    assert (
        layouts["args_0"] == layouts["add_2"] == "[@replicate, @cp, -]" and layouts["up_weight"] == "[-, -]"
    )


class Deep(nn.Module):
    """sums: whether values of all samples before are added, for which none can be split along the batch."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.sums = sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block.down(block.up(x.cumsum(0) if self.sums else x).relu())
        return x.square().mean()


def deep(sums: bool) -> Call:
    with torch.device("meta"):
        return Deep(sums), (torch.zeros(8, 4, 16),), {}


def test_what_is_computed_of_a_batch_is_split_along_it() -> None:
    """By prices alone values would stay split along the sequence, as the sums over samples are."""
    plan = planned(Configuration("torchtitan", shard=2, accumulation=1), WAITING, deep(sums=True))
    held = [r for r in plan.records if r.results and len(r.results[0].layout.dims) == 3]
    computed = [str(r.results[0].layout) for r in held if "cumsum" not in r.name and "flip" not in r.name]
    assert len(computed) > 20 and set(computed) == {"[@shard, -, -]"}


def test_stages_are_split_along_the_batch_too() -> None:
    """Where readers share a value of a stage, ops have other names than in the whole graph."""
    one = Configuration("torchtitan", 2, shard=2, micro_batch=2, schedule="1f1b")
    captured = captured_on(deep(sums=False), WAITING)
    cut = cut_call(captured, 2, sizes_only=True).joint
    place = next(node.name for node in cut.graph.nodes if "blocks.1" in node.meta.get("module", ""))
    for stage in stage_graphs(cut, (place,)):
        found = AlongTheCall.of(cut, one)(stage.joint)
        ops = [n for n in stage.joint.graph.nodes if n.op == "call_function" and not is_piece(n)]
        of_batch = {node.name for node in ops if node.meta["val"].ndim == 3}
        assert len(of_batch) > 5 and found.keys() >= of_batch


@pytest.mark.parametrize("shard", [1, 2])
def test_weights_are_split_over_context_too(shard: int) -> None:
    found = collectives(Configuration("torchtitan", shard=shard, context=2, accumulation=1))
    assert found["forward all_gather"] >= 4 and found["backward reduce_scatter"] == 4


class Mixture(nn.Module):
    """Of each of 64 tokens its two best of 4 experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.empty(4, 32, 16)), nn.Parameter(torch.empty(4, 16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(2)
        order = ids.flatten().argsort()
        ends = torch.bincount(ids.flatten(), minlength=4).cumsum(0).to(torch.int32)
        rows = tokens.repeat_interleave(2, 0)[order]
        hidden = torch._grouped_mm(rows, self.up.transpose(1, 2), offs=ends).relu()
        made = (
            torch._grouped_mm(hidden, self.down.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
        )
        return (x + torch.zeros_like(tokens).index_add(0, order // 2, made).view_as(x)).square().mean()


def test_experts_are_divided_and_other_weights_as_they_are() -> None:
    """Over one axis that is the batch's too."""
    with torch.device("meta"):
        call = Mixture().bfloat16(), (torch.zeros(8, 8, 16, dtype=torch.bfloat16),), {}
    for sizes, others in (((2, 1), Replicate()), ((1, 2), Shard(0))):
        one = Configuration("Megatron-LM", 1, *sizes, experts=2, accumulation=1)
        plan = planned(one, WAITING, call)
        assert plan.mesh.names == ("ep",)
        assert plan.parameters["up"] == plan.parameters["down"] == (Shard(0),)
        assert plan.parameters["router.weight"] == (others,)
        assert not [one for one in plan.collectives if one.nbytes >= 2 * 4 * 32 * 16]


@pytest.mark.parametrize(("once", "copies"), [(1, 2.0), (2, 5 / 3), (0, 2.0)])
def test_tokens_are_priced_as_they_travel(once: int, copies: float) -> None:
    """16 tokens of 32 bytes of each of 4 ranks: to both experts' ranks, or once to each of 2 hosts, of which a token
    wants one in 2 of 6 cases. The search and the program's timeline price alike."""
    with torch.device("meta"):
        call = Mixture().bfloat16(), (torch.zeros(8, 8, 16, dtype=torch.bfloat16),), {}
    one = Configuration("Megatron-LM", 1, 1, 4, experts=4, accumulation=1, routing=Routing(once=once))
    plan = planned(one, WAITING, call)
    assert isinstance(plan, Plan)
    sent = {move.nbytes for move in plan.collectives if move.name == "send_rows"}
    moved = {one.nbytes for part in plan.ran for one in part.moved if one.kind == "all_to_all"}
    assert max(sent) == pytest.approx(16 * 32 * copies, abs=1) == max(moved)


def test_flops_of_a_step_are_three_times_those_of_the_forward() -> None:
    model = given()
    joint = canonical_capture(model.model, model.args, {}).joint
    assert model_flops(joint) == 3 * 2 * (8 * 4) * (16 * 64 + 64 * 16)


def test_what_has_no_plan_in_as_many_micro_batches_has_one_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last number the error is raised. All are of one capture."""
    tried: list[tuple[object, Captured]] = []

    def found(self: Division, task: Task, until: object) -> Mock:
        tried.append((self.micro_batches, task.captured))
        if self.micro_batches != "auto":
            raise InfeasibleError(f"none in {self.micro_batches}")
        return Mock(step_time=2.0, peak_memory=3, reserve=4, lower_bound=1.0)

    monkeypatch.setattr(Division, "fastest", found)
    asked = Workload(given(), 8, 0, MACHINE, 2)
    flops = model_flops(asked.captured().joint)
    run, _ = best_run(asked, {"dp": 2}, [4, "auto", 8])
    assert (run, [count for count, _ in tried]) == (Run(2.0, 3, 4, flops, 1.0), [4, "auto"])
    with pytest.raises(InfeasibleError, match="none in 2"):
        best_run(asked, {"dp": 2}, [4, 2])
    assert all(one is asked.captured() for _, one in tried)


def test_a_call_is_captured_once_for_what_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of transformers once for each; one whose own it is to say, once."""
    calls: list[Call] = []
    monkeypatch.setattr(priced_runs, "captured_on", lambda call, machine: calls.append(call) or Mock())
    for model, count in ((MetaModel.of(LLAMA, torch.bfloat16), 3), (given(), 1)):
        calls.clear()
        asked = Workload(model, 8, 8, MACHINE, 2)
        for recompute in ("none", "selective", "full", "none"):
            assert asked.captured(recompute, 1) is asked.captured(recompute, 1)
        assert len(calls) == count


def test_a_configuration_beside_the_best_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOSHARD_PROGRESS", "1")
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.0)
    slow_compute().save(tmp_path / "slow.json")
    Path("planned_residual.py").write_text(
        "from tests.planner.test_plan_command import given\n"
        "def made():\n    one = given()\n    return one.model, one.args\n"
    )
    Path("a.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nseed: 1\n")
    options = ("planned_residual:made", "--device", "cpu", "--profile", "slow.json", "-o", "plan.json")
    code, out, err = command("plan", *options, "--accelerate", "a.yaml", "--memory-limit", "1GB")
    for stage in ("pricing shard=2; not compiled", "planning dp=2", "pricing shard=2"):
        assert f"autoshard: {stage}: " in err
    assert (
        code == 0 and "runs        accelerate: shard=2; not compiled\n" in out and "not read    seed" in out
    )
    rows = {line[:11].strip(): line[12:] for line in out.splitlines()}
    plan = Plan.load("plan.json")
    assert plan.mesh == MeshSpec({"dp": 2}, "cpu")
    assert rows["autoshard"].startswith(format_seconds(plan.step_time)) and "of 1GB" in rows["autoshard"]
    assert "dynamo_backend: INDUCTOR: " in rows["better"]
    with monkeypatch.context() as patched:  # what the configuration runs is said, and the framework's best
        none = InfeasibleError("nothing fits\n  try: more")
        patched.setattr(priced_runs, "best_run", Mock(side_effect=none))
        code, out, err = command("plan", *options, "--accelerate", "a.yaml", "--memory-limit", "1GB")
    said = {line[:11].strip(): line[12:] for line in out.splitlines()}
    assert (code, said["autoshard"]) == (1, "no plan: nothing fits") and "try: more" in err
    same = ("runs", "step", "better", "not read")
    assert [said[name] for name in same] == [rows[name] for name in same] and "distance" not in said
    code, out, _ = command("plan", *options, "--gpus", "4")
    assert code == 0 and "dp=4 " in out and "dp=2,tp=2 " in out and "mesh (dp=" in out
    for wrong, named in [
        (("--accelerate", "a.yaml", "--mesh", "dp=2"), "--mesh does not go with --accelerate"),
        (("--accelerate", "a.yaml", "--megatron", "--bf16 --swiglu"), "does not go with"),
        (("--gpus", "2", "--mesh", "dp=2"), "--mesh does not go with --gpus"),
        (("--gpus", "2", "--stages", "dp"), "--stages does not go with --gpus"),
        (("--gpus", "2", "--batch", "4"), "--batch does not go with a model"),
    ]:
        code, _, err = command("plan", *options, *wrong)
        assert code == 1 and named in err and "\n  try: " in err, err
    code, _, err = command("plan", "--mesh", "dp=2")
    assert code == 1 and "needs a model" in err and "\n  try: " in err


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def test_what_is_reserved_does_not_grow_with_depth() -> None:
    """One of two plans has an all-to-all, and room for it."""
    found = Run(1.0, 10.0, 5.0, 100.0).deeper(Run(2.0, 20.0, 9.0, 200.0), 3.0)
    assert (found.seconds, found.nbytes, found.flops) == (4.0, 40.0 + 9.0, 400.0)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_two_depths_tell_of_all(recompute: str) -> None:
    model = MetaModel.of(LLAMA, torch.bfloat16)
    asked = Configuration("torchtitan", shard=2, tensor=2, recompute=recompute)  # type: ignore[arg-type]
    machine = replace(MACHINE, optimizer="adamw, fp32 master")
    step = Workload(model, 8, 64, machine, 4)
    run = configured_run(step, asked)
    whole = priced(step.captured(asked.recompute), asked, 8, machine)
    assert run.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert run.nbytes == pytest.approx(whole.nbytes, rel=0.02)
    assert run.flops == pytest.approx(whole.flops)


@pytest.mark.parametrize("kind, attends", [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_models_attend_as_transformers_has_them_attend(kind: str, attends: str) -> None:
    """The logits of Gemma 2 are capped, those of gpt-oss have sinks: torch has no such attention."""
    model, _, _ = MetaModel.of({**LLAMA, "model_type": kind}, torch.bfloat16).call(2, 8, "none", 1)
    assert model.config._attn_implementation == attends


class Blocks(nn.Sequential):
    """Eight that are alike, and a loss."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("virtual", [2, 4])
def test_stages_a_rank_are_as_the_configuration_says(virtual: int) -> None:
    with torch.device("meta"):
        call = Blocks(), (torch.zeros(8, 16),), {}
    one = Configuration("Megatron-LM", 2, schedule="interleaved", virtual=virtual)
    plan = planned(one, MACHINE, call)
    assert isinstance(plan, PipelinePlan) and plan.stages_per_rank == virtual
    with pytest.raises(InfeasibleError, match="try: "):
        planned(replace(one, schedule="1f1b"), MACHINE, call)


@pytest.mark.slow
def test_a_model_of_transformers_in_stages(tmp_path: Path, command: Command) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    sizes = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --micro-batch-size 2"
    said = f"--bf16 {sizes} --sequence-parallel"
    code, out, _ = command(
        "plan", "--hf", str(tmp_path), "--batch", "8", "--megatron", said, "--gpus", "4", "--seconds", "60"
    )
    assert code == 0 and "runs        Megatron-LM: pp=2, tp=2, sequence parallel; 1f1b\n" in out
    assert "tokens a second" in out and "MFU" in out and "better " in out


def test_what_is_no_language_model(tmp_path: Path, command: Command) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    code, _, err = command("plan", "--hf", str(tmp_path), "--batch", "8", "--gpus", "4")
    assert code == 1 and "model_type is 'resnet'" in err and "try: autoshard plan module:function" in err


@pytest.mark.parametrize("bare", ["40", "999999", "1.5"])
def test_a_limit_without_its_unit(command: Command, bare: str) -> None:
    code, _, err = command("plan", "--gpus", "8", "--memory-limit", bare)
    assert code == 1 and f'--memory-limit "{bare}GB"' in err
