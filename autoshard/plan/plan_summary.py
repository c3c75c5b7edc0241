"""A plan on one screen: `print(plan)`. Each mesh axis by the name that its pattern has in the field."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.plan.plan_content import Nearly, PlanContent
from autoshard.plan.plan_words import memory_words, race_lines, stages_words
from cost_model.errors import titled
from cost_model.memory import format_count, format_seconds
from passes.ir.routing import Routing
from passes.layout.layout import KEYS, RING, nested_sizes
from passes.plan.planned_graph import NodeRecord, made_of_parameters

MOST = 0.5
"""Share of weights, or of the elements of activations, from which on an axis is named after what it does with them."""
SOME = 0.1
"""Share from which on it is said as well."""
_ROUTED = ("routed_mm", "routed_outer")
_WINDOWED = ("aten.convolution", "neighborhood_attention")


def plan_summary(plan: PlanContent) -> str:
    """Mesh, step, memory, gap, and what each axis of the mesh does, in lines of one subject."""
    return "\n".join(titled(*line) for line in summary_lines(plan)) + "\n"


def summary_lines(plan: PlanContent) -> Iterator[tuple[str, str]]:
    records = [record for stage in plan.stages for record in stage.records]
    weights = sum(math.prod(one.results[0].shape) for one in records if one.op == "param")
    nominal = ", nominal: measured on no machine" if plan.origin.nominal else ""
    yield "plan", f"{format_count(weights)} parameters on {plan.mesh} of {plan.mesh.device_type}"
    yield "prices", f"profile {plan.origin.profile}{nominal}"
    yield "step", _step(plan)
    yield "memory", memory_words(plan)
    yield "proof", _proof(plan)
    if plan.axis:
        yield plan.axis, f"pipeline: {stages_words(plan)}, bubble {plan.bubble:.0%}"
    elif plan.micro_batches > 1:
        yield "batch", f"in {plan.micro_batches} pieces, one after the other"
    for axis in plan.mesh.real_axes():
        if axis != plan.axis:
            yield axis, axis_words([stage.records for stage in plan.stages], axis, load_words(plan, axis))
    if plan.nearly is not None:
        yield "nearly", _nearly(plan, plan.nearly)
    for line in race_lines(plan.race)[:1]:
        yield "raced", line
    yield "more", 'plan.explain(), plan.explain("name"), plan.why_not("FSDP"), plan.draw("plan.html")'


def step_parts(plan: PlanContent) -> tuple[float, float, float]:
    """Seconds of computation, of communication, and of those that are not hidden, of a plan without stages."""
    computed = min(plan.step_time, sum(record.seconds for record in plan.records))
    moved = sum(collective.seconds for collective in plan.collectives)
    return computed, moved, min(moved, plan.step_time - computed)


def _step(plan: PlanContent) -> str:
    """What waits: of a plan without stages, what its kernels do not take."""
    words = f"{format_seconds(plan.step_time)} predicted"
    if plan.axis:
        return words
    computed, moved, exposed = step_parts(plan)
    return (
        f"{words}: {format_seconds(computed)} of computation, {format_seconds(moved)} of communication, "
        f"{format_seconds(exposed)} ({exposed / plan.step_time:.0%} of the step) not hidden"
    )


def _proof(plan: PlanContent) -> str:
    if plan.lower_bound <= 0.0:
        return "not known: the search ended before it had a bound"
    limited = plan.memory_limit is not None
    # Gap below which the plan is said to be optimal: what one decimal shows.
    if plan.gap < 0.0005:
        return f"{'as fast as without a limit' if limited else 'optimal'} under these prices"
    of = "the fastest plan without a limit" if limited else "optimal"
    return f"within {plan.gap:.1%} of {of} under these prices (bound {format_seconds(plan.lower_bound)})"


def _nearly(plan: PlanContent, nearly: Nearly) -> str:
    """ "FSDP on dp and tp, batch split: +1.2%, 11 ms more exposed communication"."""
    axes: dict[str, list[str]] = defaultdict(list)
    for axis, words in nearly.pattern.items():
        axes[words].append(axis)
    pattern: list[str] = []
    for words, those in axes.items():
        name, *said = words.split("; ")
        pattern.append(", ".join([f"{name} on {' and '.join(those)}", *said]))
    exposed = nearly.slower - nearly.computed
    parts = [("exposed communication", exposed), ("computation", nearly.computed)]
    longer = [
        f"{format_seconds(abs(share) * plan.step_time)} {'more' if share > 0.0 else 'less'} {what}"
        for what, share in parts
        if abs(share) >= max(SOME * nearly.slower, 0.0005)
    ]
    return ", ".join([f"{'; '.join(pattern)}: +{nearly.slower:.1%}", *longer])


@dataclass
class AxisUses:
    """What one axis does, in elements.

    weights: by whether the axis splits them where they are stored, and where they are read.
    dims: of results in the forward, by what of them it splits.
    experts: whether it splits experts. exchanges: factors along which it splits ops that exchange within themselves.
    """

    weights: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    dims: Counter[str] = field(default_factory=Counter)
    experts: bool = False
    exchanges: set[str] = field(default_factory=set)

    def share_of_weights(self, *kinds: tuple[bool, bool]) -> float:
        return sum(self.weights[kind] for kind in kinds) / max(1, sum(self.weights.values()))

    @property
    def where_stored(self) -> float:
        """Share of weights that are read split."""
        return self.share_of_weights((True, True), (False, True))

    @property
    def gathered(self) -> float:
        """Share of weights that are stored split and read whole."""
        return self.share_of_weights((True, False))

    def share_of_dims(self, dim: str) -> float:
        return self.dims[dim] / max(1, sum(self.dims.values()))


def load_words(plan: PlanContent, axis: str) -> str:
    """Of experts, where the axis splits them."""
    numbers, count = plan.origin.routing, plan.mesh.size(axis)
    if not numbers:
        return "experts equally loaded"
    routing = Routing.of(numbers)
    more = count * routing.share(nested_sizes(max(count, len(routing.shares)), (count,)))
    return f"time and memory for {more:.2f} times the rows of equal loads"


def patterns(plan: PlanContent, records: Sequence[NodeRecord]) -> dict[str, str]:
    """The words of every axis, of a program of the call that `plan` is of."""
    return {axis: axis_words([records], axis, load_words(plan, axis)) for axis in plan.mesh.real_axes()}


def without_shares(words: str) -> str:
    """Of a pattern, what is left where it does not matter of how many of the weights it is."""
    return re.sub(r" of \d+% of the weights", "", words)


def axis_uses(stages: Iterable[Sequence[NodeRecord]], axis: str) -> AxisUses:
    """stages: the records of each stage's graph."""
    uses = AxisUses()
    for records in stages:
        made = made_of_parameters(records)
        _note_weights(uses, records, made, axis)
        _note_results(uses, records, made, axis)
        splits = (split for record in records for split in record.splits)
        uses.exchanges |= {
            split.factor for split in splits if split.factor in _EXCHANGES and axis in split.axes
        }
    if RING in uses.exchanges:  # rows of a sequence that is split may lie in the first dim
        uses.dims["sequence"] += uses.dims.pop("batch", 0)
    return uses


