"""One rank's program where a batch is run in pieces: what runs before them, the program of a piece, what runs after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from passes.ir.joint import GraphInput, GraphOutput, ancestors, dependents
from passes.ir.op_traits import is_collect, is_collective, is_piece, is_view
from passes.ir.torch_compat import lazy_module
from passes.lower.partition import RankGraph
from passes.lower.phases import extract, unaliased
from passes.lower.rank_program import RankProgram


def pieces_of(program: RankProgram, pieces: int) -> RankPieces:
    """pieces: of the joint graph that `program` is of."""
    return one_piece(program) if pieces == 1 else split_pieces(program)


def one_piece(program: RankProgram) -> RankPieces:
    """All of `program` is the piece; nothing runs before it or after it."""
    placeholders = [node for node in program.local.module.graph.nodes if node.op == "placeholder"]
    ends = list(zip(program.outputs, _results(program), strict=True))
    names = [None if node is None else f"result {place}" for place, (_, node) in enumerate(ends)]
    values = [place for place, (end, _) in enumerate(ends) if end.kind != "grad"]
    gradients = [place for place, (end, _) in enumerate(ends) if end.kind == "grad"]
    return RankPieces(
        before=_nothing(),
        taken=(),
        made=(),
        piece=program,
        given=tuple(PieceInput(node.name) for node in placeholders),
        left=tuple(Collected(f"result {place}", "own") for place in (*values, *gradients)),
        after=_nothing(),
        read=(),
        ended=(),
        results=tuple(names),
    )


def _results(program: RankProgram) -> list[fx.Node | None]:
    return list(program.local.module.graph.output_node().args[0])  # type: ignore[arg-type]


def _nothing() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(())
    return lazy_module(graph)


IN_PLACE = {"sum": torch.Tensor.add_, "max": torch.maximum, "min": torch.minimum}
"""How a piece's value is added to what those before it have left, in that one's place where possible."""


def given_values(given: Sequence[PieceInput], known: Mapping[str, Tensor]) -> list[Tensor]:
    """The inputs of a piece's forward and backward, parts as views. known: placeholders and what was made before."""
    return [
        known[one.source] if one.part is None else known[one.source].narrow(*one.part).contiguous()
        for one in given
    ]


def leave(left: Sequence[Collected], values: Sequence[Tensor], known: dict[str, Tensor]) -> None:
    """Add what a piece leaves, `values`, to what those before it have left in `known`."""
    for one, value in zip(left, values, strict=True):
        found = known.get(one.name)
        if one.how == "cat":
            if found is None:
                shape = [one.length if d == one.dim else n for d, n in enumerate(value.shape)]
                found = known[one.name] = value.new_empty(shape)
            found.narrow(one.dim, one.start, value.shape[one.dim]).copy_(value)
        elif found is None or one.how == "own":
            known[one.name] = value
        else:
            known[one.name] = IN_PLACE[one.how](found, value)


def step_results(
    parts: RankPieces, known: Mapping[str, Tensor], leaves: Sequence[str]
) -> list[Tensor | None]:
    """The results of the step, none of which shares storage with one of `leaves` or another. known: all values."""
    taken, found = set(leaves), list[Tensor | None]()
    for name in parts.results:
        value = None if name is None else known[name]
        found.append(value.clone() if value is not None and name in taken else value)
        taken.add(str(name))
    return found


@dataclass(frozen=True)
class PieceInput:
    """What a piece is given. source: a placeholder of the rank's graph, or a value made before, by name, which is the
    same in the programs of all pieces. part: the piece's part of it: (dim, start, length); None: all of it."""

    source: str
    part: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Collected:
    """What the pieces leave. name: of the value made of it. how: "sum", "max" or "min" over the pieces; "cat": side by
    side along `dim`, of `length`, this piece's at `start`; "own": each its own, for another stage of a pipeline."""

    name: str
    how: str
    dim: int = 0
    start: int = 0
    length: int = 0


