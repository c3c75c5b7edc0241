"""Canonical graphs of usual models and layers as hashes, to compare versions: `python -m tests.versions.graph_hashes`.

A plan made with one version of torch may be run with another if the canonical graph is the same, so this
prints `graph_hash` of each as JSON, for `.ci/versions.py` to lay side by side. `--text NAME` prints the graph of one.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard import MeshSpec
from autoshard.call_ends import autocast_as
from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph
from passes.plan.describe import graph_hash
from tests.models import seeded
from tests.spatial.networks import network

__all__ = ["CASES", "KINDS", "hashes", "joint"]

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
VOCABULARY = 12


class _Then(nn.Module):
    """`layer` between a product and a mean, so that it has gradients both ways."""

    def __init__(self, layer: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.up(x))
        return (y[0] if isinstance(y, tuple) else y).float().square().mean()


class _Image(nn.Module):
    """The same between convolutions."""

    def __init__(self, layer: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self.up = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.up(x)).float().square().mean()


class _Loss(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss
        self.up = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return self.loss(self.up(x), wanted)


def _transformer(name: str, dtype: torch.dtype, dropout: float = 0.0) -> Call:
    model, inputs = seeded(name, dropout=dropout)
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return model.to(dtype), (), cast


def _t5(dtype: torch.dtype) -> Call:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 96, (4, 16))
    return T5ForConditionalGeneration(config).to(dtype).train(), (), {"input_ids": tokens, "labels": tokens}


def _spatial(name: str, dtype: torch.dtype) -> Call:
    model, x = network(name, 2, dtype)
    return model, (x,), {}


def _vector(layer: Callable[..., Any], dtype: torch.dtype) -> Call:
    return _Then(layer).to(dtype), (torch.randn(4, 6, 8, dtype=dtype),), {}


def _image(layer: Callable[..., Any], dtype: torch.dtype) -> Call:
    return _Image(layer).to(dtype), (torch.randn(2, 3, 12, 12, dtype=dtype),), {}


def _loss(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, classes: bool) -> Call:
    wanted = torch.randint(0, VOCABULARY, (4,)) if classes else torch.rand(4, VOCABULARY, dtype=dtype)
    return _Loss(loss).to(dtype), (torch.randn(4, 8, dtype=dtype), wanted), {}


def _attention(**options: Any) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2).flatten(2)

    return attend


_VECTOR: Mapping[str, Callable[[], Callable[..., Any]]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "softmax": lambda: lambda x: F.softmax(x, -1),
    "softmax in float32": lambda: lambda x: F.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda: lambda x: F.log_softmax(x, -1),
    "GELU": lambda: nn.GELU(),
    "GELU, tanh": lambda: nn.GELU(approximate="tanh"),
    "SiLU": lambda: nn.SiLU(),
    "GLU": lambda: nn.GLU(),
    "dropout": lambda: nn.Dropout(0.1),
    "attention": lambda: _attention(),
    "attention, causal": lambda: _attention(is_causal=True),
    "attention, dropout": lambda: _attention(dropout_p=0.1),
    "MultiheadAttention": lambda: _MultiHead(),
    "LSTM": lambda: nn.LSTM(8, 6, batch_first=True),
    "GRU": lambda: nn.GRU(8, 6, batch_first=True),
    "RNN": lambda: nn.RNN(8, 6, batch_first=True),
    "cumsum": lambda: lambda x: x.cumsum(1),
    "sort": lambda: lambda x: x.sort(-1)[0],
    "var": lambda: lambda x: x.var(-1),
    "normalize": lambda: lambda x: F.normalize(x, dim=-1),
    "einsum": lambda: lambda x: torch.einsum("bsd,btd->bst", x, x),
}
_IMAGE: Mapping[str, Callable[[], Callable[..., Any]]] = {
    "BatchNorm": lambda: nn.BatchNorm2d(4),
    "BatchNorm, eval": lambda: nn.BatchNorm2d(4).eval(),
    "InstanceNorm": lambda: nn.InstanceNorm2d(4, affine=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "Conv2d": lambda: nn.Conv2d(4, 4, 3, 2, 1),
    "Conv2d, depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 4, 4, 2, 1),
    "MaxPool": lambda: nn.MaxPool2d(2),
    "AvgPool": lambda: nn.AvgPool2d(3, 2, 1),
    "AdaptiveAvgPool": lambda: nn.AdaptiveAvgPool2d(5),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "PixelShuffle": lambda: nn.PixelShuffle(2),
    "reflect": lambda: nn.ReflectionPad2d(2),
}
_LOSSES: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "cross_entropy": (F.cross_entropy, True),
    "cross_entropy, smoothed": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), True),
    "nll_loss": (lambda x, y: F.nll_loss(x.log_softmax(-1), y), True),
    "mse_loss": (F.mse_loss, False),
    "smooth_l1_loss": (F.smooth_l1_loss, False),
    "huber_loss": (F.huber_loss, False),
    "l1_loss": (F.l1_loss, False),
    "bce_with_logits": (F.binary_cross_entropy_with_logits, False),
    "kl_div": (lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"), False),
}


class _MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def _cases() -> dict[str, Callable[[torch.dtype], Call]]:
    cases: dict[str, Callable[[torch.dtype], Call]] = {
        name: lambda dtype, name=name: _transformer(name, dtype) for name in ("llama", "gpt2", "bert", "vit")
    }
    cases["gpt2, dropout"] = lambda dtype: _transformer("gpt2", dtype, 0.1)
    cases["t5"] = _t5
    for name in ("unet", "resnet", "convnext", "weather"):
        cases[name] = lambda dtype, name=name: _spatial(name, dtype)
    for name, vector in _VECTOR.items():
        cases[name] = lambda dtype, make=vector: _vector(make(), dtype)
    for name, image in _IMAGE.items():
        cases[name] = lambda dtype, make=image: _image(make(), dtype)
    for name, (loss, classes) in _LOSSES.items():
        cases[name] = lambda dtype, loss=loss, classes=classes: _loss(loss, dtype, classes)
    return cases


CASES = _cases()
"""name -> (dtype -> model, args, kwargs)."""


KINDS: Mapping[str, tuple[str, torch.dtype, bool]] = {
    "float32 on the CPU": ("cpu", torch.float32, False),
    "float32": ("cuda", torch.float32, False),
    "bfloat16": ("cuda", torch.bfloat16, False),
    "autocast": ("cuda", torch.bfloat16, True),
}
"""name -> (device type of the mesh, dtype of the weights or of autocast, whether it is autocast). No GPU is needed."""


def joint(name: str, kind: str) -> JointGraph:
    """The canonical graph of a case; under autocast its weights are float32."""
    device, dtype, autocast = KINDS[kind]
    torch.manual_seed(0)
    model, args, kwargs = CASES[name](torch.float32 if autocast else dtype)
    with autocast_as(MeshSpec({"a": 1}, device_type=device), dtype if autocast else None):
        return canonical_capture(model, args, kwargs, device=torch.device(device)).joint


def hashes() -> dict[str, str]:
    """ "case / kind" -> the hash, or the error that came instead."""
    found: dict[str, str] = {}
    for name in CASES:
        for kind in KINDS:
            try:
                found[f"{name} / {kind}"] = graph_hash(joint(name, kind))
            except Exception as error:  # another version's failure is what is looked for
                found[f"{name} / {kind}"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return found


def _text(graph: JointGraph) -> str:
    lines: list[str] = []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        shape = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        lines.append(f"{node.name}: {shape} = {node.target} {node.args} {node.kwargs or ''}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", choices=tuple(CASES), help="print this graph instead")
    parser.add_argument("--kind", default="float32", choices=tuple(KINDS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if given.text:
        print(_text(joint(given.text, given.kind)))
        return
    report = {"torch": torch.__version__, "python": sys.version.split()[0], "hashes": hashes()}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
