"""A model with its batch, and how a PyTorch user would split it: blocks for FSDP, styles for tensor parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from benchmarks.racing.models import GPT, MLP, ConvNet, WordModel

__all__ = ["Workload", "convnet", "gpt", "mlp", "words"]

Styles = dict[str, ParallelStyle]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """What is trained.

    build:     the model (seeded by the caller); batch: the global batch, dim 0 is split by data parallelism.
    blocks:    names of the modules that FSDP shards one by one.
    tensor:    styles for parallelize_module; new ones at each call, as they hold state.
    sequence:  the same with sequence parallelism; None where the model has no sequence.
    columns, rows: patterns of the weights that `tensor` splits at dim 0 and at dim 1, for pinned plans.
    loss_parallel: whether the loss of `tensor` is computed on logits split by class.
    """

    text: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    blocks: tuple[str, ...]
    tensor: Callable[[], Styles]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    sequence: Callable[[], Styles] | None = None
    loss_parallel: bool = False


def mlp(width: int, hidden: int, layers: int, batch: int) -> Workload:
    names = [f"layers.{i}" for i in range(layers)]

    def styles() -> Styles:
        return {f"{n}.up": ColwiseParallel() for n in names} | {f"{n}.down": RowwiseParallel() for n in names}

    return Workload(
        text=f"MLP, {layers} blocks {width}-{hidden}-{width}, batch {batch}",
        build=lambda: MLP(width, hidden, layers),
        batch=lambda: (torch.randn(batch, width), torch.randn(batch, width)),
        blocks=tuple(names),
        tensor=styles,
        columns=("layers.*.up.weight", "layers.*.up.bias"),
        rows=("layers.*.down.weight",),
    )


def gpt(vocabulary: int, context: int, width: int, layers: int, batch: int, head: int = 32) -> Workload:
    names = [f"layers.{i}" for i in range(layers)]

    def shared(ends: Callable[[], Styles], prepare: bool) -> Styles:
        found = ends()
        for name in names:
            into = Shard(1) if prepare else Replicate()
            found |= {f"{name}.attention.{w}": ColwiseParallel() for w in "qkv"}
            found[f"{name}.attention.out"] = RowwiseParallel(output_layouts=into)
            found[f"{name}.mlp.up"] = ColwiseParallel()
            found[f"{name}.mlp.down"] = RowwiseParallel(output_layouts=into)
            if prepare:
                for part in ("attention", "mlp"):
                    found[f"{name}.{part}"] = PrepareModuleInput(
                        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                    )
                found |= {f"{name}.norm1": SequenceParallel(), f"{name}.norm2": SequenceParallel()}
        return found

    def tensor_ends() -> Styles:
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": head}

    def sequence_ends() -> Styles:
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }

    return Workload(
        text=f"GPT, {layers} layers of {width}, vocabulary {vocabulary}, batch {batch} x {context}",
        build=lambda: GPT(vocabulary, context, width, head, layers),
        batch=lambda: _words(vocabulary, batch, context),
        blocks=tuple(names),
        tensor=lambda: shared(tensor_ends, prepare=False),
        columns=(
            "tokens.weight",
            "head.weight",
            *(f"layers.*.attention.{w}.weight" for w in "qkv"),
            "layers.*.mlp.up.weight",
            "layers.*.mlp.up.bias",
        ),
        rows=("layers.*.attention.out.weight", "layers.*.mlp.down.weight"),
        sequence=lambda: shared(sequence_ends, prepare=True),
        loss_parallel=True,
    )


def words(vocabulary: int, width: int, hidden: int, batch: int, length: int) -> Workload:
    def styles() -> Styles:
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }

    return Workload(
        text=f"word model, vocabulary {vocabulary}, width {width}, batch {batch} x {length}",
        build=lambda: WordModel(vocabulary, width, hidden),
        batch=lambda: _words(vocabulary, batch, length),
        blocks=("tokens", "mlp", "head"),
        tensor=styles,
        columns=("tokens.weight", "mlp.up.weight", "mlp.up.bias", "head.weight"),
        rows=("mlp.down.weight",),
        loss_parallel=True,
    )


def convnet(channels: int, side: int, hidden: int, classes: int, batch: int) -> Workload:
    return Workload(
        text=f"convnet, {channels} channels on {side}x{side}, head {hidden}, batch {batch}",
        build=lambda: ConvNet(channels, side, hidden, classes),
        batch=lambda: (torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,))),
        blocks=("trunk", "up", "down"),
        tensor=lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
        columns=("up.weight", "up.bias"),
        rows=("down.weight",),
    )


def _words(vocabulary: int, batch: int, length: int) -> Batch:
    return tuple(torch.randint(0, vocabulary, (2, batch, length)))  # type: ignore[return-value]
