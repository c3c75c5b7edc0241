"""What a profiler sees of a step that is run again: when collectives began and ended, and the most bytes it held.

On CPUs with gloo. A collective begins where the program issues it; it ends when its messages are through, which gloo
tells the profiler, or with what it does in shared memory. The thread that computes stands still while it issues and
while it waits: that is exposed. On GPUs the allocator counts bytes.

Collectives are timed one by one as well: a program's graphs run op by op, on the tensors of a real step.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from autoshard.runtime.leaves import Compiler, fitted
from cost_model.measure.clock import Marks
from cost_model.measure.own_collectives import SHARED
from passes.compile.bind_device import expand_ops
from passes.compile.compile_graph import Compiled
from passes.ir.torch_compat import allocations
from passes.ir.torch_dtensor import local_of
from passes.ops.collective_ops import NAMED
from passes.predict.step_events import COLLECTIVE_KINDS, copies_of_collectives

PHASES = ("forward", "backward")
"""Names of ranges under a profiler."""
_STEP = "autoshard report: step"
_KINDS = "all_reduce|all_gather_into_tensor|reduce_scatter_tensor|all_to_all_single"
_NAMED = re.compile(rf"^({_KINDS}): ")
_UNNAMED = re.compile(rf"^_c10d_functional::({_KINDS})(_|_out)?$")
_WAIT = "_c10d_functional::wait_tensor"
_MESSAGES = ("gloo:send", "gloo:recv", SHARED)
_WORK = {
    "all_reduce": ("gloo:all_reduce",),
    "all_gather_into_tensor": ("gloo:all_gather",),
    "reduce_scatter_tensor": ("gloo:reduce_scatter", "gloo:all_reduce"),
    "all_to_all_single": ("gloo:all_to_all",),
}
"""Work of gloo's threads for a collective that sends no messages of its own."""


@dataclass(frozen=True)
class Range:
    """Something that a profiler saw. begin, end: seconds on one clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Tracks:
    """spans: of every collective, in the order of issue, (begin, end) in seconds since the forward began. exposed:
    phase -> seconds in which the computing thread stood still."""

    spans: tuple[tuple[float, float], ...]
    exposed: dict[str, float]


def run_tracks(
    run: Callable[[], object], graphs: Sequence[fx.GraphModule], repeats: int, meet: Callable[[], object]
) -> Tracks | None:
    """Medians over `repeats` runs of the programs of `graphs`; None where what the profiler saw cannot be told apart.

    meet: waits until all ranks are there. All ranks must run alike.
    """
    run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(repeats):
            meet()
            with record_function(_STEP):
                run()
    events = [
        Range(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in seen.events() or ()
    ]
    kinds = [kind for graph in graphs for kind in _collectives(graph)]
    steps = [read_step(within, kinds) for within in _steps(events)]
    known = [step for step in steps if step is not None]
    return _median(known) if known and len(known) == len(steps) else None


def _collectives(module: fx.GraphModule) -> list[str]:
    """Names of the ops, in the order of issue."""
    ops: dict[Any, str] = {
        getattr(torch.ops._c10d_functional, name).default: name for name in _KINDS.split("|")
    }
    return [ops[node.target] for node in module.graph.nodes if node.target in ops]


def _steps(events: Sequence[Range]) -> Iterator[list[Range]]:
    for step in (event for event in events if event.name == _STEP):
        yield [event for event in events if step.begin <= event.begin < step.end]


def read_step(events: Sequence[Range], kinds: Sequence[str]) -> Tracks | None:
    """The tracks of one step, which issues collectives of `kinds` in this order, from the begin of its forward on.

    Messages that begin inside a collective are its own, and so is what it does in memory that ranks share. Other work
    of gloo runs on threads of its own, later than it was issued and, of a kind, in that order. None if anything is
    missing, left over or of another kind.
    """
    ordered = sorted(events, key=lambda event: event.begin)
    issued = _outermost([e for e in ordered if _NAMED.match(e.name) or _UNNAMED.match(e.name)])
    phases = [event for event in ordered if event.name in PHASES]
    if [_kind(event) for event in issued] != list(kinds) or not phases:
        return None
    threads = [
        e for e in ordered if e.name.startswith("gloo:") and e.name not in (*_MESSAGES, "gloo:barrier")
    ]
    messages = [event for event in ordered if event.name in _MESSAGES]
    own = [[m.end for m in messages if one.begin <= m.begin <= one.end] for one in issued]
    ends: list[float] = []
    for one, found in zip(issued, own, strict=True):
        work = None if found else next((t for t in threads if _is_work_of(t, one)), None)
        if not found and work is None:
            return None
        if work is not None:
            threads.remove(work)
        ends.append(work.end if work is not None else max(found))
    if threads:
        return None
    zero = phases[0].begin
    waits = [event for event in ordered if event.name == _WAIT]
    exposed = {
        phase.name: sum(
            _inside(e, phase) for e in _outermost(sorted((*issued, *waits), key=lambda e: e.begin))
        )
        for phase in phases
    }
    spans = [(one.begin - zero, max(one.end, end) - zero) for one, end in zip(issued, ends, strict=True)]
    return Tracks(tuple(spans), exposed)


def _kind(issued: Range) -> str:
    match = _NAMED.match(issued.name) or _UNNAMED.match(issued.name)
    assert match is not None
    return match[1]


def _is_work_of(work: Range, issued: Range) -> bool:
    return work.begin >= issued.begin and work.name.startswith(_WORK[_kind(issued)])


def _inside(event: Range, phase: Range) -> float:
    return max(0.0, min(event.end, phase.end) - max(event.begin, phase.begin))


def _outermost(events: Sequence[Range]) -> list[Range]:
    """Those that are in no other; by their begin."""
    found: list[Range] = []
    for event in events:
        if not found or event.begin >= found[-1].end:
            found.append(event)
    return found


def _median(runs: Sequence[Tracks]) -> Tracks:
    spans = zip(*(run.spans for run in runs), strict=True)
    return Tracks(
        tuple(
            (statistics.median(b for b, _ in same), statistics.median(e for _, e in same)) for same in spans
        ),
        {phase: statistics.median(run.exposed[phase] for run in runs) for phase in runs[0].exposed},
    )


class PeakCounter:
    """Counts a GPU's tensors, not what its allocator keeps. A report resets the peak. Tests bring their own."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The most bytes allocated at once since then."""
        return torch.cuda.max_memory_allocated()


