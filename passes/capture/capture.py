"""Capture: one call of an unmodified module as one ATen graph of forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cost_model.errors import AutoshardError, UnsupportedOpError
from passes.capture.answers import is_of_user
from passes.capture.build_joint import build_joint, overwritten_inputs
from passes.capture.call import CallSpec, flatten_call, tensor_names
from passes.capture.capture_errors import capture_error, check_dtypes, users_part
from passes.capture.held_tensors import check_shared_memory
from passes.capture.model_state import find_slots
from passes.capture.trace import TracedCall, trace
from passes.ir.collector import collector_paused
from passes.ir.joint import CPU, JointGraph
from passes.ir.kept_random_state import random_state_kept

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """joint: the graph. call: its mapping to the user's call. aliases: parameter or buffer name ->
    the other names of the same tensor (tied weights); only those that have any. reads: the attributes of modules
    that the graph depends on."""

    joint: JointGraph
    call: CallSpec
    aliases: Mapping[str, tuple[str, ...]]
    reads: Mapping[nn.Module, frozenset[str]]


@collector_paused()
@random_state_kept()
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    forward: Callable[..., Any] | None = None,
    answers: Sequence[Tensor] = (),
) -> Captured:
    """The joint graph of `forward(*args, **kwargs)`, as gradient mode, autocast and train flags are now.

    No kernel runs but those that answer what the forward asks of the call's values (`if labels.max() >= n`), and
    nothing changes in `model` and the global random numbers. Numbers, strings and None among the arguments are baked
    in. Outputs that are not tensors are kept as constants of the returned structure.

    device:  where the ranks will run, on this machine or not: the model sees this type of device, with its
             autocast ("cuda" on a laptop). None: the CPU. The graph is traced on CPU fakes whatever this is and
             wherever the model and the arguments are, `meta` included, so it is the same everywhere.
    forward: what to call instead of `model` (of the same module).
    answers: to the first questions that the forward asks of values (`CallSpec.checks`).

    Raises CaptureError, with the line of the user's code, for what cannot be one graph: control flow
    that depends on values, shapes that do, a changed parameter, a forward that fails, tensors that share memory
    of which one changes. With `answers` a forward's own error is raised as it is.
    """
    called = model if forward is None else forward
    inputs, key = flatten_call(args, kwargs)
    slots = find_slots(model)
    runs_on = CPU if device is None else torch.device(device)
    program = TracedCall(model, called, slots, inputs, key.tree, runs_on.type)
    try:
        traced = trace(program, answers)
    except Exception as cause:
        if isinstance(cause, AutoshardError) and not isinstance(cause, UnsupportedOpError):
            raise
        if answers and is_of_user(cause):
            raise  # what the forward raises for values like these
        raise capture_error(model, called, cause) from users_part(cause)
    check_dtypes(traced.aot.module.graph)
    joint = replace(build_joint(program, traced, tensor_names(key)), device=runs_on)
    written = [e.index for e in traced.aot.outputs if e.kind == "mutated" and e.index < len(slots)]
    check_shared_memory(model, slots, written, joint.constants.values())
    aliases = {slot.name: slot.aliases for slot in slots if slot.aliases}
    overwritten = overwritten_inputs(program, traced)
    count = traced.output_count + len(overwritten)
    call = CallSpec(key, traced.outputs, count, traced.returned, traced.places, overwritten)
    return Captured(joint, call, aliases, traced.reads)
