"""Time every collective of a program, one by one: run its graphs op by op, on the tensors of a real step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.runtime.compiled_pieces import by_phase
from autoshard.runtime.leaves import conform
from autoshard.runtime.observe import Marks
from passes.compile.expand_ops import expand_ops
from passes.lower.phases import Phases
from passes.lower.piece_values import given_values, leave
from passes.lower.piecewise import RankPieces
from passes.ops.named_collective import NAMED
from passes.predict.step_events import COLLECTIVE_KINDS, copies_of_collectives

__all__ = ["PiecesProbe", "WholeProbe", "ones_for", "probe"]

c10d = torch.ops._c10d_functional


class TimedRun(fx.Interpreter):
    """Every collective is waited for where it starts. Notes a mark at every change between computing and a collective
    with its copies."""

    def __init__(self, module: fx.GraphModule, marks: Marks) -> None:
        super().__init__(module)
        self._marks = marks
        self._copies = copies_of_collectives(module.graph)
        self._issued = [node.name for node in module.graph.nodes if node.target in COLLECTIVE_KINDS]
        self._spans: list[tuple[str | None, Any, Any]] = []  # collective or None, begin, end
        self._computing: Any = None

    def run_node(self, n: fx.Node) -> Any:
        if n.target in COLLECTIVE_KINDS:
            self._close()
            self._meet(n)
            return self._span(n.name, n)
        if n in self._copies:
            self._close()
            return self._span(self._copies[n].name, n)
        if n.op == "call_function" and n.target is not c10d.wait_tensor.default and self._computing is None:
            self._computing = self._marks.mark()
        if n.op == "output":
            self._close()
        return super().run_node(n)

    def compute(self) -> float:
        """Seconds of all else."""
        return sum(self._marks.seconds(begin, end) for node, begin, end in self._spans if node is None)

    def collectives(self) -> tuple[float, ...]:
        """Seconds of each, in the order of the graph: from when all ranks of the group are there to the end of the
        wait, with the copies that put its parts in order."""
        found = dict.fromkeys(self._issued, 0.0)
        for node, begin, end in self._spans:
            if node is not None:
                found[node] += self._marks.seconds(begin, end)
        return tuple(found.values())

    def _span(self, collective: str, node: fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(node)
        begin = self._marks.mark()
        if node.target in COLLECTIVE_KINDS:
            # The op that compiled programs run, which may not be the plain one.
            value = c10d.wait_tensor.default(NAMED[node.target](*args, "report"))
        else:
            value = super().run_node(node)
        self._spans.append((collective, begin, self._marks.mark()))
        return value

    def _close(self) -> None:
        if self._computing is not None:
            self._spans.append((None, self._computing, self._marks.mark()))
            self._computing = None

    def _meet(self, node: fx.Node) -> None:
        """Wait for all ranks of the group: a collective is timed from when the last has come."""
        (operand,) = node.all_input_nodes
        token = self.env[operand].new_zeros(1, dtype=torch.float32)
        c10d.wait_tensor.default(c10d.all_reduce.default(token, "sum", str(node.args[-1])))


Ran = tuple[TimedRun, Sequence[Any]]
"""What was timed, and the results."""


class TimedGraph:
    """A graph to be run op by op, any number of times. It is functional: nothing of the model changes."""

    def __init__(self, module: fx.GraphModule, marks: Marks) -> None:
        self._marks = marks
        self._module = expand_ops(module)
        self.takes = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]

    @torch.no_grad()
    def run(self, inputs: Sequence[Tensor]) -> Ran:
        timed = TimedRun(self._module, self._marks)
        given = [conform(value, like) for value, like in zip(inputs, self.takes, strict=True)]
        return timed, timed.run(*given)


class TimedPhases:
    """Of one program, or of a piece's."""

    def __init__(self, phases: Phases, marks: Marks) -> None:
        self._phases = phases
        self.forward = TimedGraph(phases.forward, marks)
        self._backward = None if phases.backward is None else TimedGraph(phases.backward.module, marks)

    def backward(
        self, inputs: Sequence[Tensor], results: Sequence[Any], tangents: Sequence[Tensor] | None = None
    ) -> Ran | None:
        """inputs, results: of the forward. tangents: ones where there are none. None: there is no backward."""
        graph = self._phases.backward
        if graph is None or self._backward is None:
            return None
        given = [inputs[i] for i in graph.passed] + [results[i] for i in graph.saved]
        if tangents is None:
            tangents = ones_for(self._backward.takes[len(given) :], inputs)
        return self._backward.run([*given, *tangents])


