"""Small models with random weights for whole-model tests: Hugging Face ones unmodified, and a plain ViT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Example = tuple[nn.Module, dict[str, Any]]


def llama(dropout: float = 0.0, layers: int = 2, batch: int = 4) -> Example:
    """Grouped-query attention: 4 heads share 2 key/value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).train(), _labelled(96, batch)


def gpt2(dropout: float = 0.0, layers: int = 2, batch: int = 4) -> Example:
    """Tied embedding and head, Conv1D weights stored [in, out]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96,
        n_positions=32,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config).train(), _labelled(96, batch)


def bert(dropout: float = 0.0, layers: int = 2, batch: int = 4) -> Example:
    """Attention mask as an input, post-norm, biased head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    inputs = _labelled(96, batch)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, -3:] = 0
    return BertForMaskedLM(config).train(), inputs


class ViT(nn.Module):
    """A plain vision transformer: patches by a strided convolution, nn.TransformerEncoder, mean pool."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """images: float [n, 3, 16, 16]; labels: int64 [n]."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        logits = self.head(self.norm(self.encoder(tokens)).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def vit(dropout: float = 0.0, layers: int = 2, batch: int = 4) -> Example:
    inputs = {"images": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 10, (batch,))}
    return ViT(layers=layers, dropout=dropout).train(), inputs


def vit64(dropout: float = 0.0, layers: int = 2, batch: int = 4) -> Example:
    """`vit` in float64."""
    model, inputs = vit(dropout, layers, batch)
    return model.double(), {**inputs, "images": inputs["images"].double()}


def _labelled(vocabulary: int, batch: int, length: int = 16) -> dict[str, Any]:
    tokens = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


class TwoLinear(nn.Module):
    """10 -> 32 -> 5 with a ReLU between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 32)
        self.down = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class SwiGLU(nn.Module):
    """Llama's MLP without biases: w2(silu(w1 x) * w3 x)."""

    def __init__(self, width: int, hidden: int, **kwargs: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False, **kwargs)
        self.w2 = nn.Linear(hidden, width, bias=False, **kwargs)
        self.w3 = nn.Linear(width, hidden, bias=False, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


MODELS: dict[str, Callable[..., Example]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "vit64": vit64,
}


def seeded(name: str, **kwargs: Any) -> Example:
    """The model and a batch, the same in every process."""
    torch.manual_seed(0)
    return MODELS[name](**kwargs)


class Followed(nn.Module):
    """A teacher that follows by a moving average, as BYOL and MoCo write it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.slow = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(own, alpha=0.1)
            wanted = self.slow(x)
        return (self.net(x) - wanted).square().mean()
