"""`save_pretrained` of transformers writes whole tensors of a parallel model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.agreement import collectively

__all__ = ["save_whole_pretrained"]


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
