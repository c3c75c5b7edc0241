"""The leaves of one kind of call: tensors as the caller has them, and as a rank's program takes them.

And a rank's programs of the pieces of a batch, with what compiles their graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.runtime.sharding import shard_of
from cost_model.mesh import MeshSpec
from passes.compile.compile_graph import Compiled, compile_graph
from passes.ir.joint import GraphInput, GraphOutput, JointGraph, node_value
from passes.ir.torch_dtensor import dtensor_from, local_of, sharding_of
from passes.layout.layout import Layout
from passes.layout.placements import layout_to_placements
from passes.lower.phases import Backward, BackwardHalves, split_backward
from passes.lower.piecewise import RankPieces, pieces_of, without_gradients
from passes.lower.rank_program import RankProgram

Returned = Literal["global", "local", "dtensor"]


@dataclass(frozen=True)
class InputSide:
    """One input of a program other than a tangent.

    shape:  global.
    layout: of the graph's placeholder. A plain tensor of the global shape is sliced to it; one of this
            rank's local shape is taken as the shard; a DTensor is redistributed.
    """

    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class OutputSide:
    """One tensor output of a call, by its index. shape: global. layout: as the graph returns it.

    returned: "global" (the layout is replicated) and "local" hand the tensor out as it is; "dtensor"
              wraps it.
    mesh: of the ranks that have it; None: all.
    """

    shape: tuple[int, ...]
    layout: Layout
    returned: Returned = "global"
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class CallEnds:
    """inputs: one per placeholder, tangents excepted. outputs: one per tensor output, in the order of their index."""

    inputs: tuple[InputSide, ...]
    outputs: tuple[OutputSide, ...]


def input_sides(joint: JointGraph, layouts: Mapping[str, Layout]) -> tuple[InputSide, ...]:
    """layouts: by name of the placeholder; the others are whole."""
    return tuple(
        InputSide(
            shape := tuple(node_value(node).shape), layouts.get(node.name, Layout.replicated(len(shape)))
        )
        for node, spec in joint.given
        if spec.kind != "tangent"
    )


def output_shapes(joint: JointGraph) -> dict[int, tuple[int, ...]]:
    """Tensor output of a call -> its shape, by index."""
    found = {
        spec.index: tuple(node_value(result).shape)
        for spec, result in joint.returned
        if spec.kind == "output" and result is not None
    }
    return dict(sorted(found.items()))


def returned_as(index: int, asked: Mapping[int, Layout | None]) -> Returned:
    return "global" if index not in asked else "dtensor" if asked[index] is None else "local"


def plain_input(value: Tensor, side: InputSide, mesh: DeviceMesh, spec: MeshSpec) -> Tensor:
    """A DTensor argument of a call as this rank's shard in the wanted layout (differentiable)."""
    if not isinstance(value, DTensor):
        return value
    wanted = layout_to_placements(side.layout, spec)
    if value.placements == wanted and not value.requires_grad:
        return local_of(value)
    return value.redistribute(mesh, wanted).to_local()


@dataclass(frozen=True)
class RankSides:
    """The inputs of a program, one for each of its leaves, on one rank."""

    sides: Sequence[InputSide]
    spec: MeshSpec
    rank: int

    def sliced(self, position: int, value: Tensor) -> Tensor:
        """This rank's shard of `value`, which is whole or the shard already: told by its shape."""
        side = self.sides[position]
        if tuple(value.shape) == side.layout.local_shape(side.shape, self.spec, self.rank):
            return value
        return shard_of(value, side.layout, self.spec, self.rank)


