"""Which ops capture takes apart, and into what.

Prefer primitives over hand-written rules: a norm written as sums and pointwise ops shards by the rules
of sums and pointwise ops (sync batch norm, sharded layer norm and vocabulary-parallel losses are then
found, not coded). Kept whole: products, convolution, attention, embedding, pooling, resizing, patches, gather, scatter,
sort, uniform, normal and exponential draws (a pass gives them a seed) and every pointwise op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from passes.capture.decomposed_draws import DRAWS
from passes.capture.decomposed_matrices import MATRICES
from passes.capture.decomposed_norms import NORMS
from passes.capture.decomposed_places import PLACES
from passes.capture.decomposed_shapes import SHAPES
from passes.capture.decomposed_sums import SUMS
from passes.ir.torch_compat import torch_decompositions

__all__ = ["decomposition_table"]

# Taken apart the way torch itself does it. A name that this torch lacks is skipped.
_TORCH = """
_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp
nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
soft_margin_loss soft_margin_loss_backward log_sigmoid_forward log_sigmoid_backward
native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_with_update_functional
_batch_norm_no_update batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
miopen_batch_norm_backward _weight_norm_interface
hardswish_backward hardtanh_backward hardsigmoid_backward elu_backward leaky_relu_backward
glu glu_backward mish_backward softplus_backward masked_fill
rsub tril triu tril_indices triu_indices linalg_vector_norm norm aminmax count_nonzero
addmv addr split diag_embed eye linspace
affine_grid_generator _euclidean_dist dist vdot std_mean nansum take rot90 narrow_copy block_diag
renorm index_fill index_copy max_unpool2d max_unpool3d _safe_softmax
_unsafe_masked_index _unsafe_masked_index_put_accumulate
"""


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Op overload -> function, for `torch.export`, `make_fx` and AOT autograd. Ours win over torch's."""
    aten = torch.ops.aten
    known = [getattr(aten, name) for name in _TORCH.split() if hasattr(aten, name)]
    return {**torch_decompositions(known), **SUMS, **NORMS, **SHAPES, **MATRICES, **PLACES, **DRAWS}
