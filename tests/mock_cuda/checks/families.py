"""Ten families of models, small, in a dtype or under autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FAMILIES", "KINDS", "Example", "example"]

KINDS = ("float32", "bfloat16", "autocast")


@dataclass(frozen=True)
class Example:
    """A model and one call of it, on the CPU."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Autocast(nn.Module):
    """The model under CUDA's autocast to bfloat16, as users write it inside a forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.model(*args, **kwargs)


class MeanSquare(nn.Module):
    """A loss for a model that has none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).float().square().mean()


class UNet(nn.Module):
    """Two levels, batch and group norm, both kinds of upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, padding=1)
        self.group_norm = nn.GroupNorm(4, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.norm(self.enter(x)))
        coarse = F.silu(self.group_norm(self.down(F.max_pool2d(fine, 2))))
        again = self.up(coarse) + F.interpolate(coarse, scale_factor=2, mode="bilinear")[:, :16]
        return self.leave(torch.cat([fine, again], 1))


class Recurrent(nn.Module):
    """An LSTM, a GRU and a plain RNN, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(kind(32, 32, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 256, (batch, length))


def _language(model: nn.Module, length: int, **more: Any) -> Example:
    tokens = _tokens(4, length)
    return Example(model, (), {"input_ids": tokens, "labels": tokens.clone(), **more})


def _llama(dtype: torch.dtype) -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return _language(LlamaForCausalLM(config), 32)


def _gpt2(dtype: torch.dtype) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=1, n_head=4, use_cache=False)
    return _language(GPT2LMHeadModel(config), 32)


def _bert(dtype: torch.dtype) -> Example:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128
    )
    tokens = _tokens(4, 32)
    labels = torch.zeros(4, dtype=torch.long)
    kwargs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return Example(BertForSequenceClassification(config), (), kwargs)


def _vit(dtype: torch.dtype) -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, image_size=32,
        patch_size=8,
    )  # fmt: skip
    kwargs = {
        "pixel_values": torch.randn(4, 3, 32, 32, dtype=dtype),
        "labels": torch.zeros(4, dtype=torch.long),
    }
    return Example(ViTForImageClassification(config), (), kwargs)


def _mixtral(dtype: torch.dtype) -> Example:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    return _language(MixtralForCausalLM(config), 16)


def _t5(dtype: torch.dtype) -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _language(T5ForConditionalGeneration(config), 16)


def _gemma(dtype: torch.dtype) -> Example:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=20, use_cache=False,
    )  # fmt: skip
    return _language(Gemma2ForCausalLM(config), 32)


def _unet(dtype: torch.dtype) -> Example:
    return Example(MeanSquare(UNet()), (torch.randn(4, 3, 32, 32, dtype=dtype),), {})


def _recurrent(dtype: torch.dtype) -> Example:
    return Example(Recurrent(), (torch.randint(0, 64, (4, 8)),), {})


def _encoder(dtype: torch.dtype) -> Example:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Example(MeanSquare(encoder), (torch.randn(4, 16, 64, dtype=dtype),), {})


FAMILIES: dict[str, Callable[[torch.dtype], Example]] = {
    "llama": _llama, "gpt2": _gpt2, "bert": _bert, "vit": _vit, "mixtral": _mixtral, "t5": _t5, "gemma": _gemma,
    "unet": _unet, "recurrent": _recurrent, "encoder": _encoder,
}  # fmt: skip


def example(family: str, kind: str) -> Example:
    """`kind`: "float32", "bfloat16" (parameters and inputs), or "autocast" (float32 under CUDA's autocast)."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    made = FAMILIES[family](dtype)
    model = made.model.to(dtype)
    return Example(Autocast(model) if kind == "autocast" else model, made.args, made.kwargs)
