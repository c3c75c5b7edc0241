"""What a parallel model has beside its `forward`, so that what people do with a model does what they mean."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.direct_calls import accept_direct_calls
from autoshard.runtime.empty_buffers import watch_empty_buffers
from autoshard.runtime.loading import accept_any_state
from autoshard.runtime.pretrained import save_whole_pretrained
from autoshard.runtime.wrapping import refuse_data_parallel

__all__ = ["attach"]


def attach(model: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """Loading of any state dict, saving whole ones, buffers without values, layers called directly, and no second
    parallelism. What is returned takes all of it off again."""
    before = set(vars(model))
    handles = [*accept_any_state(model), *accept_direct_calls(model)]
    save_whole_pretrained(model, mesh)
    watch_empty_buffers(model)
    refuse_data_parallel(model)
    added = set(vars(model)) - before

    def detach() -> None:
        for handle in handles:
            handle.remove()
        for name in added:
            del vars(model)[name]

    return detach
