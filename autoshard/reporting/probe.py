"""Time every collective of a program, one by one: run its graphs op by op, on the tensors of a real step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.runtime.leaves import conform
from autoshard.runtime.piece_code import Compiler
from cost_model.measure.clock import Marks
from passes.compile.bind_device import expand_ops
from passes.compile.compile_graph import Compiled
from passes.ops.named_collective import NAMED
from passes.predict.step_events import COLLECTIVE_KINDS, copies_of_collectives

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


class TimedCompiler(Compiler):
    """Graphs are run op by op, as often as they are asked to: nothing of the model changes. runs: in order, those of a
    step so far."""

    def __init__(self, marks: Marks) -> None:
        super().__init__("op by op")
        self._marks = marks
        self.runs: list[TimedRun] = []

    def __call__(
        self, module: fx.GraphModule, adding: Sequence[int] = ()
    ) -> tuple[Compiled, tuple[Tensor, ...]]:
        expanded = expand_ops(module)
        takes = tuple(node.meta["val"] for node in module.graph.nodes if node.op == "placeholder")

        def run(inputs: list[Tensor]) -> Sequence[Tensor | None]:
            timed = TimedRun(expanded, self._marks)
            self.runs.append(timed)
            with torch.no_grad():
                return timed.run(*(conform(value, like) for value, like in zip(inputs, takes, strict=True)))

        return run, takes


@dataclass(frozen=True)
class Probed:
    """Seconds of one run. collectives: parallel to those of the prediction. compute: phase -> all else."""

    collectives: tuple[float, ...]
    compute: Mapping[str, float]

    @staticmethod
    def of(runs: Sequence[TimedRun], phases: Mapping[str, Sequence[TimedRun]]) -> Probed:
        """runs: of whose collectives there is a prediction, in order. phases: all that ran in each."""
        collectives = tuple(seconds for run in runs for seconds in run.collectives())
        return Probed(
            collectives, {name: sum(run.compute() for run in own) for name, own in phases.items() if own}
        )


def probe(once: Callable[[], Probed], repeats: int) -> Probed:
    """Medians of so many runs behind one that warms up. All ranks must run alike."""
    once()
    runs = [once() for _ in range(repeats)]
    return Probed(
        tuple(map(statistics.median, zip(*(run.collectives for run in runs), strict=True))),
        {phase: statistics.median(run.compute[phase] for run in runs) for phase in runs[0].compute},
    )
