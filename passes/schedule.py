"""From what a rank computes in a phase to when: the passes between splitting the phases and compiling."""

from __future__ import annotations

from torch import fx

from passes.bucket import Bucket
from passes.overlap import Overlap

__all__ = ["scheduled"]


def scheduled(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, in place, with its collectives merged and running behind computation.

    Merged first: what is left to hide is then what the buckets take.
    """
    return Overlap()(Bucket()(module))
