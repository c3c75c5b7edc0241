"""While a model is traced on the CPU, it sees the device type of its mesh.

Fakes of a device that this build of torch cannot drive abort the process in autograd, so every model is traced on
CPU fakes, wherever that happens. What the model's code asks of a tensor's device is answered as on the mesh, and
device arguments that name the mesh's device type mean the CPU. So a model takes the same way on a laptop as on GPUs.

`torch.autocast("cuda")` acts on CUDA tensors only, and `torch.autocast("cpu")` casts other ops, so the casts of GPUs
are made here too: torch's own lists, by torch's own names (ATen/autocast_mode.h; CUDA, XPU and MTIA share them). A test
compares both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.capture.provenance import is_user_file
from passes.ir.joint import CPU
from passes.ir.torch_dispatch import (
    accelerator_kernels,
    autocast_of_cpu_ignored,
    fake_devices_answered,
    is_autocast_op,
    replaced_attribute,
)
from passes.ir.torch_tracing import tracing_suspended

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
    given = _by_name(op, args, kwargs)
    if not _is_cast(args[0]) or given["dtype"] is not None:
        return op(*args, **kwargs)
    return op(*args[: list(given).index("dtype")], **{**kwargs, "dtype": torch.float32})


def _full_other(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """norm(x, p) -> norm(x, p, dtype=float32), another overload with every argument."""
    if not _is_cast(args[0]):
        return op(*args, **kwargs)
    given = _by_name(op, args, kwargs)
    norm = torch.ops.aten.norm
    if "dim" in given:
        dims = given["dim"], bool(given["keepdim"])
        return norm.ScalarOpt_dim_dtype(args[0], given["p"], *dims, dtype=torch.float32)
    return norm.ScalarOpt_dtype(args[0], 2 if given["p"] is None else given["p"], dtype=torch.float32)


def _by_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of the schema in its order, None where the call has none."""
    names = [argument.name for argument in op._schema.arguments]
    return {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}


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
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type))
        stack.callback(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type))
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, dtype)
        yield


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


@contextmanager
def seen_on(device_type: str) -> Generator[None]:
    """Inside, traced tensors are on the first device of `device_type` as far as the model's code can see, its
    autocast is that of `device_type`, and the machine has one such device. To be entered around the model's own code
    only, and answered to it only: torch asks too, for itself.

    Real tensors that live on a device (a mask that is neither parameter nor buffer) are read as copies on the CPU.
    """
    with ExitStack() as stack:
        # A default device that the user set names where tensors are made, not where they are traced.
        stack.enter_context(torch.device(CPU))
        if device_type != CPU.type:
            stack.enter_context(accelerator_autocast(device_type))
            _answer_for_machine(stack, device_type)
            view = stack.enter_context(_View(torch.device(device_type, 0)))
            stack.enter_context(fake_devices_answered(_asked_by_user, view.device_of))
        elif torch.accelerator.is_available():
            stack.enter_context(_OnCpu())
        yield


def _answer_for_machine(stack: ExitStack, device_type: str) -> None:
    """What a model may ask of the machine, answered as on a rank."""
    # What a model that asks for the compute capability is told, whatever the GPU: the graph is one for all of
    # them. It is Hopper's; the kernels that run are chosen by the real one.
    of_type: dict[str, Any] = {
        "is_available": True, "is_bf16_supported": True, "current_device": 0, "get_device_capability": (9, 0),
    }  # fmt: skip
    of_any: dict[str, Any] = {"is_available": True, "current_accelerator": torch.device(device_type)}
    for module, answers in ((getattr(torch, device_type, None), of_type), (torch.accelerator, of_any)):
        for name, value in answers.items():
            if hasattr(module, name):
                answer = lambda *args, value=value, **kwargs: value
                stack.enter_context(replaced_attribute(module, name, answer))


def _asked_by_user() -> bool:
    """Whether what the calling function answers is asked in the user's code."""
    return is_user_file(sys._getframe(2).f_code.co_filename)


class _OnCpu(TorchFunctionMode):
    """Real tensors of a device are read as copies on the CPU, one copy of each."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._carried(args, kwargs or {})
        return func(*args, **kwargs)

    def _carried(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return pytree.tree_map_only(Tensor, self._copy, (args, kwargs))

    def _copy(self, leaf: Any) -> Any:
        if not _is_real_elsewhere(leaf):
            return leaf
        if id(leaf) not in self._copies:
            with tracing_suspended(), torch.no_grad():
                copy = leaf.detach().to(CPU).requires_grad_(leaf.requires_grad)
            # The tensor is kept too: its id must not be another's while the copy is known by it.
            self._copies[id(leaf)] = leaf, copy
        return self._copies[id(leaf)][1]


def _is_real_elsewhere(leaf: Any) -> bool:
    """Traced tensors are subclasses. `meta` tensors have no values to copy: capture names them in an error."""
    plain = type(leaf) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and leaf.device.type not in (CPU.type, "meta")


class _View(_OnCpu):
    """Answers what code asks about devices, and carries out on the CPU what it asks of the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, kind = device, device.type
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: self.device_of,  # type: ignore[attr-defined]
            Tensor.get_device: lambda tensor: self._device.index,
            getattr(Tensor, f"is_{kind}").__get__: lambda tensor: tensor.device.type == CPU.type,
            Tensor.is_cpu.__get__: lambda tensor: False,  # type: ignore[attr-defined]
        }
        self._moves = getattr(Tensor, kind)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._carried(args, kwargs or {})
        answer = self._answers.get(func)
        if answer is not None and _asked_by_user():
            return answer(*args, **kwargs)
        with autocast_of_cpu_ignored() if torch.is_autocast_enabled(CPU.type) else nullcontext():
            if func is self._moves:
                return Tensor.to(args[0], CPU)
            return func(*self._places(func, args), **self._keywords(kwargs))

    def device_of(self, tensor: Tensor) -> torch.device:
        found = tensor.device
        return self._device if found.type == CPU.type else found

    def _keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("device") is None:
            return kwargs
        return {**kwargs, "device": self._here(kwargs["device"])}

    def _places(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Devices given by position: objects anywhere, names and numbers to `Tensor.to` only."""
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, int)):
            return args[0], self._here(args[1]), *args[2:]
        return tuple(self._here(a) if isinstance(a, torch.device) else a for a in args)

    def _here(self, device: Any) -> Any:
        """The CPU for a device of the mesh's type: an object, "cuda:1", or a number."""
        mine = isinstance(device, int) or torch.device(device).type == self._device.type
        return CPU if mine else device
