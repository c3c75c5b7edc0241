from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_USES
from passes.ir.joint import JointGraph
from passes.ir.properties import Property, described
from passes.ir.rewrite import replace

__all__ = ["NO_DUPLICATES", "MergeDuplicates"]

aten = torch.ops.aten


def _identity(node: fx.Node) -> Hashable:
    return node.target, _key(node.args), _key(node.kwargs)


def _duplicate(joint: JointGraph) -> str | None:
    first: dict[Hashable, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.op == "call_function" and _mergeable(node):
            twin = first.setdefault(_identity(node), node)
            if twin is not node:
                return f"{described(node)}: computes what %{twin.name} does"
    return None


NO_DUPLICATES = Property("nothing is computed twice", _duplicate)


@dataclass(frozen=True)
class MergeDuplicates(GraphPass):
    """Compute a common subexpression (same op, same arguments) once, where it first appears.

        %a: f32[8] = aten.exp(%x)
        %b: f32[8] = aten.exp(%x)
        %y: f32[8] = aten.add(%a, %b)
        ->
        %a: f32[8] = aten.exp(%x)
        %y: f32[8] = aten.add(%a, %a)

    An op of the backward and its twin in the forward become one of the forward: whether to save the value or to
    compute it again is
    decided when the phases are split. Not merged: random ops; `clone`, kept only where identity
    matters; constants with dims, which are free and should each take the layout of their reader.
    """

    requires = (ONE_SPELLING, NO_USES)
    ensures = (NO_DUPLICATES,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        first: dict[Hashable, fx.Node] = {}
        for node in list(joint.graph.nodes):
            if node.op != "call_function" or not _mergeable(node):
                continue
            twin = first.setdefault(_identity(node), node)
            if twin is not node:
                # The twin may stand first and yet be the backward's: tracing orders by use, not by phase.
                if node.meta["phase"] == "forward":
                    twin.meta["phase"] = "forward"
                replace(node, twin)
        return joint


def _mergeable(node: fx.Node) -> bool:
    if node.target is aten.full.default:
        return not node.args[0]
    tags = getattr(node.target, "tags", ())
    return node.target is not aten.clone.default and torch.Tag.nondeterministic_seeded not in tags


def _key(argument: Any) -> Hashable:
    """Equal keys mean the same argument: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in sorted(argument.items()))
    if isinstance(argument, float):
        return float, repr(argument)
    return type(argument), argument
