"""Reads arguments of Megatron-LM's `pretrain_gpt.py`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.planner.configuration import MODULES, Configuration, Recompute, modules_again
from autoshard.planner.options import Options, of_gpus
from cost_model.errors import ShardingError
from passes.ir.routing import BALANCED, Routing

DISPATCHERS = {"allgather": BALANCED, "alltoall": Routing(once=0), "flex": Routing(once=8)}
"""Of Megatron-LM. A token of alltoall travels for each of its experts, and one of DeepEP or HybridEP, in flex, once to
each host of 8 GPUs. [deepseek-ai/DeepEP, README: "NVLink and RDMA
forwarding"]"""
_NOT_KNOWN = ("num-experts", "multi-latent-attention", "mtp-num-layers")
"""Options of models whose sizes `--hf` says."""
_NOT_PRICED = ("--tp-comm-overlap", "--mtp-num-layers")
"""What changes a step, and no model of transformers has, or no price."""


def megatron(text: str, gpus: int | None) -> Configuration:
    """The arguments of `pretrain_gpt.py`."""
    where = "--megatron"
    sizes = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "seq-length",
             "micro-batch-size", "global-batch-size", "vocab-size", "tensor-model-parallel-size",
             "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size",
             "expert-tensor-parallel-size", "num-experts",
             "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
             "max-position-embeddings", "kv-channels", "mtp-num-layers", "world-size")  # fmt: skip
    flags = ("sequence-parallel", "use-distributed-optimizer", "use-torch-fsdp2", "recompute-activations", "swiglu",
             "untie-embeddings-and-output-weights", "group-query-attention", "squared-relu", "add-qkv-bias",
             "disable-bias-linear", "qk-layernorm", "multi-latent-attention", "use-rotary-position-embeddings",
             "bf16", "fp16")  # fmt: skip
    parser = argparse.ArgumentParser(prog=where, add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in sizes:
        parser.add_argument(f"--{name}", type=int)
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--position-embedding-type")
    parser.add_argument("--normalization")
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--recompute-method")
    parser.add_argument("--recompute-num-layers", type=int)
    parser.add_argument("--recompute-modules", nargs="*", choices=MODULES, default=[])
    parser.add_argument("--moe-token-dispatcher-type", choices=list(DISPATCHERS))
    try:
        known, unread = parser.parse_known_args(shlex.split(text.replace("\\\n", " ")))
    except (argparse.ArgumentError, ValueError) as error:
        raise ShardingError(f"{where}: {error}\n  try: the arguments of pretrain_gpt.py, in quotes") from None
    rest = Options(_with_values(unread), where)
    names = rest.left(
        any_but=("parallel", "pipeline", "capacity", "fp8", "fp4", "offload", "fsdp", "recompute", "--lora")
    )
    for name in sizes:
        if (value := _of(known, name)) is not None and value < 1:
            raise rest.error(f"--{name}", value, "a number from 1")
    of = lambda name, default: _of(known, name) or default
    if known.fp16 or not known.bf16:
        raise rest.error("--fp16" if known.fp16 else "--bf16", known.bf16, "--bf16")
    tensor, stages = of("tensor-model-parallel-size", 1), of("pipeline-model-parallel-size", 1)
    context, expert_tensor = of("context-parallel-size", 1), of("expert-tensor-parallel-size", tensor)
    if expert_tensor not in (1, tensor):
        raise rest.error("--expert-tensor-parallel-size", expert_tensor, f"1 or {tensor}")
    data = of_gpus(where, gpus, tensor * context * stages, known.world_size)
    split = known.use_distributed_optimizer or known.use_torch_fsdp2
    modules = " ".join(known.recompute_modules) if known.recompute_granularity == "selective" else ""
    again: Recompute = "full" if known.recompute_granularity == "full" else modules_again(modules)
    each = of("num-layers-per-virtual-pipeline-stage", 0)
    virtual = of("num-virtual-stages-per-pipeline-rank", 0)
    model, unknown, taken = _model(known)
    without = [name for name in _NOT_PRICED if name in names or vars(known).get(name[2:].replace("-", "_"))]
    found = Configuration(
        "Megatron-LM", stages, 1 if split else data, data if split else 1, tensor, known.use_torch_fsdp2,
        known.sequence_parallel, again, of("micro-batch-size", 1), 0,
        of("global-batch-size", of("micro-batch-size", 1) * data), of("seq-length", 0),
        ("interleaved" if each or virtual else "1f1b") if stages > 1 else None, True, model,
        recomputes=tuple(dict.fromkeys(("none", again, "full"))),
        words={
            "tensor": "--tensor-model-parallel-size {}".format,
            "micro_batch": "--micro-batch-size {}".format,
            "recompute": _megatron_recompute,
        },
        named=unknown,
        taken=taken,
        unread=(*(f"{name} (priced without)" for name in without), *(name for name in names if name not in without)),
        equal_stages=True,
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


def _check_every_layer(known: argparse.Namespace, found: Configuration, rest: Options) -> None:
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


def _model(known: argparse.Namespace) -> tuple[dict[str, Any] | None, str, tuple[str, ...]]:
    """Its configuration of transformers; in its place, what of it is not known here; and what is taken for options that
    are not given."""
    missing = [name for name in ("num-layers", "hidden-size", "num-attention-heads") if not _of(known, name)]
    if missing:
        return None, "" if len(missing) == 3 else f"a model without --{missing[0]}", ()
    gated, taken = known.swiglu, dict[str, Any]()

    def of(name: str, default: Any) -> Any:
        value = _of(known, name)
        if value is None:
            taken[f"--{name}"] = default
        return default if value is None else value

    if known.use_rotary_position_embeddings:
        known.position_embedding_type = "rope"
    usual = "rope" if gated else "learned_absolute"
    positions = of("position-embedding-type", usual) if gated else known.position_embedding_type or usual
    norm = of("normalization", "RMSNorm") if gated else known.normalization or "LayerNorm"
    heads, width = known.num_attention_heads, known.hidden_size
    groups = (known.num_query_groups or 1) if known.group_query_attention else heads
    head = known.kv_channels or width // heads
    rotary, biases = positions == "rope", not known.disable_bias_linear
    gpt2 = not gated and not rotary
    unlike = {
        **{f"--{name}": _of(known, name) for name in _NOT_KNOWN},
        f"--position-embedding-type {positions}": positions not in ("rope", "learned_absolute")
        or gated > rotary,
        f"--normalization {norm}": norm != ("RMSNorm" if gated else "LayerNorm"),
        "--squared-relu": known.squared_relu and gated,
        "--qk-layernorm": known.qk_layernorm and (not gated or biases or known.add_qkv_bias),
        "--disable-bias-linear": gpt2 and not biases,
        "--group-query-attention": gpt2 and groups != heads,
        f"--kv-channels {head}": gpt2 and head * heads != width,
        "--add-qkv-bias": rotary and not gated and known.add_qkv_bias and not biases,
    }
    told = next((name for name, so in unlike.items() if so), None)
    if told is not None:
        return None, f"a model with {told}", ()
    length = known.max_position_embeddings or of("seq-length", 2048)
    sizes = {
        "vocab_size": of("vocab-size", 50304),
        "tie_word_embeddings": not known.untie_embeddings_and_output_weights,
    }
    activation = "relu2" if known.squared_relu else "gelu_pytorch_tanh"
    if gpt2:
        given = {"n_layer": known.num_layers, "n_embd": width, "n_head": heads, "n_positions": length}
        inner = {"n_inner": known.ffn_hidden_size or 4 * width, "activation_function": activation}
        return {"model_type": "gpt2", **given, **inner, **sizes}, "", _taken(taken)
    sizes |= {
        "num_hidden_layers": known.num_layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "max_position_embeddings": length,
    }
    if not gated:
        inner = {"intermediate_size": known.ffn_hidden_size or 4 * width, "hidden_act": activation}
        return {"model_type": "starcoder2", "use_bias": biases, **inner, **sizes}, "", _taken(taken)
    # As many numbers as in two matrices of 4 times the width, in multiples of 64. [Megatron-LM, arguments.py]
    sizes["intermediate_size"] = known.ffn_hidden_size or 8 * width // 3 // 64 * 64
    if known.add_qkv_bias and not biases:
        return {"model_type": "qwen2", **sizes}, "", _taken(taken)
    kind = "qwen3" if known.qk_layernorm else "llama"
    return {"model_type": kind, "attention_bias": biases, "mlp_bias": biases, **sizes}, "", _taken(taken)


def _of(known: argparse.Namespace, name: str) -> Any:
    return getattr(known, name.replace("-", "_"))


def _taken(options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name} {value}" for name, value in options.items())
