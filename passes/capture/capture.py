"""Capture: one call of an unmodified module as one ATen graph of forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cost_model.errors import AutoshardError, CaptureError
from passes.capture.build import build_joint
from passes.capture.call import CallSpec, flatten_call, tensor_names
from passes.capture.errors import capture_error
from passes.capture.state import find_slots
from passes.capture.trace import Program, trace
from passes.collector import collector_paused
from passes.joint import JointGraph

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """joint: the graph. call: its mapping to the user's call. aliases: parameter or buffer name ->
    the other names of the same tensor (tied weights); only those that have any."""

    joint: JointGraph
    call: CallSpec
    aliases: Mapping[str, tuple[str, ...]]


@collector_paused()
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    forward: Callable[..., Any] | None = None,
) -> Captured:
    """The joint graph of `forward(*args, **kwargs)`, as gradient mode, autocast and train flags are now.

    No kernel runs and nothing in `model` changes. Numbers, strings and None among the arguments are
    baked in. Outputs that are not tensors are kept as constants of the returned structure.

    device:  where the graph's tensors live, a device of this machine; None: where the model and the
             arguments are, with `meta` counting as the CPU. A plan is the same for any.
    forward: what to call instead of `model` (of the same module).

    Raises CaptureError, with the line of the user's code, for what cannot be one graph: control flow
    that depends on values, shapes that do, a changed argument or parameter, a forward that fails.
    """
    called = model if forward is None else forward
    inputs, key = flatten_call(args, kwargs)
    slots = find_slots(model)
    program = Program(model, called, slots, inputs, key.tree)
    try:
        traced = trace(program, None if device is None else _usable(torch.device(device)))
    except AutoshardError:
        raise
    except Exception as cause:
        raise capture_error(model, called, cause) from cause
    joint = build_joint(program, traced, tensor_names(key))
    aliases = {slot.name: slot.aliases for slot in slots if slot.aliases}
    return Captured(joint, CallSpec(key, traced.outputs, traced.output_count), aliases)


def _usable(device: torch.device) -> torch.device:
    """Autograd crashes on fakes of a device that this torch cannot drive."""
    backend: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and not (hasattr(backend, "is_available") and backend.is_available()):
        raise CaptureError(
            f"cannot capture on {device}: this machine has none\n"
            "  try: device=None; a plan does not depend on the device that the model was captured on"
        )
    return device
