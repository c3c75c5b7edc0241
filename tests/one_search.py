"""The plan that the objective alone likes best: for tests of what such a plan holds, in graphs so small that another,
which starts fewer transfers, is faster on the timeline."""

from __future__ import annotations

from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from unittest import mock

__all__ = ["ONE_SEARCH"]


class _OneSearch(ContextDecorator):
    """Whatever else is judged, it is no better."""

    def __enter__(self) -> None:
        self._stack = ExitStack()
        never = "passes.search.judged_choice.JudgedChoice.precedes", lambda *_: False
        self._stack.enter_context(mock.patch(*never))
        self._stack.enter_context(
            mock.patch("autoshard.plan.answer.BestSoFar.or_better", lambda self, found: found)
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stack.close()


ONE_SEARCH = _OneSearch()
