"""Which ops capture takes apart, and into what.

Prefer primitives over hand-written rules: a norm written as sums and pointwise ops shards by the rules
of sums and pointwise ops (sync batch norm, sharded layer norm and vocabulary-parallel losses are then
found, not coded). Kept whole: products, convolution, attention, embedding, pooling, resizing, patches, gather, scatter,
sort, uniform, normal and exponential draws (a pass gives them a seed) and every pointwise op.

Here: random draws with a known form (torch's own, ATen/native/TransformationHelper.h for geometric and Cauchy;
`multinomial` races exponentials), determinants and solves as factorizations, what is written to diagonals as a choice,
and distances of all pairs.

Torch factorizes the transposed matrix if it lies in rows, and the gradient's formula asks the traced tensor for that:
a rank whose part lies otherwise would factorize another matrix than its gradient takes it for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.capture.decomposed_places import PLACES
from passes.capture.decomposed_sums import SUMS, or_of_nothing
from passes.ir.torch_compat import torch_decompositions

aten = torch.ops.aten


def normal(mean: Tensor | float, std: Tensor | float) -> Tensor:
    """mean + std z, of the shape that they broadcast to."""
    shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
    like = std if isinstance(std, Tensor) else mean
    assert isinstance(like, Tensor)
    return torch.randn_like(like.expand(shape)) * std + mean


def normal_of_size(mean: float, std: float, size: list[int], **options: Any) -> Tensor:
    return torch.randn(size, **options) * std + mean


def log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return torch.exp(torch.randn_like(x) * std + mean)


def geometric(x: Tensor, p: float) -> Tensor:
    """ceil(log(1 - u) / log(1 - p)), at least 1."""
    tries = (
        torch.rand_like(x, dtype=torch.float32).neg().log1p() / math.log1p(-p)
        if p < 1
        else torch.ones_like(x)
    )
    return tries.ceil().clamp_min(1).to(x.dtype)


def cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    """median + sigma tan(pi (u - 1/2))."""
    return torch.tan((torch.rand_like(x) - 0.5) * math.pi) * sigma + median


def random_between(x: Tensor, low: int, high: int | None) -> Tensor:
    """Whole numbers in [low, high); without `high`, as many as the dtype holds every one of."""
    if high is None:
        exact = 2 / torch.finfo(x.dtype).eps if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
        high = int(exact) + 1
    return torch.randint_like(x, low, high)


def multinomial(p: Tensor, samples: int, replacement: bool = False) -> Tensor:
    """The places of the largest p / e, e exponential: of each sample's own e with replacement, else of one."""
    if replacement and samples > 1:
        p = p.unsqueeze(-2).expand(*p.shape[:-1], samples, p.shape[-1])
    races = p / aten.exponential.default(torch.empty_like(p, memory_format=torch.contiguous_format))
    if replacement and samples > 1:
        return races.argmax(-1)
    return races.argmax(-1, keepdim=True) if samples == 1 else races.topk(samples).indices


def rrelu_with_noise(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    _generator: None = None,
) -> tuple[Tensor, Tensor]:
    """A slope of its own for each element below zero; in evaluation the mean one for all."""
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slopes = torch.where(x > 0, 1.0, torch.rand_like(x) * (upper - lower) + lower)
    return x * slopes, slopes


def _torchs_own(form: Callable[..., Any]) -> Callable[..., Any]:
    """A draw from a generator of the user's own stays as it is: capture names it in an error."""

    def draw(*args: Any, generator: Any = None, **options: Any) -> Any:
        owned = generator is not None or any(isinstance(arg, torch.Generator) for arg in args)
        return NotImplemented if owned else form(*args, **options)

    return draw


_DRAWN: dict[Any, Callable[..., Any]] = {
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.float_float: normal_of_size,
    aten.log_normal.default: log_normal,
    aten.geometric.default: geometric,
    aten.cauchy.default: cauchy,
    getattr(aten.random, "from"): random_between,
    aten.random.to: lambda x, high: random_between(x, 0, high),
    aten.random.default: lambda x: random_between(x, 0, None),
    aten.multinomial.default: multinomial,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
}


def _transposed(a: Tensor) -> bool:
    """Whether torch's kernels factorize, and its formulas expect, the transposed `a`."""
    return a.is_contiguous() and not a.is_complex()


