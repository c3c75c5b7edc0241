"""Reads configurations of torchtitan (TOML), Megatron-LM (command line) and accelerate (YAML).

What changes a step and cannot be priced is an error that names the option. What changes none is `unread`.
"""

from __future__ import annotations

import argparse
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.planner.configuration import MODULES, RECOMPUTE, Configuration, Recompute, modules_again
from cost_model.errors import ShardingError
from passes.ir.routing import BALANCED, Routing

_LLAMAS: Mapping[str, Mapping[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}  # fmt: skip
"""Of torchtitan's Llama 3. [meta-llama/Llama-3.1-8B, -70B and -405B, config.json]"""
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zero_bubble",
}


DISPATCHERS = {"allgather": BALANCED, "alltoall": Routing(once=0), "flex": Routing(once=8)}
"""Of Megatron-LM. A token of alltoall travels for each of its experts, and one of DeepEP or HybridEP, in flex, once to
each host of 8 GPUs. [deepseek-ai/DeepEP, README: "NVLink and RDMA
forwarding"]"""


class _Options:
    """Options of one file by name; each is taken once, and what is left is checked. names: how an error says them."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._left = dict(values)
        self._where = where

    def __call__(self, name: str, default: Any, kind: Callable[[Any], Any] | None = None) -> Any:
        value = self._left.pop(name, default)
        make = kind or type(default)
        try:
            return _truth(value) if make is bool else make(value)
        except (TypeError, ValueError):
            raise self.error(name, value, f"{name} as in {default!r}") from None

    def only(self, name: str, *allowed: Any, remedy: str = "") -> Any:
        """An option of which other values cannot be priced."""
        value = self._left.pop(name, allowed[0])
        if value not in allowed:
            raise self.error(name, value, remedy or f"{name} = {' or '.join(map(repr, allowed))}")
        return value

    def error(self, name: str, value: object, remedy: str) -> ShardingError:
        return ShardingError(f"{self._where}: {name} is {value!r}, which cannot be priced\n  try: {remedy}")

    def left(self, *harmless: str, any_but: Sequence[str] | None = None) -> tuple[str, ...]:
        """Names not taken. ShardingError for one that is not harmless: of `harmless`, or with none of the words
        `any_but` in it."""
        for name, value in self._left.items():
            known = name in harmless if any_but is None else not any(word in name for word in any_but)
            if not known and value not in (False, None, 0, "", {}, []):
                raise self.error(name, value, f"the configuration without {name}")
        return tuple(self._left)


def _truth(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _of_gpus(where: str, gpus: int | None, model_parallel: int, given: int | None = None) -> int:
    """Data-parallel ranks. given: all ranks, by the configuration itself."""
    count = gpus or given
    if count is None:
        raise ShardingError(f"{where}: it does not say how many GPUs run it\n  try: --gpus 64")
    if count % model_parallel:
        raise ShardingError(
            f"{where}: {count} GPUs are no multiple of the {model_parallel} that hold a model\n"
            f"  try: --gpus {-(-count // model_parallel) * model_parallel}"
        )
    return count // model_parallel


def torchtitan(path: Path, gpus: int | None) -> Configuration:
    """A job's TOML."""
    where = f"--torchtitan {path}"
    try:
        sections: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ShardingError(f"{where} is no TOML: {error}\n  try: a job's configuration") from None
    of = lambda name: _Options(sections.pop(name, {}), f"{where}, [{name}]")
    training, again, compiled, model = map(of, ("training", "activation_checkpoint", "compile", "model"))
    parallel = _Options(
        sections.pop("parallelism", sections.pop("experimental", {})), f"{where}, [parallelism]"
    )
    for name in ("float8", "mx", "quantize"):
        if sections.pop(name, None):
            raise ShardingError(f"{where}: [{name}] cannot be priced\n  try: the configuration without it")
    replicate, tensor = parallel("data_parallel_replicate_degree", 1), parallel("tensor_parallel_degree", 1)
    stages, shard = parallel("pipeline_parallel_degree", 1), parallel("data_parallel_shard_degree", -1)
    schedule = parallel("pipeline_parallel_schedule", "1F1B")
    if schedule.lower() not in _SCHEDULES:
        raise parallel.error("pipeline_parallel_schedule", schedule, "1F1B, GPipe or Interleaved1F1B")
    at_once = parallel("pipeline_parallel_microbatch_size", 1)
    context, experts = parallel("context_parallel_degree", 1), parallel("expert_parallel_degree", 1)
    expert_tensor = parallel("expert_tensor_parallel_degree", tensor)
    if expert_tensor not in (1, tensor):
        raise parallel.error("expert_tensor_parallel_degree", expert_tensor, f"1 or {tensor}")
    sends = parallel.only("expert_parallel_comm_backend", "standard", "deepep", "hybridep")
    gathers = parallel.only("fsdp_reshard_after_forward", "default", "always", "never")
    each = parallel("pipeline_parallel_layers_per_stage", 0)
    left = parallel.left("disable_loss_parallel", "enable_async_tensor_parallel", "enable_compiled_autograd",
                  "pipeline_parallel_split_points", "module_fqns_per_model_part",
                  "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")  # fmt: skip
    if shard == -1:
        shard = _of_gpus(where, gpus, replicate * context * tensor * stages)
    local = training("local_batch_size", training("batch_size", 8))
    batch, sequence = training("global_batch_size", -1), training("seq_len", 2048)
    training.only("mixed_precision_param", "bfloat16")
    training.only("dtype", "float32")
    training.only("enable_cpu_offload", False)
    training.left("mixed_precision_reduce", "steps", "max_norm", "dataset", "dataset_path", "warmup_steps", "seed",
                  "gc_freq", "gc_debug", "deterministic", "debug_moe_force_load_balance", "data_parallel_shard_degree",
                  "compile")  # fmt: skip
    mode = again("mode", "selective")
    if mode not in RECOMPUTE:
        raise again.error("mode", mode, "'none', 'selective' or 'full'")
    again.only("selective_ac_option", "op", remedy="selective_ac_option = 'op', or mode = 'full'")
    name, flavor = model("name", ""), model("flavor", "")
    model.only("converters", [])
    config = None
    if name == "llama3" and flavor in _LLAMAS:
        others = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": sequence}
        config = {"model_type": "llama", **_LLAMAS[flavor], **others}
    return Configuration(
        "torchtitan", stages, replicate, shard, tensor,
        # In stages weights stay gathered for all micro-batches. [torchtitan, "default" of fsdp_reshard_after_forward]
        gathers == "always" or stages == 1, True, mode,
        at_once if stages > 1 else local, 0,
        batch if batch > 0 else local * replicate * shard,
        sequence, _SCHEDULES[schedule.lower()] if stages > 1 else None, compiled("enable", False), config,
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
        unread=(*sections, *(f"parallelism.{name}" for name in left)),
        context=context,
        experts=experts,
        expert_tensor=tensor > 1 and expert_tensor == tensor,
        layers_a_stage=each,
        # Standard: an all-to-all of rows. [torchtitan, ExpertParallel, `_token_dispatch`]
        routing=DISPATCHERS["alltoall" if sends == "standard" else "flex"],
    )  # fmt: skip