@dataclass(frozen=True)
class RankPieces:
    """before: takes the placeholders `taken` of the rank's graph, returns the values `made`.
    piece: forward and backward of this piece; takes `given`, one per input, and returns what is `left`, the forward's
           and after them the backward's.
    after: takes the values `read`, placeholders, made before, or left behind, and returns the values `ended`.
    results: of the rank's graph, each by the name of a value of any of these; None for no gradient.
    """

    before: fx.GraphModule
    taken: tuple[str, ...]
    made: tuple[str, ...]
    piece: RankProgram
    given: tuple[PieceInput, ...]
    left: tuple[Collected, ...]
    after: fx.GraphModule
    read: tuple[str, ...]
    ended: tuple[str, ...]
    results: tuple[str | None, ...]

    def joined(self) -> RankPieces:
        """The same, a piece of fewer and larger kernels (`RankProgram.joined`)."""
        return replace(self, piece=self.piece.joined())


def split_pieces(program: RankProgram) -> RankPieces:
    """The program of a rank, of the graph of one piece (`passes.micro_batches.in_pieces`), where it is cut in time.

    Views of what is made before are looked at again by whoever reads them.
    """
    return _Split(program).pieces()


def without_gradients(program: RankProgram) -> RankProgram:
    """`program` where gradients are not asked for yet: what they alone need is left out, on all ranks alike."""
    graph = fx.Graph()
    results = graph.graph_copy(program.local.module.graph, {}) or ()
    ends = zip(program.outputs, results, strict=True)  # type: ignore[arg-type]
    kept = [None if end.kind == "grad" else node for end, node in ends]
    # Turn of the first collectives of which only gradients are made (`passes.plan.planned_graph.Turn`).
    early = [n for n in graph.nodes if is_collective(n) and n.meta.get("turn", (0,))[0] < 2]
    wanted = ancestors([*(node for node in kept if node is not None), *early])
    graph.output(tuple(kept))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node not in wanted:
            graph.erase_node(node)
    local = RankGraph(lazy_module(graph), program.local.values)
    return replace(program, local=local)


