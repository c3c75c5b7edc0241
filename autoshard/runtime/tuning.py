"""What makes a model faster beside its steps: the search goes on, kernels and collectives are timed, programs are
compiled; a better program is exchanged between two steps, on all ranks at once."""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoshard.plan.plan import Plan
from autoshard.plan.plan_words import plan_words
from autoshard.progress import tell
from autoshard.refine.refine import ToTime
from autoshard.runtime.beside import Beside, Better, Search, Slices, compiling
from autoshard.runtime.call_program import CallProgram
from autoshard.runtime.executable import Home, Running
from autoshard.runtime.making import Call, Lowered, Lowering, places_of
from autoshard.runtime.optimizers import ELEMENTWISE, optimizers_of
from autoshard.watching.agreement import everyones
from cost_model.cache_files import remember, remembered
from cost_model.errors import log
from cost_model.memory import format_seconds
from passes.ir.torch_dtensor import take_place_of

TURN_SECONDS, MOST_CALLS = 0.5, 1000
"""Ranks ask each other how far they are about so often, and at least every so many calls."""
TRIAL_CALLS, SLOWER = 8, 1.1
"""Steps of a new program that are compared with those before, and from when on it was better before."""


class TunedHome(Home, Protocol):
    tunings: list[Tuning]

    def exchanged(self, plan: Plan) -> None:
        """Parameters are laid out as `plan` has them from now on."""
        ...

    def replanned(self, call: Call) -> Plan:
        """The plan of another kind of call for the parameters' layouts of now. All ranks together."""
        ...

    @property
    def copied(self) -> bool: ...


@dataclass(frozen=True)
class _Report:
    """How far this rank is. seconds: of a step. ready: nothing is being compiled. error: why it cannot be. held: what
    would move; None where nothing may now. waits: nothing is to be timed now. news, searching: of rank 0."""

    seconds: float
    ready: bool
    error: str | None
    held: object
    waits: bool
    news: Any
    searching: bool


