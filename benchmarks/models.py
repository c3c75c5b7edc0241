"""Published configurations of language models, on `meta`: no weight is ever allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

__all__ = ["MODELS", "llama_3_8b", "llama_3_70b"]


def llama_3_8b(layers: int = 32, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """meta-llama/Meta-Llama-3-8B with `layers` of its 32 layers."""
    return _llama(layers, dtype, hidden_size=4096, intermediate_size=14336, num_attention_heads=32)


def llama_3_70b(layers: int = 80, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """meta-llama/Meta-Llama-3-70B with `layers` of its 80 layers."""
    return _llama(layers, dtype, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)


def gpt2_xl(layers: int = 48, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """openai-community/gpt2-xl with `layers` of its 48 layers; sequences of at most 1024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1600, n_head=25, n_layer=layers, use_cache=False)
    with torch.device("meta"):
        return nn.Module.to(GPT2LMHeadModel(config), dtype)


def _llama(layers: int, dtype: torch.dtype, **sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        num_hidden_layers=layers,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
        **sizes,
    )
    with torch.device("meta"):
        return nn.Module.to(LlamaForCausalLM(config), dtype)


MODELS: Mapping[str, tuple[Callable[[int, torch.dtype], nn.Module], int]] = {
    "llama-3-8b": (llama_3_8b, 32),
    "llama-3-70b": (llama_3_70b, 80),
    "gpt2-xl": (gpt2_xl, 48),
}
"""Name -> (how to build it, its number of layers)."""