def megatron(text: str, gpus: int | None) -> Configuration:
    """The arguments of `pretrain_gpt.py`."""
    where = "--megatron"
    sizes = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "seq-length",
             "micro-batch-size", "global-batch-size", "vocab-size", "tensor-model-parallel-size",
             "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size",
             "expert-tensor-parallel-size", "num-experts",
             "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
             "max-position-embeddings", "world-size")  # fmt: skip
    flags = ("sequence-parallel", "use-distributed-optimizer", "use-torch-fsdp2", "recompute-activations", "swiglu",
             "untie-embeddings-and-output-weights", "group-query-attention", "bf16", "fp16")  # fmt: skip
    parser = argparse.ArgumentParser(prog=where, add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in sizes:
        parser.add_argument(f"--{name}", type=int)
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--recompute-method")
    parser.add_argument("--recompute-num-layers", type=int)
    parser.add_argument("--recompute-modules", nargs="*", choices=MODULES, default=[])
    parser.add_argument("--moe-token-dispatcher-type", choices=list(DISPATCHERS))
    try:
        known, unread = parser.parse_known_args(shlex.split(text.replace("\\\n", " ")))
    except (argparse.ArgumentError, ValueError) as error:
        raise ShardingError(f"{where}: {error}\n  try: the arguments of pretrain_gpt.py, in quotes") from None
    rest = _Options(_with_values(unread), where)
    names = rest.left(
        any_but=("parallel", "pipeline", "capacity", "fp8", "fp4", "offload", "fsdp", "recompute", "lora")
    )
    of = lambda name, default: getattr(known, name.replace("-", "_")) or default
    if known.fp16 or not known.bf16:
        raise rest.error("--fp16" if known.fp16 else "--bf16", known.bf16, "--bf16")
    tensor, stages = of("tensor-model-parallel-size", 1), of("pipeline-model-parallel-size", 1)
    context, expert_tensor = of("context-parallel-size", 1), of("expert-tensor-parallel-size", tensor)
    if expert_tensor not in (1, tensor):
        raise rest.error("--expert-tensor-parallel-size", expert_tensor, f"1 or {tensor}")
    data = _of_gpus(where, gpus, tensor * context * stages, known.world_size)
    split = known.use_distributed_optimizer or known.use_torch_fsdp2
    modules = " ".join(known.recompute_modules) if known.recompute_granularity == "selective" else ""
    again: Recompute = "full" if known.recompute_granularity == "full" else modules_again(modules)
    each = of("num-layers-per-virtual-pipeline-stage", 0)
    virtual = of("num-virtual-stages-per-pipeline-rank", 0)
    found = Configuration(
        "Megatron-LM", stages, 1 if split else data, data if split else 1, tensor, known.use_torch_fsdp2,
        known.sequence_parallel, again, of("micro-batch-size", 1), 0,
        of("global-batch-size", of("micro-batch-size", 1) * data), of("seq-length", 0),
        ("interleaved" if each or virtual else "1f1b") if stages > 1 else None, True, _megatron_model(known),
        recomputes=tuple(dict.fromkeys(("none", again, "full"))),
        words={
            "tensor": "--tensor-model-parallel-size {}".format,
            "micro_batch": "--micro-batch-size {}".format,
            "recompute": _megatron_recompute,
        },
        unread=names,
        context=context,
        experts=of("expert-model-parallel-size", 1),
        expert_tensor=tensor > 1 and expert_tensor == tensor,
        virtual=virtual,
        layers_a_stage=each,
        routing=DISPATCHERS.get(known.moe_token_dispatcher_type, BALANCED),
    )  # fmt: skip
    if again == "full":
        _check_every_layer(known, found, rest)
    return found


def _with_values(words: Sequence[str]) -> dict[str, Any]:
    """Each "--name" with what follows it, "--name value" or "--name=value"; True: nothing does."""
    found, last = dict[str, Any](), ""
    for word in words:
        if word.startswith("--"):
            last, _, value = word.partition("=")
            found[last] = value or True
        elif found:
            found[last] = word if found[last] is True else f"{found[last]} {word}"
    return found


def _check_every_layer(known: argparse.Namespace, found: Configuration, rest: _Options) -> None:
    """ShardingError where full recomputation is of some layers, or of several as one."""
    method, count, layers = known.recompute_method, known.recompute_num_layers or 1, known.num_layers or 0
    # "block" is of so many layers of each stage.
    if method == "block" and count * found.stages * (found.stages_a_rank(layers) or 1) < layers:
        raise rest.error("--recompute-method", method, "--recompute-method uniform, which is of every layer")
    if method == "uniform" and count > 1:
        raise rest.error("--recompute-num-layers", count, "--recompute-num-layers 1")


def _megatron_recompute(how: Recompute) -> str:
    if how == "none":
        return "no --recompute-granularity"
    return f"--recompute-granularity {'full' if how == 'full' else f'selective --recompute-modules {how}'}"


def _megatron_model(known: argparse.Namespace) -> dict[str, Any] | None:
    if known.num_experts or not (known.num_layers and known.hidden_size and known.num_attention_heads):
        return None
    width, heads, vocabulary = known.hidden_size, known.num_attention_heads, known.vocab_size or 50304
    length = known.max_position_embeddings or known.seq_length or 2048
    if not known.swiglu:
        inner = known.ffn_hidden_size or 4 * width
        sizes = {"n_layer": known.num_layers, "n_embd": width, "n_head": heads, "n_inner": inner}
        return {"model_type": "gpt2", **sizes, "vocab_size": vocabulary, "n_positions": length}
    return {
        "model_type": "llama",
        "num_hidden_layers": known.num_layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": (known.num_query_groups or 1) if known.group_query_attention else heads,
        # As many numbers as in two matrices of 4 times the width, in multiples of 64. [Megatron-LM, arguments.py]
        "intermediate_size": known.ffn_hidden_size or 8 * width // 3 // 64 * 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "tie_word_embeddings": not known.untie_embeddings_and_output_weights,
    }


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
    said = _Options(values, where)
    kind = said("distributed_type", "NO", str)
    if kind not in ("NO", "MULTI_GPU", "FSDP"):
        raise said.error("distributed_type", kind, "FSDP or MULTI_GPU")
    said.only("mixed_precision", "bf16", remedy="mixed_precision: bf16")
    fsdp = _Options(said("fsdp_config", {}), f"{where}, fsdp_config")
    sizes = _Options(said("parallelism_config", {}), f"{where}, parallelism_config")
    of = lambda name: sizes(f"parallelism_config_{name}_size", 1)
    replicate, shard, context, tensor = of("dp_replicate"), of("dp_shard"), of("cp"), of("tp")
    sizes.only("parallelism_config_sp_size", 1)
    sizes.left("parallelism_config_cp_comm_strategy", "parallelism_config_cp_backend")
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
    full = fsdp("fsdp_activation_checkpointing", False)
    fsdp.left(any_but=("offload",))
    compiled = str(said("dynamo_config", {}).get("dynamo_backend", "NO")).upper() != "NO"
    processes, accumulation = said("num_processes", 1), said("gradient_accumulation_steps", 1)
    unread = said.left(any_but=("deepspeed", "megatron", "fp8", "tpu", "ipex"))
    if replicate * shard == 1:
        data = _of_gpus(where, gpus, context * tensor, processes)
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
        unread=unread,
        context=context,
    )  # fmt: skip
