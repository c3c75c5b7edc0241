"""Check: the canonical graph captured from CPU, meta and CUDA tensors has one hash, with autocast("cuda") inside too.

python -m tests.mock_cuda.checks.portability
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.plan.describe import graph_hash
from tests.mock_cuda.checks.capture_for import captured_for_cuda
from tests.mock_cuda.checks.families import KINDS, Autocast
from tests.mock_cuda.checks.report import Report

Layer = Callable[[], nn.Module]


class AfterLinear(nn.Module):
    """A layer or function between a product and a loss."""

    def __init__(self, layer: Callable[[Tensor], Tensor], before: nn.Module) -> None:
        super().__init__()
        self.before = before
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.before(x))
        return (y[0] if isinstance(y, tuple) else y).float().square().mean()


def _loss(function: Callable[..., Tensor], targets: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.flatten(0, 1), targets(x.flatten(0, 1)))


def _classes(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)


ROWS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {  # of x: [4, 8, 32]
    "LayerNorm": lambda: nn.LayerNorm(32),
    "RMSNorm": lambda: nn.RMSNorm(32),
    "softmax": lambda: lambda x: x.softmax(-1),
    "softmax in float32": lambda: lambda x: F.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda: lambda x: x.log_softmax(-1),
    "cross_entropy": lambda: _loss(F.cross_entropy, _classes),
    "nll_loss": lambda: _loss(F.nll_loss, _classes),
    "mse_loss": lambda: _loss(F.mse_loss, torch.zeros_like),
    "l1_loss": lambda: _loss(F.l1_loss, torch.zeros_like),
    "smooth_l1_loss": lambda: _loss(F.smooth_l1_loss, torch.zeros_like),
    "huber_loss": lambda: _loss(F.huber_loss, torch.zeros_like),
    "bce with logits": lambda: _loss(F.binary_cross_entropy_with_logits, torch.zeros_like),
    "kl_div": lambda: _loss(F.kl_div, torch.ones_like),
    "gelu": lambda: nn.GELU(approximate="tanh"),
    "dropout": lambda: nn.Dropout(0.1),
    "normalize": lambda: lambda x: F.normalize(x, dim=-1),
    "attention": lambda: (
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
    ),
    "LSTM": lambda: nn.LSTM(32, 16, batch_first=True),
    "GRU": lambda: nn.GRU(32, 16, batch_first=True),
    "RNN": lambda: nn.RNN(32, 16, batch_first=True),
    "a test of the device": lambda: lambda x: x * 2 if x.is_cuda and x.device.type == "cuda" else x.cos(),
}
IMAGES: dict[str, Layer] = {  # of x: [2, 8, 8, 8]
    "BatchNorm2d": lambda: nn.BatchNorm2d(8),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(8, affine=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "Conv2d": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "Conv2d depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(8, 8, 2, stride=2),
    "Upsample bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "MaxPool2d": lambda: nn.MaxPool2d(2),
}
OTHER: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "Conv1d": (lambda: nn.Conv1d(8, 8, 3), (2, 8, 16)),
    "Conv3d": (lambda: nn.Conv3d(8, 8, 3), (2, 8, 4, 6, 6)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), (4, 8)),
}


def _cases() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Name -> how to make the model, and its input's shape."""
    rows = {
        name: (lambda layer=layer: AfterLinear(layer(), nn.Linear(32, 32)), (4, 8, 32))
        for name, layer in ROWS.items()
    }
    images = {
        name: (lambda layer=layer: AfterLinear(layer(), nn.Conv2d(8, 8, 1)), (2, 8, 8, 8))
        for name, layer in IMAGES.items()
    }
    other = {
        name: (lambda layer=layer: AfterLinear(layer(), nn.Identity()), shape)
        for name, (layer, shape) in OTHER.items()
    }
    return {**rows, **images, **other}


def hashes(make: Callable[[], nn.Module], shape: tuple[int, ...], kind: str) -> dict[str, str]:
    """Where the tensors were -> hash of the graph captured for a CUDA mesh."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    found: dict[str, str] = {}
    for device in ("cpu", "meta", "cuda"):
        model = make().to(dtype).to(device)
        model = Autocast(model) if kind == "autocast" else model
        x = torch.zeros(shape, dtype=dtype, device=device)
        found[device] = graph_hash(captured_for_cuda(model, (x,)).joint)
    return found


def main() -> None:
    report = Report()
    torch.cuda.set_device(0)
    for name, (make, shape) in _cases().items():
        for kind in KINDS:
            with report.case(f"{name} {kind}"):
                found = hashes(make, shape, kind)
                assert len(set(found.values())) == 1, found
    report.exit()


if __name__ == "__main__":
    main()
