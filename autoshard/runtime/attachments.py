"""What a parallel model has beside its `forward`, so that what people do with a model does what they mean."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autoshard.arguments import refuse_data_parallel
from autoshard.runtime.process_groups import pipeline_mesh_of
from autoshard.runtime.sharding import as_laid_out, checksum
from autoshard.watching.agreement import collectively, everyones
from cost_model.errors import ShardingError, few
from passes.capture.model_state import refresh_flat_weights
from passes.ir.torch_compat import version_of
from passes.ir.torch_dtensor import whole_value


def accept_direct_calls(model: nn.Module) -> list[RemovableHandle]:
    """Let every layer with parameters run as it is when it is called outside the model's forward.

    Tensors of such a call are the same on every rank, and so is what it returns: every rank has the layer's whole
    parameters for the call, and whole tensors for DTensors among its arguments. Gradients flow through.
    """
    calls = _DirectCalls()
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if module is not model and next(module.parameters(), None) is not None:
            handles.append(module.register_forward_pre_hook(calls.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(calls.leave, always_call=True))
    return handles


class _DirectCalls:
    """The outermost layer of the call that runs now, if any: what is inside it sees whole parameters."""

    def __init__(self) -> None:
        self._outermost: nn.Module | None = None
        self._whole: AbstractContextManager[Any] = nullcontext()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Parameters are plain before the first call, and while a call is captured.
        if self._outermost is not None or next(_dtensors(module), None) is None:
            return None
        self._outermost, self._whole = module, _whole_parameters(module)
        self._whole.__enter__()
        given = any(isinstance(value, DTensor) for value in pytree.tree_leaves((args, kwargs)))
        return pytree.tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs)) if given else None

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is self._outermost:
            self._outermost = None
            self._whole.__exit__(None, None, None)


def _dtensors(module: nn.Module) -> Iterator[DTensor]:
    return (parameter for parameter in module.parameters() if isinstance(parameter, DTensor))


@contextmanager
def _whole_parameters(module: nn.Module) -> Generator[None]:
    whole = {id(parameter): parameter.full_tensor() for parameter in _dtensors(module)}
    tables = [table for one in module.modules() if (table := one._parameters)]
    places = [(table, name, p) for table in tables for name, p in table.items() if id(p) in whole]
    try:
        for table, name, parameter in places:
            table[name] = whole[id(parameter)]  # type: ignore[assignment]
        _refresh(module)
        yield
    finally:
        for table, name, parameter in places:
            table[name] = parameter
        _refresh(module)


def _refresh(module: nn.Module) -> None:
    for one in module.modules():
        refresh_flat_weights(one)


@dataclass(frozen=True)
class _Empty:
    """A buffer as `to_empty` left it: filled with a value that no model computes, where its dtype has one."""

    name: str
    tensor: weakref.ref[Tensor]
    version: int

    def still(self, model: nn.Module) -> bool:
        module, _, name = self.name.rpartition(".")
        now = model.get_submodule(module)._buffers.get(name)
        # `buffer.data.copy_` writes without a new version, hence the look at the values.
        return (
            now is not None and now is self.tensor() and version_of(now) == self.version and _is_filled(now)
        )


class _ToEmpty:
    """The model's `to_empty`. A call after it raises ShardingError as long as a buffer that was on `meta` is unwritten.

    A checkpoint has persistent buffers only, and `reset_parameters` of most modules writes parameters alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *, device: Any, recurse: bool = True) -> nn.Module:
        model = self._model
        meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        type(model).to_empty(model, device=device, recurse=recurse)
        made = [_filled(name, model.get_buffer(name)) for name in meta]
        if any(not model.get_buffer(name).is_meta for name in meta):
            _Check(model, made)
        return model


class _Check:
    """A forward pre-hook that goes when it has passed."""

    def __init__(self, model: nn.Module, empties: list[_Empty]) -> None:
        self._empties = empties
        self._handle = model.register_forward_pre_hook(self)

    def __call__(self, model: nn.Module, args: Any) -> None:
        names = [empty.name for empty in self._empties if empty.still(model)]
        if names:
            raise ShardingError(
                f"the model was on meta, and to_empty left buffers without values: {few(names, 4)}\n"
                f"  try: model.get_buffer({names[0]!r}).copy_(...) after to_empty, load_state_dict if persistent, "
                "or make buffers outside torch.device('meta')"
            )
        self._handle.remove()


def _filled(name: str, buffer: Tensor) -> _Empty:
    value = _never(buffer.dtype)
    if value is not None:
        with torch.no_grad():
            buffer.fill_(value)
    return _Empty(name, weakref.ref(buffer), version_of(buffer))


