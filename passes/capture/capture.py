"""Capture: one call of an unmodified module as one ATen graph of forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from cost_model.errors import AutoshardError, UnsupportedOpError
from passes.capture.answers import is_of_user
from passes.capture.call import CallSpec, flatten_call, tensor_names
from passes.capture.capture_errors import (
    capture_error,
    check_dtypes,
    held_object_error,
    is_collective,
    mutation_error,
    users_part,
)
from passes.capture.model_state import check_shared_memory, find_slots
from passes.capture.provenance import node_checkpoint, node_is_saved, node_module, node_source, refused
from passes.capture.questions import NO_ANSWERS, Answers
from passes.capture.trace import Traced, TracedCall, trace
from passes.capture.trees import renumbered
from passes.ir.joint import CPU, GraphInput, GraphOutput, JointGraph, ancestors
from passes.ir.process_state import collector_paused, random_state_kept
from passes.ir.sized_graph import with_fixed_sizes
from passes.ir.torch_compat import fake_like, lazy_module
from passes.ir.torch_sizes import SYMBOLIC, SymbolicShapes, results_sized, symbols_unwarned
from passes.ir.torch_tracing import AotEnd

aten = torch.ops.aten
_LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default)


class _Builder:
    """overwritten: tensors of the call that the forward changes in place, by position, in the order of their new
    values. indices: of the call's outputs, as traced -> in the graph. One of these tensors that is returned is no
    output besides its new value."""

    def __init__(self, program: TracedCall, traced: Traced, input_names: Sequence[str]) -> None:
        self.program, self.traced, self.input_names = program, traced, input_names
        self.old = traced.aot.module
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.inputs: list[GraphInput] = []
        self.constants: dict[str, torch.Tensor] = {}
        self._refuse_mutations()
        changed = [e.index - len(program.slots) for e in traced.aot.outputs if e.kind == "mutated"]
        self.overwritten = tuple(sorted(index for index in changed if index >= 0))
        graded = {end.index for end in traced.aot.inputs if end.kind == "tangent"}
        passed = {i: t for i, t in traced.passed.items() if t in self.overwritten and i not in graded}
        own = [i for i in range(traced.output_count) if i not in passed]
        new = {index: len(own) + place for place, index in enumerate(self.overwritten)}
        self.returned, self.output_count = sum(i < traced.returned for i in own), len(own) + len(new)
        self.indices = dict(zip(own, range(len(own)), strict=True)) | {i: new[t] for i, t in passed.items()}
        ends = zip(traced.aot.outputs, _results(self.old.graph), strict=True)
        ends = [pair for pair in ends if pair[0].kind != "output" or pair[0].index not in passed]
        self.ends, self.results = [end for end, _ in ends], [node for _, node in ends]

    def joint(self) -> JointGraph:
        """Placeholders: parameters, buffers, constants, inputs, tangents. Unused ones are kept."""
        self._add_placeholders()
        self._copy_nodes()
        return self._finished()

    def _add_placeholders(self) -> None:
        old = self.old.graph.find_nodes(op="placeholder")
        ends = list(zip(old, self.traced.aot.inputs, strict=True))
        slots = len(self.program.slots)
        for node, end in ends:
            if end.kind == "input" and end.index < slots:
                slot = self.program.slots[end.index]
                self._placeholder(node, GraphInput("param" if slot.is_parameter else "buffer", slot.name))
        self._add_constants()
        for node, end in ends:
            if end.kind == "input" and end.index >= slots:
                index = end.index - slots
                self._placeholder(node, GraphInput("input", self.input_names[index], index))
        for node, end in ends:
            if end.kind == "tangent":
                self._placeholder(node, GraphInput("tangent", f"tangent {end.index}", end.index))

    def _copy_nodes(self) -> None:
        live = ancestors(node for node in self.results if node is not None)
        forward = ancestors(
            node for node, end in zip(self.results, self.ends, strict=True)
            if node is not None and end.kind in ("output", "mutated")
        )  # fmt: skip
        for node in self.old.graph.nodes:
            if node.op != "call_function" or node not in live or node in self.new:
                continue
            if node.target in _LIFTS and node.args[0].op == "get_attr":
                self.new[node] = self.new[node.args[0]]
                continue
            if isinstance(node.meta.get("val"), SYMBOLIC):
                self.new[node] = node.meta["val"]
                continue
            if is_collective(node):
                raise held_object_error(self.program.model, node, None)
            copy = self.graph.node_copy(node, lambda n: self.new[n])
            module, source = _origin(node, copy)
            phase = "forward" if node in forward else "backward"
            copy.meta = {"val": node.meta["val"], "phase": phase, "module": module, "source": source}
            if phase == "forward" and (region := node_checkpoint(node)) is not None:
                copy.meta["checkpoint"] = region
                if node_is_saved(node):
                    copy.meta["saved"] = True
            self.new[node] = copy

    def _finished(self) -> JointGraph:
        pairs = zip(self.ends, self.results, strict=True)
        outputs = [(self._output(end), node) for end, node in pairs if end.kind != "none"]
        outputs.sort(key=lambda pair: _order(pair[0]))
        self.graph.output(tuple(None if node is None else self.new[node] for _, node in outputs))
        return JointGraph(
            lazy_module(self.graph), tuple(self.inputs), tuple(spec for spec, _ in outputs), self.constants
        )

    def _output(self, end: AotEnd) -> GraphOutput:
        slots = len(self.program.slots)
        if end.kind == "mutated" and end.index >= slots:
            index = self.output_count - len(self.overwritten) + self.overwritten.index(end.index - slots)
            return GraphOutput("output", f"output {index}", index)
        if end.kind == "mutated":
            return GraphOutput("buffer", self.program.slots[end.index].name, end.index)
        if end.kind == "grad":
            if end.index < slots:
                return GraphOutput("grad", self.program.slots[end.index].name, end.index)
            name = self.input_names[end.index - slots]
            return GraphOutput("grad", name, self.inputs.index(GraphInput("input", name, end.index - slots)))
        if end.index >= self.traced.output_count:
            slot = self.traced.rebound[end.index - self.traced.output_count]
            return GraphOutput("buffer", self.program.slots[slot].name, slot)
        index = self.indices[end.index]
        return GraphOutput("output", f"output {index}", index)

    def _placeholder(self, old: fx.Node, spec: GraphInput, value: torch.Tensor | None = None) -> fx.Node:
        node = self.graph.placeholder(_identifier(spec.name))
        value = old.meta["val"] if value is None else value
        node.meta = {"val": value, "phase": "forward", "module": "", "source": ""}
        self.inputs.append(spec)
        self.new[old] = node
        return node

    def _add_constants(self) -> None:
        known: dict[int, fx.Node] = {}
        some = self.old.graph.find_nodes(op="placeholder")[0].meta["val"]
        live = ancestors(node for node in self.results if node is not None)
        for node in self.old.graph.nodes:
            if node.op != "get_attr" or node not in live:
                continue
            value = getattr(self.old, str(node.target))
            if not isinstance(value, torch.Tensor):
                raise held_object_error(self.program.model, next(iter(node.users)), value)
            if id(value) not in known:
                self._check_constant(value, node)
                name = f"constant {len(self.constants)}"
                self.constants[name] = value
                fake = fake_like(value, some)
                known[id(value)] = self._placeholder(node, GraphInput("constant", name), fake)
            self.new[node] = known[id(value)]

    def _check_constant(self, value: torch.Tensor, node: fx.Node) -> None:
        source = next((s for s in map(node_source, node.users) if s), "")
        if value.requires_grad:
            raise refused(
                f"it computes with a tensor of shape {list(value.shape)} that requires grad but is neither its "
                "parameter nor an argument",
                "make it an nn.Parameter attribute (in a list: nn.ParameterList)",
                at=source,
                model=self.program.model,
            )
        if value.device.type == "meta":
            raise refused(
                f"a tensor of shape {list(value.shape)} on `meta` is neither parameter nor buffer",
                "self.register_buffer(name, tensor, persistent=False)",
                at=source,
                model=self.program.model,
            )

    def _refuse_mutations(self) -> None:
        slots = self.program.slots
        for end in self.traced.aot.inputs:
            if end.kind != "mutated_tangent" or (end.index < len(slots) and slots[end.index].is_trained):
                continue
            inside = end.index < len(slots)
            what = f"buffer {slots[end.index].name}" if inside else self.input_names[end.index - len(slots)]
            raise refused(
                f"forward changes {what} in place by a value that requires grad",
                ".detach() the value first",
                model=self.program.model,
            )
        for node, end in zip(_results(self.old.graph), self.traced.aot.outputs, strict=True):
            if end.kind == "mutated" and end.index < len(slots) and slots[end.index].is_trained:
                what = f"parameter {slots[end.index].name}"
                source, by = ("", None) if node is None else (node_source(node), node.target)
                raise mutation_error(self.program.model, what, source, by)


def _order(end: GraphOutput) -> tuple[int, int]:
    """Outputs in the order of the call's results; the others by kind, as they come: tracing lists first what the
    forward changes in place."""
    return ("output", "buffer", "grad").index(end.kind), end.index if end.kind == "output" else 0


def _identifier(name: str) -> str:
    """ "layers.0.weight" -> "layers_0_weight", "0.weight" -> "p_0_weight"."""
    word = re.sub(r"\W+", "_", name).strip("_")
    return word if word[:1].isalpha() else f"p_{word}"


def _origin(old: fx.Node, new: fx.Node) -> tuple[str, str]:
    """(module, source). A node without (a sum of two gradients) takes its last operand's that has one."""
    module, source = node_module(old), node_source(old)
    if module or source:
        return module, source
    origins = [(node.meta["module"], node.meta["source"]) for node in new.all_input_nodes]
    return next((origin for origin in reversed(origins) if any(origin)), ("", ""))


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    leaves = pytree.tree_leaves(graph.output_node().args[0], is_leaf=lambda leaf: leaf is None)
    return [leaf if isinstance(leaf, fx.Node) else None for leaf in leaves]


