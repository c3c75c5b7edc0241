"""Watch the steps of a training loop: when forward, backward and optimizer began and ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from autoshard.reporting.tracks import PHASES, PeakCounter, Probed, TimedCompiler, Tracks, run_tracks
from autoshard.runtime.compiled_pieces import StepInPieces
from autoshard.runtime.leaves import Compiler, PieceCode, PiecesOnRank, conform
from autoshard.runtime.observe import InPieces, PhaseRun
from cost_model.measure.clock import Marks
from passes.compile.compile_graph import Compiled, compile_graph
from passes.lower.phases import Phases
from passes.predict.predict_program import predict_phases, predict_pieces
from passes.predict.prediction import Prediction
from passes.predict.step_events import AxesOf
from passes.strategies.prices import Prices


class SeenWhole:
    """One program, to be run again. inputs: of the forward, this rank's tensors."""

    def __init__(self, phases: Phases, inputs: Sequence[Tensor], backend: str) -> None:
        self.inputs = inputs
        self._phases, self._backend = phases, backend
        backward = phases.backward
        self._graphs = [phases.forward, *([] if backward is None else [backward.module])]

    def predicted(self, prices: Prices, axes_of: AxesOf) -> Prediction:
        return predict_phases(self._phases, prices, axes_of)

    def probed(self, marks: Marks) -> Callable[[], Probed]:
        """A function that runs it once, op by op."""
        compiler = TimedCompiler(marks)
        programs = [compiler(graph)[0] for graph in self._graphs]

        def once() -> Probed:
            compiler.runs.clear()
            self._run(programs)
            return Probed.of(compiler.runs, dict(zip(PHASES, [[run] for run in compiler.runs], strict=False)))

        return once

    @cached_property
    def _compiled(self) -> list[Compiled]:
        return [compile_graph(graph, self._backend) for graph in self._graphs]

    def run_again(self) -> None:
        """Once, in ranges of the profiler named after the phases."""
        self._run(self._compiled)

    @torch.no_grad()
    def _run(self, programs: Sequence[Compiled]) -> None:
        """As in a step, nothing but the loop's own holds what the backward has read."""
        backward = self._phases.backward
        with record_function(PHASES[0]):
            results = programs[0](list(self.inputs))
        if backward is None:
            return
        given: list[Any] = [self.inputs[i] for i in backward.passed] + [results[i] for i in backward.saved]
        del results
        with record_function(PHASES[1]):
            values = [n.meta["val"] for n in backward.module.graph.nodes if n.op == "placeholder"]
            given += _ones_for(values[len(given) :], self.inputs)
            gradients = programs[1](given)
            given.clear()
        del gradients

    def tracks(self, repeats: int, meet: Callable[[], object]) -> Tracks | None:
        """As `run_tracks`."""
        return run_tracks(self.run_again, self._graphs, repeats, meet)


class SeenInPieces:
    """The programs of a batch in pieces, to be run again; each has ranges of its own under the profiler."""

    def __init__(self, step: InPieces, inputs: Sequence[Tensor], backend: str) -> None:
        self.inputs = inputs
        self._step = step
        self._codes = PiecesOnRank(step.programs, len(step.programs), Compiler(backend)).codes

    def predicted(self, prices: Prices, axes_of: AxesOf) -> Prediction:
        programs = self._step.programs
        return predict_pieces(programs[0], self._codes[0].parts, len(programs), prices, axes_of)

    def probed(self, marks: Marks) -> Callable[[], Probed]:
        """Computing is that of all pieces. Collectives are, as in the prediction, those before the pieces, of the first
        piece, and after them."""
        compiler = TimedCompiler(marks)
        step = StepInPieces(self._step, [PieceCode(one.parts, compiler) for one in self._codes], ())

        @torch.no_grad()
        def once() -> Probed:
            compiler.runs.clear()
            step.results(self._known())
            before, *pieces, after = compiler.runs
            each = len(pieces) // len(self._codes)  # a forward, and a backward if there is one
            forward, backward = [before, *pieces[::each]], pieces[1::2] if each > 1 else []
            (backward or forward).append(after)
            return Probed.of(
                (before, *pieces[:each], after), dict(zip(PHASES, (forward, backward), strict=True))
            )

        return once

    @cached_property
    def _compiled(self) -> StepInPieces:
        return StepInPieces(self._step, self._codes, [_Ranges()])

    @torch.no_grad()
    def run_again(self) -> None:
        self._compiled.results(self._known())

    def tracks(self, repeats: int, meet: Callable[[], object]) -> Tracks | None:
        """None: the prediction has the collectives of one piece."""
        return None

    def _known(self) -> dict[str, Tensor]:
        return dict(zip(self._step.given, self.inputs, strict=True))


