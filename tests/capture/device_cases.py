"""Modules whose ops torch takes apart by device, dtype or library: one case each, small."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CASES", "Applied", "case"]


class Applied(nn.Module):
    """A product, so that gradients flow, then the case's module or function, then a number."""

    def __init__(self, act: nn.Module | Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.act = act
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result = self.act(self.mix(x))
        result = result[0] if isinstance(result, tuple) else result
        return result.float().pow(2).mean()


def _loss(name: str, **options: object) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(F, name)(x, torch.zeros_like(x).detach(), **options)


def _classes(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64, device=x.device)


# Of [2, 4, 8] in.
_ROWS: dict[str, Callable[[], nn.Module | Callable[[Tensor], Tensor]]] = {
    "layer_norm": lambda: nn.LayerNorm(8),
    "layer_norm_two_dims": lambda: nn.LayerNorm((4, 8), elementwise_affine=False),
    "rms_norm": lambda: nn.RMSNorm(8),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "batch_norm_eval": lambda: nn.BatchNorm1d(4).eval(),
    "batch_norm_no_stats": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "instance_norm": lambda: nn.InstanceNorm1d(4, affine=True),
    "softmax": lambda: nn.Softmax(-1),
    "softmax_to_float32": lambda: lambda x: F.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda: nn.LogSoftmax(1),
    "log_softmax_to_float32": lambda: lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    "cross_entropy": lambda: lambda x: F.cross_entropy(x, _classes(x)),
    "cross_entropy_smooth": lambda: lambda x: F.cross_entropy(x, _classes(x), label_smoothing=0.1),
    "nll_loss": lambda: lambda x: F.nll_loss(x.log_softmax(1), _classes(x)),
    "mse_loss": lambda: _loss("mse_loss"),
    "l1_loss": lambda: _loss("l1_loss"),
    "smooth_l1_loss": lambda: _loss("smooth_l1_loss"),
    "huber_loss": lambda: _loss("huber_loss"),
    "kl_div": lambda: _loss("kl_div", reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda: _loss("binary_cross_entropy_with_logits"),
    "cosine_similarity": lambda: lambda x: F.cosine_similarity(x, x.flip(1), -1),
    "conv1d": lambda: nn.Conv1d(4, 4, 3, padding=1),
    "conv_transpose1d": lambda: nn.ConvTranspose1d(4, 4, 2, stride=2),
    "conv2d": lambda: nn.Sequential(nn.Unflatten(2, (2, 4)), nn.Conv2d(4, 4, 3, padding=1, groups=2)),
    "pooling": lambda: nn.Sequential(nn.Unflatten(2, (2, 4)), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
    "upsample": lambda: nn.Sequential(nn.Unflatten(2, (2, 4)), nn.Upsample(scale_factor=2, mode="bilinear")),
    "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
    "gru": lambda: nn.GRU(8, 8, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(8, 8, num_layers=2, nonlinearity="relu"),
    "attention": lambda: lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "multihead": lambda: lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1),
    "dropout": lambda: nn.Dropout(0.1),
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "cumsum": lambda: lambda x: x.cumsum(1),
    "normalize": lambda: lambda x: F.normalize(x, dim=-1),
    "variance": lambda: lambda x: x.var(-1),
}  # fmt: skip


def case(name: str) -> nn.Module:
    """Takes [2, 4, 8]."""
    return Applied(_ROWS[name](), 8)


CASES = tuple(_ROWS)
