"""Language models of transformers: dense ones, mixtures of experts, state spaces and hybrids, encoders, translators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.zoo_models.row import Made, Row
from benchmarks.zoo_models.tiny import labels, masked, tiny, tokens

_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 4}


def _causal(kind: str, options: Mapping[str, Any]) -> Made:
    ids, options = tokens(), dict(options)
    return tiny(options.pop("task", "ForCausalLM"), kind, **options), {
        "input_ids": ids,
        "labels": ids.clone(),
        "use_cache": False,
    }


def _rows(kind: str, types: Mapping[str, Any]) -> list[Row]:
    """types: a model's type, with what is set by hand, by name."""
    pairs = ((name, (one, {}) if isinstance(one, str) else one) for name, one in types.items())
    return [Row(name, kind, lambda one=one: _causal(*one)) for name, one in pairs]


_DENSE = _rows("language", {
    "Llama": "llama", "Qwen3": "qwen3", "Gemma 2": "gemma2",
    "Gemma 3": "gemma3_text", "Phi": "phi", "Phi-3": "phi3", "OLMo 2": "olmo2",
    "StarCoder 2": "starcoder2", "Cohere": "cohere", "Falcon": "falcon", "BLOOM": "bloom", "MPT": "mpt",
    "GPT-2": ("gpt2", {"task": "GPT2LMHeadModel"}), "GPT-J": ("gptj", {"rotary_dim": 4}),
    "GLM-4": "glm4", "BitNet": "bitnet", "DiffLlama": "diffllama", "Doge": "doge",
    "GPT-BigCode": "gpt_bigcode", "MiniCPM3": ("minicpm3", {"num_key_value_heads": 4}),
    "GPT-Neo": ("gpt_neo", {"attention_types": [[["global"], 1]]}), "HRM": "hrm_text",
})  # fmt: skip
_MIXTURES = _rows("experts", {
    "Mixtral": "mixtral", "Qwen2-MoE": ("qwen2_moe", {"decoder_sparse_step": 1}), "Qwen3-MoE": ("qwen3_moe", {"decoder_sparse_step": 1}),
    "OLMoE": "olmoe", "PhiMoE": "phimoe",
    "DeepSeek-V2": ("deepseek_v2", {"topk_method": "greedy", "num_key_value_heads": 4}), "DeepSeek-V3": ("deepseek_v3", _LATENT),
    "gpt-oss": "gpt_oss", "JetMoE": "jetmoe",
    "GLM-4 MoE": "glm4_moe", "MiniMax": ("minimax", {"layer_types": ["full_attention"]}),
    "MiniMax M2": "minimax_m2", "Llama 4": "llama4_text",
    "LongCat-Flash": ("longcat_flash", _LATENT | {"num_layers": 1, "num_hidden_layers": 2, "zero_expert_num": 2}),
})  # fmt: skip
_SSM: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
_STATES = _rows("state space", {
    "Mamba": "mamba", "Mamba 2": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
    "FalconMamba": "falcon_mamba", "RWKV": ("rwkv", {"attention_hidden_size": 32, "context_length": 64, "num_hidden_layers": 2}),
    "xLSTM": ("xlstm", {"num_heads": 4, "chunk_size": 4, "mode": "inference"}),
})  # fmt: skip
_HYBRIDS = _rows("hybrid", {
    "Jamba": ("jamba", {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                        "expert_layer_offset": 1}),
    "Bamba": ("bamba", _SSM | {"num_hidden_layers": 2, "attn_layer_indices": [1]}),
    "Falcon-H1": ("falcon_h1", _SSM | {"mamba_d_ssm": 64}),
    "Zamba 2": ("zamba2", {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "n_mamba_heads": 8,
                           "mamba_headdim": 8, "mamba_ngroups": 1, "chunk_size": 4, "attention_hidden_size": 64, "attention_head_dim": 16,
                           "hybrid_layer_ids": [1]}),
    "Qwen3-Next": ("qwen3_next", _LINEAR | {"decoder_sparse_step": 1}), "Qwen3.5": ("qwen3_5_text", _LINEAR),
    "OLMo hybrid": ("olmo_hybrid", _LINEAR), "LFM 2": ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "RecurrentGemma": ("recurrent_gemma", {"num_hidden_layers": 2, "block_types": ["recurrent", "attention"], "lru_width": 32}),
    "Granite hybrid": ("granitemoehybrid", _SSM | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}),
    "Nemotron-H": ("nemotron_h", {"num_hidden_layers": 2, "hybrid_override_pattern": "M*", "mamba_num_heads": 8, "mamba_head_dim": 8,
                                  "n_groups": 1, "chunk_size": 4}),
})  # fmt: skip


