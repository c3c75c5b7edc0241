"""State dicts that were saved whole come to sharded parameters, and shards to whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autoshard.runtime.checksum import checksum
from autoshard.runtime.optimizers import live_optimizers, shard_when_loaded
from autoshard.runtime.sharding import like_parameter
from autoshard.runtime.stage_mesh import pipeline_mesh_of
from autoshard.watching.agreement import everyones
from cost_model.errors import ShardingError

__all__ = ["accept_any_state"]


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
