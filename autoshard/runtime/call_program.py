"""A rank's program of a call as a differentiable function: which of the call's outputs get a gradient, and whether its
values are those for which the program was traced."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.runtime.leaves import Leaves, conform, expected
from cost_model.errors import ShardingError
from passes.capture import CallSpec
from passes.capture.questions import Answers, Check
from passes.ir.joint import GraphInput, GraphOutput
from passes.ir.torch_compat import is_batched, version_of
from passes.ir.torch_dtensor import local_of
from passes.lower.rank_program import all_but_the_loss


class CallGradients:
    """outputs, inputs: of a call's graph. tangents: per output that gets a gradient which is read, its index and a
    tensor like its gradient on this rank.

    buffers: (place among the results, leaf) of new values. gradients: the ends that are gradients, in order.
    """

    def __init__(
        self,
        outputs: Sequence[GraphOutput],
        inputs: Sequence[GraphInput],
        tangents: Sequence[tuple[int, Tensor]],
    ) -> None:
        self._tangents = list(tangents)
        self._returned = [place for place, end in enumerate(outputs) if end.kind == "output"]
        self._ends = [outputs[place].index for place in self._returned]
        self.buffers = [(place, end.index) for place, end in enumerate(outputs) if end.kind == "buffer"]
        self._graded = [place for place, end in enumerate(outputs) if end.kind == "grad"]
        self.gradients = [outputs[place] for place in self._graded]
        indices = {kind.index for kind in inputs if kind.kind == "tangent"}
        self._constant = [place for place, index in enumerate(self._ends) if index not in indices]

    @property
    def has_loss(self) -> bool:
        """Whether one scalar alone gets a gradient."""
        return len(self._tangents) == 1 and self._tangents[0][1].ndim == 0

    @property
    def differentiated(self) -> list[int]:
        """Positions, among a call's outputs, of those that a usual step differentiates."""
        unread = all_but_the_loss({index: value.ndim for index, value in self._tangents})
        wanted = {index for index, _ in self._tangents} - unread
        return [place for place, index in enumerate(self._ends) if index in wanted]

    def loss_is_one(self, device: torch.device) -> dict[int, Tensor]:
        ((index, value),) = self._tangents
        return {index: torch.ones((), dtype=value.dtype, device=device)}

    def given(self, tangents: Sequence[Tensor | None], device: torch.device) -> dict[int, Tensor]:
        """By index of the output; zeros where autograd has none. tangents: per output."""
        known = self.by_index(tangents)
        found: dict[int, Tensor] = {}
        for index, value in self._tangents:
            (like,) = expected([value])
            tangent = known[index]
            if tangent is None:
                tangent = torch.zeros(value.shape, dtype=value.dtype, device=device)
            found[index] = conform(tangent, like)
        return found

    def by_index(self, tangents: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """tangents: per output."""
        return dict(zip(self._ends, tangents, strict=True))

    def returned(self, results: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return tuple(results[place] for place in self._returned)  # type: ignore[misc]

    def gradients_in(self, results: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [results[place] for place in self._graded]

    def constant(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of `outputs` that never have a gradient."""
        return [outputs[i] for i in self._constant]

    def overwritten(self, leaves: Sequence[Tensor]) -> dict[int, Tensor]:
        """Copies of the buffers that a call writes, to be read again."""
        return {leaf: leaves[leaf].clone() for _, leaf in self.buffers}

    def loss_tangent(self, tangents: Sequence[Tensor | None]) -> Tensor | None:
        """Raises ShardingError if another output got a gradient."""
        loss, known = self._tangents[0][0], self.by_index(tangents)
        others = [i for i, tangent in known.items() if tangent is not None and i != loss]
        if others:
            raise ShardingError(
                f"outputs {others} get a gradient besides the loss: in pieces and stages forward and backward run "
                "when the loss is computed\n  try: micro_batches=1 without stages, or the whole loss in the model"
            )
        return known[loss]


def _nothing() -> None:
    return None


def no_checks(outputs: Sequence[Tensor], later: bool) -> Callable[[], None]:
    return _nothing


@dataclass(frozen=True)
class Around:
    """turn: of "forward" or "backward": the block in which it runs, so that ranks know where the others are.
    checks: given a forward's outputs before buffers change, raises if they are not for this program; what it returns is
            called after the backward, if there is one."""

    turn: Callable[[str], AbstractContextManager[Any]] = lambda phase: nullcontext()
    checks: Callable[[Sequence[Tensor], bool], Callable[[], None]] = no_checks


class CallProgram(ABC):
    """Runs calls of one kind: leaves in, outputs out. Calls are independent: a second may run before the first's
    backward, and a graph may be retained. New values of buffers are written into the buffers.

        outputs = program(leaves)

    leaves:  one tensor per input of the graph: parameters (DTensors or plain), buffers, constants, the
             call's tensors, the seed. DTensor arguments of the call come as shards (`plain_input`).
    outputs: the call's tensor outputs in the order of their index.
    """

    def __init__(self, leaves: Leaves, ends: CallGradients, around: Around) -> None:
        self.leaves, self.ends, self.around = leaves, ends, around
        self.is_between = True
        """Whether no forward was the last that ran: its backward is to come."""

    def _settled(
        self, leaves: Sequence[Tensor], results: Sequence[Tensor | None], later: bool
    ) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """(the call's outputs among `results`, what is to be called after the backward): checked, and new values of
        buffers written. later: whether there is a backward."""
        outputs = self.ends.returned(results)
        late = self.around.checks(outputs, later)
        for place, leaf in self.ends.buffers:
            local_of(leaves[leaf]).copy_(results[place])  # type: ignore[arg-type]
        return outputs, late

    def prepared(self) -> Iterator[None]:
        """Compiles what a usual step runs and is not compiled yet, a part at each turn."""
        yield from ()

    @property
    @abstractmethod
    def gradients(self) -> Sequence[GraphOutput]:
        """The gradients that `run_backward` returns; empty where nothing is trained."""

    @abstractmethod
    def run_forward(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor], Any]:
        """(outputs, tensors to save, what else the backward is given). Outside autograd."""

    @abstractmethod
    def run_backward(
        self, saved: list[Tensor], tangents: Sequence[Tensor | None], kept: Any
    ) -> Sequence[Tensor | None]:
        """Local gradients, parallel to `gradients`. `saved` is emptied."""

    def read_again(self, leaves: Sequence[Tensor]) -> list[tuple[GraphInput, Tensor]]:
        """DTensors whose shards the backward reads."""
        return []

    @property
    def differentiated(self) -> list[int]:
        """Positions, among a call's outputs, of those that a usual step differentiates."""
        return self.ends.differentiated

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self.gradients:
            return _Call.apply(self, *leaves)  # type: ignore[return-value]
        with torch.no_grad():
            return self.run_forward(leaves)[0]


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: CallProgram, *leaves: Tensor) -> tuple[Tensor, ...]:
        outputs, saved, ctx.kept = program.run_forward(leaves)
        program.is_between = False
        ctx.program = program
        ctx.looks = program.leaves.looks(leaves)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*program.ends.constant(outputs))
        ctx.save_for_backward(*saved)
        ctx.versions = [(spec.name, leaf, version_of(leaf)) for spec, leaf in program.read_again(leaves)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _check_first_order(tangents)
        _check_versions(ctx.versions)
        program: CallProgram = ctx.program
        saved = list(ctx.saved_tensors)
        # Where a loss has parameters in it too (a penalty), its gradient is a DTensor, the same on all ranks.
        tangents = tuple(t.full_tensor() if isinstance(t, DTensor) else t for t in tangents)
        # With retain_graph=False nobody needs them again: the backward may free each when it is done.
        ctx.maybe_clear_saved_tensors()
        found = program.run_backward(saved, tangents, ctx.kept)
        program.is_between = True
        # `needs_input_grad` is a new tuple at every look.
        needed = ctx.needs_input_grad[1:]
        return (None, *program.leaves.gradients(ctx.looks, needed, program.gradients, found))


def _check_first_order(tangents: Sequence[Tensor | None]) -> None:
    """ShardingError in a backward that is to be differentiated again: autograd records it for create_graph=True only.
    What ran would have no graph, and a penalty on these gradients no effect. Also in one of several gradients at once.
    """
    if any(tangent is not None and is_batched(tangent) for tangent in tangents):
        raise ShardingError(
            "is_grads_batched=True: a parallel model has a program for one backward at a time\n"
            "  try: torch.autograd.grad(..., retain_graph=True) for each gradient"
        )
    if torch.is_grad_enabled():
        raise ShardingError(
            "create_graph=True: the backward of a parallel model cannot be differentiated again\n"
            "  try: compute the penalty in the model's forward, with torch.autograd.grad(..., create_graph=True) "
            "there, and return it"
        )


def _check_versions(versions: Sequence[tuple[str, Tensor, int]]) -> None:
    """autograd compares what was saved, which of a DTensor is the shard: ops on the whole do not count there."""
    changed = next((name for name, leaf, version in versions if version_of(leaf) != version), None)
    if changed is not None:
        raise ShardingError(
            f"{changed} was changed in place after the forward, and the backward needs it as it was\n"
            "  try: backward() first; or call the model again after the change"
        )


class Otherwise(Exception):
    """A call does not do what its program does. answers: to the first questions of its forward, the last of which came
    out otherwise, and to those after them if they are asked on the other side, too. Nothing has been changed yet."""

    def __init__(self, answers: Answers, place: str) -> None:
        super().__init__(place)
        self.answers, self.place = answers, place


MOST_TRIED = 64
"""Programs of one call, of which each tells one more of the values that the forward asks for."""


class Checks:
    """The checks of one program, asked after each forward, before anything of the user's is changed."""

    def __init__(self, call: CallSpec) -> None:
        self._checks = call.checks

    def __call__(self, outputs: Sequence[Tensor] | Mapping[int, Tensor], later: bool) -> Callable[[], None]:
        """Raises Otherwise, on all ranks alike.

        later: whether a check that only raises may wait on a device, so that its host need not wait for the forward;
        what is returned then makes up for it, and raises the user's error: too late to do otherwise."""
        waiting: list[tuple[Check, Tensor]] = []
        found: list[Tensor] = []
        other: tuple[int, str] | None = None
        device_type = "cpu"
        for index, check in self._checks:
            if index is None:
                found.append(check.answer)
                continue
            value = outputs[index].detach()
            if later and check.error is not None and value.device.type != "cpu":
                waiting.append((check, value.to("cpu", non_blocking=True)))
                device_type = value.device.type
                found.append(check.answer)
                continue
            found.append(value.cpu())
            if other is None and not torch.equal(found[-1], check.answer):
                other = len(found), check.place
        if other is not None:
            count, place = other
            raise Otherwise(Answers(tuple(found[:count]), self._by_lines(found, count)), place)
        return _late(waiting, device_type) if waiting else _nothing

    def _by_lines(self, found: Sequence[Tensor], count: int) -> dict[str, list[Tensor]]:
        """The truth values among `found`, from the one at `count` on."""
        later: dict[str, list[Tensor]] = {}
        for value, (_, check) in list(zip(found, self._checks, strict=True))[count:]:
            if value.dtype == torch.bool and not value.dim():
                later.setdefault(check.lines, []).append(value)
        return later


def _late(waiting: Sequence[tuple[Check, Tensor]], device_type: str) -> Callable[[], None]:
    copied = torch.Event(device_type)
    copied.record()

    def settle() -> None:
        copied.synchronize()
        for check, value in waiting:
            if not torch.equal(value, check.answer):
                raise _raised(check)

    return settle


def _raised(check: Check) -> Exception:
    """The user's own error, with the line where the forward asks."""
    error = copy.copy(check.error)
    assert error is not None
    error.add_note(f"  at {check.place}")
    return error