def _encoder(task: str, kind: str, options: Mapping[str, Any]) -> Made:
    model, ids = tiny(task, kind, **options), tokens()
    targets = {
        "ForMaskedLM": {"labels": ids.clone()},
        "ForSequenceClassification": {"labels": labels()},
        "ForTokenClassification": {"labels": labels(*ids.shape)},
        "ForQuestionAnswering": {"start_positions": labels(most=8), "end_positions": labels(most=8)},
    }.get(task, {})
    return model, {"input_ids": ids, "attention_mask": masked(ids), **targets}


_BLOCKS = {"block_size": 1, "num_random_blocks": 1}
"""Of sequences that are no longer than some blocks BigBird's attention is whole."""
_TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_ENCODERS = [
    Row(f"{name}, {task}", "encoder", lambda task=task, kind=kind: _encoder(task, kind, _BLOCKS if kind == "big_bird" else {}))
    for name, kind, task in (
        ("BERT", "bert", _TASKS[0]), ("ALBERT", "albert", _TASKS[0]),
        ("ELECTRA", "electra", _TASKS[2]), ("DeBERTa", "deberta", _TASKS[1]),
        ("DeBERTa v2", "deberta-v2", _TASKS[0]), ("MPNet", "mpnet", _TASKS[3]), ("ModernBERT", "modernbert", _TASKS[0]),
        ("RoFormer", "roformer", _TASKS[0]), ("ConvBERT", "convbert", _TASKS[1]), ("SqueezeBERT", "squeezebert", _TASKS[1]),
        ("MobileBERT", "mobilebert", _TASKS[0]), ("FNet", "fnet", "Model"), ("Nystromformer", "nystromformer", _TASKS[0]),
        ("BigBird", "big_bird", _TASKS[0]), ("Longformer", "longformer", _TASKS[0]),
        ("Funnel", "funnel", "Model"), ("CANINE", "canine", "Model"), ("XLNet", "xlnet", _TASKS[1]),
        ("I-BERT", "ibert", _TASKS[0]), ("TAPAS", "tapas", "Model"), ("ESM", "esm", _TASKS[0]),
    )
]  # fmt: skip


def _translator(kind: str, options: Mapping[str, Any]) -> Made:
    model, ids = tiny("ForConditionalGeneration", kind, **options), tokens()
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.dtype = torch.float64  # type: ignore[assignment]
    given = {"input_ids": ids, "attention_mask": masked(ids), "labels": tokens(length=8), "use_cache": False}
    return model, given


_TRANSLATORS = [
    Row(name, "encoder-decoder", lambda kind=kind, options=options: _translator(kind, options))
    for name, kind, options in (
        ("T5", "t5", {"decoder_start_token_id": 0}), ("BART", "bart", {}), ("Pegasus", "pegasus", {}),
        ("M2M-100", "m2m_100", {}), ("LED", "led", {"attention_window": 4}),
        ("LongT5", "longt5", {"local_radius": 3, "decoder_start_token_id": 0}), ("Switch", "switch_transformers", {"num_sparse_encoder_layers": 1,
                                                                                    "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0}),
        ("NLLB-MoE", "nllb-moe", {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "expert_capacity": 24}),
        ("ProphetNet", "prophetnet", {}), ("T5Gemma", "t5gemma", {}), ("BigBird-Pegasus", "bigbird_pegasus", _BLOCKS),
    )
]  # fmt: skip
ROWS = [*_DENSE, *_MIXTURES, *_STATES, *_HYBRIDS, *_ENCODERS, *_TRANSLATORS]
