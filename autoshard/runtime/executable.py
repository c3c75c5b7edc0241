"""Runs one kind of call on this rank: the leaves of the graph in, the user's outputs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.plan import Plan
from autoshard.progress import Say
from autoshard.runtime.call_program import CallProgram, Otherwise
from autoshard.runtime.guards import Guards
from autoshard.runtime.leaves import CallEnds, InputSide, output_wrapper, plain_input
from autoshard.runtime.observe import Observer, StageRecorder
from autoshard.runtime.planner import Settings
from autoshard.runtime.process_groups import local_device
from autoshard.runtime.sharding import arrived, seed_on
from autoshard.watching.check_calls import CheckCalls
from autoshard.watching.watch import Watch
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.capture import CallSpec, Captured, flatten_call
from passes.ir.joint import GraphInput, JointGraph


class SeedStream:
    """The stream of seeds of a model's calls; `torch.distributed.checkpoint` saves and loads it as it is.

    A stream starts at the first plan, with rank 0's `torch.initial_seed()`. One that was loaded before goes on where
    it was saved. It is the same on every rank.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._started = False
        self._before = self._generator.get_state()

    def start(self, seed: int) -> None:
        """Begin at `seed`, unless the stream has begun."""
        if not self._started:
            self._generator.manual_seed(seed)
            self._started = True

    def next(self) -> Tensor:
        """The seed of one call's random ops, on the CPU."""
        self._before = self._generator.get_state()
        return torch.randint(0, 2**62, (), generator=self._generator, dtype=torch.int64)

    def back(self) -> None:
        """The call runs again, by another program: it draws the same numbers, as they decide which."""
        self._generator.set_state(self._before)

    def state_dict(self) -> dict[str, Any]:
        """generator: its state, uint8 on the CPU. started: False before the first plan."""
        return {"generator": self._generator.get_state(), "started": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of this model's stream or another's. ShardingError for anything else."""
        generator = torch.Generator()
        try:
            generator.set_state(state["generator"])
            started = bool(state["started"])
        except (TypeError, KeyError, RuntimeError) as error:
            raise ShardingError(
                f"state is no state of a model's random numbers: {type(error).__name__}: {error}\n"
                "  try: what autoshard.api(model).state_dict() returned"
            ) from error
        self._generator, self._started = generator, started

    def copied(self) -> SeedStream:
        """A stream of its own that goes on from here."""
        twin = SeedStream()
        twin.load_state_dict(self.state_dict())
        return twin


@dataclass(frozen=True)
class Running:
    """What runs a kind of call: its program, and where inputs and outputs meet it. captured: the call as it is cut."""

    captured: Captured
    ends: CallEnds
    program: CallProgram
    plan: Plan


class Programs(Protocol):
    """Of one kind of call; they may change between two."""

    running: Running

    def next(self) -> Running:
        """For one more call. A step that has begun with another program ends with that one."""
        ...

    def end(self) -> None:
        """There are no more calls."""
        ...


class MadeAhead:
    """running: at first. made: compiles by a backend, on all ranks together, for a later kind of call; None: it is."""

    is_remade = False
    """Whether it is made from what is kept elsewhere, at once."""

    def __init__(self, running: Running, made: Callable[[], CallProgram] | None) -> None:
        self.running, self._made = running, made
        self._calls = 0

    def next(self) -> Running:
        self._calls += 1
        # A last, smaller batch comes once an epoch, and compiling it takes longer than running it: a later kind of call
        # runs op by op twice. Counted by calls, so that all ranks compile at the same one.
        if self._made is not None and self._calls > 2:
            self.running, self._made = replace(self.running, program=self._made()), None
        return self.running

    def end(self) -> None:
        """Nothing goes on."""


class Home(Protocol):
    """A session: programs are made for it, and a call's tensors come from it."""

    model: nn.Module
    mesh: DeviceMesh
    spec: MeshSpec
    settings: Settings
    observers: list[Observer]
    stage_clocks: list[StageRecorder]
    seeds: SeedStream
    watch: Watch | None

    def stages(self, stage: str, call: object) -> AbstractContextManager[Say]: ...


@dataclass(eq=False)
class Executable:
    """Runs one kind of call: gathers the leaves, runs the program, rebuilds the user's outputs."""

    _home: Home
    _spec: CallSpec
    _programs: Programs
    guards: Guards
    _check_call: CheckCalls

    def __post_init__(self) -> None:
        self.answers = tuple(check.answer for _, check in self._spec.checks)
        self.is_remade = isinstance(self._programs, MadeAhead) and self._programs.is_remade
        self._running: Running | None = None
        self._given: list[GraphInput] = []
        self._leaves: list[Leaf] = []
        self._has_run = False
        self._outputs: Sequence[Callable[[Tensor], Tensor]] = ()

    @property
    def moves(self) -> bool:
        """Whether it takes part where parameters go to other layouts."""
        return not isinstance(self._programs, MadeAhead)

    def end(self) -> None:
        self._programs.end()

    def _take(self, running: Running) -> None:
        joint, ends = running.captured.joint, running.ends
        self._running = running
        self._outputs = [output_wrapper(side, self._home.mesh, self._home.spec) for side in ends.outputs]
        given = [pair for pair in joint.given if pair[1].kind != "tangent"]
        self._given = [spec for _, spec in given]
        self._leaves = [
            _leaf(self._home, joint, spec, side, node)
            for (node, spec), side in zip(given, ends.inputs, strict=True)
        ]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, _ = flatten_call(args, kwargs)
        self._check_call(tensors)
        running = self._programs.next()
        if running is not self._running:
            self._take(running)
        leaves = [leaf(tensors) for leaf in self._leaves]
        home = self._home
        if not self._has_run:
            for spec, leaf in zip(self._given, leaves, strict=True):
                arrived(leaf, spec.name, local_device(home.mesh))  # an error for a parameter on meta
            self._has_run = True
        try:
            outputs = running.program(leaves)
        except Otherwise:
            if any(spec.kind == "seed" for spec in self._given):
                home.seeds.back()
            raise
        wrapped = [wrap(value) for wrap, value in zip(self._outputs, outputs, strict=True)]
        return self._spec.unflatten(wrapped, args, kwargs)


Leaf = Callable[[Sequence[Tensor]], Tensor]


def _leaf(home: Home, joint: JointGraph, spec: GraphInput, side: InputSide, node: fx.Node) -> Leaf:
    """A function that gets the tensor of one placeholder in a call."""
    device = local_device(home.mesh)
    if spec.kind == "seed":
        return lambda tensors: seed_on(home.seeds.next(), device)
    if spec.kind == "constant":
        constant = joint.constants[spec.name].to(device)
        return lambda tensors: constant
    if spec.kind == "input":
        return lambda tensors: plain_input(
            arrived(tensors[spec.index], spec.name, device), side, home.mesh, home.spec
        )
    owner, name = _owner(home.model, spec.name)
    if spec.kind == "param":
        parameters = owner._parameters  # a module's `__getattr__` is Python, and takes four times as long
        return lambda tensors: parameters[name]  # type: ignore[return-value]
    if node.users:
        return lambda tensors: arrived(getattr(owner, name), spec.name, device)
    made = node.meta["val"]

    def unread(tensors: Sequence[Tensor]) -> Tensor:
        """What a call makes anew before it reads it (a weight of `weight_norm`) has the graph of the last one. What no
        call reads may be gone (the last value of a metric)."""
        if isinstance(value := getattr(owner, name, None), Tensor):
            return arrived(value, spec.name, device).detach()
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    return unread


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    module, _, name = path.rpartition(".")
    return model.get_submodule(module), name
