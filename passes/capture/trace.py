"""Run a model's forward on fake tensors under AOT autograd: the raw joint graph and what it returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from passes.capture.answered_calls import torch_calls_answered
from passes.capture.answers import traced_with_answers
from passes.capture.capture_errors import own_backward_error
from passes.capture.decomposed_places import laid, lies_as, strides_of
from passes.capture.decompositions import decomposition_table
from passes.capture.device_view import seen_on
from passes.capture.known_values import History
from passes.capture.model_state import (
    Slot,
    held_tensors_kept,
    rebound_buffers,
    state_kept,
    state_replaced,
    tables_kept,
)
from passes.capture.nested_calls import nested_calls_written_out
from passes.capture.places import Call, Place
from passes.capture.provenance import provenance, refused
from passes.capture.questions import Answers, Questions, RunEnded
from passes.capture.row_values import count_leaving, counted, loops_ended
from passes.capture.rows import LengthAsked, rows_have_lengths
from passes.capture.snapshot import Snapshot, attributes_read, write_only_candidates
from passes.capture.stand_ins import Counted, Spot, Stored, Uses
from passes.capture.torch_shortcuts import marked_registered, shortcuts_off, trace_cumulative_averages
from passes.capture.trees import Step, Tree, changed_places, flatten, off_meta, passed_on, retree, unflatten
from passes.capture.world_of_one import world_of_one
from passes.ir.joint import CPU
from passes.ir.process_state import host_draws_told, seeds_refused
from passes.ir.torch_dispatch import compiling_flag, encoder_masks_trusted
from passes.ir.torch_sizes import SizesLost, SymbolicShapes
from passes.ir.torch_tracing import (
    AotGraph,
    failures_unlogged,
    fake_tensors,
    full_precision_backward,
    has_writes,
    trace_joint,
)


@dataclass(frozen=True)
class TracedCall:
    """What is traced: `forward` of `model` on one call. inputs: tensors, `call` their structure.

    device_type: what the model sees that its tensors are on ("cpu", "cuda"). sizes: of the inputs, where they are
    symbols."""

    model: nn.Module
    forward: Callable[..., Any]
    slots: Sequence[Slot]
    inputs: Sequence[Tensor]
    call: Tree
    device_type: str
    sizes: SymbolicShapes | None = None


@dataclass
class Traced:
    """What the last run of the forward made, and its graph. A flat output is a tensor of the call, one that the forward
    left in a place, or a re-assigned buffer.

    aot: inputs are the slots' values, then the call's tensors; flat outputs are the call's `output_count` tensors, then
    the new values of the slots `rebound`. outputs: structure of (what the call returns, what it leaves in `places`).
    returned: how many of the `output_count` tensors it returns. writes: places, and what is left there. reads:
    attributes that it read and does not only add to. passed: of the `output_count` tensors those that are tensors of
    the call itself, by index, and which."""

    aot: AotGraph = field(init=False)
    outputs: Tree = field(init=False)
    output_count: int = 0
    returned: int = 0
    writes: tuple[tuple[Place, Any], ...] = ()
    rebound: tuple[int, ...] = ()
    passed: Mapping[int, int] = field(default_factory=dict)
    reads: dict[nn.Module, set[str]] = field(default_factory=dict)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(place for place, _ in self.writes)


class _Traceable(nn.Module):
    """The program as a function of all its tensors. The model is no submodule: it has no parameters."""

    def __init__(
        self, program: TracedCall, run: Traced, spots: Sequence[Spot], uses: Uses, questions: Questions
    ) -> None:
        super().__init__()
        self.program, self.run, self.questions = program, run, questions
        self.spots, self.uses = spots, uses
        self._during_backward, self.after_backward = ExitStack(), ExitStack()
        self._tensors: Sequence[Tensor] = ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.end_backward()
        self.after_backward.close()
        self.questions.begin()
        try:
            return self._flat(tensors)
        except Exception as error:
            if self.questions.history is None or isinstance(error, RunEnded):
                raise
            self.questions.stopped = error
            raise RunEnded from error
        finally:
            self.questions.end()

    def _flat(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        program, run = self.program, self.run
        count = len(program.slots)
        tree = off_meta(program.call, program.device_type)
        kept = state_kept(program.model, passed_on(tree))
        with state_replaced(program.slots, tensors[:count]), kept as before:
            _put_stand_ins(self.spots, self.uses)
            args, kwargs = call = unflatten(tree, tensors[count:])
            with (
                seen_on(program.device_type),
                attributes_read(before) as run.reads,
                loops_ended(),
                seeds_refused(),
            ):
                result = program.forward(*args, **kwargs)
            after = retree(call, tensors[count:])
            changes = before.changes()
            arguments = [(Argument(path), value) for path, value in changed_places(tree, after, call)]
            writes = (*changes, *arguments)
            count_leaving(flatten((result, tuple(value for _, value in writes)))[0])
            run.writes = (*writes, *self.questions.checks())
            outputs, run.outputs = flatten((result, tuple(value for _, value in run.writes)))
            given = {id(tensor): place for place, tensor in enumerate(tensors[count:])}
            run.passed = {i: given[id(t)] for i, t in enumerate(outputs) if id(t) in given}
            outputs = counted(outputs)
            rebound = rebound_buffers(program.slots, tensors[:count])
            put_left = before.now() if changes or rebound else None
        run.output_count, run.returned, run.rebound = len(outputs), len(flatten(result)[0]), tuple(rebound)
        if not run.returned:
            raise refused("its forward returns no tensor", "return the loss", model=program.model)
        if self.questions.history is not None:
            raise RunEnded
        self._tensors = tensors
        if put_left is not None:
            # `before` holds this run's tensors in the slots, where the next run must find the model's own.
            self.after_backward.enter_context(tables_kept(program.slots))
            self.after_backward.callback(before.restore)
        self._during_backward.enter_context(state_replaced(program.slots, tensors[:count]))
        if put_left is not None:
            put_left()
        self._during_backward.enter_context(attributes_read(before, run.reads))
        # A clone is no alias of an input, a parameter or another output: the graph stays functional.
        # Contiguous, so that the tangents are traced contiguous, as the runtime passes them.
        flat = (*outputs, *(buffer.detach() for buffer in rebound.values()))
        return tuple(t.clone(memory_format=torch.contiguous_format) for t in flat)

    def end_backward(self) -> None:
        """Until then modules hold the traced tensors, and what the forward left: a custom function's backward may call
        them. `after_backward` puts back the rest."""
        self._during_backward.close()

    def check_gradients(self) -> None:
        """CaptureError for a gradient that the model's own `.backward()` left in one of the traced tensors. Of a trace
        that rewrites writes they are no leaves, and torch refuses such a call."""
        names = chain((f"parameter {slot.name}" for slot in self.program.slots), repeat("an argument"))
        ends = zip(names, self._tensors, strict=False)
        if left := [name for name, tensor in ends if tensor.is_leaf and tensor.grad is not None]:
            raise own_backward_error(self.program.model, left[0])


_TRACER_FRAMES = frozenset({_Traceable.forward.__code__, trace_joint.__code__})


@host_draws_told()
def trace(program: TracedCall, answers: Answers) -> Traced:
    """Trace `program` on CPU fakes. Everything it changes, in the model and in torch, is put back.

    answers: to questions that the forward asks of values."""
    try:
        return _answered(program, answers)
    except LengthAsked:
        pass
    try:
        with rows_have_lengths():
            return _answered(program, answers)
    except LengthAsked as asked:
        raise asked.error from None


def _answered(program: TracedCall, answers: Answers) -> Traced:

    def tracer(questions: Questions) -> Traced | None:
        try:
            return _traced(program, (), Uses(), questions)
        except RunEnded:
            return None

    traced, questions = traced_with_answers(tracer, answers)
    spots, uses = write_only_candidates(traced.writes, traced.reads), Uses()
    if spots:
        with suppress(Exception):  # whatever code says to an object that is no number
            again = _traced(program, spots, uses, questions)
            if not uses.looked_at:
                for module, name in spots:
                    again.reads.get(module, set()).discard(name)
                return again
    return traced


def _traced(program: TracedCall, spots: Sequence[Spot], uses: Uses, questions: Questions) -> Traced:
    """One trace, with stand-ins in `spots`."""
    run = Traced()
    with ExitStack() as stack:
        stack.enter_context(_plain_autograd())
        stack.enter_context(state_kept(program.model))
        stack.enter_context(held_tensors_kept(program.model))
        trace_cumulative_averages(program.model)
        before = Snapshot(program.model)
        answers = stack.enter_context(torch_calls_answered(program.device_type))
        for context in (
            shortcuts_off(),
            marked_registered(),
            compiling_flag(),
            failures_unlogged(),
            encoder_masks_trusted(),
            full_precision_backward(),
            nested_calls_written_out(),
            world_of_one(),
            questions.answered(),
        ):
            stack.enter_context(context)
        traceable = _Traceable(program, run, spots, uses, questions)
        stack.enter_context(traceable.after_backward)
        run.aot = _joint(program, traceable, answers)
        _check_backward_writes(before, run.places)
    return run


def _joint(program: TracedCall, traceable: _Traceable, answers: dict[Any, Callable[..., Any]]) -> AotGraph:
    """First as if nothing were written in place, unless a module says that it does so."""

    def run(table: dict[Any, Callable[..., Any]], rewrite_writes: bool) -> AotGraph:
        fakes = _fakes(program, traceable.questions.history)
        try:
            with provenance(program.model, answers, _TRACER_FRAMES):
                return trace_joint(traceable, fakes, table, rewrite_writes=rewrite_writes)
        finally:
            traceable.end_backward()

    table = decomposition_table()
    is_final = traceable.questions.history is None
    if is_final and not any(_writes_in_place(module) for module in program.model.modules()):
        # What is wrong with a program, the other trace says, and torch's anomaly detection warns there.
        aot = None
        with suppress(Exception), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in ")
            aot = run({**table, **_REFUSED_WRITES}, False)
        if aot is not None and not has_writes(aot):
            traceable.check_gradients()
            return aot
    return run(table, True)


def _writes_in_place(module: nn.Module) -> bool:
    """Running statistics and `nn.ReLU(inplace=True)`."""
    return getattr(module, "inplace", False) or getattr(module, "track_running_stats", False)


def _refuse_write(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("a write in place")


_WRITES = "add_ sub_ mul_ div_ copy_ fill_ zero_ masked_fill_ index_put_ relu_"
_PACKETS = [getattr(torch.ops.aten, name) for name in _WRITES.split()]
_REFUSED_WRITES = {getattr(packet, name): _refuse_write for packet in _PACKETS for name in packet.overloads()}
"""The usual ones, as decompositions, so that the first trace ends at the first; `has_writes` finds the others."""


def _fakes(program: TracedCall, history: History | None) -> list[Tensor]:
    """Fakes that no longer know the real tensors, so that those can be swapped later. A call's lie in memory as its
    tensors do; parameters and buffers are contiguous."""
    makers = [partial(_fake, slot.tensor, None) for slot in program.slots]
    if (sizes := program.sizes) is not None:
        if history is not None:
            raise SizesLost("the forward asks for values")
        makers += [partial(_sized, *pair) for pair in zip(program.inputs, sizes.shapes, strict=True)]
        return fake_tensors(makers, symbols=sizes.symbols)
    makers += [partial(_fake, tensor, strides_of(tensor)) for tensor in program.inputs]
    if history is None:
        return fake_tensors(makers)
    fakes = fake_tensors(makers, history.note)
    history.begin(fakes, [*(slot.tensor for slot in program.slots), *program.inputs])
    return fakes


def _fake(real: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    return laid(real.shape, strides, dtype=real.dtype, device=CPU).requires_grad_(real.requires_grad)


def _sized(real: Tensor, shape: Sequence[Any]) -> Tensor:
    lies = lies_as(real)
    if isinstance(lies, tuple):
        raise SizesLost(f"elements of an input of sizes {list(real.shape)} and strides {list(lies)} overlap")
    return laid(shape, lies, dtype=real.dtype, device=CPU).requires_grad_(real.requires_grad)


@contextmanager
def _plain_autograd() -> Generator[None]:
    """no_grad for inference mode, whose tensors cannot be traced; no casts remembered from before."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        yield


