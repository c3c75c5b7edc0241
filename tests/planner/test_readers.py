"""Configurations of torchtitan, Megatron-LM and accelerate, read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoshard import ShardingError
from autoshard.planner.configuration import Configuration
from autoshard.planner.priced_runs import MetaModel
from autoshard.planner.readers import accelerate, megatron, torchtitan

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
[activation_checkpoint]
mode = "full"
[optimizer]
lr = 3e-4
"""
MEGATRON = """--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 \\
--global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel \\
--bf16 --lr 1e-4"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
gradient_accumulation_steps: 2
"""


def titan(tmp_path: Path, old: str = "", new: str = "", gpus: int | None = 16) -> Configuration:
    file = tmp_path / "job.toml"
    assert old in TITAN
    file.write_text(TITAN.replace(old, new) if old else TITAN)
    return torchtitan(file, gpus)


def hugging_face(tmp_path: Path, more: str = "") -> Configuration:
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE + more)
    return accelerate(file, None)


def test_torchtitan(tmp_path: Path) -> None:
    found = titan(tmp_path)
    assert found.axes == {"shard": 4, "tp": 4} and found.gpus == 16
    assert found.batch == 8 and found.sequence == 8192 and found.pieces(16) == 2
    assert found.recompute == "full" and found.sequence_parallel and not found.compiled
    assert found.model is not None and found.model["num_hidden_layers"] == 32
    assert found.unread == ("optimizer",)
    assert str(found) == "shard=4, tp=4, sequence parallel; blocks computed again; not compiled"


def test_torchtitan_gathers_once_in_stages(tmp_path: Path) -> None:
    """Weights stay gathered for all micro-batches, unless it says "always"; without stages they never do."""
    tensor, staged = "tensor_parallel_degree = 4", "tensor_parallel_degree = 4\npipeline_parallel_degree = 2"
    always = f'{staged}\nfsdp_reshard_after_forward = "always"'
    assert titan(tmp_path).each_piece and titan(tmp_path, tensor, always).each_piece
    assert not titan(tmp_path, tensor, staged).each_piece


def test_megatron() -> None:
    found = megatron(MEGATRON, 16)
    # 2 data-parallel ranks of DDP: --use-distributed-optimizer is not given.
    assert found.axes == {"pp": 4, "replicate": 2, "tp": 2}
    assert found.pieces(64) == 16 and found.schedule == "1f1b" and found.unread == ("--lr",)
    assert found.model is not None and found.model["model_type"] == "gpt2"
    split = megatron(MEGATRON + " --use-distributed-optimizer --swiglu", 16)
    assert split.axes == {"pp": 4, "shard": 2, "tp": 2} and not split.each_piece
    assert split.model is not None and split.model["model_type"] == "llama"
    # Megatron's own, where none is said: 8/3 of the width in multiples of 64, and one group.
    grouped = megatron(
        f"{MEGATRON} --swiglu --group-query-attention".replace("--ffn-hidden-size", "--lr"), 16
    ).model
    assert grouped is not None and grouped["num_key_value_heads"] == 1
    assert grouped["intermediate_size"] == grouped["hidden_size"] * 8 // 3 // 64 * 64


def test_accelerate(tmp_path: Path) -> None:
    found = hugging_face(tmp_path)
    assert found.axes == {"shard": 8} and found.pieces(64) == 2 and not found.each_piece
    assert found.batch == 0 and found.model is None
    sizes = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    assert hugging_face(tmp_path, sizes).axes == {"replicate": 2, "shard": 4}


def test_context_is_a_part_of_the_devices(tmp_path: Path) -> None:
    """16 devices: 2 for sequences and 4 for products leave 2 for the batch."""
    found = titan(
        tmp_path, "tensor_parallel_degree = 4", "tensor_parallel_degree = 4\ncontext_parallel_degree = 2"
    )
    assert found.axes == {"shard": 2, "cp": 2, "tp": 4} and found.gpus == 16 and found.pieces(16) == 4
    assert found.batch_axes == ("shard",) and found.stored_axes == ("shard", "cp")
    sizes = "parallelism_config:\n  parallelism_config_cp_size: 4\n"
    assert hugging_face(tmp_path, sizes).axes == {"shard": 2, "cp": 4}


