"""Published configurations of language models and of a vision transformer, and a U-Net, on `meta`: no weight is ever
allocated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

__all__ = ["MODELS", "UNet", "family_constraints", "llama_3_8b", "llama_3_70b", "unet", "vit_large"]


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


def vit_large(layers: int = 24, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """google/vit-large-patch16-224 with `layers` of its 24 layers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_hidden_layers=layers,
        id2label={label: str(label) for label in range(1000)},
        problem_type="single_label_classification",
    )
    with torch.device("meta"):
        return nn.Module.to(ViTForImageClassification(config), dtype)


def unet(levels: int = 4, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A U-Net of width 64 at full size [Ronneberger et al. 2015], with group norms and padded convolutions."""
    with torch.device("meta"):
        return nn.Module.to(UNet(64, levels, classes=8), dtype)


class UNet(nn.Module):
    """Per level two convolutions, half the size and twice the channels; back up, with what was kept on the way."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        pairs = list(itertools.pairwise(widths))
        self.stem = _two_convolutions(3, width)
        self.down = nn.ModuleList(_two_convolutions(low, high) for low, high in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(high, low, 2, 2) for low, high in reversed(pairs))
        self.up = nn.ModuleList(_two_convolutions(2 * low, low) for low, _ in reversed(pairs))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """The loss of images float [n, 3, h, w] whose pixels have labels int64 [n, h, w]."""
        kept = [self.stem(pixel_values)]
        for down in self.down:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([kept.pop(), grow(x)], 1))
        return F.cross_entropy(self.head(x), labels)


def _two_convolutions(inner: int, outer: int) -> nn.Module:
    parts: list[nn.Module] = []
    for channels in (inner, outer):
        parts += [nn.Conv2d(channels, outer, 3, padding=1, bias=False), nn.GroupNorm(8, outer), nn.ReLU()]
    return nn.Sequential(*parts)


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


def family_constraints(
    name: str, axes: int, *, columns: Sequence[str] = (), rows: Sequence[str] = ()
) -> dict[str, Any]:
    """What a user who knows the model would write as `constraints` on a mesh of `axes` axes: storage alone.

    name: "DDP", "FSDP" or "TP". columns, rows: patterns of the weights that TP splits at dim 0 and at dim 1.
    """
    whole, first, second = ([placement] * axes for placement in (Replicate(), Shard(0), Shard(1)))
    if name == "TP":
        return {"*": whole} | dict.fromkeys(columns, first) | dict.fromkeys(rows, second)
    return {"*": {"DDP": whole, "FSDP": first}[name]}
