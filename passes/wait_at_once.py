"""Wait for every collective where it starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.lower_redistribute import collective_nodes

__all__ = ["WaitAtOnce"]


@dataclass(frozen=True)
class WaitAtOnce:
    """Put each wait right behind its collective; one that nothing reads gets a wait of its own.

        %r: f32[8, 16] = all_reduce(%dx)                 %r: f32[8, 16] = all_reduce(%dx)
        %dw: f32[64, 16] = mm(%gt, %x)           ->      %v: f32[8, 16] = wait_tensor(%r)
        %v: f32[8, 16] = wait_tensor(%r)                 %dw: f32[64, 16] = mm(%gt, %x)

    In place. The collectives keep the order that `Overlap` gave them, the same on every rank.
    """

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        wait = torch.ops._c10d_functional.wait_tensor.default
        for node in [n for n in collective_nodes(graph) if n.target is not wait]:
            waits = [user for user in node.users if user.target is wait]
            if not waits:
                with graph.inserting_after(node):
                    waits = [graph.call_function(wait, (node,))]
                waits[0].meta = dict(node.meta)
            for found in reversed(waits):
                node.append(found)
        graph.lint()
        module.recompile()
        return module
