"""The rules of all ops, by name: this table is the specification (notation: notation.py).

`pointwise` names the arguments it is linear in; ops that torch tags as pointwise and that are not
here follow `pointwise()`: all dims, linear in nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from passes.rules.core.opcall import Builder
from passes.rules.core.spec import spec
from passes.rules.plain import attention_rules as attention
from passes.rules.plain import creation, indexing, movement, products, reductions, scattering, views
from passes.rules.plain import grouped_rules as grouped
from passes.rules.plain.fourier import transform
from passes.rules.plain.pointwise import pointwise
from passes.rules.windowed import convolution, patches, shifting
from passes.rules.windowed import neighborhood_rules as neighborhood
from passes.rules.windowed.adaptive import (
    adaptive_average,
    adaptive_average_backward,
    adaptive_max,
    adaptive_max_backward,
)
from passes.rules.windowed.padding_rules import edge_pad, edge_pad_backward
from passes.rules.windowed.pooling import average_pool, average_pool_backward, max_pool, max_pool_backward
from passes.rules.windowed.resizing import resize, resize_backward

__all__ = ["TABLE"]

_POINTWISE: dict[str, Builder] = {
    # arithmetic
    "aten::add.Tensor": pointwise("self other"),
    "aten::add.Scalar": pointwise("self other"),
    "aten::sub.Tensor": pointwise("self other"),
    "aten::sub.Scalar": pointwise("self other"),
    "aten::rsub.Tensor": pointwise("self other"),
    "aten::rsub.Scalar": pointwise("self other"),
    "aten::mul.Tensor": pointwise("self", "other"),
    "aten::mul.Scalar": pointwise("self", "other"),
    "aten::div.Tensor": pointwise("self"),
    "aten::div.Scalar": pointwise("self"),
    "aten::neg.default": pointwise("self"),
    "aten::positive.default": pointwise("self"),
    "aten::deg2rad.default": pointwise("self"),
    "aten::rad2deg.default": pointwise("self"),
    "aten::addcmul.default": pointwise("self tensor1", "self tensor2"),
    "aten::addcdiv.default": pointwise("self tensor1"),
    "aten::lerp.Scalar": pointwise("self end"),
    "aten::lerp.Tensor": pointwise("self end"),
    # choice, where the choice itself is whole
    "aten::where.self": pointwise("self other"),
    "aten::where.ScalarOther": pointwise("self other"),
    "aten::where.ScalarSelf": pointwise("self other"),
    "aten::where.Scalar": pointwise(),
    "aten::masked_fill.Scalar": pointwise("self value"),
    "aten::masked_fill.Tensor": pointwise("self value"),
    # copies and casts
    "aten::clone.default": pointwise("self"),
    "aten::alias.default": pointwise("self"),
    "aten::detach.default": pointwise("self"),
    "aten::lift_fresh_copy.default": pointwise("self"),
    "aten::_to_copy.default": pointwise("self"),
    "aten::copy.default": pointwise("src"),
    "prims::convert_element_type.default": pointwise("a"),
    "aten::conj_physical.default": pointwise("self"),
    "aten::_conj.default": pointwise("self"),
    "aten::zeros_like.default": pointwise(),
    "aten::ones_like.default": pointwise(),
    "aten::empty_like.default": pointwise(),
    "aten::full_like.default": pointwise(),
    "aten::fill.Scalar": pointwise(),
    "aten::fill.Tensor": pointwise("value"),
    "autoshard::use.default": pointwise("x"),
    # derivatives of pointwise ops: linear in the gradient
    "aten::threshold_backward.default": pointwise("grad_output"),
    "aten::gelu_backward.default": pointwise("grad_output"),
    "aten::silu_backward.default": pointwise("grad_output"),
    "aten::sigmoid_backward.default": pointwise("grad_output"),
    "aten::tanh_backward.default": pointwise("grad_output"),
    "aten::logit_backward.default": pointwise("grad_output"),
    "aten::elu_backward.default": pointwise("grad_output"),
    "aten::leaky_relu_backward.default": pointwise("grad_output"),
    "aten::hardswish_backward.default": pointwise("grad_output"),
    "aten::hardsigmoid_backward.default": pointwise("grad_output"),
    "aten::hardtanh_backward.default": pointwise("grad_output"),
    "aten::softplus_backward.default": pointwise("grad_output"),
    "aten::mish_backward.default": pointwise("grad_output"),
    "aten::native_dropout_backward.default": pointwise("grad_output"),
    # pointwise, but not tagged so
    "aten::hardswish.default": pointwise(),
    "aten::polar.default": pointwise(),
    "aten::complex.default": pointwise("real imag"),
    "aten::floor_divide.default": pointwise(),
    "aten::isin.Tensor_Scalar": pointwise(),
}

_REDUCTIONS: dict[str, Builder] = {
    "aten::sum.default": reductions.reduce("sum", "self"),
    "aten::sum.dim_IntList": reductions.reduce("sum", "self"),
    "aten::mean.default": reductions.mean("self"),
    "aten::mean.dim": reductions.mean("self"),
    "aten::amax.default": reductions.extremum("max"),
    "aten::amin.default": reductions.extremum("min"),
    "aten::max.default": reductions.extremum("max"),
    "aten::min.default": reductions.extremum("min"),
    "aten::any.default": reductions.reduce("max"),
    "aten::any.dim": reductions.reduce("max"),
    "aten::any.dims": reductions.reduce("max"),
    "aten::all.default": reductions.reduce("min"),
    "aten::all.dim": reductions.reduce("min"),
    "aten::all.dims": reductions.reduce("min"),
    "aten::argmax.default": reductions.reduce_whole(),
    "aten::argmin.default": reductions.reduce_whole(),
    "aten::max.dim": reductions.reduce_whole(),
    "aten::min.dim": reductions.reduce_whole(),
    "aten::prod.default": reductions.reduce_whole(),
    "aten::prod.dim_int": reductions.reduce_whole(),
    "aten::var.correction": reductions.reduce_whole(),
    "aten::std.correction": reductions.reduce_whole(),
    "aten::var_mean.correction": reductions.reduce_whole(),
    "aten::logsumexp.default": reductions.reduce_whole(),
    "aten::linalg_vector_norm.default": reductions.reduce_whole(),
    "aten::histc.default": reductions.histogram,
    # dims that one rank must see whole
    "aten::cumsum.default": reductions.along("dim", "self"),
    "aten::cumprod.default": reductions.along("dim"),
    "aten::logcumsumexp.default": reductions.along("dim"),
    "aten::cummax.default": reductions.along("dim"),
    "aten::cummin.default": reductions.along("dim"),
    "aten::sort.default": reductions.along("dim"),
    "aten::sort.stable": reductions.along("dim"),
    "aten::topk.default": reductions.along("dim"),
    "aten::_softmax.default": reductions.along("dim"),
    "aten::_log_softmax.default": reductions.along("dim"),
    "aten::_softmax_backward_data.default": reductions.along("dim", "grad_output"),
    "aten::_log_softmax_backward_data.default": reductions.along("dim", "grad_output"),
    "aten::glu.default": reductions.along("dim"),
}

_VIEWS: dict[str, Builder] = {
    "aten::view.default": views.view,
    "aten::reshape.default": views.view,
    "aten::_unsafe_view.default": views.view,
    "aten::unsqueeze.default": views.view,
    "aten::squeeze.default": views.squeeze,
    "aten::squeeze.dim": views.squeeze,
    "aten::squeeze.dims": views.squeeze,
    "aten::permute.default": views.permute,
    "aten::transpose.int": views.transpose,
    "aten::t.default": views.transpose,
    "aten::expand.default": views.expand,
    "aten::repeat.default": views.repeat,
    "aten::view_as_complex.default": spec("... p -> ...; p: whole; linear: 0", views.view_as_complex),
    "aten::view_as_real.default": spec("... -> ... p; linear: 0"),
}

_MOVEMENT: dict[str, Builder] = {
    "aten::slice.Tensor": shifting.slice_,
    "aten::slice_backward.default": shifting.slice_backward,
    "aten::select.int": movement.select,
    "aten::select_backward.default": movement.select_backward,
    "aten::cat.default": shifting.cat,
    "aten::stack.default": movement.stack,
    "aten::split_with_sizes.default": shifting.split,
    "aten::split.Tensor": shifting.split,
    "aten::unbind.int": movement.unbind,
    "aten::constant_pad_nd.default": shifting.pad,
    "aten::roll.default": shifting.roll,
    "aten::flip.default": shifting.flip,
    "autoshard::circular_pad.default": shifting.circular_pad,
    "autoshard::circular_pad_backward.default": shifting.circular_pad_backward,
    "aten::tril.default": spec("... r c -> ... r c; linear: 0", movement.diagonal_part),
    "aten::triu.default": spec("... r c -> ... r c; linear: 0", movement.diagonal_part),
}

_CREATION: dict[str, Builder] = {
    "aten::full.default": creation.created(),
    "aten::zeros.default": creation.created(),
    "aten::ones.default": creation.created(),
    "aten::empty.memory_format": creation.created(),
    "aten::new_zeros.default": creation.new_like,
    "aten::new_ones.default": creation.new_like,
    "aten::new_full.default": creation.new_like,
    "aten::new_empty.default": creation.new_like,
    "aten::scalar_tensor.default": spec(" -> "),
    "aten::arange.default": creation.arange,
    "aten::arange.start": creation.arange,
    "aten::arange.start_step": creation.arange,
    "prims::iota.default": creation.iota,
    "autoshard::uniform.default": creation.uniform,
}

_INDEXING: dict[str, Builder] = {
    "aten::embedding.default": spec("v d, *t -> *t d; v: sum; linear: 0", indexing.embedding),
    "aten::embedding_dense_backward.default": scattering.embedding_backward,
    "aten::gather.default": indexing.gather,
    "aten::index_select.default": indexing.index_select,
    "aten::index.Tensor": indexing.index,
    "aten::_unsafe_index.Tensor": indexing.index,
    "aten::scatter.src": scattering.scatter,
    "aten::scatter.value": scattering.scatter,
    "aten::scatter_add.default": scattering.scatter_add,
    "aten::scatter_reduce.two": scattering.scatter_reduce,
    "aten::index_add.default": scattering.index_add,
    "aten::index_put.default": scattering.index_put,
    "aten::_unsafe_index_put.default": scattering.index_put,
}

_PRODUCTS: dict[str, Builder] = {
    "autoshard::contract.default": products.contract,
    "aten::mm.default": spec("m k, k n -> m n; linear: 0; linear: 1"),
    "aten::bmm.default": spec("b m k, b k n -> b m n; linear: 0; linear: 1"),
    "aten::mv.default": spec("m k, k -> m; linear: 0; linear: 1"),
    "aten::dot.default": spec("k, k -> ; linear: 0; linear: 1"),
    "aten::addmm.default": products.add_product("m n", "m k", "k n", "m n"),
    "aten::baddbmm.default": products.add_product("b m n", "b m k", "b k n", "b m n"),
    "autoshard::grouped_mm.default": grouped.grouped_mm,
    "autoshard::attention.default": attention.attention,
    "autoshard::attention_backward.default": attention.attention_backward,
    "autoshard::neighborhood_attention.default": neighborhood.neighborhood_attention,
    "autoshard::neighborhood_attention_backward.default": neighborhood.neighborhood_attention_backward,
    "aten::convolution.default": convolution.convolution,
    "aten::convolution_backward.default": convolution.convolution_backward,
}

_TRANSFORMS: dict[str, Builder] = {f"aten::_fft_{kind}.default": transform for kind in ("r2c", "c2r", "c2c")}

_POOLING: dict[str, Builder] = {
    f"aten::{name.format(space)}.default": build(space)
    for space in (2, 3)
    for name, build in (
        ("max_pool{}d_with_indices", max_pool),
        ("max_pool{}d_with_indices_backward", max_pool_backward),
        ("avg_pool{}d", average_pool),
        ("avg_pool{}d_backward", average_pool_backward),
        ("_adaptive_avg_pool{}d", adaptive_average),
        ("_adaptive_avg_pool{}d_backward", adaptive_average_backward),
        ("adaptive_max_pool{}d", adaptive_max),
        ("adaptive_max_pool{}d_backward", adaptive_max_backward),
    )
}

_PATCHES: dict[str, Builder] = {
    "aten::im2col.default": patches.patches,
    "aten::col2im.default": patches.patches_back,
    "aten::unfold.default": patches.windows_along,
    "aten::unfold_backward.default": patches.windows_along_back,
}

_PADDING: dict[str, Builder] = {
    f"aten::{kind}_pad{space}d{suffix}.default": build(space)
    for kind in ("reflection", "replication")
    for space in (1, 2, 3)
    for suffix, build in (("", edge_pad), ("_backward", edge_pad_backward))
}

_RESIZING: dict[str, Builder] = {
    f"aten::{name}{suffix}": build(space)
    for space, names in (
        (1, "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
        (2, "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d"),
        (2, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
        (3, "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d"),
    )
    for name in names.split()
    for suffix, build in ((".default", resize), (".vec", resize), ("_backward.default", resize_backward))
}

TABLE: Mapping[str, Builder] = MappingProxyType(
    {
        **_POINTWISE,
        **_REDUCTIONS,
        **_VIEWS,
        **_MOVEMENT,
        **_CREATION,
        **_INDEXING,
        **_PRODUCTS,
        **_TRANSFORMS,
        **_POOLING,
        **_PATCHES,
        **_PADDING,
        **_RESIZING,
    }
)
"""Op name, "namespace::op.overload", -> how its rule is made."""
