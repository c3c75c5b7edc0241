"""Tiny models of transformers with random weights, made from the names of their classes and a few overrides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH = 96, 12, 4

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "encoder_vocab_size", "decoder_vocab_size", "n_vocab"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim", "projection_dim"), 32
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "mlp_dim",
            "ffn_hidden_size", "n_inner", "d_inner", "shared_intermediate_size", "block_ff_dim", "attention_hidden_size",
        ),
        64,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
            "num_decoder_layers", "num_encoder_layers", "depth",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
            "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_dim", "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions", "n_ctx"), 64),
    **dict.fromkeys(("max_target_positions",), 64),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace",), 0),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id"), None),
    **dict.fromkeys(("image_size",), 16),
    **dict.fromkeys(("patch_size",), 4),
    **dict.fromkeys(("use_mamba_kernels",), False),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
}  # fmt: skip
"""By the names that configurations have for them."""


def tiny_config(kind: Any, **options: Any) -> Any:
    """Of a class or a model's type: small sizes by the names it has, without dropout, then `options`; those that
    are dicts go to the configurations it holds."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind] if isinstance(kind, str) else kind
    default = made()
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict) and "model_type" in value:
            rest = {key: one for key, one in value.items() if key != "model_type"}
            options[name] = tiny_config(value["model_type"], **rest)
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig) and not isinstance(options.get(name), PreTrainedConfig):
            found[name] = tiny_config(type(value), **options.get(name, {})).to_dict()
        elif name in _SIZES and not isinstance(value, (list, tuple)):
            found[name] = _SIZES[name]
        elif isinstance(value, float) and ("drop" in name or name == "pdrop"):
            found[name] = 0.0
    nested = {name for name in found if isinstance(found[name], dict)}
    return made(**found | {name: value for name, value in options.items() if name not in nested})


def tiny(task: str, kind: Any, **options: Any) -> nn.Module:
    """A model of `kind` for a task, by the name of its class ("ForCausalLM") or of the class itself."""
    import transformers

    config = tiny_config(kind, **options)
    stem = type(config).__name__.removesuffix("Config")
    stems = (stem, stem.removesuffix("Text"), stem.removesuffix("VisionConfig"))
    found = (getattr(transformers, name, None) for name in (*(one + task for one in stems), task))
    named: Any = next(one for one in found if one is not None)
    return named(config)


def tokens(batch: int = BATCH, length: int = LENGTH, least: int = 3, most: int = VOCABULARY) -> Tensor:
    return torch.randint(least, most, (batch, length))


def masked(ids: Tensor) -> Tensor:
    """An attention mask: of the first row all but the last two tokens."""
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return mask


def labels(*shape: int, most: int = 2) -> Tensor:
    return torch.randint(0, most, shape or (BATCH,))


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, 3, 16, 16)))
