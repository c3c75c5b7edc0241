"""What every graph pass is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from passes.joint import JointGraph

__all__ = ["GraphPass", "run_passes"]


@dataclass(frozen=True)
class GraphPass(ABC):
    """A rewrite of a joint graph. Its fields are its options; its name is its class in kebab-case.

    Invariants, which hold before and after every pass:
      - the graph is functional and in topological order: placeholders, ops, one output;
      - `inputs` parallels the placeholders and `outputs` the returned tuple; passes may append an
        input of kind "seed" and change nothing else about the two;
      - every op has meta "val" (global shapes), "phase", "module" and "source";
      - outputs and gradients are the same functions of the inputs, rounding aside.

    A pass owns the graph it is given and may rewrite it in place; copy first to keep the original.
    """

    @property
    def name(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    @abstractmethod
    def __call__(self, joint: JointGraph) -> JointGraph: ...


def run_passes(joint: JointGraph, passes: Iterable[GraphPass]) -> JointGraph:
    for graph_pass in passes:
        joint = graph_pass(joint)
    return joint
