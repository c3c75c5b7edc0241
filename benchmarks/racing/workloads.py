"""A model with its batch, and how a PyTorch user would split it: blocks for FSDP, styles for tensor parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
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
from benchmarks.space.by_hand import Padded

__all__ = [
    "Batch",
    "Styles",
    "Workload",
    "convnet",
    "decoder_styles",
    "gathered",
    "gpt",
    "mlp",
    "random_words",
    "word_ends",
    "words",
]

Styles = dict[str, ParallelStyle]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """What is trained.

    build:     the model (seeded by the caller); batch: the global batch, dim 0 is split by data parallelism.
    slices:    whether the batch has a part for every rank; without, nobody splits it.
    blocks:    names of the modules that FSDP shards one by one.
    tensor:    styles for parallelize_module; new ones at each call, as they hold state.
    sequence:  the same with sequence parallelism; None where the model has no sequence.
    columns, rows: patterns of the weights that `tensor` splits at dim 0 and at dim 1, for pinned plans.
    loss_parallel: whether the loss of `tensor` is computed on logits split by class.
    in_space:  (model, how a rank gets its neighbours' rows, ranks) -> the model for a rank's rows of images.
    """

    text: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    blocks: tuple[str, ...]
    tensor: Callable[[], Styles] | None
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    sequence: Callable[[], Styles] | None = None
    loss_parallel: bool = False
    slices: bool = True
    in_space: Callable[[nn.Module, Padded, dist.ProcessGroup], nn.Module] | None = None


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


def decoder_styles(
    names: Sequence[str], columns: Sequence[str], rows: Sequence[str], sequence: bool
) -> Styles:
    """Of blocks of norm1, attention, norm2 and mlp. columns, rows: of the mlp, the layers split at outputs and inputs.
    sequence: what lies between the parts is split in the sequence."""
    into = Shard(1) if sequence else Replicate()
    found: Styles = {}
    for name in names:
        found |= {f"{name}.attention.{w}": ColwiseParallel() for w in "qkv"}
        found[f"{name}.attention.out"] = RowwiseParallel(output_layouts=into)
        found |= {f"{name}.mlp.{w}": ColwiseParallel() for w in columns}
        found |= {f"{name}.mlp.{w}": RowwiseParallel(output_layouts=into) for w in rows}
        if sequence:
            for part in ("attention", "mlp"):
                found[f"{name}.{part}"] = gathered()
            found |= {f"{name}.norm1": SequenceParallel(), f"{name}.norm2": SequenceParallel()}
    return found


def gathered(plain: bool = False) -> ParallelStyle:
    """Tokens split in the sequence, whole for the module. plain: it has plain weights."""
    return PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=plain
    )


def word_ends(sequence: bool, embeddings: Sequence[str] = ("tokens",)) -> Styles:
    """Of embeddings, the last norm and the head, split by vocabulary."""
    head = {"output_layouts": Shard(-1), "use_local_output": False}
    if not sequence:
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(**head),
        }
    split = {name: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)) for name in embeddings}
    return {**split, "norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), **head)}


def gpt(vocabulary: int, context: int, width: int, layers: int, batch: int, head: int = 32) -> Workload:
    names = [f"layers.{i}" for i in range(layers)]

    def styles(sequence: bool) -> Styles:
        ends = word_ends(sequence, ("tokens", "places"))
        return ends | decoder_styles(names, ("up",), ("down",), sequence)

    return Workload(
        text=f"GPT, {layers} layers of {width}, vocabulary {vocabulary}, batch {batch} x {context}",
        build=lambda: GPT(vocabulary, context, width, head, layers),
        batch=lambda: random_words(vocabulary, batch, context),
        blocks=tuple(names),
        tensor=lambda: styles(sequence=False),
        columns=(
            "tokens.weight",
            "head.weight",
            *(f"layers.*.attention.{w}.weight" for w in "qkv"),
            "layers.*.mlp.up.weight",
            "layers.*.mlp.up.bias",
        ),
        rows=("layers.*.attention.out.weight", "layers.*.mlp.down.weight"),
        sequence=lambda: styles(sequence=True),
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
        batch=lambda: random_words(vocabulary, batch, length),
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


def random_words(vocabulary: int, batch: int, length: int) -> Batch:
    """x and y, int64 [batch, length]."""
    return tuple(torch.randint(0, vocabulary, (2, batch, length)))  # type: ignore[return-value]