@dataclass(frozen=True)
class Captured:
    """joint: the graph. call: its mapping to the user's call. aliases: parameter or buffer name ->
    the other names of the same tensor (tied weights); only those that have any. reads: the attributes of modules
    that the graph depends on."""

    joint: JointGraph
    call: CallSpec
    aliases: Mapping[str, tuple[str, ...]]
    reads: Mapping[nn.Module, frozenset[str]]


@collector_paused()
@random_state_kept()
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    forward: Callable[..., Any] | None = None,
    answers: Answers = NO_ANSWERS,
    sizes: SymbolicShapes | None = None,
) -> Captured:
    """The joint graph of `forward(*args, **kwargs)`, as gradient mode, autocast and train flags are now.

    No kernel runs but those that answer what the forward asks of the call's values (`if labels.max() >= n`), and
    nothing changes in `model` and the global random numbers. Numbers, strings and None among the arguments are baked
    in. Outputs that are not tensors are kept as constants of the returned structure.

    device:  where the ranks will run, on this machine or not: the model sees this type of device, with its
             autocast ("cuda" on a laptop). None: the CPU. The graph is traced on CPU fakes whatever this is and
             wherever the model and the arguments are, `meta` included, so it is the same everywhere.
    forward: what to call instead of `model` (of the same module).
    answers: to questions that the forward asks of values (`CallSpec.checks`).
    sizes:   shapes of the call's tensors in symbols, in which the graph's shapes and arguments are then written, for
             all sizes for which the symbols' guards hold (`passes.ir.sized_graph`).

    Raises CaptureError, with the line of the user's code, for what cannot be one graph: control flow
    that depends on values, shapes that do, a changed parameter, a forward that fails, tensors that share memory
    of which one changes. With `answers` a forward's own error is raised as it is.
    """
    called = model if forward is None else forward
    inputs, key = flatten_call(args, kwargs)
    slots = find_slots(model)
    runs_on = CPU if device is None else torch.device(device)
    program = TracedCall(model, called, slots, inputs, key.tree, runs_on.type, sizes)
    try:
        with nullcontext() if sizes is None else results_sized():
            traced = trace(program, answers)
    except Exception as cause:
        if isinstance(cause, AutoshardError) and not isinstance(cause, UnsupportedOpError):
            raise
        if answers and is_of_user(cause):
            raise  # what the forward raises for values like these
        raise capture_error(model, called, cause) from users_part(cause)
    check_dtypes(traced.aot.module.graph)
    builder = _Builder(program, traced, tensor_names(key))
    with symbols_unwarned():
        joint = replace(builder.joint(), device=runs_on)
        joint = joint if sizes is None else with_fixed_sizes(joint)
    written = [e.index for e in traced.aot.outputs if e.kind == "mutated" and e.index < len(slots)]
    check_shared_memory(model, slots, written, joint.constants.values())
    aliases = {slot.name: slot.aliases for slot in slots if slot.aliases}
    outputs = renumbered(traced.outputs, builder.indices)
    call = CallSpec(key, outputs, builder.output_count, builder.returned, traced.places, builder.overwritten)
    reads = {module: frozenset(names) for module, names in traced.reads.items()}
    return Captured(joint, call, aliases, reads)
