"""An assignment of layouts, lowered, and its step on the timeline; its collectives, what they reserve, their prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autoshard.plan.plan_content import PlanContent
from cost_model.collectives import BucketedPrices, CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.measurements import paced
from cost_model.memory import ADAMW, Axes, Optimizer, reserve_bytes
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile, scaled_link, with_timed_collectives
from cost_model.timed import TimedPrices
from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment
from passes.plan.decide import decide
from passes.plan.planned_graph import Collective, PlannedGraph
from passes.predict.predict_step import StepInOrders, predicted_step
from passes.predict.prediction import MemoryStep, MemoryWalk, Prediction, TimelinePart
from passes.redistribution.redistribute import Redistributor
from passes.search.state_columns import Held
from passes.states.compute_again import compute_again
from passes.strategies.prices import Prices
from passes.strategies.traffic import (
    TrafficModel,
    eager_traffic,
    fused_traffic,
    grouped_traffic,
    uncompiled_traffic,
)


@dataclass(frozen=True)
class Judged:
    """prices: that it was planned by. step: None where it was not put on the timeline. tried: within a limit, each as
    it is planned with so much in transfers at once."""

    planned: PlannedGraph
    prices: Prices
    step: Prediction | None
    tried: tuple[Judged, ...] = ()

    @property
    def seconds(self) -> float:
        assert self.step is not None
        return self.step.seconds

    @property
    def peak(self) -> MemoryStep:
        """Where most bytes are alive, on the fullest rank."""
        assert self.step is not None
        return self.step.peak

    @property
    def memory(self) -> MemoryWalk | None:
        """What is alive when, on the fullest rank."""
        return None if self.step is None else self.step.memory

    @property
    def timeline(self) -> tuple[TimelinePart, ...]:
        """What runs when, on the slowest rank."""
        return () if self.step is None else self.step.timeline

    @property
    def held(self) -> Held:
        """Bytes of every step of the program, on the fullest rank."""
        assert self.memory is not None
        return self.memory.held()

    @property
    def phase_seconds(self) -> Sequence[float]:
        """Of the forward, the backward and the update."""
        assert self.step is not None
        return self.step.phase_seconds

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return self.planned.collectives


def judged(
    joint: JointGraph,
    assignment: Assignment,
    prices: Prices,
    predict: Callable[[PlannedGraph, Prices], Prediction] | None = None,
) -> Judged:
    """Planned by `prices`, and its step under them."""
    planned = decide(joint, assignment, prices)
    return Judged(planned, prices, (predict or partial(predicted_step, joint))(planned, prices))


def judged_within(
    joint: JointGraph, assignment: Assignment, prices: Prices, over: Callable[[Judged], int]
) -> Judged:
    """`judged`, or what is within a limit: with fewer bytes in transfers at once, as many as fit.

    over: bytes by which a plan is over the limit. Where even transfers that go one by one hold too much, the one that
    is least over is returned.
    """
    steps = StepInOrders(joint)
    one = judged(joint, assignment, prices, steps.predicted)
    tried, moved, missing = [one], one.peak.of("moved"), over(one)
    # Share of the peak that transfers must hold for fewer at once to be tried.
    if missing > 0 and moved >= 0.01 * one.peak.nbytes:
        # What makes room for just what is over the limit, unless that is far; if it does not, whether
        # none at once do; if they do, shares between.
        most, far = max(0, moved - missing), missing > 0.25 * (one.peak.nbytes - missing)
        shares = [0, most // 2, most // 4] if far else [most, 0, most // 2, most // 4]
        for held in dict.fromkeys(shares):
            one = judged(joint, assignment, prices.holding(held), steps.predicted)
            tried.append(one)
            if (over(one) > 0) == (held == 0) or one.peak == tried[-2].peak:
                break
    fitting = [one for one in tried if over(one) <= 0]
    best = min(fitting, key=lambda one: one.seconds) if fitting else min(tried, key=over)
    return replace(best, tried=tuple(tried))


MESSAGES = frozenset({"all_to_all", "point_to_point"})
"""Kinds of collectives in which ranks send to each other, and that gathers can do without."""

_NEIGHBOURS = 2
"""Ranks with which a halo is exchanged: one before, one after. Longer halos reach further, which is not counted."""
_ALL = 2**62
_PEERS = {
    **dict.fromkeys(("all_to_all", "reshard", "send_rows", "return_rows"), _ALL),
    **dict.fromkeys(("halo_exchange", "halo_reduce"), _NEIGHBOURS),
}
"""Ranks with which a rank exchanges messages of its own in a step, by its name."""


def plan_reserve(mesh: MeshSpec, collectives: Iterable[Collective]) -> int:
    """Bytes per device for CUDA's context and the communicators of a plan with these collectives."""
    return reserve_bytes(mesh, _peers(mesh, collectives))


