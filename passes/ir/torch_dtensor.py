"""Private torch APIs of DTensors: one small function each, saying what it is for. Supported: torch 2.11 to 2.15."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from passes.ir.torch_dispatch import replaced_attribute


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of an axis whose shards of `dim` are split again by an axis to its left: the only one that states
    an axis order. `_StridedShard` since torch 2.4."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement: Any) -> bool:
    """Whether `placement` is one of `strided_shard`'s."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def strided_shard_factor(placement: Any) -> int:
    """`split_factor` of a placement for which `is_strided_shard` holds."""
    return int(placement.split_factor)


def handle_dtensor_op(op: Any, handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """From now on `handler(op, args, kwargs)` answers `op` of DTensors, unless torch has its own (since torch 2.4)."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
    handlers.setdefault(op, handler)


def wrap_dtensor_handler(op: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """From now on `wrap(handler)` answers `op` of DTensors, for which torch has `handler(op, args, kwargs)`. Once."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[assignment]
    if not hasattr(handlers[op], "wrapped"):
        handlers[op] = _wrapped(handlers[op], wrap)


def answer_new_ops(
    answer: Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any], *, first: bool = False
) -> None:
    """From now on `answer(op, args, kwargs, propagate)` is the result of an op of DTensors, if not NotImplemented.
    propagate: () -> what is found of the results without it, by torch with their shardings as `output_spec`; returned,
    torch goes on. first: asked before all others, whenever those are given; else after them.

    It is asked when torch has not seen the op with such layouts before, so always until it lets torch go on. torch
    takes what is no sharding for the result, which is how it decomposes ops. Since 2.10."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    torchs = dispatcher._propagate_op_sharding_dispatch_slow_path
    if (answers := getattr(torchs, "answers", None)) is None:
        answers = list[Any]()

        def answered(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any) -> Any:
            def ask(place: int) -> Any:
                if place == len(answers):
                    return torchs(op, args, kwargs, *rest)
                onward = functools.partial(ask, place + 1)
                found = answers[place](op, args, kwargs, onward)
                return onward() if found is NotImplemented else found

            return ask(0)

        answered.answers = answers  # type: ignore[attr-defined]
        dispatcher._propagate_op_sharding_dispatch_slow_path = answered
    if answer not in answers:
        answers.insert(0 if first else len(answers), answer)


def leave_plain_what_is_plain() -> None:
    """From now on what an op of DTensors writes into a plain tensor stays that, if torch has seen the op with such
    layouts before: by then the whole values are in it, and torch fails, or notes in it how a DTensor lies. Of no effect
    where torch has looked its method up already, at the first op that it knows of any DTensor. 2.10."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    torchs = dispatcher._dispatch_fast_path_python_tail

    def ended(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any) -> Any:
        *_, in_place, out = rest
        written = (
            [kwargs[a.name] for a in op._schema.arguments if a.is_out] if out else [*args[:1]] * in_place
        )
        if not written or any(isinstance(value, (DTensor, list)) for value in written):
            return torchs(op, args, kwargs, *rest)
        return written[0] if len(written) == 1 else tuple(written)

    if not hasattr(torchs, "torchs"):
        ended.torchs = torchs  # type: ignore[attr-defined]
        dispatcher._dispatch_fast_path_python_tail = ended


def unscaling_op() -> Any:
    """By which GradScaler divides gradients by its scale and looks for an overflow; with a handler since 2.3."""
    return torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


Places = tuple[tuple[str, str], ...]
"""(module, name): under which torch finds one function of its own. Users may have imported one before, from the public
place, so each is also where torch's public functions look for it."""

TOTAL_NORM: Places = (("torch.nn.utils.clip_grad", "_get_total_norm"), ("torch.nn.utils", "get_total_norm"))
CLIP_BY_NORM: Places = (
    ("torch.nn.utils.clip_grad", "_clip_grads_with_norm_"),
    ("torch.nn.utils", "clip_grads_with_norm_"),
)
CLIP_BY_VALUE: Places = (
    ("torch.nn.utils.clip_grad", "clip_grad_value_"),
    ("torch.nn.utils", "clip_grad_value_"),
)
GATHER_STATE: Places = (("torch.distributed.checkpoint.state_dict", "_gather_state_dict"),)
"""Makes DTensors of a state dict whole. Since torch 2.3."""
SET_PARAMETRIZED: Places = (("torch.nn.utils.parametrize", "_maybe_set"),)
"""(parameter, value): what `remove_parametrizations` leaves in the parameter. Since torch 2.2."""
DISTRIBUTE_STATE: Places = (("torch.distributed._state_dict_utils", "_distribute_tensors"),)
"""(state dict, keys, ...) -> its pairs of a DTensor and a whole tensor become one DTensor. Since torch 2.4."""