@pytest.mark.parametrize(
    ("more", "axes", "over"),
    [
        # By expert over tensor too, or over data alone, where products of experts are split over tensor.
        ("--expert-tensor-parallel-size 1", {"pp": 4, "replicate": 2, "ep": 2, "tp": 2}, ("ep", "tp")),
        ("", {"pp": 4, "ep": 4, "tp": 2}, ("ep",)),
    ],
)
def test_experts_take_neighbours(more: str, axes: dict[str, int], over: tuple[str, ...]) -> None:
    """32 devices, 8 of a stage, 4 of them of the batch, and 4 expert-parallel ranks."""
    found = megatron(f"{MEGATRON} --num-experts 8 --expert-model-parallel-size 4 {more}", 32)
    assert found.axes == axes and found.expert_axes == over and found.model is None
    assert found.pieces(64) == 8
    wrong = megatron(f"{MEGATRON} --num-experts 8 --expert-model-parallel-size 3", 32)
    with pytest.raises(ShardingError, match="3 expert-parallel ranks are not"):
        _ = wrong.axes


def test_others_are_divisions_of_as_many_devices(tmp_path: Path) -> None:
    """A batch of 8 is one sequence for each of 8 ranks, and for 16 none: that one is refused when it is priced."""
    found = titan(tmp_path)
    others = list(found.others())
    assert {(one.shard, one.micro_batch) for one in others} == {(16, 2), (8, 1), (4, 2), (2, 2)}
    assert {one.gpus for one in others} == {16}
    assert {(one.tensor, one.shard) for one in others} == {(1, 16), (2, 8), (4, 4), (8, 2)}
    assert replace(found, compiled=True) in others and len(others) == 12
    changed = next(one for one in others if one.tensor == 2 and one.recompute == "none")
    assert found.changes(changed) == (
        "parallelism.data_parallel_shard_degree = 8, parallelism.tensor_parallel_degree = 2, "
        'training.local_batch_size = 1, activation_checkpoint.mode = "none", compile.enable = true'
    )


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (
            "tensor_parallel_degree = 4",
            "tensor_parallel_degree = 4\nexpert_tensor_parallel_degree = 2",
            "expert_tensor_parallel_degree is 2",
        ),
        ("tensor_parallel_degree = 4", "new_degree = 4", "new_degree is 4"),
        ("tensor_parallel_degree = 4", "tensor_parallel_degree = 'x'", "tensor_parallel_degree is 'x'"),
        ("tensor_parallel_degree = 4", "tensor_parallel_degree = 5", "no multiple of the 5"),
        ("tensor_parallel_degree = 4", "tensor_parallel_degree = 0", "tensor_parallel_degree is 0"),
        ("shard_degree = -1", "shard_degree = 2", "its sizes multiply to 8 GPUs, and there are 16"),
        ("[optimizer]", '[compile]\nenable = true\nbackend = "eager"\n[optimizer]', "backend is 'eager'"),
        ('mode = "full"', 'mode = "selective"\nselective_ac_option = "2"', "selective_ac_option is '2'"),
        ("[model]", "compile = true\n[model]", "[compile] is True"),
        ('mode = "full"', 'mode = "memory_budget"', "mode is 'memory_budget'"),
        ("[optimizer]", "[float8]\nenable_float8_linear = true", "[float8]"),
        ("[model]", "[model", "is no TOML"),
        ("[model]", '[model]\nconverters = ["float8"]', "converters is ['float8']"),
    ],
)
def test_what_torchtitan_cannot_have_priced(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(ShardingError) as caught:
        titan(tmp_path, old, new)
    assert named in str(caught.value) and "\n  try: " in str(caught.value)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--expert-tensor-parallel-size 4", "--expert-tensor-parallel-size is 4"),
        ("--moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor"),
        ("--seq-length x", "--seq-length"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0"),
        ("--lora-rank 8", "--lora-rank is '8'"),
        ("--fp16", "--fp16"),
        ("--fp8-format hybrid", "--fp8-format is 'hybrid'"),
        ("--fp8-format=hybrid", "--fp8-format is 'hybrid'"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "--recompute-method is 'block'",
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "--recompute-num-layers is 2",
        ),
    ],
)
def test_what_megatron_cannot_have_priced(more: str, named: str) -> None:
    with pytest.raises(ShardingError) as caught:
        megatron(f"{MEGATRON} {more}", 16)
    assert named in str(caught.value) and "\n  try: " in str(caught.value)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("distributed_type: DEEPSPEED", "distributed_type is 'DEEPSPEED'"),
        ("mixed_precision: fp16", "mixed_precision is 'fp16'"),
        ("fsdp_config:\n  fsdp_offload_params: true", "fsdp_offload_params is True"),
        ("dynamo_config:\n  dynamo_backend: EAGER", "dynamo_backend is 'EAGER'"),
        ("parallelism_config:\n  parallelism_config_tp_size: 0", "parallelism_config_tp_size is 0"),
        ("parallelism_config:\n  parallelism_config_dp_shard_size: 4", "multiply to 4 GPUs, and there are 8"),
        ("- a", "is no YAML"),
    ],
)
def test_what_accelerate_cannot_have_priced(tmp_path: Path, more: str, named: str) -> None:
    with pytest.raises(ShardingError) as caught:
        hugging_face(tmp_path, more)
    assert named in str(caught.value) and "\n  try: " in str(caught.value)


