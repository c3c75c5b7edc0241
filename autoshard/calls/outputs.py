"""What becomes of a call's outputs: gathered on every rank, left as the plan has them, or in the layout asked for; and
whether its values are those for which its program was traced, where the forward asks for some."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.calls.global_call import matched_placements
from cost_model.mesh import MeshSpec
from passes.capture import CallSpec, Captured
from passes.capture.call import number_indices, tensor_paths
from passes.capture.questions import Check
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout

LARGE_NBYTES = 1 << 20
"""Beside a loss, an output of more bytes than this stays as the plan has it: 1 MiB, far below the logits of any
language model and above what a training loop logs."""


def output_layouts(captured: Captured, mesh: MeshSpec, out_placements: Any) -> dict[int, Layout | None]:
    """Layout per tensor output of a call that is not gathered; None where it stays as the plan likes, a DTensor.

    None for `out_placements` gathers all, but in training, where there is a loss (a scalar with a gradient), large
    outputs beside it: logits and caches that nobody asked for. What a forward leaves in attributes is gathered
    unless it is large; numbers (`loss.item()`) always are.
    """
    values = _values(captured)
    returned = [index for index in sorted(values) if index < captured.call.returned]
    left = {index: None for index in values if index not in returned and _is_large(values[index])}
    if isinstance(out_placements, str):  # "keep", as `check_call_placements` has seen
        return {**dict.fromkeys(returned), **left}
    if out_placements is None:
        return {**dict.fromkeys(_unasked(captured, returned, values)), **left}
    paths = tensor_paths(captured.call.returned_tree)
    names = [_output_name(paths[i], i) for i in returned]
    given = matched_placements(out_placements, names, mesh, argument="out_placements")
    asked: dict[int, Layout | None] = {
        i: placements_to_layout(placements, tuple(values[i].shape), mesh, what=f"output {i}")
        for i, placements in given.items()
        if placements is not None
    }
    return {**asked, **left}


def _values(captured: Captured) -> dict[int, torch.Tensor]:
    joint, numbers = captured.joint, number_indices(captured.call.outputs)
    return {
        spec.index: result.meta["val"]
        for spec, result in zip(joint.outputs, joint.results, strict=True)
        if spec.kind == "output" and result is not None and spec.index not in numbers
    }


def _unasked(captured: Captured, returned: list[int], values: Mapping[int, torch.Tensor]) -> list[int]:
    trained = {spec.index for spec in captured.joint.inputs if spec.kind == "tangent"}
    has_loss = any(i in trained and values[i].numel() == 1 for i in returned)
    return [i for i in returned if has_loss and values[i].numel() > 1 and _is_large(values[i])]


def _output_name(path: str, position: int) -> str:
    """Of an output in a dict or an object its name there, "logits"; of others the position."""
    named = re.match(r"(?:\.|\[['\"])(\w+)(?:['\"]\])?", path)
    return named[1] + path[named.end() :] if named else f"output {position}"


def _is_large(value: torch.Tensor) -> bool:
    return math.prod(value.shape) * value.element_size() > LARGE_NBYTES


class Otherwise(Exception):
    """A call does not do what its program does. answers: to the first questions of its forward, the last of which came
    out otherwise. Nothing has been changed yet."""

    def __init__(self, answers: Sequence[Tensor], place: str) -> None:
        super().__init__(place)
        self.answers, self.place = tuple(answers), place


def _nothing() -> None:
    return None


def no_checks(outputs: Sequence[Tensor], later: bool) -> Callable[[], None]:
    return _nothing


class Checks:
    """Of one program; to be asked after each forward, before anything of the user's is changed."""

    def __init__(self, call: CallSpec) -> None:
        self._checks = call.checks

    def __call__(self, outputs: Sequence[Tensor], later: bool) -> Callable[[], None]:
        """Raises Otherwise, on all ranks alike.

        later: whether a check that only raises may wait on a device, so that its host need not wait for the forward;
        what is returned then makes up for it, and raises the user's error: too late to do otherwise."""
        waiting: list[tuple[Check, Tensor]] = []
        found: list[Tensor] = []
        for index, check in self._checks:
            if index is None:
                found.append(check.answer)
                continue
            value = outputs[index].detach()
            if later and check.error is not None and value.device.type != "cpu":
                waiting.append((check, value.to("cpu", non_blocking=True)))
                found.append(check.answer)
                continue
            found.append(value.cpu())
            if not torch.equal(found[-1], check.answer):
                raise Otherwise(found, check.place)
        return _late(waiting, outputs) if waiting else _nothing


def _late(waiting: Sequence[tuple[Check, Tensor]], outputs: Sequence[Tensor]) -> Callable[[], None]:
    copied = torch.Event(outputs[0].device.type)
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
