"""From what a rank computes in a phase to when: the passes between splitting the phases and compiling."""

from __future__ import annotations

from torch import fx

from passes.bucket import Bucket
from passes.overlap import Overlap
from passes.serialize_communicators import SerializeCommunicators

__all__ = ["one_communicator_at_a_time", "scheduled"]


def scheduled(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, in place, with its collectives merged and running behind computation.

    Merged first: what is left to hide is then what the buckets take.
    """
    return Overlap()(Bucket()(module))


def one_communicator_at_a_time(module: fx.GraphModule) -> fx.GraphModule:
    """`scheduled`, where collectives of different groups must not be in flight together."""
    return SerializeCommunicators()(scheduled(module))
