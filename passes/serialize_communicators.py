"""Keep two communicators of one GPU from being in flight at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.lower_redistribute import collective_nodes

__all__ = ["SerializeCommunicators"]


@dataclass(frozen=True)
class SerializeCommunicators:
    """Wait for what is in flight on other communicators before a collective starts.

        %g: f32[8, 16] = all_gather(%w, group dp)          %g: f32[8, 16] = all_gather(%w, group dp)
        %r: f32[8, 16] = all_reduce(%x, group tp)    ->    %v: f32[8, 16] = wait_tensor(%g)
        %v: f32[8, 16] = wait_tensor(%g)                   %r: f32[8, 16] = all_reduce(%x, group tp)

    The same nodes, in place; waits move up, nothing else. NCCL's kernels hold their part of the GPU until the
    other ranks join them. Two of different communicators that start in another order on another GPU, or of
    which one leaves no room for the other, wait for each other forever. [NCCL user guide, "Using multiple NCCL
    communicators concurrently"] On a GPU a wait is an order between streams: the host goes on.

    Collectives of one communicator stay in flight together: they run in the order in which they were issued.

    Requires: a collective is read by its wait only.
    Ensures:  what is in flight at any place of the graph is of one group; collectives in their old order.
    """

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        starts = set(collective_nodes(graph))
        flying: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if node in starts:
                for other in [o for o in flying if o.args[-1] != node.args[-1]]:
                    node.prepend(flying.pop(other))
                (flying[node],) = node.users
            elif node.all_input_nodes:
                flying.pop(node.all_input_nodes[0], None)
        graph.lint()
        module.recompile()
        return module