def _ones_for(values: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that look like `values`, on the device of `inputs`."""
    device = inputs[0].device if inputs else torch.device("cpu")
    return [conform(torch.ones(v.shape, dtype=v.dtype, device=device), v) for v in values]


class _Ranges:
    """An `Observer` by which the profiler knows the phases."""

    def begin(self, run: PhaseRun) -> None:
        self._range = record_function(run.phase)
        self._range.__enter__()

    def end(self, run: PhaseRun) -> None:
        self._range.__exit__(None, None, None)


STEP_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Mark:
    """phase: of `STEP_PHASES`. at: from `Marks.mark`. last: no piece of the batch comes after."""

    phase: str
    edge: Literal["begin", "end"]
    at: Any
    last: bool = True


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank, from the begin of its forward to that of the next step's; and
    of the phases in it."""

    seconds: float
    phases: Mapping[str, float]

    @property
    def other(self) -> float:
        """Seconds in no phase: data, gradients set to zero, the loop itself."""
        return self.seconds - sum(self.phases.values())


class Recorder:
    """Marks the phases of a model's programs, and the steps of the optimizers that have its parameters.

    An `Observer` of a session. Keeps the graphs and inputs of the last forward that had a backward, or
    of the last at all. peaks: phase -> the most bytes that were allocated in it, where the device counts them.
    """

    def __init__(self, model: nn.Module, marks: Marks, counter: PeakCounter | None = None) -> None:
        self.log: list[Mark] = []
        self.peaks: dict[str, int] = {}
        self._marks = marks
        self._counter = counter
        self._model = model
        self._updating: set[int] = set()  # optimizers in a step, by id
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._forward: PhaseRun | None = None
        self._trained: tuple[Phases | InPieces, PhaseRun] | None = None
        self._hooks: list[Any] = []

    def start(self) -> None:
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_update(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._end_update(optimizer)),
        ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, run: PhaseRun) -> None:
        if run.phase == "forward":
            self._forward = run
        elif self._forward is not None and self._forward.forward is run.forward:
            self._trained = (run.phases, self._forward)
        self._note(run.phase, "begin", run.last)

    def end(self, run: PhaseRun) -> None:
        self._note(run.phase, "end", run.last)

    def program(self) -> tuple[Phases | InPieces, PhaseRun] | None:
        """(graphs, the forward run whose inputs to use) of the step that was seen last."""
        if self._trained is None and self._forward is not None:
            return self._forward.phases, self._forward
        return self._trained

    def optimizers(self) -> list[Optimizer]:
        """Those that updated the model's parameters."""
        return list(self._optimizers)

    def steps(self) -> list[StepTimes]:
        """The steps so far; the last one ends now."""
        return steps_of(self.log, self._marks.mark(), self._marks)

    def _note(self, phase: str, edge: Literal["begin", "end"], last: bool = True) -> None:
        self.log.append(Mark(phase, edge, self._marks.mark(), last))
        if self._counter is None:
            return
        if edge == "begin":
            self._counter.reset()
        else:
            self.peaks[phase] = max(self.peaks.get(phase, 0), self._counter.peak())

    def _begin_update(self, optimizer: Optimizer) -> None:
        # Looked up at every step: the model's first call makes other parameters of them.
        ours = {id(p) for p in self._model.parameters()}
        if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            self._updating.add(id(optimizer))
            self._optimizers.add(optimizer)
            self._note("optimizer", "begin")

    def _end_update(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._updating:
            self._updating.remove(id(optimizer))
            self._note("optimizer", "end")


def steps_of(log: Sequence[Mark], end: Any, marks: Marks) -> list[StepTimes]:
    """Cut `log` into steps. A step begins with the first forward after an optimizer's update; without
    updates after a backward; without these it is every forward; of a batch in pieces that of the last. So several
    forwards and backwards before an update (accumulated gradients) are one step."""
    closing = max((mark.phase for mark in log), key=STEP_PHASES.index, default="forward")
    starts: list[int] = []
    closed = True
    for i, mark in enumerate(log):
        if closed and (mark.phase, mark.edge) == ("forward", "begin"):
            starts.append(i)
            closed = False
        closed = closed or ((mark.phase, mark.edge) == (closing, "end") and mark.last)
    ends = [*starts[1:], len(log)] if starts else []
    return [
        _step(log[first:last], log[last].at if last < len(log) else end, marks)
        for first, last in zip(starts, ends, strict=True)
    ]


def _step(log: Sequence[Mark], end: Any, marks: Marks) -> StepTimes:
    phases: dict[str, float] = dict.fromkeys(STEP_PHASES, 0.0)
    begun: dict[str, Any] = {}
    for mark in log:
        if mark.edge == "begin":
            begun[mark.phase] = mark.at
        elif mark.phase in begun:
            phases[mark.phase] += marks.seconds(begun.pop(mark.phase), mark.at)
    return StepTimes(marks.seconds(log[0].at, end), phases)