class Tuning:
    """The program of one kind of call, and those that may take its place.

    running: at first. lowered: its own, to be compiled; None: it is. search: of rank 0; None: there is none. begin: the
    call at which all this begins. All ranks come to each call together, and change programs at the same one.
    """

    def __init__(
        self,
        home: TunedHome,
        call: Call,
        running: Running,
        lowered: Lowered | None,
        *,
        begin: int,
        search: Search | None = None,
    ) -> None:
        self.running, self.stale = running, False
        self._home, self._call, self._search_work = home, call, search
        self._calls, self._due = 0, begin
        self._begins: deque[float] = deque(maxlen=2 * TRIAL_CALLS + 1)
        self._target = None if lowered is None else _Target(running.plan, lambda: lowered.alone)
        self._searching = search is not None
        self._search: Beside | None = None
        self._compiling: Beside | None = None
        self._parts: Iterator[CallProgram | None] | None = None
        self._made: CallProgram | None = None
        self._error: str | None = None
        """Why the target has no program on this rank."""
        self._holdings: _Holdings | None = None
        self._timing: Slices | None = None
        self._before: tuple[Running, float] | None = None
        self._since = 0

    @property
    def ended(self) -> bool:
        """Nothing more will change by itself; the same on all ranks after the same calls."""
        return self._target is None and not self._searching and self._before is None and not self.stale

    def next(self) -> Running:
        """What runs one more call. All ranks together."""
        self._calls += 1
        self._begins.append(time.monotonic())
        self._make()
        if self.stale:
            self._replan()
        elif self._calls >= self._due and not self.ended:
            self._turn()
        return self.running

    def end(self) -> None:
        """There are no more calls: what goes on beside the steps ends."""
        for work in (self._search, self._compiling):
            if work is not None:
                work.end()
        self._home.tunings.remove(self)

    def _make(self) -> None:
        """A part of the target's program on this rank, once it is compiled: no step waits for all of it."""
        if self._parts is None or self._error or (self._compiling is not None and not self._compiling.ended):
            return
        try:
            self._made = next(self._parts, self._made)
        except Exception as error:  # whatever it is, the steps go on
            log.debug("tuning: no program", exc_info=True)
            self._error = f"{type(error).__name__}: {error}"

    def _turn(self) -> None:
        if self._search_work is not None and self._home.mesh.get_rank() == 0:
            self._search = Beside(self._search_work)
        self._search_work = None
        if self._parts is None and self._target is not None:
            self._compile()
        reports = everyones(self._home.mesh, self._report(), what="how far tuning is")
        seconds = max(report.seconds for report in reports)
        self._due = self._calls + max(1, min(MOST_CALLS, int(TURN_SECONDS / max(seconds, 1e-6))))
        first = reports[0]
        self._searching = first.searching
        self._judge_trial(seconds)
        if isinstance(first.news, ToTime):
            self._timing = Slices(self._home, first.news)
        if isinstance(first.news, Better):
            self._aim(Plan.from_json(first.news.data))
        elif self._target is not None and all(report.ready for report in reports):
            self._arrived(reports, seconds)
        if not any(report.waits for report in reports):
            self._time()

    def _report(self) -> _Report:
        job, target = self._compiling, self._target
        if job is not None:
            job.news()
            self._error = self._error or job.error
        ready = self._made is not None or self._error is not None
        self._holdings = None
        if ready and target is not None and target.plan is not self.running.plan and self._is_between():
            self._holdings = _Holdings(self._home.model)
        held = None if self._holdings is None else self._holdings.described
        search = self._search
        news = None if search is None else search.news()
        if search is not None and search.error:
            log.warning("tuning: the search beside the steps ended: %s", search.error)
        waits = self._timing is None or self._timing.waits()
        searching = search is not None and not search.ended
        return _Report(self._step_seconds(), ready, self._error, held, waits, news, searching)

    def _is_between(self) -> bool:
        """Whether no forward waits for its backward."""
        return self.running.program.is_between and not self._home.copied

    def _step_seconds(self) -> float:
        gaps = [after - before for before, after in pairwise(self._begins)]
        return statistics.median(gaps) if gaps else 0.0

    def _aim(self, plan: Plan) -> None:
        """From now on this plan is to take the place of the one that runs. All ranks together."""
        if self._compiling is not None:
            self._compiling.end()
        self._target = _Target(plan, self._call.lowering(plan))
        self._compile()

    def _compile(self) -> None:
        """Into the compiler's cache on disk, from which this process reads it."""
        target, backend = self._target, self._home.settings.backend
        assert target is not None
        self._compiling, self._made, self._error = None, None, None
        self._parts = target.parts(backend)
        if backend != "eager":
            self._compiling = compiling(self._home, lambda: deque(target.parts(backend), maxlen=0))

    def _arrived(self, reports: list[_Report], seconds: float) -> None:
        target = self._target
        assert target is not None
        other = target.plan is not self.running.plan
        error = next((report.error for report in reports if report.error), None)
        if error is not None:
            log.warning("tuning: a program cannot be compiled, and the steps go on without: %s", error)
        elif other and any(report.held is None or report.held != reports[0].held for report in reports):
            gc.collect()  # an optimizer that nobody has any more may be gone on some ranks and not on others
            return  # not now: or some backward is to come
        else:
            self._exchange(target, seconds)
        self._target = self._compiling = self._made = None

    def _exchange(self, target: _Target, seconds: float) -> None:
        home, call, plan = self._home, self._call, target.plan
        before = self.running
        assert self._made is not None
        self.running = call.running(plan, self._made)
        remember(*_program(home, plan, call.kind))
        self._move(before.plan)
        self._before = None if target.is_back else (before, seconds)
        self._since = self._calls
        self._begins.clear()
        what = "compiled" if plan is before.plan else plan_words(plan)
        tell(home.mesh.get_rank(), f"tuning: from step {self._calls} on {what}")

    def _move(self, before: Plan) -> None:
        plan, home = self.running.plan, self._home
        if plan is not before:
            assert self._holdings is not None
            self._holdings.move({n: place.placements for n, place in places_of(home.mesh, plan).items()})
            home.exchanged(plan)

    def _judge_trial(self, seconds: float) -> None:
        """Of the program that runs, by its real steps: back to the one before where that was faster."""
        if self._before is None or self._calls - self._since <= TRIAL_CALLS:
            return
        before, took = self._before
        now = self.running.plan
        self._before = None
        steps = f"{format_seconds(took)} -> {format_seconds(seconds)}"
        rank = self._home.mesh.get_rank()
        if seconds <= SLOWER * took:
            tell(rank, f"tuning: steps take {steps}")
        elif before.plan is now:
            tell(rank, f"tuning: steps take {steps}, and go on as before")
            self.running = before
        else:
            tell(rank, f"tuning: steps take {steps}, and go on by the plan before")
            self._target = _Target(before.plan, self._call.lowering(before.plan), is_back=True)
            self._parts = None

    def _time(self) -> None:
        assert self._timing is not None
        times = self._timing.step()
        if times is not None:
            if self._search is not None:
                self._search.answer(times)
            self._timing = None

    def _replan(self) -> None:
        """Another kind of call has moved the parameters."""
        plan = self._home.replanned(self._call)
        lowered = self._call.made(plan)
        self.running = self._call.running(plan, lowered("eager"))
        self._target, self._compiling, self._before, self.stale = None, None, None, False
        self._parts = None
        if self._home.settings.backend != "eager":
            self._target = _Target(plan, lambda: lowered.alone)
            self._due = self._calls + 2


