"""Models that something else has wrapped or compiled, and wrappers around a parallel model: refused by name."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from cost_model.errors import ShardingError

__all__ = ["check_original", "check_unwrapped", "refuse_data_parallel"]

_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, DataParallel)


def check_original(model: nn.Module) -> None:
    """ShardingError for a model that torch.compile, TorchScript, DDP or FSDP has made of another."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ShardingError(
                f"{name or 'model'} is a TorchScript module ({type(module).__name__}), whose code autoshard cannot "
                "trace\n  try: the original in its place, before torch.jit.script or torch.jit.trace"
            )
    if _is_compiled(model):
        raise ShardingError(
            "model is what torch.compile returned, and autoshard compiles each rank's program itself\n"
            "  try: pass the original; backend=... chooses a backend of torch.compile"
        )
    for name, module in model.named_modules():
        if isinstance(module, (*_WRAPPERS, FSDPModule)):
            raise ShardingError(_text(type(module).__name__, name))


def check_unwrapped(model: nn.Module) -> None:
    """ShardingError if DDP or FSDP took the model, or a part of it, since `autoshard` was called."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ShardingError(_text("fully_shard", name))
    ours = set(model.modules())
    for wrapper in _live_wrappers():
        if not ours.isdisjoint(wrapper.modules()):
            raise ShardingError(_text(type(wrapper).__name__, ""))


def refuse_data_parallel(model: nn.Module) -> None:
    """Make `DistributedDataParallel(model)` raise ShardingError: it asks a module which parameters to ignore."""
    model._ddp_params_and_buffers_to_ignore = _Refusal()  # type: ignore[assignment]


class _Refusal:
    def __iter__(self) -> Iterator[str]:
        raise ShardingError(_text("DistributedDataParallel", ""))


def _text(wrapper: str, name: str) -> str:
    what = f"{name} of the model" if name else "the model"
    return (
        f"{what} is wrapped by {wrapper}, and autoshard is the parallelism: gradients would be reduced twice\n"
        "  try: the model without it; with accelerate, transformers' Trainer or Lightning as in docs/company.md"
    )


def _is_compiled(model: nn.Module) -> bool:
    original: Any = vars(model).get("_modules", {}).get("_orig_mod")
    return isinstance(original, nn.Module) and type(model).__name__ == "OptimizedModule"


def _live_wrappers() -> list[nn.Module]:
    # type(), not isinstance: the latter asks every object, lazily loaded modules included.
    return [o for o in gc.get_objects() if issubclass(type(o), _WRAPPERS)]
