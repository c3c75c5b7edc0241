"""From what a rank computes in a phase to when: the passes between splitting the phases and compiling."""

from __future__ import annotations

from torch import fx

from passes.ir.fake_calls import FakeCalls
from passes.ir.graph_pass import RankPass, run_rank_passes
from passes.schedule.bucket import Bucket
from passes.schedule.overlap import Overlap
from passes.schedule.serialize_communicators import SerializeCommunicators

SCHEDULE: tuple[RankPass, ...] = (
    Bucket(),  # first: what is left to hide is then what the buckets take
    Overlap(),
)


def scheduled(module: fx.GraphModule, calls: FakeCalls | None = None) -> fx.GraphModule:
    """`module`, in place, with its collectives merged and running behind computation. calls: of such graphs."""
    return run_rank_passes(module, SCHEDULE if calls is None else (Bucket(calls), *SCHEDULE[1:]))


def one_communicator_at_a_time(module: fx.GraphModule) -> fx.GraphModule:
    """`scheduled`, where collectives of different groups must not be in flight together."""
    return run_rank_passes(module, (*SCHEDULE, SerializeCommunicators()))
