"""The operators of namespace `autoshard::`. Importing this package registers them with torch.

One module per operator; each registers its own kernels, fake kernel and gradient.
"""

from passes.ops import contract as contract
from passes.ops import graph_marks as graph_marks
from passes.ops import halo_op as halo_op
from passes.ops.attention_op import attention, attention_backward
from passes.ops.circular_pad import circular_pad, circular_pad_backward
from passes.ops.ctc_loss import ctc_loss, ctc_loss_backward
from passes.ops.grouped_product import grouped_mm
from passes.ops.neighborhood_op import neighborhood_attention, neighborhood_attention_backward
from passes.ops.uniform import uniform, uniform_reference

__all__ = [
    "attention",
    "attention_backward",
    "circular_pad",
    "circular_pad_backward",
    "ctc_loss",
    "ctc_loss_backward",
    "grouped_mm",
    "neighborhood_attention",
    "neighborhood_attention_backward",
    "uniform",
    "uniform_reference",
]
