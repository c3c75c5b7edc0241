"""From what a rank computes in a phase to when: the passes between splitting the phases and compiling."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.ir.fake_calls import FakeCalls
from passes.ir.graph_pass import RankPass, run_rank_passes
from passes.ir.graph_properties import COLLECTIVES, OPS, HasGraph, Property, described, group_of, is_start
from passes.ops.sent_rows import exchange_rows
from passes.plan.planned_graph import Turn
from passes.schedule.bucket import Bucket
from passes.schedule.overlap import Overlap, issue_key

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


def _two_groups(graph: HasGraph) -> str | None:
    flying: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        if is_start(node):
            others = [other for other, group in flying.items() if group != group_of(node)]
            if others:
                return (
                    f"{described(node)}: starts while %{others[0].name} of {flying[others[0]]} is in flight"
                )
            flying[node] = group_of(node)
        elif node.all_input_nodes:
            flying.pop(node.all_input_nodes[0], None)
    return None


ONE_GROUP_IN_FLIGHT = Property("collectives in flight together are of one group", _two_groups)


@dataclass(frozen=True)
class SerializeCommunicators(RankPass):
    """Wait for what is in flight on other communicators before a collective starts.

        %g: f32[8, 16] = all_gather(%w, group dp)          %g: f32[8, 16] = all_gather(%w, group dp)
        %r: f32[8, 16] = all_reduce(%x, group tp)    ->    %v: f32[8, 16] = wait_tensor(%g)
        %v: f32[8, 16] = wait_tensor(%g)                   %r: f32[8, 16] = all_reduce(%x, group tp)

    The same nodes, in place; waits move up, nothing else. NCCL's kernels hold their part of the GPU until the
    other ranks join them. Two of different communicators that start in another order on another GPU, or of
    which one leaves no room for the other, wait for each other forever. [NCCL user guide, "Using multiple NCCL
    communicators concurrently"] On a GPU a wait is an order between streams: the host goes on.

    Collectives of one communicator stay in flight together: they run in the order in which they were issued.
    """

    ensures = (ONE_GROUP_IN_FLIGHT,)
    keeps = (OPS, COLLECTIVES)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        flying: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if is_start(node):
                for other in [o for o in flying if group_of(o) != group_of(node)]:
                    node.prepend(flying.pop(other))
                (flying[node],) = node.users
            elif node.all_input_nodes:
                flying.pop(node.all_input_nodes[0], None)
        graph.lint()
        module.recompile()
        return module


def behind_ids(graph: fx.Graph) -> None:
    """Lets rows that have the turn of the transfer that they stand for go behind the collectives of the ids that say
    where to, if these have a later one."""
    if not graph.find_nodes(op="call_function", target=exchange_rows):
        return
    last: dict[fx.Node, Turn] = {}
    for node in graph.nodes:
        before = max((last[n] for n in node.all_input_nodes if n in last), default=None)
        if node.target is exchange_rows and before is not None and before > issue_key(node)[0]:
            for made in (node, *node.users):
                made.meta["turn"] = (*before, 1)
                made.meta.pop("places", None)
        own = [issue_key(node)[0]] if "turn" in node.meta else []
        if before is not None or own:
            last[node] = max(own if before is None else [before, *own])