def test_torchtitans_own_files(tmp_path: Path) -> None:
    """[float8] counts with a converter alone, a layer in two with "selective" alone, and compiling with the model."""
    more = 'mode = "full"\nselective_ac_option = "2"\n[float8]\nenable_fsdp_float8_all_gather = false\n[compile]\n'
    found = titan(tmp_path, 'mode = "full"', f'{more}enable = true\ncomponents = ["loss"]')
    assert found.recompute == "full" and not found.compiled
    assert found.unread == ("float8", "optimizer", "activation_checkpoint.selective_ac_option")
    assert titan(tmp_path, 'mode = "full"', f"{more}enable = true").compiled
    assert titan(tmp_path, "[parallelism]", "compile = true\nsteps = 10\n[parallelism]").compiled
    told = titan(
        tmp_path, "[parallelism]", "steps = 10\n[parallelism]\nenable_async_tensor_parallel = true"
    ).unread
    assert told == ("optimizer", "parallelism.enable_async_tensor_parallel", "training.steps")


def test_what_accelerate_is_not_read_of(tmp_path: Path) -> None:
    more = "parallelism_config:\n  parallelism_config_cp_comm_strategy: allgather\nrdzv_backend: static\n"
    told = hugging_face(tmp_path, more).unread
    assert told == (
        "parallelism_config.parallelism_config_cp_comm_strategy",
        "fsdp_config.fsdp_version",
        "rdzv_backend",
    )


LLAMA_8B = """--bf16 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu \\
--group-query-attention --num-query-groups 8 --normalization RMSNorm --position-embedding-type rope \\
--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 8192"""
QWEN = LLAMA_8B.replace("--group-query-attention", "--kv-channels 128 --qk-layernorm --group-query-attention")
GPT_3 = "--bf16 --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048"


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (LLAMA_8B, 8_030_261_248),
        # Biases of 3 products of the MLP and 4 of attention.
        (
            LLAMA_8B.replace("--disable-bias-linear", ""),
            8_030_261_248 + 32 * (2 * 14336 + 3 * 4096 + 2 * 1024),
        ),
        (f"{LLAMA_8B} --add-qkv-bias", 8_030_261_248 + 32 * (4096 + 2 * 1024)),
        (
            QWEN.replace("--kv-channels 128", "--kv-channels 64"),
            8_030_261_248 - 32 * (5 * 4096 * 4096 // 4 - 128),
        ),
        (f"{GPT_3} --vocab-size 51200", 174_615_846_912),
        (f"{GPT_3} --vocab-size 51200 --squared-relu", 174_615_846_912),
        (
            f"{GPT_3} --vocab-size 51200 --untie-embeddings-and-output-weights",
            174_615_846_912 + 51200 * 12288,
        ),
        # StarCoder2 7B.
        (
            "--bf16 --num-layers 32 --hidden-size 4608 --num-attention-heads 36 --group-query-attention --vocab-size "
            "49152 --num-query-groups 4 --position-embedding-type rope --ffn-hidden-size 18432 --seq-length 4096",
            7_173_923_840,
        ),
    ],
)
def test_what_megatron_says_of_a_model(words: str, parameters: int) -> None:
    found = megatron(words, 8)
    assert found.model is not None and found.taken == ()
    assert MetaModel.of(found.model, torch.bfloat16).parameters() == parameters


