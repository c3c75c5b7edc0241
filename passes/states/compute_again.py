"""Forward ops that the backward runs once more, instead of reading what the forward kept."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from passes.ir.joint import JointGraph
from passes.ir.rewrite import duplicate_joint
from passes.states.backward_copies import Copies, copies_in


def compute_again(joint: JointGraph, names: Collection[str]) -> JointGraph:
    """A new joint graph in which the backward reads no value of the forward ops `names`, but copies of them.

        %h: f32[8, 64] = gelu(%a)                                   names: h
        %y: f32[8, 16] = contract(%h, %w)
        %dw            = contract(%dy, %h)                          // backward
        ->
        %h: f32[8, 64] = gelu(%a)
        %y: f32[8, 16] = contract(%h, %w)
        %h_again: f32[8, 64] = gelu(%a)                             // backward
        %dw            = contract(%dy, %h_again)

    A copy stands right before its first reader and reads what the backward has: copies, or values that are kept. It
    is an op like any other, with layouts and a price of its own. Views of a copied value are copied with it. Readers
    in the backward share a `use`, as everywhere; so a weight is gathered once for an op that runs again and for its
    gradient.

    names: ops of the forward. `joint` is left as it is, and one that has these copies is returned.
    """
    missing = set(names) - set(copies_in(joint)) if names else set[str]()
    if not missing:
        return joint
    copied = duplicate_joint(joint)
    Copies(copied, names).write()
    return copied


def runs_again(node: fx.Node) -> bool:
    """Whether `node` is a copy, or was made for one: the backward runs it, whatever else may."""
    return bool(node.meta.get("again"))
