"""nn.TransformerEncoder as it runs in evaluation without gradients, where torch takes a way that has other values.

Its fused ops are not traced, but what they make of padding is: an encoder packs the rows of a batch whose padding is
at their ends, and what is padded is zero in its result; a layer takes any number but 0 in a mask for "not to be seen".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.torch_tracing import replaced_attribute

__all__ = ["inference_paths_kept"]

Forward = Callable[..., Tensor]


@contextmanager
def inference_paths_kept() -> Generator[None]:
    """To be entered before torch's fast paths are off. Does nothing if the user turned them off."""
    with ExitStack() as stack:
        if torch.backends.mha.get_fastpath_enabled():
            for kind, made in ((nn.TransformerEncoder, _encoder), (nn.TransformerEncoderLayer, _layer)):
                stack.enter_context(replaced_attribute(kind, "forward", made(kind.forward)))
        yield


def _encoder(original: Forward) -> Forward:
    def forward(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if mask is not None or src_key_padding_mask is None or not _packs(self, src):
            return original(self, src, mask, src_key_padding_mask, is_causal)
        padded = _seen_or_not(src_key_padding_mask)
        at_ends = (padded[:, 1:] | ~padded[:, :-1]).all()
        norm, self.norm = self.norm, None
        try:
            output = original(self, src, None, padded, is_causal)
        finally:
            self.norm = norm
        output = output.masked_fill((padded & at_ends).unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)

    return forward


def _layer(original: Forward) -> Forward:
    def forward(
        self: Any,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if _is_fused(self, src):
            src_mask, src_key_padding_mask = _seen_or_not(src_mask), _seen_or_not(src_key_padding_mask)
        return original(self, src, src_mask, src_key_padding_mask, is_causal)

    return forward


def _seen_or_not(mask: Any) -> Any:
    return mask if mask is None or mask.dtype == torch.bool else mask != 0


def _packs(encoder: Any, src: Tensor) -> bool:
    first = encoder.layers[0]
    return (
        bool(getattr(encoder, "use_nested_tensor", False))
        and not first.training
        and _is_inference(first, src)
    )


def _is_fused(layer: Any, src: Tensor) -> bool:
    attention = layer.self_attn
    return (
        not layer.training
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and bool(layer.activation_relu_or_gelu)
        and layer.norm1.eps == layer.norm2.eps
        and attention.num_heads % 2 == 0
        and not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
        and _is_inference(layer, src)
    )


def _is_inference(layer: nn.Module, src: Tensor) -> bool:
    """Whether nothing of it is differentiated or cast."""
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (src, *layer.parameters()))
    return src.dim() == 3 and not trained and not torch.is_autocast_enabled()