class _Split:
    def __init__(self, program: RankProgram) -> None:
        self.program = program
        self.graph = fx.Graph()  # a private copy, so that clones can be added to it
        self.results = list(self.graph.graph_copy(program.local.module.graph, {}) or ())  # type: ignore[arg-type]
        self.placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.ops = [node for node in self.graph.nodes if node.op == "call_function"]
        # What rank programs of pieces of other sizes call the same: the node of the global graph, the first of several.
        self.names = {local: name for name, local in reversed(list(program.local.values.items()))}

    def pieces(self) -> RankPieces:
        piece, given, left = self._piece()
        after_ops = self._with_views([node for node in self.ops if _runs(node) == "after"])
        read, own = _outside(after_ops, []), set(after_ops)
        ended = list(dict.fromkeys(node for node in self.results if node in own))
        after = extract(read, *_unaliased(after_ops, ended))
        sources = {source.source for source in given} | {self._name(node) for node in read}
        sources |= {self._name(node) for node in self.results if node is not None}
        made = self._made(sources)
        taken, before = self._before(list(made.values()))
        return RankPieces(
            self.program.schedule(before),
            taken,
            tuple(made),
            piece,
            given,
            left,
            self.program.schedule(after),
            tuple(self._name(node) for node in read),
            tuple(self._name(node) for node in ended),
            tuple(None if node is None else self._name(node) for node in self.results),
        )

    def _name(self, node: fx.Node) -> str:
        return self.names.get(node.name, node.name)

    def _made(self, sources: set[str]) -> dict[str, fx.Node]:
        """The values made before that are read later, by name."""
        own = {self._name(node): node for node in self.ops if _runs(node) == "before"}
        parts = {self._part(node): node.all_input_nodes[0] for node in self.ops if is_piece(node)}
        return {
            name: node
            for name, node in {**own, **parts}.items()
            if name in sources and node.op != "placeholder"
        }

    def _part(self, piece: fx.Node) -> str:
        """What a part is taken of: a placeholder, or the value as it was brought to where the part is taken."""
        (whole,) = piece.all_input_nodes
        return whole.name if whole.op == "placeholder" else f"whole of {self._name(piece)}"

    def _given(self, node: fx.Node) -> PieceInput:
        if not is_piece(node):
            return PieceInput(self._name(node))
        dim, start, length = node.args[1:]
        return PieceInput(self._part(node), (dim, start, length))  # type: ignore[arg-type]

    def _collected(self, node: fx.Node) -> Collected:
        if not is_collect(node):
            return Collected(self._name(node), "own")
        how, dim, start, length = node.args[1:]
        return Collected(self._name(node), str(how), dim, start, length)  # type: ignore[arg-type]

    def _before(self, made: Sequence[fx.Node]) -> tuple[tuple[str, ...], fx.GraphModule]:
        ops = [node for node in self.ops if _runs(node) == "before"]
        keep = ancestors([*made, *(node for node in ops if is_collective(node))])
        taken = [node for node in self.placeholders if node in keep]
        module = extract(taken, *_unaliased([node for node in ops if node in keep], made))
        return tuple(node.name for node in taken), module

    def _piece(self) -> tuple[RankProgram, tuple[PieceInput, ...], tuple[Collected, ...]]:
        own = [node for node in self.ops if _runs(node) == "piece"]
        ops = self._with_views([node for node in own if not is_piece(node) and not is_collect(node)])
        returned = {node for node in self.results if node is not None}
        collects = [n for n in own if is_collect(n) or n in returned]
        late = self._after_tangents()
        # Of a gradient that a stage receives, a part may be a result as it is: no op of the backward made it.
        gradients = {n for n in collects if n in late or n.meta["phase"] == "backward"}
        collects.sort(key=gradients.__contains__)
        results = [node.all_input_nodes[0] if is_collect(node) else node for node in collects]
        read = _outside(ops, results)
        module = extract(read, ops, results)
        for node in module.graph.nodes:
            if "turn" in node.meta:
                number, *place = node.meta["turn"]
                node.meta["turn"] = number - 1, *place
        inputs = [
            GraphInput("tangent" if node in late else "input", node.name, place)
            for place, node in enumerate(read)
        ]
        outputs = [GraphOutput("grad" if node in gradients else "output", node.name) for node in collects]
        program = RankProgram.of(RankGraph(module, {}), inputs, outputs, self.program.schedule)
        return program, tuple(map(self._given, read)), tuple(map(self._collected, collects))

    def _after_tangents(self) -> set[fx.Node]:
        kinds = zip(self.placeholders, self.program.inputs, strict=True)
        return dependents(self.graph.nodes, [node for node, spec in kinds if spec.kind == "tangent"])

    def _with_views(self, ops: Sequence[fx.Node]) -> list[fx.Node]:
        """`ops`, and the views that they read of values made before which the global graph has too."""
        own, views = set(ops), set[fx.Node]()
        stack = [operand for node in ops for operand in node.all_input_nodes]
        while stack:
            node = stack.pop()
            known = all(n.op == "placeholder" or n.name in self.names for n in node.all_input_nodes)
            if is_view(node) and _runs(node) == "before" and known and node not in own and node not in views:
                views.add(node)
                stack.extend(node.all_input_nodes)
        return [node for node in self.ops if node in own or node in views]


def _unaliased(
    ops: Sequence[fx.Node], results: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node | None]]:
    """`ops` with copies of those of `results` that share another's storage, and what stands for `results`."""
    found = unaliased(results, set())
    known = set(ops)
    return [*ops, *(node for node in found if node is not None and node not in known)], found


def _runs(node: fx.Node) -> str:
    """A view of a value made before of which a piece takes its part is one of before."""
    return str(node.meta.get("runs", "before"))


def _outside(ops: Iterable[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
    """What `ops` and `results` read of elsewhere, in the order of the graph."""
    own = set(ops)
    read = {operand for node in own for operand in node.all_input_nodes} | set(results)
    if not read:
        return []
    graph = next(iter(read)).graph
    return [node for node in graph.nodes if node in read and node not in own]
