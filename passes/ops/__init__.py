"""The operators of namespace `autoshard::`. Importing this package registers them with torch.

Each module registers the kernels, fake kernels and gradients of its own.
"""

from passes.ops import graph_marks as graph_marks
from passes.ops import halo_op as halo_op
from passes.ops.attention_op import attention, attention_backward
from passes.ops.layer_ops import circular_pad, circular_pad_backward, ctc_loss, ctc_loss_backward
from passes.ops.neighborhood_op import neighborhood_attention, neighborhood_attention_backward
from passes.ops.product_ops import grouped_mm
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