def axis_words(
    stages: Iterable[Sequence[NodeRecord]], axis: str, load: str = "experts equally loaded"
) -> str:
    """ "tensor parallel with sequence parallelism", "FSDP; batch split". load: of experts, in words."""
    uses = axis_uses(stages, axis)
    where_stored, gathered = uses.where_stored, uses.gathered
    split = [dim for dim in ("batch", "sequence", "space") if uses.share_of_dims(dim) >= MOST / 2]
    names = [f"expert parallel ({load})"] if uses.experts else []
    if where_stored >= SOME and not (uses.experts and where_stored < MOST):
        part = "" if where_stored >= 1.0 - SOME else f" of {where_stored:.0%} of the weights"
        sequence = ""
        if uses.share_of_dims("sequence") >= SOME / 2:
            sequence, split = " with sequence parallelism", [dim for dim in split if dim != "sequence"]
        names.append(f"tensor parallel{part}{sequence}")
    if gathered >= SOME:
        part = "" if gathered >= 1.0 - SOME else f" of {gathered:.0%} of the weights"
        names.append(f"FSDP{part}")
    elif not names and split:
        names.append(_OF_WHOLE_WEIGHTS[split[0]])
    said = [f"{dim} split" for dim in split]
    said += [words for factor, words in _EXCHANGES.items() if factor in uses.exchanges]
    return "; ".join([", ".join(names), *said] if names else said) or "every rank computes the same"


_EXCHANGES = {RING: "ring attention", KEYS: "keys split"}
_OF_WHOLE_WEIGHTS = {"batch": "DDP", "sequence": "context parallel", "space": "domain parallel with halos"}


def _note_weights(uses: AxisUses, records: Sequence[NodeRecord], made: set[str], axis: str) -> None:
    """By how their readers have them; casts and views of a weight, `made` of it, are the weight."""
    of = {record.name: record for record in records}
    read: dict[str, bool] = defaultdict(bool)
    for record in records:
        for operand in record.operands:
            if operand.source in made and record.name not in made and record.op != "output":
                read[_root(operand.source, of)] |= axis in operand.layout.axes
                experts = (one.axes for one in record.splits if one.factor == "g" and record.op in _ROUTED)
                uses.experts |= any(axis in axes for axes in experts)
    for record in records:
        if record.op == "param":
            stored = axis in record.results[0].layout.axes
            uses.weights[stored, read[record.name]] += math.prod(record.results[0].shape)


def _root(name: str, of: dict[str, NodeRecord]) -> str:
    while of[name].op != "param":
        name = of[name].operands[0].source
    return name


def _note_results(uses: AxisUses, records: Sequence[NodeRecord], made: set[str], axis: str) -> None:
    """Of the forward's results, without weights. A sequence is the middle dim of those that have three; space is what
    convolutions go over."""
    results = [
        (record, result)
        for record in records
        if record.phase == "forward"
        and record.op not in ("param", "input", "output")
        and record.name not in made
        for result in record.results
        if len(result.shape) > 1
    ]
    lengths = {result.shape[1] for _, result in results if len(result.shape) == 3}
    space = {n for record, result in results if record.op in _WINDOWED for n in result.shape[2:]}
    for _, result in results:
        dim, shape = result.layout.dim_of(axis), result.shape
        if dim is None or dim == 0:
            word = "none" if dim is None else "batch"
        elif dim > 1 and shape[dim] in space:
            word = "space"
        else:
            word = "sequence" if shape[dim] in lengths and dim < len(shape) - 1 else "features"
        uses.dims[word] += math.prod(shape)
