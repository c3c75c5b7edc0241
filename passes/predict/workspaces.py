"""Bytes that an op has for itself while it runs, beside its operands and results; and that every program of a graph
holds at some step, which proves that nothing fits a memory limit.

Convolutions on a CPU copy their operands into another layout. oneDNN computes on blocks of channels: operands are
copied into blocks, and results out of them. What oneDNN does not take, torch computes as a product over columns: the
values that each result reads, side by side.
[torch/csrc: aten/native/Convolution.cpp `use_mkldnn`, aten/native/ConvolutionMM2d.cpp, aten/native/mkldnn/Conv.cpp]

In every program parameters, the optimizer's states and inputs are there throughout (`passes.predict.memory_walk`).
Beside them are all gradients when the backward ends, and, while a product runs, what it reads and makes. All else a
program may hold less of than the search counts, or not at once: what is computed again for nothing, gradients before
they are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from cost_model.measure import own_collectives as own
from passes.ir.joint import JointGraph, node_value, node_values, result_index, results_nbytes, tensor_operands
from passes.ir.op_traits import is_product, is_use, storage_root
from passes.layout.layout import Layout, NodeLayouts
from passes.lower.rank_program import missing_tangents, without_usually_missing
from passes.micro_batches.cut_head import may_have_head
from passes.ops.layer_ops import UNIFORM_WORDS
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


Options = Mapping[str, Sequence[NodeLayouts]]


def least_nbytes(joint: JointGraph, options: Options, prices: Prices) -> int:
    """On rank 0, whatever of `options` each node has, whatever is computed again, and however head and loss are cut.

    options: layouts by node name, all that the search has.
    """
    if missing_tangents(joint):
        joint = without_usually_missing(joint)
    least = _Least(joint, options, prices)
    return least.held() + max((least.gradients(), *least.products()), default=0)


class _Least:
    def __init__(self, joint: JointGraph, options: Options, prices: Prices) -> None:
        self._joint, self._options, self._prices = joint, options, prices
        self._known: dict[Hashable, int] = {}

    def held(self) -> int:
        """Throughout."""
        trained, optimizer = self._joint.trained, self._prices.optimizer
        total = 0
        for node, spec in self._joint.given:
            if spec.kind != "tangent":
                nbytes = self._of_placeholder(node)
                total += nbytes
                if node in trained:
                    total += optimizer.state_nbytes(nbytes, node_value(node).element_size())
        return total

    def gradients(self) -> int:
        """At the end, each in its parameter's layout. Of several that may be one tensor the largest; nothing of what is
        an input, or repeated from a smaller tensor."""
        found: dict[fx.Node, int] = {}
        placeholders, trained = self._joint.placeholders, self._joint.trained
        for end, result in self._joint.returned:
            if end.kind == "grad" and result is not None and placeholders[end.index] in trained:
                root = _root(result)
                if _is_own(root, result):
                    nbytes = self._of_placeholder(placeholders[end.index])
                    found[root] = max(found.get(root, 0), nbytes)
        return sum(found.values())

    def products(self) -> Iterator[int]:
        """What each holds besides. A head in pieces over tokens has products of less."""
        if self._joint.head_pieces > 1 or may_have_head(self._joint):
            return
        for node in self._joint.graph.nodes:
            if node.op == "call_function" and is_product(node) and node.name in self._options:
                yield min(self._of_product(node, option) for option in self._options[node.name])

    def _of_placeholder(self, node: fx.Node) -> int:
        return min(self._nbytes(node, 0, option.results[0]) for option in self._options[node.name])

    def _of_product(self, node: fx.Node, option: NodeLayouts) -> int:
        """0 of what is absent, and of what may run in parts, as windows do."""
        if not option.results or any(layout.has_halo for layout in option.tensors):
            return 0
        read: dict[fx.Node, int] = {}
        for operand, layout in zip(tensor_operands(node), option.operands, strict=True):
            root = _root(operand)
            if _is_own(root, operand):
                producer, index = result_index(operand)
                read[root] = max(read.get(root, 0), self._nbytes(producer, index, layout))
        made = (i for i, value in enumerate(node_values(node)) if value is not None)
        return sum(self._nbytes(node, i, option.results[i]) for i in made) + sum(read.values())

    def _nbytes(self, node: fx.Node, index: int, layout: Layout) -> int:
        value = node_value(node, index)
        key = layout, value.shape, value.element_size()
        if key not in self._known:
            local = layout.local_shape(value.shape, self._prices.mesh, 0)
            self._known[key] = math.prod(local) * value.element_size()
        return self._known[key]


def _root(value: fx.Node) -> fx.Node:
    """Whose memory it is, if nothing is redistributed."""
    root = storage_root(value)
    while is_use(root):
        root = storage_root(tensor_operands(root)[0])
    return root


def _is_own(root: fx.Node, value: fx.Node) -> bool:
    """Whether `value` is memory of an op: no input of the graph, nor repeated from what is smaller."""
    whole = sum(one.numel() for one in node_values(root) if one is not None)
    return root.op != "placeholder" and whole >= node_value(value).numel()
