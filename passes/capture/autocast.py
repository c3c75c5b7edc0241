"""Autocast of GPUs, for tensors that are traced on the CPU.

`torch.autocast("cuda")` acts on CUDA tensors only, and `torch.autocast("cpu")` casts other ops. Capture traces CPU
fakes for every mesh (docs/decisions/0020), so the casts of GPUs are made here: torch's own lists, by torch's own
names (ATen/autocast_mode.h; CUDA, XPU and MTIA share them). A test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.ir.torch_dispatch import accelerator_kernels, is_autocast_op

__all__ = ["CUDNN_LAYERS", "POLICIES", "accelerator_autocast", "autocast_on", "cast_to"]

_LOWER_PRECISION = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_FULL_PRECISION = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""
_FULL_PRECISION_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_FULL_PRECISION_OTHER_OVERLOAD = "norm.Scalar norm.ScalarOpt_dim"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
_REFUSED = "binary_cross_entropy"
CUDNN_LAYERS = (
    "lstm.input", "lstm.data", "gru.input", "gru.data",
    "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data",
)  # fmt: skip
"""Whole recurrent layers. On GPUs they are cuDNN's, which autocast gives everything in lower precision; capture traces
them as products and pointwise ops."""

Op = Callable[..., Any]
Policy = Callable[[Op, torch.dtype, tuple[Any, ...], dict[str, Any]], Any]
"""(op, autocast's dtype, args, kwargs) -> the op's result, with the casts that are due."""


def _is_cast(value: Any) -> bool:
    """float64 never is."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def cast_to(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(args, kwargs) with every tensor that autocast casts in `dtype`."""
    return pytree.tree_map(lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (args, kwargs))


def _lower(op: Op, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is cast, in `dtype`."""
    args, kwargs = cast_to(dtype, args, kwargs)
    return op(*args, **kwargs)


def _full(op: Op, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _lower(op, torch.float32, args, kwargs)


def _full_result(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operand stays; the op is asked for a float32 result unless the call asks for another."""
    if not _is_cast(args[0]) or _given(op, "dtype", args, kwargs) is not None:
        return op(*args, **kwargs)
    return op(*args[: _place(op, "dtype")], **{**kwargs, "dtype": torch.float32})


def _full_other(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """norm(x, p) -> norm(x, p, dtype=float32), another overload with every argument."""
    if not _is_cast(args[0]):
        return op(*args, **kwargs)
    given = {a.name: _given(op, a.name, args, kwargs) for a in op._schema.arguments}
    tensor = given.pop("self")
    aten = torch.ops.aten.norm
    if "dim" in given:
        return aten.ScalarOpt_dim_dtype(
            tensor, given["p"], given["dim"], bool(given["keepdim"]), dtype=torch.float32
        )
    return aten.ScalarOpt_dtype(tensor, 2 if given["p"] is None else given["p"], dtype=torch.float32)


def _place(op: Any, name: str) -> int:
    return [argument.name for argument in op._schema.arguments].index(name)


def _given(op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = _place(op, name)
    return args[place] if place < len(args) else kwargs.get(name)


def _widest(op: Op, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All operands in float32 if any of them is, else in autocast's dtype."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_cast(leaf)]
    wide = any(tensor.dtype == torch.float32 for tensor in tensors)
    return _lower(op, torch.float32 if wide else dtype, args, kwargs)


def _refuse(op: Op, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is unsafe to autocast: use binary_cross_entropy_with_logits, or disable autocast there"
    )


POLICIES: dict[str, Policy] = {
    name: policy
    for names, policy in (
        (_LOWER_PRECISION, _lower),
        (_FULL_PRECISION, _full),
        (_FULL_PRECISION_RESULT, _full_result),
        (_FULL_PRECISION_OTHER_OVERLOAD, _full_other),
        (_WIDEST, _widest),
        (_REFUSED, _refuse),
    )
    for name in names.split()
} | dict.fromkeys(CUDNN_LAYERS, _lower)
"""ATen name, with its overload if that has a name -> what autocast does there."""


@contextmanager
def autocast_on(device_type: str, dtype: torch.dtype) -> Generator[None]:
    """`torch.autocast(device_type, dtype)`, whether or not this machine has such a device (torch's own then warns and
    does nothing)."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


@contextmanager
def accelerator_autocast(device_type: str) -> Generator[None]:
    """Inside, autocast of `device_type` casts CPU tensors as it would cast those of that device.

    It is asked at every op whether autocast is on, so the model may switch it on and off.
    """

    def kernel(op: Op, policy: Policy) -> Op:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled(device_type):
                return op(*args, **kwargs)
            return policy(op, torch.get_autocast_dtype(device_type), args, kwargs)

        return run

    kernels: dict[Any, Op] = {}
    for name, policy in POLICIES.items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None and (name in CUDNN_LAYERS or is_autocast_op(name)):
            kernels[op] = kernel(op, policy)
    with accelerator_kernels(kernels):
        yield
