"""Arguments of the public functions: what they must be, before anything is traced, measured or communicated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from cost_model.errors import (
    ProfileError,
    ShardingError,
    checked_count,
    checked_flag,
    checked_path,
    is_whole,
    reject,
    shown,
)
from cost_model.memory import OPTIMIZERS
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.ir.process_state import live
from passes.ir.size_names import check_size_names
from passes.layout.placements import placement_leaves

_DEVICES = ("cpu", "cuda")
_CHOICES = {
    "refine": "'auto', or 'off' to plan with modelled prices alone",
    "recompute": "'auto' or 'user'",
    "batch": "'global' or 'per_rank'",
    "tune": "'background', 'first' for all before the first step, or 'off'",
}


def checked_model(model: object) -> nn.Module:
    """`model` if it is a module of the user's own; ShardingError for a wrapper, a class or anything else."""
    if not isinstance(model, nn.Module):
        raise reject("model", model, "an nn.Module, such as nn.Linear(8, 8)")
    check_original(model)
    return model


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
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if any(getattr(hook, "__module__", "").startswith("torch.distributed.tensor") for hook in hooks):
            raise ShardingError(
                f"{name or 'model'} is split by parallelize_module, whose hooks communicate\n"
                "  try: the model without it; constraints={'layers.*.up.weight': [Shard(0)]} pins what is to be split"
            )


def check_unwrapped(model: nn.Module) -> None:
    """ShardingError if DDP or FSDP took the model, or a part of it, since `autoshard` was called."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ShardingError(_text("fully_shard", name))
    ours = set(model.modules())
    # By name: what the error's frames hold lives as long as it is remembered.
    names = [type(wrapper).__name__ for wrapper in live(_WRAPPERS) if not ours.isdisjoint(wrapper.modules())]
    if names:
        raise ShardingError(_text(names[0], "", "del the wrapper, or "))


def refuse_data_parallel(model: nn.Module) -> None:
    """Make `DistributedDataParallel(model)` raise ShardingError: it asks a module which parameters to ignore."""
    model._ddp_params_and_buffers_to_ignore = _Refusal()  # type: ignore[assignment]


class _Refusal:
    def __iter__(self) -> Iterator[str]:
        raise ShardingError(_text("DistributedDataParallel", ""))


def _text(wrapper: str, name: str, first: str = "") -> str:
    what = f"{name} of the model" if name else "the model"
    return (
        f"{what} is wrapped by {wrapper}, and autoshard is the parallelism: gradients would be reduced twice\n"
        f"  try: {first}the model without it; with accelerate, transformers' Trainer or Lightning as in docs/company.md"
    )


def _is_compiled(model: nn.Module) -> bool:
    original: Any = vars(model).get("_modules", {}).get("_orig_mod")
    return isinstance(original, nn.Module) and type(model).__name__ == "OptimizedModule"


def check_device(mesh: MeshSpec) -> None:
    """ShardingError unless plans can be made for the mesh's devices, here or elsewhere."""
    if mesh.device_type not in _DEVICES:
        raise ShardingError(
            f"mesh is one of {mesh.device_type!r} devices\n  try: {' or '.join(map(repr, _DEVICES))}"
        )


def check_profile_kind(profile: object) -> None:
    """ProfileError unless `profile` is one, or may name one."""
    if profile is not None and not isinstance(profile, Profile):
        if not isinstance(profile, (str, os.PathLike)):
            raise ProfileError(
                str(reject("profile", profile, "a Profile, a path, a shipped profile's name, or None"))
            )
        checked_path(profile, "profile", ProfileError)


def check_call_placements(in_placements: Any, out_placements: Any, mesh: MeshSpec) -> None:
    """ShardingError for what are no placements on `mesh`; to which tensors they belong is known after capture."""
    if in_placements is not None:
        placement_leaves(in_placements, mesh, argument="in_placements")
    if isinstance(out_placements, str):
        if out_placements != "keep":
            raise ShardingError(
                f"out_placements is {out_placements!r}\n  try: 'keep', None, or placements per output"
            )
    elif out_placements is not None:
        placement_leaves(out_placements, mesh, argument="out_placements")


def checked_race(race: object, planned: bool) -> int:
    """How many plans run before one is kept; 0 for none. planned: a plan is given, so there is no choice."""
    if race is None:
        return 0
    if not is_whole(race):
        raise reject("race", race, "3, for the three best plans, or None for no race")
    count = checked_count(race, "race")
    if count > 1 and planned:
        raise ShardingError(
            f"race is {count}, and plan is given, which leaves nothing to race\n  try: race=None, or no plan"
        )
    return count


def check_choices(**given: object) -> None:
    """ShardingError unless each argument is one of the words that it may be."""
    for name, value in given.items():
        if value not in _CHOICES[name].split("'")[1::2]:
            raise reject(name, value, _CHOICES[name])


def checked_dynamic(dynamic: object) -> tuple[str, ...]:
    """Names of sizes, in order. ShardingError for anything else."""
    if dynamic is None:
        return ()
    if not isinstance(dynamic, (set, frozenset, list, tuple)):
        raise reject(
            "dynamic", dynamic, "{'batch', 'sequence'}, or None: symbols from a size's second value on"
        )
    check_size_names(dynamic, "dynamic")
    return tuple(sorted(set(dynamic)))


def checked_micro_batches(micro_batches: object) -> int | str:
    """In how many pieces a batch is run, or "auto". ShardingError for anything else."""
    if micro_batches == "auto":
        return "auto"
    if not is_whole(micro_batches):
        raise reject("micro_batches", micro_batches, "a whole number from 1, or 'auto'")
    return checked_count(micro_batches, "micro_batches", least=1)


def check_inference(inference: object, micro_batches: object, stages: object) -> None:
    """ShardingError unless it is a flag, and what is asked for besides has no need of a backward."""
    if checked_flag(inference, "inference") and (micro_batches != 1 or stages is not None):
        raise ShardingError(
            f"inference=True plans calls without a backward, and micro_batches={micro_batches!r} with "
            f"stages={stages!r} divides training\n  try: micro_batches=1, stages=None"
        )


def check_autocast(dtype: object) -> None:
    """ShardingError for a dtype that autocast does not cast to."""
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and dtype in (torch.bfloat16, torch.float16)
    ):
        said = str(dtype) if isinstance(dtype, torch.dtype) else shown(dtype)
        raise ShardingError(f"autocast is {said}\n  try: torch.bfloat16, torch.float16, or None")


OptimizerLike = str | torch.optim.Optimizer


def optimizer_name(optimizer: object) -> str:
    """Its name among `OPTIMIZERS`. An optimizer of torch's that is none of them counts as AdamW, which keeps and moves
    more than most, and a centred RMSprop with momentum, of three states, as AMSGrad; with groups that differ, as the
    one that keeps most. ShardingError for anything else."""
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise reject(
            "optimizer", optimizer, f"one of {', '.join(map(repr, OPTIMIZERS))}, or an optimizer of torch's"
        )
    if isinstance(optimizer, torch.optim.SGD):
        moved = any(group["momentum"] for group in optimizer.param_groups)
        return "momentum" if moved else "sgd"
    name = "adam" if type(optimizer) is torch.optim.Adam else "adamw"
    return f"{name}, amsgrad" if any(map(_of_three_states, optimizer.param_groups)) else name


def _of_three_states(group: Mapping[str, Any]) -> bool:
    return bool(group.get("amsgrad") or (group.get("centered") and group.get("momentum")))
