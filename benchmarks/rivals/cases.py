"""Models with their calls, and which of their weights tensor parallelism splits in which dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import MODELS, unet, vit_large

__all__ = ["NETWORKS", "Network"]

Call = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """build: of so many layers. call: of so many samples, each of `sequence` tokens where there are tokens.

    tensor, vocabulary: the end of a parameter's name -> the dim that tensor parallelism splits; of the ends of a
    language model, where they may be split as well.
    """

    build: Callable[[int, torch.dtype], nn.Module]
    layers: int
    batch: int
    sequence: int
    call: Callable[[int, int, torch.dtype], Call]
    tensor: Mapping[str, int] = field(default_factory=dict)
    vocabulary: Mapping[str, int] = field(default_factory=dict)


def _tokens(batch: int, sequence: int, dtype: torch.dtype) -> Call:
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def _images(size: int, labels: tuple[int, ...]) -> Callable[[int, int, torch.dtype], Call]:
    """labels: the shape of a sample's."""

    def call(batch: int, sequence: int, dtype: torch.dtype) -> Call:
        pixels: Tensor = torch.zeros(batch, 3, size, size, dtype=dtype, device="meta")
        return {
            "pixel_values": pixels,
            "labels": torch.zeros(batch, *labels, dtype=torch.int64, device="meta"),
        }

    return call


_LLAMA = {
    **{f"self_attn.{name}_proj.weight": 0 for name in "qkv"},
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
    "mlp.down_proj.weight": 1,
}
_GPT2 = {  # its products keep weights as [in, out]
    "attn.c_attn.weight": 1,
    "attn.c_attn.bias": 0,
    "mlp.c_fc.weight": 1,
    "mlp.c_fc.bias": 0,
    "attn.c_proj.weight": 0,
    "mlp.c_proj.weight": 0,
}
_VIT = {
    **{f"attention.{name}_proj.{kind}": 0 for name in "qkv" for kind in ("weight", "bias")},
    "mlp.fc1.weight": 0,
    "mlp.fc1.bias": 0,
    "attention.o_proj.weight": 1,
    "mlp.fc2.weight": 1,
}
_WORDS = {"lm_head.weight": 0, "embed_tokens.weight": 0, "wte.weight": 0}

NETWORKS: Mapping[str, Network] = {
    "llama-3-8b": Network(*MODELS["llama-3-8b"], 64, 8192, _tokens, _LLAMA, _WORDS),
    "llama-3-70b": Network(*MODELS["llama-3-70b"], 64, 8192, _tokens, _LLAMA, _WORDS),
    "gpt2-xl": Network(*MODELS["gpt2-xl"], 256, 1024, _tokens, _GPT2, _WORDS),
    "vit-large": Network(vit_large, 24, 2048, 0, _images(224, ()), _VIT),
    "unet": Network(unet, 4, 256, 0, _images(256, (256, 256))),
}
"""Name -> what is planned, of how many layers (levels of the U-Net), for how many samples a step."""