def test_what_is_taken_for_options_that_are_not_given() -> None:
    assert megatron(GPT_3, 8).taken == ("--vocab-size 50304",)
    swiglu = "--position-embedding-type rope", "--normalization RMSNorm", "--vocab-size 50304"
    assert megatron(f"{GPT_3} --swiglu", 8).taken == swiglu


@pytest.mark.parametrize(
    "option",
    [
        "--num-experts 8",
        "--multi-latent-attention",
        "--mtp-num-layers 1",
        "--kv-channels 64",
        "--group-query-attention",
        "--normalization RMSNorm",
        "--position-embedding-type relative",
        "--swiglu --position-embedding-type learned_absolute",
        "--swiglu --normalization LayerNorm",
        "--disable-bias-linear",
    ],
)
def test_models_that_megatron_alone_knows(option: str) -> None:
    """Their sizes are what `--hf` says."""
    found = megatron(f"{GPT_3} {option}", 8)
    assert found.model is None and found.named.startswith("a model with --")


def test_what_is_priced_without() -> None:
    found = megatron(f"{MEGATRON} --tp-comm-overlap --mtp-num-layers 1 --q-lora-rank 512", 16)
    assert found.unread == (
        "--tp-comm-overlap (priced without)",
        "--mtp-num-layers (priced without)",
        "--lr",
        "--q-lora-rank",
    )


def test_stages_of_megatron_have_equal_layers() -> None:
    with pytest.raises(ShardingError, match=r"9 layers are no multiple of 4 .*\n  try: 1, 3, 9 pipeline"):
        megatron(MEGATRON, 16).stages_a_rank(9)
    with pytest.raises(ShardingError, match="12 layers are no multiple of 8 stages"):
        megatron(f"{MEGATRON} --num-virtual-stages-per-pipeline-rank 2", 16).stages_a_rank(12)


def test_gpus_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match="how many GPUs"):
        titan(tmp_path, gpus=None)
    with pytest.raises(ShardingError, match="try: --batch 16"):
        megatron(MEGATRON, 16).pieces(13)


@pytest.mark.parametrize(
    ("words", "layers", "stages"),
    [
        ("--num-layers-per-virtual-pipeline-stage 1", 8, 2),
        ("--num-virtual-stages-per-pipeline-rank 2", 8, 2),
        ("--num-layers-per-virtual-pipeline-stage 3", 24, 2),
        ("", 8, None),
    ],
)
def test_stages_of_each_pipeline_rank(words: str, layers: int, stages: int | None) -> None:
    found = megatron(f"{MEGATRON} {words}", 16)
    assert found.schedule == ("interleaved" if words else "1f1b")
    assert found.stages_a_rank(layers) == stages


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("--recompute-granularity selective", "none"),
        ("--recompute-activations", "none"),
        ("--recompute-granularity selective --recompute-modules core_attn", "none"),
        (
            "--recompute-granularity selective --recompute-modules moe_act core_attn layernorm",
            "layernorm moe_act",
        ),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full"),
    ],
)
def test_what_megatron_computes_again(words: str, again: str) -> None:
    found = megatron(f"{MEGATRON} {words}", 16)
    assert found.recompute == again and again in found.recomputes
    back = megatron(
        f"{MEGATRON} {found.words['recompute'](again)}".replace("no --recompute-granularity", ""), 16
    )
    assert back.recompute == again


@pytest.mark.parametrize(("words", "once"), [("", 1), ("allgather", 1), ("alltoall", 0), ("flex", 8)])
def test_how_megatron_sends_tokens(words: str, once: int) -> None:
    found = megatron(f"{MEGATRON} --moe-token-dispatcher-type {words}" if words else MEGATRON, 16)
    assert found.routing.once == once


def test_torchtitan_says_layers_of_a_stage(tmp_path: Path) -> None:
    """32 layers, 5 a stage, are 7 stages, the last of 2: none for each of 4 ranks."""
    new = (
        "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_layers_per_stage = {}\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"'
    )
    assert titan(tmp_path, "[parallelism]", new.format(4)).stages_a_rank(32) == 2
    with pytest.raises(ShardingError, match="7 stages, no multiple of 4 pipeline ranks\n  try: 8 layers"):
        titan(tmp_path, "[parallelism]", new.format(5)).stages_a_rank(32)
