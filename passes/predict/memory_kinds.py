"""What the bytes of a rank's program are for: kinds of values, and what a person calls a value."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, get_args

from torch import fx

from passes.ir.op_traits import is_collective, is_view, op_name
from passes.predict.step_events import COLLECTIVE_KINDS
from passes.states.compute_again import runs_again

Kind = Literal["parameters", "gradients", "optimizer", "inputs", "kept", "again", "moved", "working"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""parameters; their gradients, as they are returned; the optimizer's states; inputs: of the call, buffers, constants
and the gradient of the loss; kept: what the forward saves for the backward; again: what the backward computes once
more; moved: what transfers send and receive, in buckets or not (gathers, reductions), to its last reader; working: all
else that a phase makes and still reads."""


def kind_of_op(node: fx.Node, forward: Set[str]) -> Kind:
    """Of what `node` makes, if it is neither kept nor a gradient. forward: names of the forward's ops, for an op of the
    backward: it has those that it computes again under their names."""
    if is_collective(node) or "turn" in node.meta or _only_sent(node):
        return "moved"
    return "again" if runs_again(node) or node.name in forward else "working"


def _only_sent(node: fx.Node) -> bool:
    """Whether collectives alone read the value."""
    readers = list(node.users)
    return bool(readers) and all(
        is_collective(reader) or (is_view(reader) and _only_sent(reader)) for reader in readers
    )


def made_by(node: fx.Node) -> tuple[str, str]:
    """(name, op): whose value an op makes, a module's or a transfer's, and what it does."""
    name = str(node.meta.get("serves") or node.meta.get("module") or "")
    op = (is_collective(node) and COLLECTIVE_KINDS.get(node.target)) or op_name(node).rpartition(".")[0]
    return name, op.removeprefix("aten.").removeprefix("autoshard.")
