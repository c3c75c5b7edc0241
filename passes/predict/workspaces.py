"""Bytes that an op has for itself while it runs, beside its operands and results.

Convolutions on a CPU copy their operands into another layout. oneDNN computes on blocks of channels: operands are
copied into blocks, and results out of them. What oneDNN does not take, torch computes as a product over columns: the
values that each result reads, side by side.
[torch/csrc: aten/native/Convolution.cpp `use_mkldnn`, aten/native/ConvolutionMM2d.cpp, aten/native/mkldnn/Conv.cpp]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from cost_model.measure import own_collectives as own
from passes.ir.joint import node_value, results_nbytes
from passes.ops.uniform import UNIFORM_WORDS
from passes.predict.step_events import COLLECTIVE_KINDS, AxesOf
from passes.strategies.prices import Prices
from passes.strategies.traffic import TrafficModel, eager_traffic

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default

_BLOCK = 16
"""Channels of a block, of machines with AVX-512; 8 with AVX2, where less is copied."""


def convolution_copies(node: fx.Node, value: Callable[[fx.Node], torch.Tensor] = node_value) -> int:
    """Bytes beside operands and results while `node` runs, at most; 0 if it is no convolution.
    value: of operands and result.

    Kernels of one element count as those of several threads: one thread makes no copies for fewer than 16 images.
    Not counted: what tiles hold in half precision where a processor has them (AMX), as much as the result once more.
    """
    if node.target is _FORWARD:
        x, weight, _, *how = node.args
        call = _Convolution.of(value(x), value(weight), value(node), how)  # type: ignore[arg-type]
        return call.forward()
    if node.target is _BACKWARD:
        y, x, weight, _, *how, mask = node.args
        call = _Convolution.of(value(x), value(weight), value(y), how)  # type: ignore[arg-type]
        to_input, *to_weight = mask  # type: ignore[misc]
        return call.backward(bool(to_input), any(to_weight))
    return 0


@dataclass(frozen=True)
class _Convolution:
    """x: [images, channels, *sizes], y alike; weight: [channels of y, channels of x / groups, *sizes]."""

    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor
    strided: bool
    dilated: bool
    transposed: bool
    groups: int

    @staticmethod
    def of(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, how: list[object]) -> _Convolution:
        stride, _, dilation, transposed, _, groups = how
        several = lambda sizes: any(size != 1 for size in sizes)  # type: ignore[union-attr]
        return _Convolution(x, weight, y, several(stride), several(dilation), bool(transposed), int(groups))  # type: ignore[call-overload]

    def forward(self) -> int:
        """Blocks of the operands and of y; then y out of its blocks."""
        if not self._in_blocks:
            return self._columns
        blocks = self._read + self.weight.nbytes + self._blocks(self.y)
        out = self._blocks(self.y) * (2 if self.transposed and self.strided else 1)
        return max(blocks - self.y.nbytes, out)

    def backward(self, to_input: bool, to_weight: bool) -> int:
        """The gradient of x first, which is there while that of the weight is computed."""
        if not self._in_blocks:
            return self._columns if to_weight or self.transposed else 0
        gradient = self._blocks(self.y)
        found = gradient + self.weight.nbytes + self._read if to_weight else 0
        if to_input:
            blocks = gradient + self.weight.nbytes + self._blocks(self.x) - self.x.nbytes
            out = self._blocks(self.x) * (2 if self.strided and not self.transposed else 1)
            found = max(found, blocks, out)
        return found

    @property
    def _in_blocks(self) -> bool:
        """Whether oneDNN runs it, as torch decides."""
        if self.x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
        large = any(size > 3 for size in self.weight.shape[2:])
        several = self.groups > 1 or self.x.shape[0] > 1
        # Elements of one image up to which torch computes with columns.
        return self.x.dtype != torch.float32 or several or large or self.x.numel() > 20_480

    @property
    def _columns(self) -> int:
        """Of all images, but one at a time where the kernel's elements are apart."""
        taps = math.prod(self.weight.shape[2:])
        if taps == 1:
            return 0
        read, places = (self.y, self.x) if self.transposed else (self.x, self.y)
        images = 1 if self.dilated else read.shape[0]
        channels = read.shape[1] // self.groups
        return images * channels * taps * math.prod(places.shape[2:]) * read.element_size()

    @property
    def _read(self) -> int:
        # So few channels, of an image, oneDNN reads where they are.
        plain = self.groups == 1 and self.x.shape[1] <= 3
        return 0 if plain else self._blocks(self.x)

    def _blocks(self, tensor: torch.Tensor) -> int:
        channels = tensor.shape[1]
        return tensor.nbytes // max(channels, 1) * math.ceil(channels / _BLOCK) * _BLOCK


Value = Callable[[fx.Node], torch.Tensor]


def _no_bytes(node: fx.Node, value: Value = node_value) -> int:
    return 0


@dataclass(frozen=True)
class Workspaces:
    """of_op: while it runs, with such operands and result: (op, value of a node = its own) -> bytes. of_message: what
    moves a collective's data copies it into, from its start to its wait."""

    of_op: Callable[..., int] = _no_bytes
    of_message: Callable[[fx.Node], int] = _no_bytes


NONE = Workspaces()


def workspaces_of(prices: Prices, axes_of: AxesOf) -> Workspaces:
    """Of the devices that `prices` are of. axes_of: the mesh axes of a process group."""
    shared = lambda node: prices.shares_memory(axes_of(str(node.args[-1])))
    return workspaces_on(prices.mesh.device_type, prices.traffic, shared)


def workspaces_on(
    device_type: str, traffic: TrafficModel, shared: Callable[[fx.Node], bool] = lambda node: False
) -> Workspaces:
    """Of devices of that type. traffic: where all ops run op by op, random numbers have words of their own. shared:
    whether the ranks of a collective exchange its data through memory.

    NCCL moves data from and to the tensors themselves; its buffers, and those of CUDA's libraries, are in a plan's
    reserve.
    """
    on_cpu = device_type == "cpu"
    numbers = random_words if traffic is eager_traffic else _no_bytes
    kernels = convolution_copies if on_cpu else _no_bytes
    of_op = lambda node, value=node_value: numbers(node, value) + kernels(node, value)
    copies = lambda node: 0 if node.target not in COLLECTIVE_KINDS or shared(node) else _gloo_copies(node)
    return Workspaces(of_op, copies if on_cpu else _no_bytes)


def random_words(node: fx.Node, value: Value = node_value) -> int:
    """Of random numbers that are made op by op."""
    if node.target is not torch.ops.autoshard.uniform.default:
        return 0
    made = value(node)
    return made.numel() * (8 * UNIFORM_WORDS - made.element_size())


def _gloo_copies(node: fx.Node) -> int:
    """gloo gathers into a flat tensor of its own, and reduces a copy of what it scatters; it reduces for all in place.
    [torch/csrc/distributed/c10d/ProcessGroupGloo.cpp] Ranks that share memory read it where it is."""
    kind = COLLECTIVE_KINDS[node.target]
    (operand,) = node.all_input_nodes[:1]
    if kind == "all_gather":
        part, ranks = node_value(operand), int(node.args[1])  # type: ignore[arg-type]
        return 0 if own.in_one_round("all_gather", part, ranks) else results_nbytes(node)
    return results_nbytes(operand) if kind == "reduce_scatter" else 0
