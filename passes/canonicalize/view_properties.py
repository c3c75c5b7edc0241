"""Properties of permutes and reshapes, which one pass brings about and another may undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import passes.ops.contract  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::contract)
from passes.ir.properties import of_ops

__all__ = ["ONE_RESHAPE", "PERMUTES_ABSORBED", "PERMUTES_FUSED"]

aten = torch.ops.aten


def _reads(op: Any, view: Any) -> Callable[[fx.Node], str | None]:
    """A complaint of an `op` that reads a `view`."""

    def complaint(node: fx.Node) -> str | None:
        read = [operand.name for operand in node.all_input_nodes if operand.target is view]
        return f"reads %{read[0]}, a {view.overloadpacket.__name__}" if node.target is op and read else None

    return complaint


PERMUTES_FUSED = of_ops("no permute reads a permute", _reads(aten.permute.default, aten.permute.default))
ONE_RESHAPE = of_ops("no reshape reads a reshape", _reads(aten.reshape.default, aten.reshape.default))
PERMUTES_ABSORBED = of_ops(
    "no contract reads a permute", _reads(torch.ops.autoshard.contract.default, aten.permute.default)
)