@dataclass(frozen=True)
class _Target:
    """A plan that is to run, and what lowers it on this rank alone. is_back: it ran before, and was faster."""

    plan: Plan
    lowering: Lowering
    is_back: bool = False

    def parts(self, backend: str) -> Iterator[CallProgram | None]:
        """The last is its program."""
        lowered = self.lowering()
        yield
        program = lowered(backend)
        for _ in program.prepared():
            yield
        yield program


def was_compiled(home: Home, plan: Plan, kind: str) -> bool:
    """Whether the programs of a kind of call are in the compiler's cache, of an earlier start. All ranks together."""
    mine = home.settings.backend == "eager" or remembered(*_program(home, plan, kind)) is not None
    return all(everyones(home.mesh, mine, what="whether the plan was compiled before"))


def _program(home: Home, plan: Plan, kind: str) -> tuple[object, ...]:
    return "compiled", home.settings.backend, plan.fingerprint, kind, home.mesh.get_rank()


@dataclass(frozen=True)
class _Held:
    """A tensor that is cut as its parameter is. what: "parameter", "gradient", or the kind of optimizer and the name of
    its state."""

    name: str
    what: str
    tensor: DTensor


class _Holdings:
    """All that is cut as the parameters of a model are, as it is now. The objects stay when they move: whoever holds a
    parameter, a list of them or an optimizer has the moved ones.

    described: the same on all ranks, if all hold the same; None: some optimizer may keep tensors of another kind of
    the parameters' shards, which would not move along."""

    def __init__(self, model: nn.Module) -> None:
        theirs = {id(p): name for name, p in model.named_parameters()}
        self._names: dict[str, list[str]] = {}
        """All names of a parameter, by its first."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(theirs[id(parameter)], []).append(name)
        optimizers = list(optimizers_of(model))
        self._held = [*_of_parameters(model), *_of_optimizers(optimizers, theirs)]
        places = [(one.name, one.what, tuple(map(str, one.tensor.placements))) for one in self._held]
        known = all(type(o).__module__ in _KNOWN for o in optimizers)
        once = len({(name, what) for name, what, _ in places}) == len(places)
        self.described: object = sorted(places) if known and once else None

    @torch.no_grad()
    def move(self, placements: Mapping[str, tuple[Placement, ...]]) -> None:
        """To the places of their names. All ranks together, where `described` is the same on all."""
        for one in sorted(self._held, key=lambda one: (one.name, one.what)):
            mesh, now = one.tensor.device_mesh, one.tensor.placements
            named = (placements[name] for name in self._names[one.name] if name in placements)
            wanted = next(named, (Replicate(),) * mesh.ndim)
            if tuple(now) != wanted:
                value: Any = one.tensor.detach()
                take_place_of(one.tensor, value.redistribute(mesh, wanted))


_KNOWN = {f"torch.optim.{name}" for name in ELEMENTWISE}


def _of_parameters(model: nn.Module) -> Iterator[_Held]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield _Held(name, "parameter", parameter)
            if isinstance(parameter.grad, DTensor):
                yield _Held(name, "gradient", parameter.grad)


def _of_optimizers(optimizers: list[torch.optim.Optimizer], names: Mapping[int, str]) -> Iterator[_Held]:
    for optimizer in optimizers:
        for parameter, states in optimizer.state.items():
            for name, value in states.items():
                if id(parameter) in names and _is_alike(value, parameter):
                    yield _Held(names[id(parameter)], f"{type(optimizer).__name__} {name}", value)


def _is_alike(value: object, parameter: Tensor) -> bool:
    if not isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return False
    return value.shape == parameter.shape and value.placements == parameter.placements