@dataclass(frozen=True)
class Argument(Place):
    """A list, dict or object among a call's arguments, which the forward changes: it gets what `value` holds.

    path: steps from (args, kwargs)."""

    path: tuple[Step, ...]

    def get(self, call: Call) -> Any:
        held: Any = call
        for kind, key in self.path:
            held = held[key] if kind == "item" else getattr(held, key)
        return held

    def put(self, call: Call, value: Any) -> None:
        held = self.get(call)
        if isinstance(held, list):
            held[:] = value
            return
        old, new = (held, value) if isinstance(held, dict) else (vars(held), vars(value))
        old.clear()
        old.update(new)


def _check_backward_writes(before: Snapshot, forward: Iterable[Place]) -> None:
    """Nothing of the model's, and nothing that its hooks hold on to, may differ from `before` after a traced backward.

    forward: where the forward leaves something, which happens at each call. Checkpointing runs parts of the forward
    again in the backward, so these places do not count. Raises CaptureError that names the place.
    """
    known = {_name(place) for place in forward}
    for place, _ in before.changes():
        name = _name(place)
        if name not in known:
            raise refused(
                f"a hook leaves something in {name} during the backward, which a compiled step cannot repeat",
                "a hook of the parameter (register_hook, register_post_accumulate_grad_hook), or "
                "torch.autograd.grad in the forward and return the gradient",
            )


def _name(place: Place) -> str:
    """The attribute, or the list or dict."""
    at = getattr(place, "at", None)
    if at is None:
        return str(getattr(place, "holder", type(place).__name__))
    return str(at if at.attribute else at.holder)


def _put_stand_ins(spots: Sequence[Spot], uses: Uses) -> None:
    """Put them in the modules; a `Snapshot` puts back what was there."""
    for module, name in spots:
        held = vars(module)[name]
        vars(module)[name] = Counted(held, uses) if isinstance(held, (int, float)) else Stored(held, uses)
