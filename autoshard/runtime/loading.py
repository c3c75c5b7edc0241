"""State dicts that were saved whole come to sharded parameters, and shards to whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autoshard.runtime.optimizers import live_optimizers, shard_when_loaded
from autoshard.runtime.process_groups import is_of_stages, pipeline_mesh_of
from autoshard.runtime.sharding import checksum, like_parameter
from autoshard.watching.agreement import collectively, everyones
from cost_model.errors import ShardingError
from passes.ir.torch_dtensor import DISTRIBUTE_STATE, GATHER_STATE, wrap_in_torch


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
        _check_same({key: value for key, (value, _) in whole.items()}, _mesh_of(whole))
        shard_when_loaded(live_optimizers(), set(parameters.values()))
    for key, (value, parameter) in pairs.items():
        state[key] = _fitting(value, parameter)


def _fitting(value: Tensor, parameter: Tensor) -> Tensor:
    value = value.detach()
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        return like_parameter(value, parameter)
    if value.device_mesh != parameter.device_mesh:
        return like_parameter(value.full_tensor(), parameter)
    return value.redistribute(placements=parameter.placements)


def _mesh_of(whole: Mapping[str, tuple[Tensor, Tensor]]) -> DeviceMesh:
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


def states_of_all_stages() -> None:
    """From now on, in this process: `torch.distributed.checkpoint.state_dict` gathers and loads full state dicts of a
    pipelined model."""
    wrap_in_torch(GATHER_STATE, _gather)
    wrap_in_torch(DISTRIBUTE_STATE, _distribute)


def _gather(plain: Callable[..., Any]) -> Callable[..., Any]:
    """With whole tensors in the place of what some stages hold, one after the other to the host."""

    def gather(state_dict: Any, *, cpu_offload: bool = False, ranks_only: Any = (), **options: Any) -> Any:
        def whole(value: Any) -> Any:
            if not is_of_stages(value):
                return value
            found = value.detach().full_tensor()
            if ranks_only and dist.get_rank() not in ranks_only:
                return None
            return found.cpu() if cpu_offload else found

        gathered = pytree.tree_map(whole, state_dict)
        return plain(gathered, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)

    return gather


def _distribute(plain: Callable[..., None]) -> Callable[..., None]:
    """Of a tensor that this rank has no part of, torch would copy all of it into what is there."""

    def distribute(local_state_dict: dict[str, Any], keys: list[str], *rest: Any, **options: Any) -> None:
        pairs = {key: local_state_dict.get(key) for key in keys}
        ours = [key for key, pair in pairs.items() if isinstance(pair, tuple) and is_of_stages(pair[0])]
        for key in ours:
            local, whole = local_state_dict[key]
            shard = like_parameter(whole, local)
            local_state_dict[key] = shard if local.is_meta else local.copy_(shard)
        plain(local_state_dict, [key for key in keys if key not in ours], *rest, **options)

    return distribute


def save_whole_pretrained(model: nn.Module, mesh: DeviceMesh) -> None:
    """Where the model has a `save_pretrained`, let every rank call it, and rank 0 write."""
    if callable(getattr(type(model), "save_pretrained", None)):
        model.save_pretrained = _SavePretrained(model, mesh)  # type: ignore[assignment]


class _SavePretrained:
    """The model's `save_pretrained`. Collective: it gathers the parameters, in the memory of rank 0's host."""

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
            type(self._model).save_pretrained(self._model, *args, **kwargs)  # type: ignore[operator]

    def _arrived(self) -> None:
        """Nothing: a rank that does not come here is named."""
