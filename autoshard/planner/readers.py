"""Reads configurations of torchtitan (TOML), Megatron-LM (command line) and accelerate (YAML).

What changes a step and cannot be priced is an error that names the option. What changes none is `unread`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.planner.configuration import RECOMPUTE, Configuration
from autoshard.planner.megatron_reader import DISPATCHERS, megatron
from autoshard.planner.options import Options, check_gpus, of_gpus
from cost_model.errors import ShardingError

__all__ = ["accelerate", "megatron", "torchtitan"]

_LLAMAS: Mapping[str, Mapping[str, int]] = {
    "debugmodel": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 16,
                   "num_key_value_heads": 16, "vocab_size": 2048},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}  # fmt: skip
"""Of torchtitan's Llama 3. [meta-llama/Llama-3.1-8B, -70B and -405B, config.json; torchtitan,
models/llama3/__init__.py]"""
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zero_bubble",
}


def torchtitan(path: Path, gpus: int | None) -> Configuration:
    """A job's TOML."""
    where = f"--torchtitan {path}"
    try:
        sections: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ShardingError(f"{where} is no TOML: {error}\n  try: a job's configuration") from None
    of = lambda name, *others: Options(
        next((sections.pop(one) for one in (name, *others) if one in sections), {}),
        f"{where}, [{name}]",
        name,
    )
    training, again, compiled, model = map(of, ("training", "activation_checkpoint", "compile", "model"))
    parallel = of("parallelism", "experimental")
    model.only("converters", [], "", remedy="the configuration without converters")
    if sections.get("float8", {}).get("enable_float8_linear"):  # as it was said before `converters`
        raise ShardingError(f"{where}: [float8] cannot be priced\n  try: the configuration without it")
    replicate, tensor = (
        parallel.count("data_parallel_replicate_degree", 1),
        parallel.count("tensor_parallel_degree", 1),
    )
    stages, shard = (
        parallel.count("pipeline_parallel_degree", 1),
        parallel.count("data_parallel_shard_degree", -1),
    )
    schedule = parallel("pipeline_parallel_schedule", "1F1B")
    if schedule.lower() not in _SCHEDULES:
        raise parallel.error("pipeline_parallel_schedule", schedule, "1F1B, GPipe or Interleaved1F1B")
    at_once = parallel.count("pipeline_parallel_microbatch_size", 1)
    context, experts = (
        parallel.count("context_parallel_degree", 1),
        parallel.count("expert_parallel_degree", 1),
    )
    expert_tensor = parallel.count("expert_tensor_parallel_degree", tensor)
    if expert_tensor not in (1, tensor):
        raise parallel.error("expert_tensor_parallel_degree", expert_tensor, f"1 or {tensor}")
    sends = parallel.only("expert_parallel_comm_backend", "standard", "deepep", "hybridep")
    gathers = parallel.only("fsdp_reshard_after_forward", "default", "always", "never")
    each = parallel.count("pipeline_parallel_layers_per_stage", 0)
    left = parallel.left("disable_loss_parallel", "enable_async_tensor_parallel", "enable_compiled_autograd",
                  "pipeline_parallel_split_points", "module_fqns_per_model_part",
                  "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")  # fmt: skip
    if shard == -1:
        shard = of_gpus(where, gpus, replicate * context * tensor * stages)
    check_gpus(where, gpus, replicate * shard * context * tensor * stages)
    local = training.count("local_batch_size", training.count("batch_size", 8))
    batch, sequence = training.count("global_batch_size", -1), training.count("seq_len", 2048)
    training.only("mixed_precision_param", "bfloat16")
    training.only("dtype", "float32")
    training.only("enable_cpu_offload", False)
    all_compiled = training("compile", False)  # as it was said before [compile]
    left += training.left("mixed_precision_reduce", "steps", "max_norm", "dataset", "dataset_path", "warmup_steps",
                  "seed", "gc_freq", "gc_debug", "deterministic", "debug_moe_force_load_balance")  # fmt: skip
    mode = again("mode", "selective")
    if mode not in RECOMPUTE:
        raise again.error("mode", mode, "'none', 'selective' or 'full'")
    if mode == "selective":
        again.only("selective_ac_option", "op", remedy="selective_ac_option = 'op', or mode = 'full'")
    parts = compiled("components", ["model", "loss"])
    all_compiled |= compiled("enable", False) and "model" in parts
    if all_compiled:
        compiled.only("backend", "inductor")
    name, flavor = model("name", ""), model("flavor", "")
    left += *again.left(any_but=()), *compiled.left(any_but=()), *model.left(any_but=())
    config = None
    if name == "llama3" and flavor in _LLAMAS:
        others = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": sequence}
        config = {"model_type": "llama", **others, **_LLAMAS[flavor]}
    return Configuration(
        "torchtitan", stages, replicate, shard, tensor,
        # In stages weights stay gathered for all micro-batches. [torchtitan, "default" of fsdp_reshard_after_forward]
        gathers == "always" or stages == 1, True, mode,
        at_once if stages > 1 else local, 0,
        batch if batch > 0 else local * replicate * shard,
        sequence, _SCHEDULES[schedule.lower()] if stages > 1 else None, all_compiled, config,
        words={
            "replicate": "parallelism.data_parallel_replicate_degree = {}".format,
            "shard": "parallelism.data_parallel_shard_degree = {}".format,
            "tensor": "parallelism.tensor_parallel_degree = {}".format,
            "micro_batch": ("parallelism.pipeline_parallel_microbatch_size = {}" if stages > 1 else
                            "training.local_batch_size = {}").format,
            "recompute": 'activation_checkpoint.mode = "{}"'.format,
            "compiled": lambda _: "compile.enable = true",
        },
        named=f"model.name = {name!r}, model.flavor = {flavor!r}" if name else "",
        unread=(*sections, *left),
        context=context,
        experts=experts,
        expert_tensor=tensor > 1 and expert_tensor == tensor,
        layers_a_stage=each,
        # Standard: an all-to-all of rows. [torchtitan, ExpertParallel, `_token_dispatch`]
        routing=DISPATCHERS["alltoall" if sends == "standard" else "flex"],
    )  # fmt: skip


