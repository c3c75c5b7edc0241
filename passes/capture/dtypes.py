"""Dtypes that an op does not take: fake tensors compute a product's shape whatever its operands are of."""

from __future__ import annotations

import torch
from torch import fx

from cost_model.errors import CaptureError
from passes.capture.provenance import node_module, node_source

__all__ = ["check_dtypes"]

aten = torch.ops.aten
_ALIKE = frozenset(
    {
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.addbmm.default,
        aten.mv.default, aten.addmv.default, aten.dot.default, aten.convolution.default, aten.linear.default,
    }
)  # fmt: skip


def check_dtypes(graph: fx.Graph) -> None:
    """CaptureError for the first product or convolution of a raw graph whose operands differ in dtype: eager torch
    refuses it."""
    for node in graph.nodes:
        if node.target in _ALIKE:
            values = [operand.meta["val"] for operand in node.all_input_nodes]
            dtypes = list(dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor)))
            if len(dtypes) > 1:
                raise _error(node, dtypes)


def _error(node: fx.Node, dtypes: list[torch.dtype]) -> CaptureError:
    where = " ".join(part for part in (node_module(node), node_source(node)) if part)
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return CaptureError(
        f"cannot capture: {node.target} of {names}{' at ' + where if where else ''}, which torch does not compute\n"
        f"  try: inputs of the parameters' dtype, x.to({dtypes[-1]})"
    )