def messages_nbytes(mesh: MeshSpec, collectives: Iterable[Collective]) -> int:
    """Bytes of `plan_reserve` that are there for `MESSAGES`."""
    every = list(collectives)
    return plan_reserve(mesh, every) - plan_reserve(mesh, [c for c in every if c.kind not in MESSAGES])


def _peers(mesh: MeshSpec, collectives: Iterable[Collective]) -> Mapping[Axes, int]:
    """Axes -> ranks with which one exchanges messages of its own."""
    peers: dict[Axes, int] = {}
    for c in collectives:
        axes = tuple(sorted(c.axes, key=mesh.index))
        others = mesh.size(*axes) - 1
        count = _PEERS.get(c.name, 0)
        peers[axes] = max(peers.get(axes, 0), min(others, count))
    return peers


def prices_of(
    profile: Profile,
    mesh: MeshSpec,
    backend: str = "inductor",
    timed: TimedPrices | None = None,
    optimizer: Optimizer = ADAMW,
    links: MeshSpec | None = None,
    pace: float = 1.0,
) -> Prices:
    """Collectives, kernels as `backend` makes them and the update on one device, from `profile`; in place of them what
    was timed.

    links: where the ranks of `mesh` sit, if that is one stage of a larger mesh: groups are as far apart as there.
    pace: how many times as long all of it takes in the midst of a step (`autoshard.plan.derived_plans`)."""
    placed = links or mesh
    profile = paced(profile, pace)
    if timed is not None:
        timed = paced(timed, pace)
        profile = with_timed_collectives(profile, placed, timed.collectives)
    compute = ComputePrices(profile, mesh.device_type, timed)
    collectives = CollectivePrices(profile, placed)
    ways = Redistributor(mesh, collectives, link_of=collectives.link)
    return Prices(
        mesh=mesh,
        compute=compute,
        redistributor=ways,
        merged=ways.priced_by(BucketedPrices(collectives.seconds, mesh, compute)),
        optimizer_seconds=lambda nbytes: compute.update_seconds(nbytes, optimizer.passes),
        traffic=_traffic_model(backend, timed is not None),
        overlap_efficiency=profile.overlap_efficiency,
        optimizer=optimizer,
        lateness=profile.lateness,
        links=links,
        shares_memory=collectives.shares_memory,
    )


def _traffic_model(backend: str, timed: bool) -> TrafficModel:
    """How kernels of a backend fuse: "eager" runs op by op, "uncompiled" the kernels that torch has; every other one is
    taken to fuse as Inductor does. timed: for prices that know what was timed."""
    inductor = grouped_traffic if timed else fused_traffic
    return {"eager": eager_traffic, "uncompiled": uncompiled_traffic}.get(backend, inductor)


def prices_as_in(plan: PlanContent, prices: Prices) -> Prices:
    """Those under which the layouts of `plan` are brought about as it does: with as many bytes at once, and within a
    limit, where messages between all ranks take memory, without any if it has none."""
    joined = prices.joining(plan.joined_axes)
    if plan.memory_limit is not None:
        joined = joined.within(plan.memory_limit)
    if plan.moved_nbytes is not None:
        joined = joined.holding(plan.moved_nbytes)
    spared = plan.memory_limit is not None and plan.reserve > 0
    if not spared or any(one.name in _PEERS for one in plan.collectives):
        return joined
    return joined.avoiding(MESSAGES)


def program_as_in(
    plan: PlanContent, joint: JointGraph, prices: Prices
) -> tuple[JointGraph, Assignment, Prices]:
    """Of `judged`, what makes the program that `plan` is: with what it computes again and how it moves."""
    return compute_again(joint, plan.planned.again), plan.planned.layouts, prices_as_in(plan, prices)


def over_link(
    profile: Profile, timed: TimedPrices | None, mesh: MeshSpec, level: int, factor: float
) -> tuple[Profile, TimedPrices | None]:
    """With a level of links so much faster: the collectives that were timed as well."""
    if timed is not None:
        profile = with_timed_collectives(profile, mesh, timed.collectives)
        timed = replace(timed, collectives=())
    return scaled_link(profile, level, factor), timed
