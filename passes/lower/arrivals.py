"""What a redistribution brings to a rank, as nodes that may come later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes.ir.torch_compat import last_node
from passes.layout.layout import Span


@dataclass(frozen=True)
class Arrival:
    """A redistribution as emitted. own: what was moved, of these spans; first: the first node of the move; number: of
    the transfer."""

    own: fx.Node
    spans: Sequence[Span]
    first: fx.Node
    number: int

    @property
    def _received(self) -> list[fx.Node]:
        """The wait and all that is made of what has arrived."""
        found: dict[fx.Node, None] = {}
        node = self.first
        while node.op == "call_function" and node.meta.get("transfer") == self.number:
            after_wait = node.target is torch.ops._c10d_functional.wait_tensor.default
            if after_wait or any(n in found for n in node.all_input_nodes):
                found[node] = None
            node = node.next
        return list(found)

    @property
    def unread(self) -> bool:
        """Whether nothing emitted so far reads what arrives."""
        received = self._received
        return all(user in received for node in received for user in node.users)

    def put_off(self, graph: fx.Graph) -> None:
        """Let what arrives come after all that is emitted so far."""
        for node in self._received:
            last_node(graph).append(node)
