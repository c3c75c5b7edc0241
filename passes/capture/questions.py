"""What a forward asks of the values of its tensors while it is traced: `if labels.max() >= n`, `int(lengths.max())`.

A trace has no values. Every question is answered by a guess, noted, and what it is about becomes an output of the
program, so that each call can tell whether the answer holds for it (`passes.capture.answers`). A number that is read by
`.item()` or `.tolist()` and only kept needs no answer (`passes.capture.stand_ins`).
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cost_model.errors import CaptureError
from passes.capture import nested_calls
from passes.capture.known_values import History, Known
from passes.capture.places import Place
from passes.capture.provenance import frames, is_in_raise, is_in_while, is_user_file, place_text, user_frame
from passes.capture.stand_ins import AT_COMPUTED, Awaited, AwaitedCount, AwaitedCounts
from passes.ir.torch_compat import inside_function_transform
from passes.ir.torch_dispatch import replaced_attribute, traced_values_answered, values_asked
from passes.ir.torch_tracing import is_value_missing, tracing_suspended


class Undecided(Exception):
    """A question without an answer. place: "/path/model.py:12, in forward: if x.sum() > 0:"; "": its cause tells.
    remedy: for that line alone."""

    def __init__(self, place: str, remedy: str = "") -> None:
        super().__init__("the value of a tensor decides what runs next")
        self.place, self.remedy = place, remedy


def remedy_at(place: str, otherwise: str) -> str:
    """What to do about the values that are asked for at `place`."""
    return _CLASSES if re.search(r"\bone_hot\(", place) else otherwise


_CLASSES = (
    "one_hot(i, n) with the number of classes as a Python number; where i is n or more for no class, "
    "one_hot(i.clamp(max=n), n + 1)[..., :n]"
)


class RunEnded(Exception):
    """A run that looks for answers has found what there is."""


@dataclass(frozen=True, eq=False)
class Answers:
    """sure: to the first questions. likely: to later ones, by their lines, in the order in which those ask."""

    sure: tuple[Tensor, ...] = ()
    likely: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sure)


NO_ANSWERS = Answers()


@dataclass(frozen=True)
class Question:
    """value: what is asked for, traced: a truth value, or numbers. answer: what the forward was told; None: nothing;
    `AWAITED`: that it will be known. known: what is known of the value, and number: what it has in common with values
    that are computed alike, in a run that looks for answers; filled: what it is as long as the mask of which it asks
    whether any is true has such. is_count: whether it asks if a number of rows is not 0.

    lines: those of the user's code that lead to it, to tell questions apart. place: the innermost, to be read."""

    value: Tensor
    answer: Tensor | None
    lines: str
    place: str
    known: Known
    number: str
    filled: Tensor | None = None
    is_count: bool = False

    @property
    def is_branch(self) -> bool:
        """Whether there are two answers."""
        return self.value.dtype == torch.bool and self.value.dim() == 0

    @property
    def is_of_loop(self) -> bool:
        """Whether it may say how often a loop runs, which no number of sides ends."""
        return any(is_in_while(line) for line in self.lines.splitlines())

    @property
    def is_awaited(self) -> bool:
        """Whether the forward got a stand-in."""
        return self.answer is not None and _is_awaited(self.answer)


@dataclass(frozen=True, eq=False)
class Check(Place):
    """What a question of the forward was about, at every call; nothing where the answer is `AWAITED`. error: like what
    the forward raises where it comes out otherwise (of several questions of one line, for the first); None: it does
    something else. lines: of the question."""

    answer: Tensor
    place: str
    error: Exception | None
    lines: str

    def get(self, call: Any) -> Tensor | None:
        return None if _is_awaited(self.answer) else self.answer.clone()

    def put(self, call: Any, value: Any) -> None:
        """Nothing is left anywhere."""


