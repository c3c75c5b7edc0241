"""What the layouts of the first plan lose at sizes far from its own: looked for beside the steps, and said once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator
from functools import partial

from autoshard.plan.crossovers import size_crossovers
from autoshard.plan.families import Again
from autoshard.plan.plan import Plan
from autoshard.progress import Say, teller
from autoshard.refine.timed_cases import is_worth_it
from autoshard.runtime.beside import Beside, Talk
from autoshard.runtime.module import Mode
from autoshard.runtime.starting import StartingHome
from cost_model.memory import format_seconds
from passes.ir.size_names import Shapes, named_sizes, size_named


class FarSizes:
    """Of one model: rank 0 looks.

    A size is far that is twice or half of the first call's; it is looked at again at four times, and so on, until a
    line was said. Not while programs are tuned, when prices and plans may still change."""

    def __init__(self, home: StartingHome) -> None:
        self._home = home
        self._first: tuple[Again, Hashable] | None = None
        """Of the first call: what its plan can be asked, and the mode of the model."""
        self._looked: set[tuple[str, int]] = set()
        self._beside: Beside | None = None
        self._ended = home.settings.tune != "background" or home.settings.plan is not None

    def seen(self, shapes: Shapes) -> None:
        """A kind of call of these shapes."""
        home, plan = self._home, self._home.plan
        if self._ended or plan is None or home.mesh.get_rank() != 0:
            return
        mode = Mode(home.model).key()
        if self._first is None:
            self._ended = plan.again is None or plan.again.carried is None
            self._first = None if plan.again is None else (plan.again, mode)
        elif mode == self._first[1] and self._is_free() and all(tuning.ended for tuning in home.tunings):
            self._look(plan, self._first[0], shapes)

    def _is_free(self) -> bool:
        if self._beside is not None:
            self._ended = self._ended or self._beside.news() is not None
        return not self._ended and (self._beside is None or self._beside.ended)

    def _look(self, plan: Plan, again: Again, shapes: Shapes) -> None:
        """Beside the steps, at the farthest size that was not looked at."""
        for name, size, doublings in _far(plan, again, shapes):
            if (name, doublings) not in self._looked:
                self._looked.add((name, doublings))
                self._beside = Beside(partial(_tell_far, plan, again, name, size, teller()))
                return


def _far(plan: Plan, again: Again, shapes: Shapes) -> Iterator[tuple[str, int, int]]:
    """(name, size, whole doublings or halvings), the farthest first; none where steps are too short to matter."""
    sizes = named_sizes(again.shapes, shapes)
    if not all((*sizes.values(), *itertools.chain(*again.shapes))):
        return
    found = [(name, size, size / size_named(again.shapes, name)) for name, size in sizes.items()]
    times = math.prod(ratio for _, _, ratio in found)
    for name, size, ratio in sorted(found, key=lambda one: -abs(math.log2(one[2]))):
        if (doublings := int(math.log2(ratio))) and is_worth_it(plan.step_time * times):
            yield name, size, doublings


def _tell_far(plan: Plan, again: Again, name: str, size: int, say: Say, talk: Talk) -> None:
    """What `plan` loses at this size of the call that it was found for, if anything is known."""
    now, carried = size_named(again.shapes, name), again.carried
    assert carried is not None
    for won in size_crossovers(plan, again, {name: (min(now, size), max(now, size))}):
        ours, other = (format_seconds(carried(one, {name: size}, None).step_time) for one in (plan, won.plan))
        side = "down" if size < now else "on"
        say(
            f"sizes: at {name} {size} the plan, found at {now}, takes {ours} a step, and another {other}, which wins "
            f"from {won.size} {side}, as predicted: there a new autoshard(...) of such a call pays ({won.words})"
        )
        talk.send(True)