def _is_filled(buffer: Tensor) -> bool:
    value = _never(buffer.dtype)
    if value is None:
        return True
    return bool((buffer.isnan() if value != value else buffer == value).all())


def _never(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype == torch.bool else torch.iinfo(dtype).min or torch.iinfo(dtype).max


def attach(model: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """Loading of any state dict, saving whole ones, buffers without values, layers called directly, and no second
    parallelism. What is returned takes all of it off again."""
    before = set(vars(model))
    handles = [*accept_any_state(model), *accept_direct_calls(model)]
    if callable(getattr(type(model), "save_pretrained", None)):
        model.save_pretrained = _SavePretrained(model, mesh)  # type: ignore[assignment]
    model.to_empty = _ToEmpty(model)  # type: ignore[method-assign]
    refuse_data_parallel(model)
    added = set(vars(model)) - before

    def detach() -> None:
        for handle in handles:
            handle.remove()
        for name in added:
            del vars(model)[name]

    return detach


def accept_any_state(model: nn.Module) -> list[RemovableHandle]:
    """Let `load_state_dict` of the model and of its modules take whole tensors and DTensors alike.

    Every rank passes the same whole tensors and keeps its part, without communication but for a comparison of
    checksums. Raises ShardingError if they differ, before anything is loaded.
    """
    return [module.register_load_state_dict_pre_hook(_fit) for module in model.modules()]


def _fit(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace, in `state`, what is not of its parameter's kind. What an outer module did is not done again."""
    parameters = {prefix + n: p for n, p in module.named_parameters(remove_duplicate=False)}
    pairs = {
        key: (state[key], parameter)
        for key, parameter in parameters.items()
        if isinstance(state.get(key), Tensor) and state[key].shape == parameter.shape
    }
    whole = {
        key: (v, p) for key, (v, p) in pairs.items() if isinstance(p, DTensor) and not isinstance(v, DTensor)
    }
    if whole:
        _check_same({key: value for key, (value, _) in whole.items()}, _mesh_of_all(whole))
    for key, (value, parameter) in pairs.items():
        state[key] = _fitting(value, parameter)


def _fitting(value: Tensor, parameter: Tensor) -> Tensor:
    value = value.detach()
    if isinstance(parameter, DTensor):
        return as_laid_out(value, parameter)
    return whole_value(value)


def _mesh_of_all(whole: Mapping[str, tuple[Tensor, Tensor]]) -> DeviceMesh:
    parameter = next(iter(whole.values()))[1]
    assert isinstance(parameter, DTensor)
    return pipeline_mesh_of(parameter.device_mesh) or parameter.device_mesh


def _check_same(whole: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    mine = {key: (str(v.dtype), checksum(v.detach())) for key, v in whole.items() if not v.is_meta}
    first, *others = everyones(mesh, mine)
    for rank, other in enumerate(others, start=1):
        key = next((k for k in [*first, *other] if first.get(k) != other.get(k)), None)
        if key is not None:
            raise ShardingError(
                f"state_dict has other values of {key} on rank {rank} than on rank 0, and each rank keeps its part\n"
                "  try: load the same file on every rank; or, from rank 0 alone, set_model_state_dict of "
                "torch.distributed.checkpoint.state_dict with StateDictOptions(full_state_dict=True, "
                "broadcast_from_rank0=True)"
            )


class _SavePretrained:
    """The model's `save_pretrained`: every rank calls it, rank 0 writes. It gathers the parameters, in the memory of
    rank 0's host."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> _SavePretrained:
        return _SavePretrained(memo.get(id(self._model), self._model), self._mesh)

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        collectively(self._mesh, self._arrived)
        if kwargs.get("state_dict") is None:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            kwargs["state_dict"] = get_model_state_dict(self._model, options=options)
        kwargs["is_main_process"] = dist.get_rank() == 0
        collectively(self._mesh, lambda: self._write(save_directory, *args, **kwargs))

    def _write(self, *args: Any, **kwargs: Any) -> None:
        if kwargs["is_main_process"]:
            # It writes into the configuration, of this rank alone, whose next call would be of another model.
            kept = {name: value for name, value in vars(self._model).items() if name == "config"}
            vars(self._model).update(copy.deepcopy(kept))
            try:
                type(self._model).save_pretrained(self._model, *args, **kwargs)  # type: ignore[operator]
            finally:
                vars(self._model).update(kept)

    def _arrived(self) -> None:
        """Nothing: a rank that does not come here is named."""