def peak_counter(device_type: str) -> PeakCounter | None:
    """None on CPUs, which count nothing by themselves: `run_peaks`."""
    return PeakCounter() if device_type == "cuda" else None


def run_peaks(run: Callable[[], object], held: int) -> Mapping[str, int]:
    """Phase -> the most bytes that were allocated at once, on CPUs: the step run once more under torch's profiler,
    which sees every request for memory, tensors and workspaces of kernels alike.

    held: bytes that are there throughout, `held_nbytes`.
    """
    run()  # what is made once, and kept, is none of a step's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    ranges = [(e.time_range.start * 1e-6, e.name) for e in seen.events() or () if e.name in PHASES]
    return peaks_of(allocations(seen), sorted(ranges), held)


def peaks_of(
    changes: Iterable[tuple[float, int]], begins: Sequence[tuple[float, str]], held: int
) -> Mapping[str, int]:
    """changes: (seconds, bytes more or less), in order. begins: of the phases, which may come several times, in order:
    (seconds on the same clock, phase)."""
    now, phase = held, begins[0][1]
    later = list(reversed(begins[1:]))
    most = {phase: held}
    for at, nbytes in changes:
        while later and at >= later[-1][0]:
            phase = later.pop()[1]
            most[phase] = max(most.get(phase, 0), now)
        now += nbytes
        most[phase] = max(most[phase], now)
    for _, phase in reversed(later):
        most[phase] = max(most.get(phase, 0), now)
    return most


def held_nbytes(
    inputs: Iterable[Tensor], parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]
) -> int:
    """Bytes of this rank's parts that a step finds and leaves: its inputs, parameters and buffers among them, and what
    optimizers keep for the parameters. Each storage counts once."""
    owned = list(parameters)
    states = (one.state.get(p, {}).values() for one in optimizers for p in owned)
    kept = (value for values in states for value in values if isinstance(value, Tensor))
    storages = (local_of(tensor).untyped_storage() for tensor in itertools.chain(inputs, kept))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


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
                return timed.run(*fitted(inputs, takes))

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