def output_wrapper(side: OutputSide, mesh: DeviceMesh, spec: MeshSpec) -> Callable[[Tensor], Tensor]:
    """Makes of an output what the caller wants (differentiable)."""
    if side.returned != "dtensor":
        return lambda value: value
    stride = torch.empty(side.shape, device="meta").stride()
    placements = layout_to_placements(side.layout, spec)
    where, shape = side.mesh or mesh, torch.Size(side.shape)
    sharding: Any = None

    def wrapped(value: Tensor) -> Tensor:
        nonlocal sharding
        if sharding is not None and not value.requires_grad:
            return dtensor_from(value, sharding)
        found = DTensor.from_local(value, where, placements, run_check=False, shape=shape, stride=stride)
        sharding = sharding_of(found)
        return found

    return wrapped


def conform(value: Tensor, like: Tensor) -> Tensor:
    """`value` with the strides and dtype of `like`, which has its shape; itself if it has them."""
    value = local_of(value)
    if value.stride() == like.stride() and value.dtype == like.dtype:
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=value.device).copy_(value)


def fitted(values: Iterable[Tensor], likes: Iterable[Tensor]) -> list[Tensor]:
    return [conform(value, like) for value, like in zip(values, likes, strict=True)]


def expected(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Shapes, strides and dtypes alone (meta tensors) of a graph's placeholders."""
    return tuple(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in values)


def own_outputs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`outputs`, the call's one large tensor among them as no view.

    Autograd lets nobody change in place a view that a custom function made, and whether a program ends in one is its
    own affair: a cut of what was gathered is one. It still counts as changed with what was saved for the backward.
    Where there are several large outputs, or an input lies in the same memory, views stay: in the model they may be of
    each other, and what is changed in one would be missing in the other.
    """
    large = [output for output in outputs if output.numel() > 1]
    if len(large) != 1 or not large[0]._is_view():
        return tuple(outputs)
    memory = large[0].untyped_storage()._cdata
    if any(tensor.untyped_storage()._cdata == memory for tensor in inputs):
        return tuple(outputs)
    return tuple(output.detach() if output is large[0] else output for output in outputs)


@dataclass(frozen=True)
class LeafLooks:
    """Leaves of a call without their values. shardings: of DTensors; shapes: of those that may be sliced."""

    shardings: Sequence[Any]
    shapes: Mapping[int, torch.Size]


class Leaves:
    """kinds, values: of the placeholders that take the leaves, None of one that this rank does not read; ours: where
    they meet the caller.

    may_slice: leaves that may come whole where the graph takes a part: all but parameters.
    """

    def __init__(self, kinds: Sequence[str], values: Sequence[Tensor | None], ours: RankSides) -> None:
        assert len(kinds) == len(values) == len(ours.sides)
        self._ours = ours
        self._expected = [None if value is None else expected([value])[0] for value in values]
        self._known: list[Callable[[], Tensor | None]] = [lambda: None] * len(self._expected)
        # Parameters and buffers by far outnumber what may need slicing.
        self.may_slice = [i for i, kind in enumerate(kinds) if kind != "param"]

    def looks(self, leaves: Sequence[Tensor]) -> LeafLooks:
        return LeafLooks([sharding_of(leaf) for leaf in leaves], {i: leaves[i].shape for i in self.may_slice})

    def local(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """As the graph takes them."""
        locals_ = [local_of(leaf) for leaf in leaves]
        for i in self.may_slice:
            like = self._expected[i]
            if like is not None and locals_[i].shape != like.shape:
                locals_[i] = self._ours.sliced(i, locals_[i])
        for i, (value, known) in enumerate(zip(locals_, self._known, strict=True)):
            if known() is not value:
                locals_[i] = self._conformed(i, value)
        return locals_

    def gradients(
        self,
        looks: LeafLooks,
        needed: Sequence[bool],
        ends: Sequence[GraphOutput],
        found: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Per leaf its gradient as autograd wants it. ends, found: what the program returned."""
        gradients: list[Tensor | None] = [None] * len(looks.shardings)
        for end, gradient in zip(ends, found, strict=True):
            leaf = end.index
            if gradient is None or not needed[leaf]:
                continue
            sharding = looks.shardings[leaf]
            if sharding is not None:
                gradient = dtensor_from(gradient, sharding)
            shape = looks.shapes.get(leaf)
            # A leaf that came as a shard, where the graph returns its gradient whole.
            if shape is not None and gradient.shape != shape:
                gradient = self._ours.sliced(leaf, gradient)
            gradients[leaf] = gradient
        return gradients

    def _conformed(self, position: int, value: Tensor) -> Tensor:
        """`value` as the graph takes it. A parameter that is so already is remembered: it comes again at every step."""
        like = self._expected[position]
        found = value if like is None else conform(value, like)
        if found is value and position not in self.may_slice:
            self._known[position] = weakref.ref(value)
        return found


Like = Sequence[Tensor]


class CompilesGraphs(Protocol):
    @property
    def joins(self) -> bool:
        """Whether programs are to be joined before."""
        ...

    def __call__(self, module: fx.GraphModule, adding: Sequence[int] = ()) -> tuple[Compiled, Like]:
        """The compiled graph, and how its inputs look. adding: as for `compile_graph`."""
        ...

    def halves(self, backward: Backward, first: Collection[str]) -> BackwardHalves:
        """As `split_backward`, once."""
        ...


class Compiler:
    """Equal graphs are compiled once: pieces mostly are."""

    def __init__(self, backend: str) -> None:
        self.joins = backend == "eager"  # a compiler joins more itself
        self._backend = backend
        self._known: dict[str, tuple[Compiled, tuple[Tensor, ...]]] = {}

    def __call__(self, module: fx.GraphModule, adding: Sequence[int] = ()) -> tuple[Compiled, Like]:
        text = "\n".join(node.format_node() or "" for node in module.graph.nodes)
        values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        results: Any = module.graph.output_node().args[0]
        values += [results[place].meta["val"] for place in adding]
        key = f"{text} {adding} {[(v.shape, v.stride(), v.dtype) for v in values]}"
        if key not in self._known:
            self._known[key] = compile_graph(module, self._backend, adding), expected(values)
        return self._known[key]

    def halves(self, backward: Backward, first: Collection[str]) -> BackwardHalves:
        return split_backward(backward, first)


@dataclass(frozen=True)
class PieceCode:
    """A rank's program of one piece, and what compiles its graphs."""

    parts: RankPieces
    compile_: CompilesGraphs


class PiecesOnRank:
    """A rank's programs of all pieces of a batch, in their order, of the whole model or of a stage. pieces: of the
    joint graph that they are of."""

    def __init__(self, programs: Sequence[RankProgram], pieces: int, compile_: CompilesGraphs) -> None:
        self.programs, self._pieces, self._compile = tuple(programs), pieces, compile_
        self.inputs, self.outputs = programs[0].inputs, programs[0].outputs

    @property
    def count(self) -> int:
        return len(self.programs)

    @cached_property
    def codes(self) -> list[PieceCode]:
        parts = [pieces_of(program, self._pieces) for program in self.programs]
        return [PieceCode(one.joined() if self._compile.joins else one, self._compile) for one in parts]

    def placeholders(self, piece: int = 0) -> list[tuple[GraphInput, str, Tensor]]:
        """Inputs of a piece's program: what each means, its name, and how it looks."""
        nodes = self.programs[piece].local.module.graph.find_nodes(op="placeholder")
        return [(spec, n.name, n.meta["val"]) for spec, n in zip(self.inputs, nodes, strict=True)]

    @property
    def tangents(self) -> list[tuple[GraphInput, str, Tensor]]:
        """Those of the inputs that are read."""
        return [one for one in self.placeholders() if one[0].kind == "tangent" and one[1] in self.reads]

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the inputs that are read."""
        nodes = self.programs[0].local.module.graph.find_nodes(op="placeholder")
        return frozenset(node.name for node in nodes if node.users)

    def without_gradients(self) -> PiecesOnRank:
        return PiecesOnRank(list(map(without_gradients, self.programs)), self._pieces, self._compile)
