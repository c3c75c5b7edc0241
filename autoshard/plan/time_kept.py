"""What of a plan's time limit is left for its search, and what is said where it was not enough."""

from __future__ import annotations

from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from cost_model.memory import format_bytes
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph

_SECONDS_A_NODE, _DECIDING_SHARE = 2e-3, 0.25
"""Of a graph, what is kept of the time limit for what follows the search; and the share of the limit at most."""


def search_until(joint: JointGraph, deadline: Deadline) -> Deadline:
    """What is decided and predicted after the search takes its time, too: it grows with the graph."""
    after = _SECONDS_A_NODE * len(joint.graph.nodes)
    return deadline.earlier(min(after, _DECIDING_SHARE * max(0.0, deadline.left)))


def out_of_time(mesh: MeshSpec, time_limit: float, over: tuple[int, int] | None = None) -> InfeasibleError:
    """over: the memory limit, and what of the plans that were found the smallest needs; None: no plan was found."""
    axes = len(mesh.real_axes())
    fewer = f", or a mesh of fewer axes than {axes}" if axes > 1 else ""
    within = f"on {mesh} was found within time_limit={time_limit:g} seconds"
    if over is None:
        return InfeasibleError(
            f"no plan {within}: they ended before its layouts and the ways between them were listed\n"
            f"  try: a larger `time_limit`{fewer}"
        )
    limit, needed = map(format_bytes, over)
    return InfeasibleError(
        f"no plan that fits memory_limit={limit} per device {within}: of those that were found the smallest needs "
        f"{needed}\n  try: a larger `time_limit`, a larger `memory_limit`, `micro_batches`{fewer}"
    )
