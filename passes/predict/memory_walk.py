"""The bytes alive at every step of a rank's program: what it holds, and when that is freed.

A program frees a value after its last reader; views share what they view. What the forward saves lives until the
backward has read it, gradients until the update, parameters and the optimizer's states always. What a collective reads
lives until its wait, as it is in flight. Not counted: workspaces of kernels, and what an allocator keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from cost_model.memory import ADAMW, Optimizer
from passes.ir.joint import result_index, results_nbytes
from passes.ir.op_traits import is_collective, is_view, storage_root
from passes.lower.phases import Phases
from passes.strategies.pricing import TrafficModel

__all__ = ["MemoryStep", "memory_walk", "peak_step"]


@dataclass(frozen=True)
class MemoryStep:
    """Bytes alive while `node` runs. held: parameters, buffers, inputs and the optimizer's states; kept: what the
    forward saved; gradients: those that are made; working: all else that the phase has made and still reads."""

    phase: str
    node: str
    held: int
    kept: int
    gradients: int
    working: int

    @property
    def nbytes(self) -> int:
        return self.held + self.kept + self.gradients + self.working


def memory_walk(
    phases: Phases, traffic: TrafficModel, optimizer: Optimizer = ADAMW
) -> tuple[MemoryStep, ...]:
    """A step before the first op, and one per op of the forward and of the backward, in the order in which they run.

    phases: with meta "phase" where each op runs (`passes.predict.step_events` writes it). traffic: which values are
    stored. optimizer: its states of every parameter that gets a gradient.
    """
    ends = () if phases.backward is None else phases.backward.gradients
    trained = {end.index for end in ends if phases.inputs[end.index].kind == "param"}
    inputs = _placeholders(phases.forward)
    held = sum(
        results_nbytes(node) * (1 + optimizer.states * (i in trained)) for i, node in enumerate(inputs)
    )
    forward = _Phase(phases.forward, traffic)
    steps = [MemoryStep("forward", "start", held, 0, 0, 0)]
    steps += [MemoryStep("forward", node, held, 0, 0, working) for node, working, _ in forward.walk({})]
    if phases.backward is None:
        return tuple(steps)
    module = phases.backward.module
    first = len(phases.backward.passed)
    saved = dict.fromkeys(_placeholders(module)[first:], "kept")
    backward = _Phase(module, traffic)
    for node, working, kinds in backward.walk(saved):
        kept, made = kinds.get("kept", 0), kinds.get("gradients", 0)
        steps.append(MemoryStep("backward", node, held, kept, made, working - kept - made))
    return tuple(steps)


def peak_step(steps: Sequence[MemoryStep]) -> MemoryStep:
    """The first step with the most bytes."""
    return max(steps, key=lambda step: step.nbytes)


class _Phase:
    """Owners of storage in one graph, and when each is freed."""

    def __init__(self, module: fx.GraphModule, traffic: TrafficModel) -> None:
        self.ops = [node for node in module.graph.nodes if node.op == "call_function"]
        self._traffic = traffic
        place = {node: step for step, node in enumerate(self.ops)}
        (output,) = [node for node in module.graph.nodes if node.op == "output"]
        self.results = {_owner(node) for node in output.all_input_nodes}
        self.last: dict[fx.Node, int] = {}
        for node in self.ops:
            for operand in node.all_input_nodes:
                self._read(operand, place[node])
                if is_collective(operand):  # a wait: what was sent may be freed now
                    for sent in operand.all_input_nodes:
                        self._read(sent, place[node])

    def _read(self, node: fx.Node, step: int) -> None:
        self.last[_owner(node)] = max(self.last.get(_owner(node), -1), step)

    def walk(self, given: Mapping[fx.Node, str]) -> list[tuple[str, int, dict[str, int]]]:
        """Per op: bytes alive, of them by kind. given: what is alive at the start, with its kind."""
        alive = {node: (results_nbytes(node), kind) for node, kind in given.items()}
        now = sum(nbytes for nbytes, _ in alive.values())
        by_kind: dict[str, int] = {}
        for nbytes, kind in alive.values():
            by_kind[kind] = by_kind.get(kind, 0) + nbytes
        ending: dict[int, list[fx.Node]] = {}
        for node, step in self.last.items():
            if node not in self.results:
                ending.setdefault(step, []).append(node)
        found: list[tuple[str, int, dict[str, int]]] = []
        for step, node in enumerate(self.ops):
            if _owner(node) is node and self._stored(node):
                kind = "gradients" if node in self.results and given else "working"
                alive[node] = (results_nbytes(node), kind)
                now += alive[node][0]
                by_kind[kind] = by_kind.get(kind, 0) + alive[node][0]
            found.append((node.name, now, dict(by_kind)))
            gone = [
                *ending.get(step, ()),
                *([node] if node not in self.last and node not in self.results else []),
            ]
            for owner in gone:
                nbytes, kind = alive.pop(owner, (0, ""))
                now -= nbytes
                by_kind[kind] = by_kind.get(kind, 0) - nbytes
        return found

    def _stored(self, node: fx.Node) -> bool:
        return is_collective(node) or self._traffic(node).writes


def _owner(node: fx.Node) -> fx.Node:
    """Whose storage a value is: of a wait its collective's, of one of several results the op's."""
    while True:
        root = result_index(storage_root(node))[0] if is_view(node) else node
        if is_collective(root) and any(is_collective(n) for n in root.all_input_nodes):
            (root,) = root.all_input_nodes
        if root is node:
            return node
        node = root


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]
