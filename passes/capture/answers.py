"""Answers to what a forward asks of values while it is traced: the call's own, or those after which it does not raise.

    if labels.max() >= vocab: raise ValueError(...)      # known from an input
    assert torch.isfinite(h).all()                       # about numbers that are finite in a sound run
    Normal(mean, scale)                                  # validates its arguments: the other side raises

The rest are branches with two sides, of which a graph has one: an error that names the line. Questions about values
that are computed alike have one answer (a constraint of a distribution returns early where `check.all()` is false, and
then `check` is tested again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cost_model.errors import AutoshardError, CaptureError, UnsupportedOpError
from passes.capture.awaited import Awaited
from passes.capture.known_values import Known, known_values, twins
from passes.capture.questions import AWAITED, NO, Question, Questions, Undecided
from passes.capture.rows import RowsUnknown
from passes.ir.torch_tracing import AotGraph, is_value_missing, shape_dependent_errors

__all__ = ["is_of_user", "traced_with_answers"]

T = TypeVar("T")
Tracer = Callable[[Questions], tuple[AotGraph, T]]
"""The graph of a run of the forward with these answers, and what the caller makes of it."""
_MOST = 100
"""Traces of one call. One is the rule; each kind of question takes two or three more."""


def traced_with_answers(
    tracer: Tracer[T], given: Sequence[Tensor], answers: Sequence[Tensor]
) -> tuple[T, Questions]:
    """What `tracer` makes, and by which answers. given: the tensors of the graph's inputs. answers: known, to the first
    questions.

    Raises Undecided for a branch with two sides, and what the forward raises whatever it is told."""
    questions = Questions(asks=False)
    if not answers:
        try:
            return tracer(questions)[1], questions
        except Exception:
            if not questions.asked:
                raise
    search = _Search(tracer, given, tuple(answers))
    final = search.questions()
    return tracer(final)[1], final


class _Search(Generic[T]):
    """Runs the forward alone, with other answers, until they are those of the call or do not raise."""

    def __init__(self, tracer: Tracer[T], given: Sequence[Tensor], answers: Sequence[Tensor]) -> None:
        self._tracer, self._given, self._sure = tracer, given, len(answers)
        self._answers = list(answers)
        self._guesses: dict[str, Tensor] = {}
        self._errors: dict[str, Exception | None] = {}
        self._turned: set[int] = set()

    def questions(self) -> Questions:
        """With an answer to every question that will be asked, and what the other one raises."""
        run = Questions()
        for _ in range(_MOST):
            run = Questions(self._answers, self._guesses, stopping=True)
            graph, _ = self._tracer(run)
            known, first = known_values(graph, self._given, len(run.asked)), twins(graph, len(run.asked))
            if not self._corrected(run, known, first):
                self._check(run.asked, known, first)
                errors = [self._errors.get(run.asked[place].lines) for place in first]
                return Questions([*map(_answer_of, run.asked)], {}, errors)
        raise Undecided(run.asked[-1].place)

    def _corrected(self, run: Questions, known: Sequence[Known], first: Sequence[int]) -> bool:
        """Whether an answer was exchanged: one that is not the call's, or after which the forward raised."""
        is_read = run.stopped is not None and _reads_awaited(run.stopped)
        for place in range(self._sure, len(run.asked)):
            question, value = run.asked[place], known[place].value
            if question.is_awaited and not (is_read and run.read in (None, place)):
                continue
            if value is None and first[place] < place:
                value = run.asked[first[place]].answer
            if value is None and question.is_branch and run.read == place:
                value = NO  # a branch after all
            if value is None and not question.is_branch and question.answer is not None:
                value = AWAITED  # it was told what another question of that line is about
            if value is not None and not _is_same(question.answer, value):
                return self._exchange(run.asked, place, value)
        if run.stopped is None:
            return False
        if is_read and isinstance(run.stopped, TypeError):
            raise Undecided([question.place for question in run.asked if question.is_awaited][-1])
        if is_read or not is_of_user(run.stopped):
            raise _with_remedy(run.stopped, run.asked)
        for place in reversed(range(self._sure, len(run.asked))):
            question = run.asked[place]
            free = known[place].value is None and first[place] == place
            if question.is_branch and free and place not in self._turned:
                if question is run.asked[-1]:
                    self._errors[question.lines] = _plain(run.stopped)
                self._turned = {other for other in self._turned if other < place} | {place}
                return self._exchange(run.asked, place, ~_answer_of(question))
        raise run.stopped

    def _exchange(self, asked: Sequence[Question], place: int, answer: Tensor) -> bool:
        self._answers = [*map(_answer_of, asked[:place]), answer]
        self._guesses[asked[place].lines] = answer
        return True

    def _check(self, asked: Sequence[Question], known: Sequence[Known], first: Sequence[int]) -> None:
        for place, (question, value) in enumerate(zip(asked, known, strict=True)):
            if first[place] < place or question.is_awaited:
                continue
            if question.is_branch and question.lines not in self._errors:
                self._errors[question.lines] = self._other_side(asked, place)
            decided = value.is_plain if question.is_branch else value.value is not None
            raises = self._errors.get(question.lines) is not None
            if place >= self._sure and not (decided or value.is_finite or raises):
                raise Undecided(question.place)

    def _other_side(self, asked: Sequence[Question], place: int) -> Exception | None:
        """What the forward raises after another answer; None: nothing of its own."""
        answers = [*map(_answer_of, asked[:place]), ~_answer_of(asked[place])]
        guesses = {question.lines: _answer_of(question) for question in asked}
        while True:
            run = Questions(answers, guesses, stopping=True)
            graph, _ = self._tracer(run)
            answers = _alike(run.asked, twins(graph, len(run.asked)))
            if answers is None:
                break
        error = run.stopped
        return None if error is None or _reads_awaited(error) or not is_of_user(error) else _plain(error)


def _alike(asked: Sequence[Question], first: Sequence[int]) -> list[Tensor] | None:
    """Answers up to the first question that was not answered as one about the same value before it; None: all were."""
    for place, (question, twin) in enumerate(zip(asked, first, strict=True)):
        due = asked[twin].answer
        if question.answer is not None and due is not None and not _is_same(question.answer, due):
            return [*map(_answer_of, asked[:place]), due]
    return None


def _is_same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def _reads_awaited(error: Exception) -> bool:
    """Whether it says that the forward has used a number that is not known: by C code's words for its stand-in, too."""
    return isinstance(error, (Undecided, CaptureError)) or Awaited.__name__ in str(error)


def _with_remedy(error: Exception, asked: Sequence[Question]) -> Exception:
    if not is_value_missing(error) or not asked or asked[-1].answer is not None:
        return error
    found = UnsupportedOpError(
        "the value of a tensor decides what runs next (`float()`, `int()`, an index, ...)\n  try: torch.where, masks, "
        "or an argument that is a Python number; where the number is only kept, x.item() for float(x)"
    )
    found.__cause__ = error
    return found


def _answer_of(question: Question) -> Tensor:
    assert question.answer is not None
    return question.answer


def is_of_user(error: Exception) -> bool:
    """Whether it is the forward's own, and not of what tracing cannot do."""
    return not (
        is_value_missing(error)
        or isinstance(error, (AutoshardError, Undecided, RowsUnknown, *shape_dependent_errors()))
    )


def _plain(error: Exception) -> Exception:
    """Without the frames and the traced tensors that it holds."""
    try:
        return type(error)(*map(str, error.args))
    except Exception:  # a class that wants other arguments
        return RuntimeError(f"{type(error).__name__}: {error}")
