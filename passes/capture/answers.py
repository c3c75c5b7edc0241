"""Answers to what a forward asks of values while it is traced: the call's own, or those after which it does not raise.

    if labels.max() >= vocab: raise ValueError(...)      # known from an input
    assert torch.isfinite(h).all()                       # about numbers that are finite in a sound run
    Normal(mean, scale)                                  # validates its arguments: the other side raises

The rest are branches with two sides, of which a graph has one, and each side is another kind of call. Loops that no
number of sides ends are an error that names the line. Questions about values
that are computed alike have one answer (a constraint of a distribution returns early where `check.all()` is false, and
then `check` is tested again).
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from cost_model.errors import AutoshardError, CaptureError, UnsupportedOpError
from passes.capture.known_values import History
from passes.capture.provenance import is_in_raise, is_user_file
from passes.capture.questions import NO, Answers, Question, Questions, Undecided, remedy_at
from passes.capture.rows import RowsUnknown
from passes.capture.stand_ins import AT_COMPUTED, Awaited
from passes.ir.torch_tracing import is_value_missing, shape_dependent_errors

T = TypeVar("T")
Tracer = Callable[[Questions], T | None]
"""What comes of a run of the forward with these answers; None: it looked for answers only."""


def traced_with_answers(tracer: Tracer[T], answers: Answers) -> tuple[T, Questions]:
    """What `tracer` makes, and by which answers.

    Raises Undecided for a branch of which one side cannot be traced, and what the forward raises whatever it is told.
    """
    questions = Questions(asks=False)
    if not answers:
        try:
            return _made(tracer, questions), questions
        except Exception:
            if not questions.asked:
                raise
    final = _Search(tracer, answers).questions()
    return _made(tracer, final), final


def _made(tracer: Tracer[T], questions: Questions) -> T:
    made = tracer(questions)
    assert made is not None
    return made


class _Search(Generic[T]):
    """Runs the forward alone, with other answers, until they are those of the call or do not raise."""

    def __init__(self, tracer: Tracer[T], answers: Answers) -> None:
        self._tracer, self._sure, self._likely = tracer, len(answers.sure), answers.likely
        self._answers = list(answers.sure)
        self._guesses: dict[str, Tensor] = {}
        self._errors: dict[str, Exception | None] = {}
        self._untraced: dict[str, Exception] = {}
        """Why the other side of a branch cannot be traced, by its lines."""
        self._turned: set[int] = set()

    def questions(self) -> Questions:
        """With an answer to every question that will be asked, and what the other one raises."""
        run = Questions()
        for _ in range(100):  # one is the rule; each kind of question takes one or two more
            run = self._run(self._answers, self._guesses)
            if not self._corrected(run):
                self._check(run)
                errors = [
                    self._errors.get(run.asked[_first(run.asked, i)].lines) for i in range(len(run.asked))
                ]
                return Questions([*map(_answer_of, run.asked)], {}, errors)
        raise Undecided(run.asked[-1].place)

    def _run(self, answers: Sequence[Tensor], guesses: Mapping[str, Tensor]) -> Questions:
        run = Questions(answers, guesses, likely=self._likely, history=History())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sides that the call does not take
            self._tracer(run)
        return run

    def _corrected(self, run: Questions) -> bool:
        """Whether an answer was exchanged, after which the forward raised."""
        if run.stopped is None:
            return False
        if _reads_awaited(run.stopped):
            return self._told(run, run.stopped)
        if not _is_raised(run.stopped) and self._tells(run):
            return True
        if not is_of_user(run.stopped):
            raise _with_remedy(run.stopped, run.asked)
        for place in reversed(range(self._sure, len(run.asked))):
            question = run.asked[place]
            is_free = question.known.value is None and _first(run.asked, place) == place
            is_free &= question.is_branch and not question.is_awaited
            if is_free and place not in self._turned:
                if [other.lines for other in run.asked].index(question.lines) == len(run.asked) - 1:
                    self._errors[question.lines] = _plain(run.stopped)
                self._turned = {other for other in self._turned if other < place} | {place}
                self._answers = [*map(_answer_of, run.asked[:place]), ~_answer_of(question)]
                self._guesses[question.lines] = self._answers[-1]
                return True
        raise run.stopped

    def _told(self, run: Questions, error: Exception) -> bool:
        """The forward uses numbers that it was to keep only: it is told them where they are known, or of a branch."""
        if self._tells(run):
            return True
        if isinstance(error, TypeError) and any(question.is_awaited for question in run.asked):
            raise Undecided("") from error
        raise error

    def _tells(self, run: Questions) -> bool:
        """Of the number that was read, or else of the first that can be told, what it is."""
        places = [run.read] if run.read is not None else range(self._sure, len(run.asked))
        for place in places:
            question = run.asked[place]
            value = question.known.value
            if value is None and question.is_branch and run.read is not None:
                value = NO
            if value is not None and question.is_awaited and place >= self._sure:
                self._guesses[question.lines] = value
                self._answers = [*map(_answer_of, run.asked[:place])]
                return True
        return False

    def _check(self, run: Questions) -> None:
        asked, history = run.asked, run.history
        assert history is not None
        for place, question in enumerate(asked):
            if _first(asked, place) < place or question.is_awaited:
                continue
            if question.is_branch and question.lines not in self._errors:
                self._errors[question.lines] = self._other_side(asked, place)
            known = question.known
            decided = known.is_plain if question.is_branch else known.value is not None
            raises = self._errors.get(question.lines) is not None
            is_known = decided or known.is_finite or raises
            if place < self._sure or is_known or question.is_count or history.chooses(question.value):
                continue
            if not question.is_branch:
                raise Undecided(question.place)
            if question.lines in self._untraced:
                raise self._untraced[question.lines]

    def _other_side(self, asked: Sequence[Question], place: int) -> Exception | None:
        """What the forward raises after another answer; None: nothing of its own."""
        question = asked[place]
        answers = [*map(_answer_of, asked[:place]), ~_answer_of(question)]
        guesses = {other.lines: _answer_of(other) for other in asked}
        if question.is_of_loop:
            del guesses[question.lines]  # it goes on, as far as it can
        run = self._run(answers, guesses)
        error = run.stopped
        if error is None:
            return None
        if _reads_awaited(error) or not is_of_user(error):
            is_plain = not isinstance(error, TypeError)
            self._untraced[question.lines] = (
                _with_remedy(error, run.asked) if is_plain else Undecided(question.place)
            )
            return None
        return _plain(error)


def _first(asked: Sequence[Question], place: int) -> int:
    """The first question about a value that is computed as that at `place`."""
    alike = lambda question: (question.number, question.is_awaited)
    return [*map(alike, asked)].index(alike(asked[place]))


def _reads_awaited(error: Exception) -> bool:
    """Whether it says that the forward has used a number that is not known: by C code's words for its stand-in, too."""
    return isinstance(error, (Undecided, CaptureError)) or Awaited.__name__ in str(error)


def _is_raised(error: Exception) -> bool:
    """Whether a `raise` or `assert` of the user's says so; else it may be of a stand-in that torch cannot take."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    return last is not None and is_user_file(last.filename) and is_in_raise(f"{last.filename}:{last.lineno}")


def _with_remedy(error: Exception, asked: Sequence[Question]) -> Exception:
    if not is_value_missing(error) or not asked or asked[-1].answer is not None:
        return error
    remedy = (
        "torch.where, masks, or an argument that is a Python number; where the number is only kept, x.item() for "
        f"float(x); {AT_COMPUTED}"
    )
    found = UnsupportedOpError(
        "the value of a tensor decides what runs next (`float()`, `int()`, an index, ...)\n  try: "
        + remedy_at(asked[-1].place, remedy)
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
