"""The operators of namespace `autoshard::`. Importing this package registers them with torch.

Each module registers the kernels, fake kernels and gradients of its own.
"""

from passes.ops import collective_ops as collective_ops
from passes.ops import halo_op as halo_op
from passes.ops import registration as registration
from passes.ops.attention_op import attention, attention_backward
from passes.ops.attention_window import neighborhood_attention, neighborhood_attention_backward
from passes.ops.layer_ops import (
    circular_pad,
    circular_pad_backward,
    ctc_loss,
    ctc_loss_backward,
    uniform,
    uniform_reference,
)
from passes.ops.routed_ops import routed_mm, routed_outer

__all__ = [
    "attention",
    "attention_backward",
    "circular_pad",
    "circular_pad_backward",
    "ctc_loss",
    "ctc_loss_backward",
    "neighborhood_attention",
    "neighborhood_attention_backward",
    "routed_mm",
    "routed_outer",
    "uniform",
    "uniform_reference",
]
