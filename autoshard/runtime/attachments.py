"""What a parallel model has beside its `forward`, so that what people do with a model does what they mean."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.empty import watch_empty_buffers
from autoshard.runtime.loading import accept_any_state
from autoshard.runtime.pretrained import save_whole_pretrained
from autoshard.runtime.wrapping import refuse_data_parallel

__all__ = ["attach"]


def attach(model: nn.Module, mesh: DeviceMesh) -> None:
    """Loading of any state dict, saving whole ones, buffers without values, and no second parallelism."""
    accept_any_state(model)
    save_whole_pretrained(model, mesh)
    watch_empty_buffers(model)
    refuse_data_parallel(model)
