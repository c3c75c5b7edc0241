"""Cut a joint graph into the graphs of pipeline stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from cost_model.errors import ShardingError
from passes.canonicalize.mark_rows import LAST
from passes.canonicalize.normalize_arguments import MergeDuplicates, NormalizeArguments
from passes.ir.graph_pass import erase_dead, run_passes
from passes.ir.graph_properties import described
from passes.ir.joint import GraphInput, GraphOutput, JointGraph, ancestors
from passes.ir.op_traits import is_piece, when_run
from passes.ir.process_state import collector_paused
from passes.ir.torch_compat import lazy_module
from passes.ir.torch_dispatch import copied_input
from passes.stages.graph_parts import GraphParts, base, graph_parts, operands, passes_with_piece, tensor_kind
from passes.stages.stage_graph import (
    Assigned,
    Crossing,
    StageGraph,
    assigned_like,
    backward_stages,
    pair_gradients,
)
from passes.stages.stage_places import (
    ForwardPlaces,
    GradientSum,
    backward_places,
    forward_places,
    gradient_sums,
    output_places,
    tangent_places,
)

Cut = Sequence[str]
"""For every stage but the first the op of the forward that it begins with, in the graph's order."""


@collector_paused()
def stage_graphs(joint: JointGraph, cut: Cut) -> tuple[StageGraph, ...]:
    """One graph for each stage; together they compute what `joint` does. It is left as it is.

    joint: canonical, before `passes.states` adds anything, which is for each stage by itself. An op of the forward runs
    in the stage whose part of the graph it stands in; what is computed from inputs alone and is no product, in every
    stage that needs it. An op of the backward runs where the values and parameters are that it works on
    (`passes.stages.stage_graph`).

    What passes is that of the first piece, where the graph is of a batch in pieces; the graphs of its `others` are cut
    alike.

    Raises ShardingError if `cut` names no ops of the forward in order, or parts what must stay together: a buffer's
    readers and the op that makes its new value.
    """
    parts = graph_parts(joint)
    count = len(cut) + 1
    assigned = _assign_stages(parts, _starts(parts, cut), count)
    others = [(other, assigned_like(assigned, other)) for other in map(graph_parts, joint.others)]
    found: list[StageGraph] = []
    for stage in range(count):
        first = _Builder(parts, assigned, stage).build()
        pieces = tuple(_Builder(*other, stage).build().joint for other in others)
        found.append(replace(first, joint=replace(first.joint, others=pieces)))
    return tuple(found)


def _starts(parts: GraphParts, cut: Cut) -> tuple[int, ...]:
    positions = {node.name: i for i, node in enumerate(parts.forward)}
    unknown = [name for name in cut if name not in positions]
    if unknown:
        raise ShardingError(
            f"cut: {unknown[0]} is no op of the forward at which a stage may begin\n"
            "  try: find_plan(..., stages=...) again, which chooses a cut"
        )
    starts = tuple(positions[name] for name in cut)
    if list(starts) != sorted(set(starts)) or 0 in starts:
        raise ShardingError(
            f"cut: {', '.join(cut)} do not begin one stage after another\n  try: in the graph's order, each once, not "
            f"{parts.forward[0].name}, with which the first stage begins"
        )
    return starts