def accelerate(path: Path, gpus: int | None) -> Configuration:
    """The YAML that `accelerate config` writes. It says no model and no batch."""
    import yaml

    where = f"--accelerate {path}"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ShardingError(f"{where} is no YAML: {error}\n  try: what `accelerate config` writes") from None
    if not isinstance(values, dict):
        raise ShardingError(f"{where} holds no options\n  try: what `accelerate config` writes")
    said = Options(values, where)
    kind = said("distributed_type", "NO", str)
    if kind not in ("NO", "MULTI_GPU", "FSDP"):
        raise said.error("distributed_type", kind, "FSDP or MULTI_GPU")
    said.only("mixed_precision", "bf16", remedy="mixed_precision: bf16")
    of_section = lambda name: Options(said(name, {}, _section), f"{where}, {name}", name)
    fsdp, sizes, dynamo = map(of_section, ("fsdp_config", "parallelism_config", "dynamo_config"))
    of = lambda name: sizes.count(f"parallelism_config_{name}_size", 1)
    replicate, shard, context, tensor = of("dp_replicate"), of("dp_shard"), of("cp"), of("tp")
    sizes.only("parallelism_config_sp_size", 1)
    left = sizes.left("parallelism_config_cp_comm_strategy", "parallelism_config_cp_backend")
    strategy = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
    sharding = fsdp("fsdp_sharding_strategy", "FULL_SHARD", str)
    sharding = strategy.get(sharding, sharding)
    reshards = str(fsdp("fsdp_reshard_after_forward", True, str)).lower()
    reshards = strategy.get(reshards, reshards).upper()
    if sharding not in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        raise fsdp.error(
            "fsdp_sharding_strategy", sharding, "FULL_SHARD, SHARD_GRAD_OP, or parallelism_config"
        )
    fsdp.only("fsdp_offload_params", False)
    full = fsdp("fsdp_activation_checkpointing", False) and kind == "FSDP"
    left += fsdp.left(any_but=("offload",))
    backend = dynamo("dynamo_backend", "NO", str).upper()
    if backend not in ("NO", "INDUCTOR"):
        raise dynamo.error("dynamo_backend", backend, "INDUCTOR, or NO")
    compiled = backend != "NO"
    processes, accumulation = said.count("num_processes", 0), said.count("gradient_accumulation_steps", 1)
    left += *dynamo.left(any_but=()), *said.left(any_but=("deepspeed", "megatron", "fp8", "tpu", "ipex"))
    if replicate * shard > 1:
        check_gpus(where, gpus or processes or None, replicate * shard * context * tensor)
    else:
        data = of_gpus(where, gpus, context * tensor, processes or None)
        split = kind == "FSDP" and sharding != "NO_SHARD"
        replicate, shard = (1, data) if split else (data, 1)
    once = sharding == "SHARD_GRAD_OP" or reshards in ("FALSE", "SHARD_GRAD_OP")
    return Configuration(
        "accelerate", 1, replicate, shard, tensor, not once, False, "full" if full else "none",
        1, accumulation, 0, 0, None, compiled,
        recomputes=("none", "full"),
        words={
            "replicate": "parallelism_config_dp_replicate_size: {}".format,
            "shard": "parallelism_config_dp_shard_size: {}".format,
            "tensor": "parallelism_config_tp_size: {}".format,
            "recompute": lambda how: f"fsdp_activation_checkpointing: {str(how == 'full').lower()}",
            "compiled": lambda _: "dynamo_backend: INDUCTOR",
        },
        unread=left,
        context=context,
    )  # fmt: skip


def _section(value: Any) -> dict[str, Any]:
    return dict(value or {})