class Questions:
    """answers: to the first questions, in order. guesses: to later branches, by their lines; of lines in it numbers
    are told where they are known. likely: to those of other lines, one after the other. errors: like what the forward
    raises after another answer, by question.

    asked: in the last run of the forward. looked: the error for the first use of a stand-in in it; read: of which.
    history: of a run that looks for answers, which ends with `RunEnded`; stopped: what it raised. asks: if not, there
    are no answers."""

    def __init__(
        self,
        answers: Sequence[Tensor] = (),
        guesses: Mapping[str, Tensor] = {},
        errors: Sequence[Exception | None] = (),
        *,
        likely: Mapping[str, Sequence[Tensor]] = {},
        history: History | None = None,
        asks: bool = True,
    ) -> None:
        self.answers, self.guesses, self.errors = tuple(answers), guesses, errors
        self.history, self._asks, self._likely = history, asks, likely
        self.asked: list[Question] = []
        self.stopped: Exception | None = None
        self.looked: Exception | None = None
        self.read: int | None = None
        self._open = self._within = self._reading = self._counting = False
        self._top: frozenset[int] = frozenset()
        self._times: Counter[str] = Counter()

    def begin(self) -> None:
        """The forward runs."""
        self.asked, self.stopped, self.looked, self.read, self._open = [], None, None, None, True
        self._top, self._times = frozenset({id(sys._getframe(1).f_code)}), Counter()

    def checks(self) -> list[tuple[Check, Tensor | None]]:
        """Where each call tells whether the answers hold for it, and what is told. Raises where the forward has used a
        stand-in, though it has caught the error."""
        if self.looked is not None:
            raise self.looked
        # Where there is no answer, the forward has caught the error.
        answered = [question for question in self.asked if question.answer is not None]
        errors = self.errors or (None,) * len(answered)
        return [
            (
                Check(answer, question.place, error, question.lines),
                None if question.is_awaited else question.value,
            )
            for question, error in zip(answered, errors, strict=True)
            if (answer := question.answer) is not None
        ]

    def end(self) -> None:
        """Its backward runs; what asks now is the forward of a checkpoint, again."""
        self._open = False

    @contextmanager
    def answered(self) -> Generator[None]:
        """Inside, what takes a value out of a traced tensor is given an answer."""
        aten = torch.ops.aten
        kernels = {
            aten.is_nonzero.default: self._truth,
            aten._local_scalar_dense.default: self._number,
            aten.equal.default: self._equal,
            aten._linalg_check_errors.default: self._check_info,
        }
        unlogged = replaced_attribute(logging, "raiseExceptions", False)  # of records with a stand-in
        with values_asked(kernels), traced_values_answered(self._truth, self._read), unlogged:
            yield

    def _truth(self, tensor: Tensor) -> bool:
        known = lambda: torch.ops.aten.is_nonzero.default(tensor)
        return bool(self._answered(known, lambda: tensor.reshape(()) != 0))

    def _number(self, tensor: Tensor) -> Any:
        known = lambda: torch.ops.aten._local_scalar_dense.default(tensor)
        return self._answered(known, lambda: tensor.reshape(()).clone())  # it may be written to

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        alike = lambda: (one == other).all() if one.shape == other.shape else torch.tensor(False)
        return self._answered(lambda: torch.ops.aten.equal.default(one, other), alike)

    def _check_info(self, info: Tensor, api_name: str, *, is_matrix: bool) -> None:
        """Of `linalg.inv`, `solve`, `cholesky` and others. A backward that has some is not asked: its results are not
        finite then."""
        if self._open and self._truth(info.ne(0).any()):
            which = "the matrix" if is_matrix else "a matrix of the batch"
            raise torch.linalg.LinAlgError(f"{api_name}: {which} is singular, or not positive-definite")

    def _read(self, tensor: Tensor, known: Callable[[Tensor], Any]) -> Any:
        """A number or a list of them, or else a stand-in."""
        count, self._reading = len(self.asked), True
        try:
            # `item` is asked for below, by `_number`.
            is_item = known is Tensor.item
            return known(tensor) if is_item else self._answered(lambda: known(tensor), tensor.clone)
        except Exception as error:
            place = self._lines()[1]
            asked = self.asked[count:] if self._open else [q for q in self.asked if q.is_awaited]
            asked = [question for question in asked if question.place == place]
            if not asked or not is_value_missing(error):
                raise
        finally:
            self._reading = False
        if self._open:
            self.asked[-1] = replace(asked[-1], answer=AWAITED)
        look, value = partial(self._look, len(self.asked) - 1), asked[-1].value
        is_whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        if not (is_whole and value.dim() <= 1 and self._asks):
            return Awaited(value, look)
        counts = AwaitedCounts if value.dim() else AwaitedCount
        return counts(value, look, self._some)

    def _some(self, number: Tensor) -> bool:
        """Whether so many rows are any, which they are taken to be."""
        with replaced_attribute(self, "_counting", True):
            return bool(number != 0)

    def _look(self, position: int, method: str) -> Exception | str:
        """What is wrong with a use of a stand-in; its text for an error that the forward raises."""
        place = self._lines()[1]
        is_text = method in ("__str__", "__repr__", "__format__")
        error = Undecided(place, AT_COMPUTED if method == "index" else "") if not is_text else CaptureError(
            "cannot capture: the text of a number that is computed is not known before the call has run\n"
            f"  at {place}\n"
            "  try: keep the number, self.log.append(loss.item()), or return it, and print it after the call"
        )  # fmt: skip
        if is_text and is_in_raise(place.partition(", in ")[0]):
            return "(a number that is computed)"
        if self.looked is None:
            self.looked, self.read = error, position
        return error

    def _answered(self, known: Callable[[], Any], asked: Callable[[], Tensor]) -> Any:
        """What torch says, or else the answer to a question about `asked()`."""
        # Torch asks by other ops, of the tensors inside of this one.
        within, self._within = self._within, True
        try:
            return known()
        except Exception as error:
            answer = None if within or not is_value_missing(error) else self._answer(asked)
            if answer is None:
                raise
            with tracing_suspended():
                return answer.tolist()
        finally:
            self._within = within

    def _answer(self, asked: Callable[[], Tensor]) -> Tensor | None:
        if inside_function_transform():
            return None
        lines, place = self._lines()
        if not self._open:
            return self._again(place)
        value = asked().detach()
        known, number = Known(), ""
        if self.history is not None:
            known, number = self.history.known(value), self.history.number(value)
        filled = None if self.history is None else self.history.filled(value)
        if self._counting:
            filled = YES
        question = Question(value, None, lines, place, known, number, filled, self._counting)
        question = replace(question, answer=self._told(question))
        self.asked.append(question)
        return question.answer

    def _told(self, question: Question) -> Tensor | None:
        """The given answer, the known one, that of a twin, or a guess."""
        if len(self.asked) < len(self.answers):
            answer = self.answers[len(self.asked)]
            return None if _is_awaited(answer) else answer
        if self._reading and question.lines not in self.guesses:
            return None
        if question.known.value is not None:
            return question.known.value
        for twin in self.asked:
            if question.number and twin.number == question.number and not twin.is_awaited:
                return twin.answer
        if not (self._asks and question.is_branch):
            return None
        return self.guesses.get(question.lines, self._guessed(question))

    def _guessed(self, question: Question) -> Tensor:
        """Raises Undecided where a loop goes on for as long as its condition is guessed to hold."""
        times = self._times[question.lines]
        self._times[question.lines] += 1
        if times == _MOST_ROUNDS and question.is_of_loop:
            raise Undecided(question.place)
        likely = self._likely.get(question.lines, ())
        if times < len(likely):
            return likely[times]
        told = [sure.answer for sure in self.asked[: len(self.answers)] if sure.lines == question.lines]
        if told and told[-1] is not None:
            return told[-1]  # a loop that has gone on goes on, as far as it can
        return NO if question.filled is None else question.filled

    def _again(self, place: str) -> Tensor | None:
        """What all questions of that line were answered, if they were answered alike."""
        asked = [question for question in self.asked if question.place == place and not question.is_awaited]
        known = [question.answer for question in asked if question.answer is not None]
        with tracing_suspended():
            alike = all(torch.equal(answer, known[0]) for answer in known)
        return known[0] if known and alike else None

    def _lines(self) -> tuple[str, str]:
        """The lines that led to a question: all of the user's code, and below the innermost of them those of the
        library that asks. That innermost line, to be read."""
        running = list(frames(sys._getframe(2), self._top))
        innermost = user_frame(running)
        count = len(running) if innermost is None else running.index(innermost)
        asks = lambda name: is_user_file(name) or name == nested_calls.__file__  # its `while_loop`
        led = [f for i, f in enumerate(running) if i < count or asks(f.f_code.co_filename)]
        place = "" if innermost is None else place_text(innermost.f_code, innermost.f_lineno)
        return "\n".join(f"{f.f_code.co_filename}:{f.f_lineno}" for f in led), place


AWAITED = torch.empty(0, dtype=torch.uint64)
"""No answer, in a list of answers: the forward gets a stand-in."""
_MOST_ROUNDS = 24
"""Of a `while` loop whose condition no value decides."""
NO, YES = torch.tensor(False), torch.tensor(True)


def _is_awaited(answer: Tensor) -> bool:
    return answer.dtype == AWAITED.dtype and not answer.numel()
