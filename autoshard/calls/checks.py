"""Whether a call's values are those for which its program was traced, where the forward asks for some."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from passes.capture import CallSpec
from passes.capture.questions import Check

__all__ = ["Checks", "Otherwise", "no_checks"]


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