def wrap_in_torch(places: Places, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """From now on torch calls `wrap(function)` where it called the function of `places`. Once."""
    for module_name, name in places:
        wrap_attribute(importlib.import_module(module_name), name, wrap)


def wrap_attribute(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """The same for a function of a module or a method of a class."""
    function = getattr(owner, name)
    if not hasattr(function, "wrapped"):
        setattr(owner, name, _wrapped(function, wrap))


def _wrapped(function: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    found: Any = functools.wraps(function)(wrap(function))
    found.wrapped = function
    return found


def take_plain_tensors_as_replicated(device: torch.device) -> None:
    """From now on a plain tensor beside DTensors counts as the same on all ranks, in this thread and in that in which
    autograd runs the backward of `device`. What `experimental.implicit_replication` sets for a block; since 2.1, by
    thread since 2.10."""
    from torch.distributed.tensor import DTensor

    class Sets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            DTensor._op_dispatcher._allow_implicit_replication = True
            return gradient

    DTensor._op_dispatcher._allow_implicit_replication = True
    if device.type not in ("cpu", "meta"):
        with torch.enable_grad():
            Sets.apply(torch.zeros((), device=device, requires_grad=True)).backward()  # type: ignore[union-attr]


def take_gradients_of_dtensors() -> None:
    """From now on the gradient of a whole tensor that was a DTensor's may be a DTensor, as it is where that met others:
    `(p.full_tensor() * q).sum()`. `_ToTorchTensor` since 2.0."""
    from torch.distributed.tensor._api import _ToTorchTensor

    torchs: Any = _ToTorchTensor.backward

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torchs(ctx, whole_value(gradient))

    if not hasattr(torchs, "of_dtensors"):
        backward.of_dtensors = True  # type: ignore[attr-defined]
        _ToTorchTensor.backward = staticmethod(backward)  # type: ignore[method-assign]


def read_dtensors_whole() -> None:
    """From now on `f"{p.norm():.3f}"` and `.tolist()` of a DTensor are those of the whole tensor, as `.item()` is where
    its op is handled so: torch refuses both."""
    from torch.distributed.tensor import DTensor

    def whole(value: Any) -> torch.Tensor:
        return value.detach().clone().full_tensor()

    DTensor.tolist = lambda self: whole(self).tolist()  # type: ignore[method-assign]
    DTensor.__format__ = lambda self, how: format(whole(self), how) if how else str(self)  # type: ignore[method-assign]


def set_dtensor_data_by(setter: Callable[[Any, torch.Tensor], Any]) -> None:
    """Let `x.data = value` of a DTensor take `setter(x, value)`, a DTensor laid out as x, whose sizes and dtype may be
    others: torch changes the wrapper alone, so nothing."""
    from torch.distributed.tensor import DTensor

    plain: Any = torch._C.TensorBase.__dict__["data"]

    def put(x: Any, value: torch.Tensor) -> None:
        laid_out = setter(x, value)
        plain.__set__(x, laid_out)
        take_place_of(x, laid_out)

    if not isinstance(vars(DTensor).get("data"), property):
        DTensor.data = property(plain.__get__, put)  # type: ignore[assignment, method-assign]


def mesh_elsewhere(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> Any:
    """A DeviceMesh of other ranks than this one, without process groups: what `get_all_submeshes` makes of those.
    `_init_backend` since torch 2.4."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
    mesh._dim_group_names = []
    return mesh


def forget_op_layouts() -> None:
    """Results of ops on a new mesh are on that one, and not on an equal one of before: torch keeps, for operands that
    it has seen, what an op gives, with its mesh. Since torch 2.10."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, outside autograd; a plain tensor as it is. `to_local` checks more
    than a step should pay for per parameter. `_local_tensor` since torch 2.0."""
    return getattr(tensor, "_local_tensor", tensor)


def whole_value(value: Any) -> Any:
    """Of a DTensor, gathered by all of its ranks; anything else as it is."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def is_partial(tensor: Any) -> bool:
    """Whether a DTensor waits for a reduction over ranks."""
    return any(placement.is_partial() for placement in tensor.placements)


def memory_of(tensor: torch.Tensor) -> int:
    """What tells the memory of this rank's shard from any other's."""
    return local_of(tensor).untyped_storage()._cdata


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of whose memory this is a view; itself if it is none. `_base` since torch 0.4."""
    return tensor if tensor._base is None else tensor._base


def sharding_of(tensor: torch.Tensor) -> Any:
    """What a DTensor is besides its shard (mesh, placements, global shape); None for a plain tensor.
    `_spec` since torch 2.1."""
    return getattr(tensor, "_spec", None)


def dtensor_from(local: torch.Tensor, sharding: Any, kind: Any = None) -> torch.Tensor:
    """A DTensor of `local` with the `sharding_of` another, outside autograd: `from_local` costs 20 us
    for each gradient, and `__init__`, which does nothing, 1 us more than `__new__`. kind: a subclass. Since 2.1."""
    from torch.distributed.tensor import DTensor

    return DTensor.__new__(kind or DTensor, local, sharding, requires_grad=False)  # type: ignore[call-arg]


def take_place_of(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let a DTensor be cut as another of its shape, with that one's shard. `_local_tensor` since 2.0, `_spec` 2.1."""
    tensor._local_tensor = other._local_tensor  # type: ignore[attr-defined]
    tensor._spec = other._spec  # type: ignore[attr-defined]


def become_view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], view: torch.Tensor) -> Any:
    """`op(*args)`, which changes the shape of its DTensor in place to that of `view`. Since torch 2.1."""
    from torch.utils._python_dispatch import return_and_correct_aliasing

    take_place_of(args[0], view)
    return return_and_correct_aliasing(op, args, kwargs, args[0])


def bare_tensor(kind: type[Any], like: torch.Tensor) -> Any:
    """A tensor of the subclass `kind` without data. `_make_wrapper_subclass` since torch 1.11."""
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)


@contextmanager
def loss_parallel_noted() -> Generator[list[bool]]:
    """What it gives is filled when a forward inside computes a loss within torch's `loss_parallel`. Since torch 2.3."""
    from torch.distributed.tensor.parallel import loss

    noted: list[bool] = []
    enable: Callable[[], None] = loss._enable_custom_loss_ops

    def noting() -> None:
        noted.append(True)
        enable()

    with replaced_attribute(loss, "_enable_custom_loss_ops", noting):
        yield noted


def as_loss_parallel(noted: list[bool]) -> AbstractContextManager[None]:
    """Where a backward of such a loss runs, which torch wants within `loss_parallel` too."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if noted else nullcontext()