def ones_for(values: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that look like `values`, on the device of `inputs`."""
    device = inputs[0].device if inputs else torch.device("cpu")
    return [conform(torch.ones(v.shape, dtype=v.dtype, device=device), v) for v in values]


@dataclass(frozen=True)
class Probed:
    """Of one run, in seconds. collectives: parallel to those of the prediction. compute: phase -> all else."""

    collectives: tuple[float, ...]
    compute: Mapping[str, float]


def probe(once: Callable[[], Probed], repeats: int) -> Probed:
    """Medians of so many runs behind one that warms up. All ranks must run alike."""
    once()
    runs = [once() for _ in range(repeats)]
    return Probed(
        tuple(map(statistics.median, zip(*(run.collectives for run in runs), strict=True))),
        {phase: statistics.median(run.compute[phase] for run in runs) for phase in runs[0].compute},
    )


class WholeProbe:
    """inputs: of the forward."""

    def __init__(self, phases: Phases, inputs: Sequence[Tensor], marks: Marks) -> None:
        self._inputs = inputs
        self._phases = TimedPhases(phases, marks)

    def __call__(self) -> Probed:
        forward, results = self._phases.forward.run(self._inputs)
        ran = self._phases.backward(self._inputs, results)
        if ran is None:
            return Probed(forward.collectives(), {"forward": forward.compute()})
        backward, _ = ran
        return Probed(
            (*forward.collectives(), *backward.collectives()),
            {"forward": forward.compute(), "backward": backward.compute()},
        )


class PiecesProbe:
    """Computing is that of all pieces. Collectives are, as in the prediction, those before the pieces, of the first
    piece, and after them.

    parts: of every piece. known: values of a step's placeholders.
    """

    def __init__(self, parts: Sequence[RankPieces], known: Mapping[str, Tensor], marks: Marks) -> None:
        self._known, self._first = known, parts[0]
        self._before, self._after = (TimedGraph(g, marks) for g in (parts[0].before, parts[0].after))
        self._pieces = [_Piece(one, marks) for one in parts]

    @torch.no_grad()
    def __call__(self) -> Probed:
        known, first = dict(self._known), self._first
        before, made = self._before.run([known[name] for name in first.taken])
        known.update(zip(first.made, made, strict=True))
        forward, backward = [before], list[TimedRun]()
        for piece in self._pieces:
            ran, again = piece.run(known)
            forward.append(ran)
            backward += again
        after, _ = self._after.run([known[name] for name in first.read])
        told = (*forward[:2], *backward[:1], after)
        (backward if backward else forward).append(after)
        phases = {"forward": forward, "backward": backward}
        return Probed(
            tuple(seconds for run in told for seconds in run.collectives()),
            {name: sum(run.compute() for run in runs) for name, runs in phases.items() if runs},
        )


class _Piece:
    def __init__(self, parts: RankPieces, marks: Marks) -> None:
        self._left = parts.left
        self._given, self._tangents = by_phase(parts.given, parts.piece)
        phases = parts.piece.complete()
        self._outputs = len(phases.outputs)
        self._timed = TimedPhases(phases, marks)

    def run(self, known: dict[str, Tensor]) -> tuple[TimedRun, list[TimedRun]]:
        """Of the forward, and of the backward if there is one. known: what the piece leaves is added."""
        inputs = given_values(self._given, known)
        forward, results = self._timed.forward.run(inputs)
        ran = self._timed.backward(inputs, results, given_values(self._tangents, known))
        # The backward has read them: what is left may be added up in place.
        leave(self._left[: self._outputs], results[: self._outputs], known)
        if ran is None:
            return forward, []
        leave(self._left[self._outputs :], ran[1], known)
        return forward, [ran[0]]
