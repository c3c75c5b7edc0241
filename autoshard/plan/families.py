"""Families of plans by the names that people give them: what each says of weights over each axis of a mesh."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from autoshard.plan.plan_content import PlanContent
from cost_model.deadline import Deadline
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.ir.routing import Routing
from passes.search.find import Alternative

Role = Literal["whole", "stored", "used", "experts", "sequence"]
"""Over an axis. whole: weights stored and used whole. stored: stored split, gathered to use. used: stored split, and
read split by the products, so that no weight moves. experts: those of experts by expert, and never gathered; of other
weights nothing is said. sequence: the residual stream is split in it; of weights nothing is said."""


@dataclass(frozen=True)
class Family:
    """What is pinned; all else is as the search finds it.

    inner: role of weights over the last mesh axis of several ranks; outer: over the axes before it, None: free.
    residual: sums of a value and what is computed of it are split too, in the sequence, over the axes that are "used";
    False: they are whole there; None: free.
    vocabulary: "used" is said of the dims as long as the vocabulary, and of those alone.
    by_axis: roles by the names of axes, in place of outer and inner; "experts" and "sequence" beside another.
    """

    name: str
    aliases: tuple[str, ...]
    text: str
    outer: Role | None
    inner: Role
    residual: bool | None = None
    vocabulary: bool = False
    by_axis: tuple[tuple[str, Role], ...] = ()

    @property
    def axes(self) -> int:
        """Mesh axes of several ranks that it needs."""
        if self.by_axis:
            return len(dict(self.by_axis))
        return 1 if self.outer == self.inner or self.outer is None else 2

    def roles(self, mesh: MeshSpec) -> tuple[tuple[str, Role], ...]:
        """Axes, each with a role."""
        if self.by_axis:
            return self.by_axis
        axes = mesh.real_axes()
        role_of = lambda axis: self.inner if axis == axes[-1] else self.outer
        return tuple((axis, role) for axis in axes if (role := role_of(axis)) is not None)


_WHOLE = "weights whole on every rank"
_STORED = "weights stored split and gathered to use"
_USED = "the products' weights split and never gathered"
_SEQUENCE = "and the residual stream split in the sequence"

FAMILIES = (
    Family("DDP", ("data parallel", "data parallelism", "replicated"), _WHOLE, "whole", "whole"),
    Family("FSDP", ("ZeRO", "ZeRO-3", "FSDP2", "fully sharded"), _STORED, "stored", "stored"),
    Family("HSDP", ("hybrid FSDP",), f"{_STORED}, over the last axis alone", "whole", "stored"),
    Family("TP", ("tensor parallel", "tensor parallelism", "Megatron"), _USED, "used", "used"),
    Family(
        "sequence parallel",
        ("SP", "TP + SP", "TP x SP", "Megatron sequence parallel", "sequence parallelism"),
        f"{_USED}, {_SEQUENCE}",
        "used",
        "used",
        residual=True,
    ),
    Family(
        "DDP x TP", ("data and tensor parallel",), f"{_WHOLE}; over the last axis {_USED}", "whole", "used"
    ),
    Family(
        "FSDP x TP",
        ("FSDP of TP", "FSDP2 x TP", "2D"),
        f"{_STORED}; over the last axis {_USED}",
        "stored",
        "used",
    ),
    Family(
        "FSDP x sequence parallel",
        ("FSDP x SP", "FSDP of SP"),
        f"{_STORED}; over the last axis {_USED}, {_SEQUENCE}",
        "stored",
        "used",
        residual=True,
    ),
    Family(
        "vocabulary parallel",
        ("vocabulary parallelism", "vocab parallel"),
        "the head's weight split in the vocabulary and never gathered",
        None,
        "used",
        vocabulary=True,
    ),
    Family(
        "expert parallel",
        ("EP", "expert parallelism"),
        "experts' weights split by expert over the last axis and never gathered",
        None,
        "experts",
    ),
    Family(
        "context parallel",
        ("CP", "context parallelism"),
        "the residual stream split in the sequence over the last axis",
        None,
        "sequence",
    ),
)


OF_WEIGHTS = tuple(family for family in FAMILIES if family.inner in ("whole", "stored", "used"))
"""Those that say how weights are, which searches try beside what they find."""


def family_named(name: str) -> Family | None:
    """By its name or another name of it; case, and signs between words, do not matter."""
    return _by_name().get(_plain(name))


_PIPELINE = "find_plan(..., stages='auto', micro_batches='auto'), and the step_time of both plans"
_OTHERWISE: Mapping[str, str] = dict.fromkeys(
    ("pp", "pipeline", "pipelineparallel", "pipelineparallelism"), _PIPELINE
)
"""Names of plans that pinned weights do not make, and how to ask for them."""


def asked_otherwise(name: str) -> str | None:
    """How to ask for plans of that name, which are no family."""
    return _OTHERWISE.get(_plain(name))


def near_families(name: str) -> list[str]:
    """Names of families that are written much like `name`."""
    known = _by_name()
    found = difflib.get_close_matches(_plain(name), list(known))
    return list(dict.fromkeys(known[near].name for near in found))


def _by_name() -> dict[str, Family]:
    return {_plain(name): family for family in FAMILIES for name in (family.name, *family.aliases)}


def _plain(name: str) -> str:
    return "".join(sign for sign in name.lower() if sign.isalnum())


@dataclass(frozen=True)
class Variant:
    """What is otherwise when a plan is found again.

    pins: parameter or pattern -> placements, besides the task's own pins. nodes: node name -> placements of the first
    result that it has. family: instead of pins, the task's own included. link: (level, factor) of a bandwidth of the
    profile. sizes: of the call, by name.
    """

    pins: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, Any] = field(default_factory=dict)
    family: Family | None = None
    link: tuple[int, float] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


Ranges = Mapping[str, tuple[int, int]]
"""Of sizes by name, the least and the largest."""


class Sizes(Protocol):
    """A planning task's call at other sizes (`autoshard.plan.other_sizes`)."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def ranges(self) -> Ranges: ...

    @property
    def largest(self) -> Mapping[str, int]: ...

    def task(self, task: Any, sizes: Mapping[str, int]) -> Any: ...

    def plan(self, task: Any, plan: Any, sizes: Mapping[str, int], routing: Routing | None = None) -> Any: ...


Carried = Callable[[PlanContent, Mapping[str, int], Routing | None], PlanContent]
"""What a plan is at other sizes, and with other loads of experts, where they are given."""


@dataclass(frozen=True)
class Again:
    """What a plan's own questions need of the task that it was found for.

    profile: its prices. search: the plan of a variant. step_seconds: predicted, of a plan's layouts under a variant's
    prices, lowered as those have it. paced: the same, of a step that takes so many times as long as modelled.
    alternatives: what else the search had for ops of a plan, by their names. carried: what a plan is at other sizes;
    None where the call has none, as that of a stage. shapes: of its tensors. ranges: of sizes that the user asked for.

    It holds the model's graph, so it stays in its process: pickled it is None, as in a plan's file.
    """

    profile: Profile
    search: Callable[[Variant], PlanContent]
    step_seconds: Callable[[PlanContent, Variant], float]
    paced: Callable[[float], Again]
    alternatives: Callable[[PlanContent, Iterable[str], Deadline], Mapping[str, Sequence[Alternative]]]
    carried: Carried | None
    shapes: tuple[tuple[int, ...], ...]
    ranges: Ranges

    def __deepcopy__(self, memo: dict[int, Any]) -> Again:
        """Itself: nothing of it changes."""
        return self

    def __reduce__(self) -> Any:
        return type(None), ()
