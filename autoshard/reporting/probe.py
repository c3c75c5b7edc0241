"""Time every collective of a program, one by one: run its graphs op by op, on the tensors of a real step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.reporting.marks import Marks
from autoshard.runtime.input_side import conform
from passes.compile.expand_ops import expand_ops
from passes.lower.phases import Phases
from passes.ops.named_collective import NAMED
from passes.predict.step_events import COLLECTIVE_KINDS, copies_of_collectives

__all__ = ["Probe"]

c10d = torch.ops._c10d_functional


class Probe:
    """Runs a step's forward and backward with every collective waited for where it starts.

    collectives: (phase, node) -> seconds of each run, from when all ranks of the group are there to the
                 end of the wait, with the copies that put its parts in order.
    compute:     phase -> seconds of each run in everything else, op by op.

    The programs are functional: nothing of the model changes. All ranks must run alike.
    """

    def __init__(self, phases: Phases, inputs: Sequence[Tensor], marks: Marks) -> None:
        self._phases = phases
        self._inputs = list(inputs)
        self._marks = marks
        self._graphs = {"forward": expand_ops(phases.forward)}
        if phases.backward is not None:
            self._graphs["backward"] = expand_ops(phases.backward.module)
        self.collectives: dict[tuple[str, str], list[float]] = {}
        self.compute: dict[str, list[float]] = {phase: [] for phase in self._graphs}

    def seconds(self, phase: str, node: str) -> float:
        """Median of a collective, the first run not counted."""
        return statistics.median(self.collectives[phase, node][1:])

    def compute_seconds(self, phase: str) -> float:
        """Median of a phase's computing, the first run not counted."""
        return statistics.median(self.compute[phase][1:])

    @torch.no_grad()
    def run(self) -> None:
        """One more run."""
        results = self._run("forward", self._inputs)
        backward = self._phases.backward
        if backward is None:
            return
        inputs = [self._inputs[i] for i in backward.passed] + [results[i] for i in backward.saved]
        del results
        placeholders = [n for n in backward.module.graph.nodes if n.op == "placeholder"]
        values = [n.meta["val"] for n in placeholders[len(inputs) :]]
        device = self._inputs[0].device if self._inputs else torch.device("cpu")
        inputs += [conform(torch.ones(v.shape, dtype=v.dtype, device=device), v) for v in values]
        self._run("backward", inputs)

    def _run(self, phase: str, inputs: Sequence[Tensor]) -> Sequence[Any]:
        timed = _Timed(self._graphs[phase], self._marks)
        results = timed.run(*inputs)
        self.compute[phase].append(timed.compute())
        for node, seconds in timed.collectives().items():
            self.collectives.setdefault((phase, node), []).append(seconds)
        return results


class _Timed(fx.Interpreter):
    """Notes a mark at every change between computing and a collective with its copies."""

    def __init__(self, module: fx.GraphModule, marks: Marks) -> None:
        super().__init__(module)
        self._marks = marks
        self._copies = copies_of_collectives(module.graph)
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
        return sum(self._marks.seconds(begin, end) for node, begin, end in self._spans if node is None)

    def collectives(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for node, begin, end in self._spans:
            if node is not None:
                found[node] = found.get(node, 0.0) + self._marks.seconds(begin, end)
        return found

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
