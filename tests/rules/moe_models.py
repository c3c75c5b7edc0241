"""Small mixtures of experts of transformers, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _make(name: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**_COMMON | options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": lambda: _make("Mixtral", num_local_experts=4, sliding_window=None),
    "Qwen3-MoE": lambda: _make("Qwen3Moe", head_dim=8, moe_intermediate_size=16, num_experts=6),
    "OLMoE": lambda: _make("Olmoe", num_experts=4),
    "DeepSeek-V3": lambda: _make(
        "DeepseekV3",
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    "gpt-oss": lambda: _make(
        "GptOss", head_dim=8, num_local_experts=4, sliding_window=4, layer_types=["full_attention"]
    ),
    "Jamba": lambda: _make(
        "Jamba",
        num_experts=4,
        expert_layer_period=1,
        expert_layer_offset=0,
        attn_layer_period=1,
        attn_layer_offset=0,
        use_mamba_kernels=False,
    ),
    "Qwen3-Next": lambda: _make(
        "Qwen3Next",
        head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["full_attention"],
    ),
}
