"""What torch does by itself in a forward, kept out of traces: shortcuts that take other ops, or have other values.

nn.TransformerEncoder in evaluation without gradients: its fused ops are not traced, but what they make of padding is.
An encoder packs the rows of a batch whose padding is at their ends, and what is padded is zero in its result; a layer
takes any number but 0 in a mask for "not to be seen".

`torch.utils.checkpoint` with `use_reentrant=True`, its default, runs the backward of what it holds by `.backward()`
from within a backward, which no trace can hold. What is computed again is the plan's to say, so nothing is lost by
running the function once.

Batch norm with `momentum=None`, a plain average over all batches, divides by `float(num_batches_tracked)`, which a
trace cannot see. The same with the count left a tensor: running = running * (1 - 1 / count) + batch * (1 / count).

A part of an nn.ParameterList is another one, which takes parameters as they are, and of other tensors copies that are
trained alone. So what stands for a parameter in a trace says that it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from passes.ir.torch_dispatch import onednn_off, replaced_attribute, replaced_kernels

_RESIZING = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_KEYS = ("Autograd", "CompositeImplicitAutograd")
"""Where torch's kernels in Python come before those in C++, which know the op's own backward."""

Forward = Callable[..., Tensor]


@contextmanager
def shortcuts_off() -> Generator[None]:
    """Inside, no fused inference ops (nn.MultiheadAttention), which have no gradient; no ops of one library (oneDNN's
    and cuDNN's recurrent layers, cuDNN's batch norm), which have no rule; resizing is one op forward and one backward,
    which a rule splits in space: by itself torch traces the places and weights of all neighbours, and gathers from a
    whole plane, whatever table of decompositions it is given. Its kernels in C++ take no sizes in symbols."""
    has_fast_paths = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        if has_fast_paths:  # else the user turned them off
            for kind, made in ((nn.TransformerEncoder, _encoder), (nn.TransformerEncoderLayer, _layer)):
                stack.enter_context(replaced_attribute(kind, "forward", made(kind.forward)))
        stack.callback(torch.backends.mha.set_fastpath_enabled, has_fast_paths)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(replaced_attribute(torch.backends.cudnn, "enabled", False))
        stack.enter_context(onednn_off())
        for name in _RESIZING.split():
            packet: Any = getattr(torch.ops.aten, name, None)
            if packet is None:
                continue
            for overload in packet.overloads():
                ours = partial(_resize, packet.default) if overload == "vec" else None
                stack.enter_context(replaced_kernels(getattr(packet, overload), dict.fromkeys(_KEYS, ours)))
        yield


def _resize(op: Any, x: Tensor, sizes: Sequence[Any] | None, *given: Any) -> Tensor:
    """`op` to sizes, or by factors, the last of `given`."""
    factors = [None] * (x.ndim - 2) if given[-1] is None else given[-1]
    if sizes is None:
        scaled: Callable[..., Any] = lambda n, by: n * int(by) if by == int(by) else torch.sym_int(n * by)
        sizes = list(map(scaled, x.shape[2:], factors))
    return op(x, sizes, *given[:-1], *factors)


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


class _Called:
    """In place of `torch.utils.checkpoint.CheckpointFunction`: the same arguments, results and gradients."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        torch.utils.checkpoint.check_backward_validity(args)  # warns where there will be no gradients
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():
                return function(*args)
        result = function(*args)
        if isinstance(result, tuple):
            return tuple(map(_differentiable, result))
        return _differentiable(result)


def _differentiable(result: Any) -> Any:
    """Tensors in lists, dicts and the like get no gradient: an autograd function does not see them."""
    return result if isinstance(result, Tensor) else pytree.tree_map_only(Tensor, Tensor.detach, result)


def reentrant_checkpoints_called() -> AbstractContextManager[None]:
    """Inside, reentrant checkpoints are calls of what they hold."""
    return replaced_attribute(torch.utils.checkpoint, "CheckpointFunction", _Called)


def marked(parameter: Tensor) -> Tensor:
    """The same tensor, an nn.Parameter by `isinstance`. Since torch 1.12."""
    parameter._is_param = True  # type: ignore[attr-defined]
    return parameter


def marked_registered() -> AbstractContextManager[None]:
    """Inside, modules take `marked` tensors as parameters: where writes are rewritten these are no leaves."""
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.grad_fn is not None and isinstance(param, nn.Parameter):
            self._parameters[name] = param
        else:
            original(self, name, param)

    return replaced_attribute(nn.Module, "register_parameter", register_parameter)


def trace_cumulative_averages(model: nn.Module) -> None:
    """Give every batch norm of `model` that averages so a forward that can be traced, until `state_kept` undoes it.
    A subclass with a forward of its own is left alone."""
    for module in model.modules():
        norm: Any = module
        if type(module).forward is nn.BatchNorm1d.forward and norm.momentum is None:
            norm.forward = partial(_forward, norm, norm.forward)


def _forward(norm: nn.BatchNorm1d, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if not norm.training or mean is None or variance is None or count is None:
        return original(x)
    count.add_(1)
    result = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    over = [d for d in range(x.ndim) if d != 1]
    seen = torch.var_mean(x.detach().to(mean.dtype), over, correction=1)
    share = count.to(mean.dtype).reciprocal()
    for running, batch in zip((variance, mean), seen, strict=True):
        running.copy_(running * (1.0 - share) + batch * share)
    return result
