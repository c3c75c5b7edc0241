"""Larger models with their batches: a vision transformer, a Llama, a dense mixture of experts, a U-Net in space."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleOutput, SequenceParallel

from benchmarks.models import UNet
from benchmarks.racing.expert_parallel import ExpertParallel
from benchmarks.racing.in_space import split_in_space
from benchmarks.racing.transformers import Llama, MixtureModel, ViT
from benchmarks.racing.workloads import Styles, Workload, decoder_styles, gathered, random_words, word_ends

__all__ = ["llama", "mixture", "unet", "vit"]

_ATTENTION = tuple(f"layers.*.attention.{w}.weight" for w in "qkv")


def vit(
    side: int, patch: int, width: int, layers: int, batch: int, head: int = 32, classes: int = 100
) -> Workload:
    names = [f"layers.{i}" for i in range(layers)]

    def sequence() -> Styles:
        ends: Styles = {
            "patches": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": gathered(plain=True),
        }
        return ends | decoder_styles(names, ("up",), ("down",), sequence=True)

    return Workload(
        text=f"ViT, {layers} layers of {width}, batch {batch}, {side}x{side} in patches of {patch}",
        build=lambda: ViT(side, patch, width, head, layers, classes),
        batch=lambda: (torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,))),
        blocks=tuple(names),
        tensor=lambda: decoder_styles(names, ("up",), ("down",), sequence=False),
        columns=(*_ATTENTION, "layers.*.mlp.up.weight", "layers.*.mlp.up.bias"),
        rows=("layers.*.attention.out.weight", "layers.*.mlp.down.weight"),
        sequence=sequence,
    )


def llama(
    vocabulary: int, context: int, width: int, layers: int, batch: int, head: int = 16, shared: int = 2
) -> Workload:
    names, hidden = [f"layers.{i}" for i in range(layers)], 3 * width

    def styles(sequence: bool) -> Styles:
        return word_ends(sequence) | decoder_styles(names, ("gate", "up"), ("down",), sequence)

    return Workload(
        text=f"Llama, {layers} layers of {width}, vocabulary {vocabulary}, batch {batch} x {context}",
        build=lambda: Llama(vocabulary, width, head, shared, layers, hidden),
        batch=lambda: random_words(vocabulary, batch, context),
        blocks=tuple(names),
        tensor=lambda: styles(sequence=False),
        columns=(
            "tokens.weight",
            "head.weight",
            *_ATTENTION,
            "layers.*.mlp.gate.weight",
            "layers.*.mlp.up.weight",
        ),
        rows=("layers.*.attention.out.weight", "layers.*.mlp.down.weight"),
        sequence=lambda: styles(sequence=True),
        loss_parallel=True,
    )


def mixture(
    vocabulary: int,
    context: int,
    width: int,
    layers: int,
    batch: int,
    experts: int,
    hidden: int,
    head: int = 16,
) -> Workload:
    names = [f"layers.{i}" for i in range(layers)]

    def styles() -> Styles:
        found = word_ends(sequence=False) | decoder_styles(names, (), (), sequence=False)
        return found | {f"{name}.mlp.experts": ExpertParallel() for name in names}

    return Workload(
        text=(
            f"decoder with {experts} experts of {hidden} in each of {layers} layers of {width}, "
            f"vocabulary {vocabulary}, batch {batch} x {context}"
        ),
        build=lambda: MixtureModel(vocabulary, context, width, head, layers, hidden, experts),
        batch=lambda: random_words(vocabulary, batch, context),
        blocks=tuple(names),
        tensor=styles,
        columns=(
            "tokens.weight",
            "head.weight",
            *_ATTENTION,
            "layers.*.mlp.experts.up",
            "layers.*.mlp.experts.down",
        ),
        rows=("layers.*.attention.out.weight",),
        loss_parallel=True,
    )


def unet(width: int, levels: int, side: int, classes: int = 4) -> Workload:
    """One image: only its rows can be split."""
    return Workload(
        text=f"U-Net, {levels} levels from {width} channels, one image of {side}x{side}",
        build=lambda: UNet(width, levels, classes),
        batch=lambda: (torch.randn(1, 3, side, side), torch.randint(0, classes, (1, side, side))),
        blocks=(),
        tensor=None,
        columns=(),
        rows=(),
        slices=False,
        in_space=split_in_space,
    )