def _factorized(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LU, pivots and info."""
    return aten.linalg_lu_factor_ex.default(a.mT if _transposed(a) else a)


def _sign(pivots: Tensor) -> Tensor:
    """Of the permutation, 1 or -1: each row that was exchanged with another changes it."""
    exchanged = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype) != pivots
    return 1 - 2 * (exchanged.sum(-1) % 2)


def det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lu, pivots, _ = _factorized(a)
    return _sign(pivots) * lu.diagonal(0, -2, -1).prod(-1), lu, pivots


def slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, _ = _factorized(a)
    diagonal = lu.diagonal(0, -2, -1)
    return _sign(pivots) * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), lu, pivots


def solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A `b` of the shape of a batch of vectors is one."""
    lu, pivots, info = _factorized(a)
    vectors = b.ndim == 1 or b.shape == a.shape[:-1]
    right = b.unsqueeze(-1) if vectors else b
    x = aten.linalg_lu_solve.default(lu, pivots, right, left=left, adjoint=_transposed(a))
    return x.squeeze(-1) if vectors else x, lu, pivots, info


def diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """`src` in each row, and there where the column is the row's."""
    x = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = x.shape[-2:]
    before = max(0, -offset)
    each = aten.constant_pad_nd.default(src, [before, rows - before - src.shape[-1]], 0)
    chosen = torch.arange(columns) - torch.arange(rows).unsqueeze(-1) == offset
    return torch.where(chosen, each.unsqueeze(-1), x).movedim((-2, -1), (dim1, dim2))


def _pairs(n: int) -> Tensor:
    """Of rows i < j, their place among all [n * n]."""
    i, j = torch.triu_indices(n, n, 1)
    return i * n + j


def pdist_forward(x: Tensor, p: float = 2) -> Tensor:
    n = x.shape[0]
    each = aten._cdist_forward.default(x, x, p, 2)  # without products, as torch's own
    return each.reshape(n * n).index_select(0, _pairs(n))


def pdist_backward(grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Tensor:
    """A pair moves both of its rows."""
    n = x.shape[0]
    one, other = (x.new_zeros(n * n).index_add(0, _pairs(n), t).reshape(n, n) for t in (grad, distances))
    return aten._cdist_backward.default(one + one.mT, x, x, p, other + other.mT)


def scaled_product(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`F.scaled_mm` with one scale for each matrix (recipe 0), or one of each row and column (1)."""
    if recipe_a != recipe_b or recipe_a not in ([0], [1]) or any((*swizzle_a, *swizzle_b)):
        return NotImplemented
    return aten._scaled_mm.default(a, b, *scale_a, *scale_b, bias, None, out_dtype, use_fast_accum)


_FORMS: dict[Any, Callable[..., Any]] = {
    **{op: _torchs_own(form) for op, form in _DRAWN.items()},
    aten._linalg_det.default: det,
    aten._linalg_slogdet.default: slogdet,
    aten._linalg_solve_ex.default: solve_ex,
    aten.trace.default: lambda a: a.diagonal().sum(),
    aten.diagonal_scatter.default: diagonal_scatter,
    aten._pdist_forward.default: pdist_forward,
    aten._pdist_backward.default: pdist_backward,
    aten._scaled_mm_v2.default: scaled_product,
}


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
_prelu_kernel _prelu_kernel_backward rrelu_with_noise_backward pixel_shuffle pixel_unshuffle
hardswish_backward hardtanh_backward hardsigmoid_backward elu_backward leaky_relu_backward
glu glu_backward mish_backward softplus_backward masked_fill
rsub tril triu tril_indices triu_indices linalg_vector_norm norm aminmax count_nonzero
addmv addr split unsafe_split unsafe_split_with_sizes diag_embed diagonal_backward eye linspace
affine_grid_generator _euclidean_dist dist vdot std_mean nansum take rot90 narrow_copy block_diag
renorm index_fill index_copy max_unpool2d max_unpool3d _safe_softmax
_unsafe_masked_index _unsafe_masked_index_put_accumulate
"""


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Op overload -> function, for `torch.export`, `make_fx` and AOT autograd. Ours win over torch's."""
    known = [getattr(aten, name) for name in _TORCH.split() if hasattr(aten, name)]
    means = (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward)
    of_means = {op: or_of_nothing(form) for op, form in torch_decompositions(means).items()}
    return {**torch_decompositions(known), **of_means, **SUMS, **PLACES, **_FORMS}