class _Builder:
    """new: node of the whole graph -> node of the stage's. positions: input of the whole graph, or what is received ->
    its position among the inputs. sums: what a sum of gradients is in this stage."""

    def __init__(self, parts: GraphParts, assigned: Assigned, stage: int) -> None:
        self.parts, self.assigned, self.stage = parts, assigned, stage
        self.received, self.given_back = assigned.passing(stage - 1)
        self.sent, self.coming_back = assigned.passing(stage)
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.inputs: list[GraphInput] = []
        self.positions: dict[fx.Node, int] = {}
        self.sums: dict[fx.Node, fx.Node | None] = {}
        self.gradients = self._gradients()
        self.outputs = [
            (spec, node)
            for spec, node in zip(parts.joint.outputs, parts.results, strict=True)
            if spec.kind == "output" and assigned.outputs[spec.index] == stage
        ]

    def build(self) -> StageGraph:
        needed = self._needed()
        self._add_placeholders(needed)
        for node in self.parts.joint.graph.nodes:
            if node in needed and node.op == "call_function" and node not in self.new:
                self.new[node] = self.graph.node_copy(node, lambda x: self.new[self._here(x)])
                self.new[node].meta = dict(node.meta)
        outputs = self._add_outputs()
        _set_phases(self.graph, outputs)
        erase_dead(self.graph)
        kept = {spec.name for spec in self.inputs if spec.kind == "constant"}
        constants = {name: value for name, value in self.parts.joint.constants.items() if name in kept}
        pieces = self.parts.joint.pieces
        joint = JointGraph(
            lazy_module(self.graph, "StageGraph"),
            tuple(self.inputs),
            tuple(outputs),
            constants,
            self.parts.joint.device,
            pieces,
            routing=self.parts.joint.routing,
        )
        return StageGraph(
            self.stage,
            self.assigned.stages,
            self._with_uses(run_passes(joint, (NormalizeArguments(), MergeDuplicates()))),
            tuple(self._call_inputs(needed).values()),
            tuple(spec.index for spec, _ in self.outputs),
            self._crossings(self.stage - 1),
            self._crossings(self.stage),
            self._summed(),
        )

    def _with_uses(self, joint: JointGraph) -> JointGraph:
        """What is there once, pieces of a batch read through one `use` before them (`in_pieces`), named as in the whole
        graph: so a parameter is gathered once, if that is best."""
        held = {self.new[base(use)].name: use for use in self.parts.held_uses if base(use) in self.new}
        for node in [one for one in joint.graph.nodes if one.name in held]:
            readers = [user for user in node.users if user.meta.get("runs") == "piece" and not is_piece(user)]
            if readers:
                with joint.graph.inserting_before(min(readers)):
                    use = joint.graph.node_copy(held[node.name], lambda _, node=node: node)
                use.meta = held[node.name].meta | {"phase": min(readers).meta["phase"]}
                for reader in readers:
                    reader.replace_input_with(node, use)
        for graph_pass in LAST:
            joint = graph_pass(joint)
        return joint

    def _gradients(self) -> list[tuple[GraphOutput, fx.Node, fx.Node | None]]:
        """(output of the whole graph, its input, this stage's part of it), of the inputs that the stage holds."""
        found: list[tuple[GraphOutput, fx.Node, fx.Node | None]] = []
        for position, spec in enumerate(self.parts.joint.outputs):
            if spec.kind != "grad":
                continue
            of_whole = self.assigned.sums.get(position)
            part = None
            if of_whole is not None:
                returned = self.assigned.returned[position]
                here = frozenset(node for node in of_whole.parts if returned[node] == self.stage)
                part, made = of_whole.part_of(here)
                self.sums.update({node: made[node] for node in of_whole.ops})
            found.append((spec, self.parts.joint.placeholders[spec.index], part))
        return found

    def _here(self, node: fx.Node) -> fx.Node:
        """What stands for a value of the whole graph in this stage."""
        node = base(node)
        stands = self.sums.get(node, node)
        assert stands is not None, f"{node} is zero in stage {self.stage}"
        return stands if stands is node else self._here(stands)

    def _needed(self) -> set[fx.Node]:
        """All nodes of the whole graph that the stage has, makes or is given."""
        roots = [n for n, stage in self.assigned.of.items() if stage == self.stage]
        roots += [n for _, n in self.outputs if n is not None]
        roots += [n for _, _, n in self.gradients if n is not None]
        given = {*(n for n in self.received if n not in self.given_back.values()), *self.coming_back.values()}
        roots += [
            *given,
            *self.given_back.values(),
            *(n for n in self.sent if n not in self.coming_back.values()),
        ]
        found: set[fx.Node] = set()
        stack = list(map(self._here, roots))
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(() if node in given else map(self._here, operands(node)))
        buffers = {n for n, new in self.parts.changed.items() if self._is_changed_here(new)}
        # Parameters and inputs whose gradient is here though nothing reads them; what nobody reads is in no stage.
        held = {node for _, node, part in self.gradients if part is not None}
        return found | buffers | held

    def _is_changed_here(self, new: fx.Node) -> bool:
        return self.assigned.of.get(new, self.assigned.stages - 1) == self.stage

    def _call_inputs(self, needed: set[fx.Node]) -> dict[fx.Node, int]:
        specs = self.parts.specs
        return {n: specs[n].index for n in specs if specs[n].kind == "input" and n in needed}

    def _add_placeholders(self, needed: set[fx.Node]) -> None:
        specs = {node: spec for node, spec in self.parts.specs.items() if node in needed}
        of_kind: Callable[[str], Iterable[fx.Node]] = lambda kind: [
            n for n, s in specs.items() if s.kind == kind
        ]
        for kind in ("param", "buffer", "constant"):
            for node in of_kind(kind):
                self._placeholder(node, specs[node])
        call = self._call_inputs(needed)
        for index, node in enumerate(call):
            self._placeholder(node, GraphInput("input", specs[node].name, index))
        for index, node in enumerate(self.received, len(call)):
            known = node not in self.given_back.values()
            name = node.name if known else f"{node.name}_stand_in"
            received = self._placeholder(node, GraphInput("input", node.name, index), name, known=known)
            received.meta.update(when_run(node))
        self._add_tangents(specs)
        for node in of_kind("seed"):
            self._placeholder(node, specs[node])

    def _add_tangents(self, specs: Mapping[fx.Node, GraphInput]) -> None:
        own = {spec.index: node for node, spec in specs.items() if spec.kind == "tangent"}
        for index, (spec, _) in enumerate(self.outputs):
            node = own.get(spec.index)
            if node is not None and self.assigned.of[node] == self.stage:
                self._placeholder(node, GraphInput("tangent", f"tangent {index}", index))
        for index, value in enumerate(self.sent, len(self.outputs)):
            if value in self.coming_back:
                spec = GraphInput("tangent", f"tangent {index}", index)
                returned = self._placeholder(self.coming_back[value], spec, f"tangent_{value.name}")
                returned.meta.update(when_run(value))

    def _placeholder(
        self, node: fx.Node, spec: GraphInput, name: str | None = None, *, known: bool = True
    ) -> fx.Node:
        """known: whether the input is the value of `node`."""
        new = copied_input(self.graph, node, name)
        new.target = new.name  # names are made unique; the generated signature prints the target
        kept = {key: node.meta[key] for key in ("module", "source") if key in node.meta}
        new.meta = {**kept, "val": node.meta["val"], "phase": "forward"}
        if known:
            self.new[node] = new
        if spec.kind != "tangent":
            self.positions[node] = len(self.inputs)
        self.inputs.append(spec)
        return new

    def _add_outputs(self) -> list[GraphOutput]:
        ends: list[tuple[GraphOutput, fx.Node | None]] = [
            (GraphOutput("output", f"output {i}", i), None if n is None else self.new[self._here(n)])
            for i, n in enumerate(n for _, n in self.outputs)
        ]
        for i, node in enumerate(self.sent, len(ends)):
            stands_in = node in self.coming_back.values()
            value = self._zeros(node) if stands_in else self.new[self._here(node)]
            ends.append((GraphOutput("output", f"output {i}", i), value))
        for buffer, new in self.parts.changed.items():
            if self._is_changed_here(new):
                name = self.parts.specs[buffer].name
                ends.append((GraphOutput("buffer", name, self.positions[buffer]), self.new[self._here(new)]))
        for spec, node, part in self.gradients:
            if node in self.positions:
                value = None if part is None else self.new[self._here(part)]
                ends.append((GraphOutput("grad", spec.name, self.positions[node]), value))
        for node, gradient in self.given_back.items():
            ends.append(
                (GraphOutput("grad", node.name, self.positions[node]), self.new[self._here(gradient)])
            )
        self.graph.output(tuple(node for _, node in ends))
        return [spec for spec, _ in ends]

    def _zeros(self, like: fx.Node) -> fx.Node:
        value = like.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        zeros = self.graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), options)
        zeros.meta = {key: said for key, said in like.meta.items() if key != "rows"} | {"val": value}
        return zeros

    def _crossings(self, boundary: int) -> tuple[Crossing, ...]:
        if not 0 <= boundary < self.assigned.stages - 1:
            return ()
        sent, back = self.assigned.passing(boundary)
        return tuple(
            Crossing(
                n.name, boundary, self.assigned.of[n], *tensor_kind(n), n in back, n not in back.values()
            )
            for n in sent
        )

    def _summed(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for position, spec in enumerate(self.parts.joint.outputs):
            stages = self.assigned.gradient_stages(position) if spec.kind == "grad" else ()
            if len(stages) > 1 and self.parts.joint.placeholders[spec.index] in self.new:
                found[spec.name] = stages
        return found


def _set_phases(graph: fx.Graph, outputs: Iterable[GraphOutput]) -> None:
    """The forward is what values other than gradients depend on."""
    pairs = zip(outputs, graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
    forward = ancestors(n for spec, n in pairs if isinstance(n, fx.Node) and spec.kind != "grad")
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["phase"] = "forward" if node in forward else "backward"


def _assign_stages(parts: GraphParts, starts: Sequence[int], stages: int) -> Assigned:
    """starts: position in `parts.forward` at which each stage but the first begins.

    Raises ShardingError if a buffer that changes is in several stages, or the backward would go from an earlier stage
    to a later one.
    """
    own = {node: bisect_right(starts, i) for i, node in enumerate(parts.forward)}
    places = forward_places(parts, own, stages - 1)
    _check_buffers(parts, places)
    sums = gradient_sums(parts)
    bounds = backward_places(parts, places, sums)
    outputs, tangents = output_places(parts, places), tangent_places(parts, places)
    of = {**places.of, **backward_stages(parts, places, bounds, stages), **tangents}
    _check_order(parts, of)
    returned = {position: _returned(found, places, of) for position, found in sums.items()}
    reach, back = _ends(parts, of, returned)
    boundaries = range(stages - 1)
    sent = tuple(tuple(n for n in parts.forward if of[n] <= b < reach.get(n, -1)) for b in boundaries)
    late = [n for n in (*tangents, *parts.backward) if n in of]
    returning = [[n for n in late if back.get(n, stages) <= b < of[n]] for b in boundaries]
    _check_pieces(parts, [*sent, *returning])
    gradients = pair_gradients(parts, sent, returning)
    return Assigned(stages, of, outputs, sums, returned, sent, gradients)


def _returned(found: GradientSum, places: ForwardPlaces, of: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Part of the gradient -> the last stage that holds the parameter and may have the part."""
    at = places.holders.get(found.param, frozenset((0,)))
    made = {part: of.get(part, places.last) for part in found.parts}
    return {part: max((p for p in at if p <= stage), default=stage) for part, stage in made.items()}


def _ends(
    parts: GraphParts, of: Mapping[fx.Node, int], returned: Mapping[int, Mapping[fx.Node, int]]
) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """(value of the forward -> the last stage that needs it, value of the backward -> the first that needs it)."""
    reach: dict[fx.Node, int] = {}
    back: dict[fx.Node, int] = {}
    known = [node for node in (*parts.forward, *parts.backward) if node in of]
    reads = [(operand, of[node]) for node in known for operand in operands(node)]
    ends = [(part, stage) for found in returned.values() for part, stage in found.items()]
    for value, stage in (*reads, *ends):
        if value in parts.in_forward:
            for leaf in parts.leaves([value], stage, of):
                reach[leaf] = max(reach.get(leaf, 0), stage)
        else:
            back[value] = min(back.get(value, stage), stage)
    return reach, back


def _check_buffers(parts: GraphParts, places: ForwardPlaces) -> None:
    for buffer in parts.changed:
        at = places.holders.get(buffer, frozenset())
        if len(at) > 1:
            name = parts.specs[buffer].name
            raise _uncuttable(
                f"the buffer {name} is read in the stages {sorted(at)}; only the one that changes it knows its value",
                parts.changed[buffer],
                "a cut before or behind all of them",
            )


def _check_pieces(parts: GraphParts, passing: Sequence[Sequence[fx.Node]]) -> None:
    for node in (node for nodes in passing for node in nodes):
        if not passes_with_piece(parts.joint, node):
            why = "what is made once for all pieces of the batch would pass from one to another"
            raise _uncuttable(why, node, "another cut, or the op's module whole in one stage")


def _check_order(parts: GraphParts, of: Mapping[fx.Node, int]) -> None:
    for node in parts.backward:
        for operand in operands(node):
            apart = of.get(operand, 0) - of.get(node, 0)
            if node in of and operand in of and (apart > 0 if operand in parts.in_forward else apart < 0):
                why = "the backward of an earlier stage would read what a later one makes"
                raise _uncuttable(why, node, "another cut")


def _uncuttable(why: str, node: fx.Node, remedy: str) -> ShardingError:
    return ShardingError(
        f"cannot cut the graph into these stages: {why}\n  {described(node)}\n  try: {remedy}"
    )
