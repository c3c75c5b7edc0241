"""What a PyTorch user would write, each way in several settings, of which the race keeps the fastest.

A setting is what people tune: DDP's buckets, FSDP2's prefetch and whether weights are freed after the forward, async
tensor parallelism, how halos are sent.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.racing.contestants import Race, Runner
from benchmarks.racing.in_space import rows_of
from benchmarks.racing.workloads import Batch, Styles, Workload
from benchmarks.space.by_hand import functional_halo, neighbour_messages

__all__ = ["HAND_WRITTEN", "ByHand", "Setting", "setting_text"]

Setting = Mapping[str, Any]

BUCKETS_MB = (1, 5, 25, 100)
FSDP_SETTINGS = tuple(
    {"reshard_after_forward": reshard, "prefetch": prefetch}
    for reshard, prefetch in itertools.product((True, False), (0, 1))
)


@dataclass(frozen=True)
class ByHand:
    """build: in one of `settings`. runs: whether a workload can be split so."""

    build: Callable[[Race, Setting], Runner]
    settings: Callable[[Race], tuple[Setting, ...]]
    runs: Callable[[Workload], bool]


def setting_text(setting: Setting) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items())


def ddp(race: Race, setting: Setting) -> Runner:
    model = race.model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **setting)
    return Runner(race.compiled(wrapped), model, _slice(race.batch(), race.meshes.flat))


def fsdp(race: Race, setting: Setting) -> Runner:
    model = _fully_sharded(race.model(), race.workload, race.meshes.flat, setting)
    return Runner(race.compiled(model), model, _slice(race.batch(), race.meshes.flat))


def hybrid_fsdp(race: Race, setting: Setting) -> Runner:
    model = _fully_sharded(race.model(), race.workload, race.meshes.grid, setting)
    return Runner(race.compiled(model), model, _slice(race.batch(), race.meshes.flat))


def tensor_parallel(race: Race, setting: Setting) -> Runner:
    return _tensor(race, race.workload.tensor, setting)


def sequence_parallel(race: Race, setting: Setting) -> Runner:
    return _tensor(race, race.workload.sequence, setting)


def fsdp_tensor_parallel(race: Race, setting: Setting) -> Runner:
    assert race.workload.tensor is not None
    across, inside = (race.meshes.grid[name] for name in race.meshes.grid.mesh_dim_names or ())
    model = parallelize_module(race.model(), inside, race.workload.tensor())
    model = _fully_sharded(model, race.workload, across, setting)
    return Runner(_compiled(race, model, setting), model, _slice(race.batch(), across), _around(race))


def in_space(race: Race, setting: Setting) -> Runner:
    """A rank's rows of every image; gradients as DDP averages them, over connections of their own."""
    assert race.workload.in_space is not None
    mesh = race.meshes.flat
    pad = {"messages": neighbour_messages, "all-to-all": functional_halo}[setting["halos"]](mesh)
    model = race.workload.in_space(race.model(), pad, mesh.get_group())
    wrapped = DistributedDataParallel(model, process_group=dist.new_group(), gradient_as_bucket_view=True)
    return Runner(race.compiled(wrapped), model, rows_of(race.batch(), mesh.get_local_rank(), mesh.size()))


def _tensor(race: Race, styles: Callable[[], Styles] | None, setting: Setting) -> Runner:
    assert styles is not None
    model = parallelize_module(race.model(), race.meshes.flat, styles())
    return Runner(_compiled(race, model, setting), model, race.batch(), _around(race))


def _compiled(race: Race, model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    """As a whole, or block by block: a compiler does not trace embeddings that are split by vocabulary."""
    # Products and the collectives beside them in pieces that overlap: torch's async tensor parallelism.
    options = {"_micro_pipeline_tp": True} if setting.get("async") else {}
    if setting.get("compiled") != "blocks":
        return race.compiled(model, **options)
    for block in map(model.get_submodule, race.workload.blocks):
        if not isinstance(block, nn.Embedding):
            block.compile(backend=race.backend, options=options or None)
    return model


def _tensor_settings(race: Race) -> tuple[Setting, ...]:
    """torch has async tensor parallelism in Inductor, on GPUs that read each other's memory."""
    if race.backend == "eager":
        return ({},)
    whole_or_not = ({"compiled": "whole"}, {"compiled": "blocks"})
    if race.meshes.flat.device_type != "cuda":
        return whole_or_not
    return tuple({**how, "async": ahead} for how, ahead in itertools.product(whole_or_not, (False, True)))


def _sharded_tensor_settings(race: Race) -> tuple[Setting, ...]:
    if race.backend == "eager":
        return FSDP_SETTINGS
    return tuple({**setting, "compiled": "blocks"} for setting in FSDP_SETTINGS)


HAND_WRITTEN: dict[str, ByHand] = {
    "DDP": ByHand(ddp, lambda _: tuple({"bucket_cap_mb": mb} for mb in BUCKETS_MB), lambda w: w.slices),
    "FSDP2": ByHand(fsdp, lambda _: FSDP_SETTINGS, lambda w: w.slices),
    "HSDP": ByHand(hybrid_fsdp, lambda _: FSDP_SETTINGS, lambda w: w.slices),
    "TP": ByHand(tensor_parallel, _tensor_settings, lambda w: w.tensor is not None),
    "TP + SP": ByHand(sequence_parallel, _tensor_settings, lambda w: w.sequence is not None),
    "FSDP2 x TP": ByHand(
        fsdp_tensor_parallel, _sharded_tensor_settings, lambda w: w.slices and w.tensor is not None
    ),
    "space": ByHand(
        in_space,
        lambda _: ({"halos": "messages"}, {"halos": "all-to-all"}),
        lambda w: w.in_space is not None,
    ),
}


def _fully_sharded(model: nn.Module, workload: Workload, mesh: DeviceMesh, setting: Setting) -> nn.Module:
    blocks = [model.get_submodule(name) for name in workload.blocks]
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=setting["reshard_after_forward"])
    ahead = setting["prefetch"]
    if ahead:
        sharded = [block for block in blocks if isinstance(block, FSDPModule)]
        for i, block in enumerate(sharded):
            block.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + ahead])
            block.set_modules_to_backward_prefetch(sharded[max(0, i - ahead) : i][::-1])
    return model


def _around(race: Race) -> Callable[[], AbstractContextManager[Any]]:
    return loss_parallel if race.workload.loss_parallel else contextlib.nullcontext


def _slice(batch: Batch, mesh: DeviceMesh) -> Batch:
    """This rank's equal share of dim 0: the mean of the ranks' losses is the loss of the whole batch."""
    parts, mine = mesh.size(), mesh.get_local_rank()
    assert all(tensor.shape[0] % parts == 0 for tensor in batch), "data parallelism needs equal slices"
    x, y = (tensor.chunk(parts)[mine].contiguous() for tensor in batch)
    return x, y
