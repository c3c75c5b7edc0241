"""The rules of all ops, by name: this table is the specification (notation: notation.py).

`pointwise` names the arguments it is linear in; ops that torch tags as pointwise and that are not
here follow `pointwise()`: all dims, linear in nothing. No row for an op that no canonical graph holds, since capture
takes it apart or a pass spells it otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from passes.rules.core.assemble import empty_safe, pointwise
from passes.rules.core.notation import spec
from passes.rules.core.rule import Builder
from passes.rules.plain import attention, indexing, products, views
from passes.rules.windowed import convolution, patches, pooling, resizing, shifting


def _rows(builder: Builder, names: str) -> dict[str, Builder]:
    """One builder for all of `names`: "sum" is aten::sum.default, "sum.dim_IntList" an overload."""
    return {f"aten::{name}" if "." in name else f"aten::{name}.default": builder for name in names.split()}


TABLE: Mapping[str, Builder] = MappingProxyType(
    {
        # pointwise
        **_rows(pointwise("self other"), "add.Tensor add.Scalar sub.Tensor sub.Scalar"),
        **_rows(pointwise("self", "other"), "mul.Tensor mul.Scalar"),
        **_rows(pointwise("self"), "div.Tensor div.Scalar neg deg2rad rad2deg"),
        **_rows(pointwise("self tensor1", "self tensor2"), "addcmul"),
        **_rows(pointwise("self tensor1"), "addcdiv"),
        **_rows(pointwise("self end"), "lerp.Scalar lerp.Tensor"),
        # choice, where the choice itself is whole
        **_rows(pointwise("self other"), "where.self"),
        # copies and casts
        **_rows(pointwise("self"), "clone _to_copy conj_physical"),
        "prims::convert_element_type.default": pointwise("a"),
        **_rows(pointwise("value"), "fill.Tensor"),
        "autoshard::use.default": pointwise("x"),
        "autoshard::either.default": pointwise("kept again"),
        # derivatives of pointwise ops: linear in the gradient
        **_rows(
            pointwise("grad_output"),
            "threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward logit_backward",
        ),
        **_rows(pointwise("grad_out"), "hardshrink_backward"),
        **_rows(pointwise("grad_output"), "softshrink_backward"),
        # pointwise, but not tagged so
        **_rows(pointwise(), "hardswish polar floor_divide isin.Tensor_Scalar"),
        **_rows(pointwise("real imag"), "complex"),
        # reductions
        **_rows(views.reduce("sum", "self"), "sum sum.dim_IntList"),
        **_rows(views.extremum("max"), "amax max"),
        **_rows(views.extremum("min"), "amin min"),
        **_rows(views.reduce("max"), "any any.dim any.dims"),
        **_rows(views.reduce("min"), "all all.dim all.dims"),
        **_rows(views.reduce_whole, "argmax argmin max.dim min.dim prod prod.dim_int"),
        **_rows(views.reduce_whole, "kthvalue mode median median.dim nanmedian nanmedian.dim"),
        **_rows(views.histogram, "histc"),
        # dims that one rank must see whole
        **_rows(views.along("dim", "self"), "cumsum"),
        **_rows(views.along("dim"), "cumprod logcumsumexp cummax cummin sort sort.stable topk"),
        **_rows(views.along("dim", "self", "other"), "linalg_cross"),
        # views
        **_rows(views.view, "reshape"),
        **_rows(views.permute, "permute"),
        **_rows(views.expand, "expand"),
        **_rows(products.diagonal, "diagonal"),
        **_rows(spec("... p -> ...; p: whole; linear: 0", views.in_rows), "view_as_complex"),
        **_rows(spec("... -> ... p; linear: 0"), "view_as_real"),
        **_rows(views.other_dtype, "view.dtype"),
        # movement
        **_rows(shifting.slice_, "slice.Tensor"),
        **_rows(shifting.slice_backward, "slice_backward"),
        **_rows(shifting.cat, "cat"),
        **_rows(shifting.split, "split_with_sizes"),
        **_rows(shifting.pad, "constant_pad_nd"),
        **_rows(shifting.roll, "roll"),
        **_rows(shifting.flip, "flip"),
        "autoshard::circular_pad.default": shifting.circular_pad,
        "autoshard::circular_pad_backward.default": shifting.circular_pad_backward,
        # creation
        **_rows(views.full, "full"),
        **_rows(views.arange, "arange.start_step"),
        "prims::iota.default": views.iota,
        "autoshard::uniform.default": views.uniform,
        # indexing
        **_rows(spec("v d, *t -> *t d; v: sum; linear: 0", indexing.embedding), "embedding"),
        **_rows(indexing.embedding_backward, "embedding_dense_backward"),
        **_rows(indexing.gather, "gather"),
        **_rows(indexing.select, "select.int"),
        **_rows(indexing.index_select, "index_select"),
        **_rows(indexing.index, "index.Tensor _unsafe_index.Tensor"),
        **_rows(indexing.scatter, "scatter.src scatter.value"),
        **_rows(indexing.scatter_add, "scatter_add"),
        **_rows(indexing.scatter_reduce, "scatter_reduce.two"),
        **_rows(indexing.index_add, "index_add"),
        **_rows(indexing.index_put, "index_put _unsafe_index_put"),
        **_rows(indexing.looked_up("self"), "searchsorted.Tensor bucketize.Tensor"),
        **_rows(indexing.looked_up("elements"), "isin.Tensor_Tensor"),
        **_rows(products.columns, "_embedding_bag _embedding_bag_backward _embedding_bag_dense_backward"),
        **_rows(products.columns, "_embedding_bag_per_sample_weights_backward"),
        # sampling
        **_rows(
            empty_safe(spec("n c *x, n *y t -> n c *y; *x: whole; t: whole; linear: 0")),
            "grid_sampler_2d grid_sampler_3d",
        ),
        **_rows(
            empty_safe(
                spec(
                    "n c *y, n c *x, n *y t -> n c *x, n *y t; *y: sum; c: sum; *x: whole; t: whole; linear: 0"
                )
            ),
            "grid_sampler_2d_backward grid_sampler_3d_backward",
        ),
        # losses
        "autoshard::ctc_loss.default": empty_safe(
            spec("t n c, n s, n, n -> n; t: whole; c: whole; s: whole"),
        ),
        "autoshard::ctc_loss_backward.default": empty_safe(
            spec("n, t n c, n s, n, n -> t n c; t: whole; c: whole; s: whole; linear: 0"),
        ),
        # pieces
        "autoshard::piece.default": views.piece,
        "autoshard::collect.default": views.collect,
        # products
        "autoshard::contract.default": products.contract,
        "autoshard::routed_mm.default": products.routed_mm,
        "autoshard::routed_outer.default": products.routed_outer,
        "autoshard::own_rows.default": products.own_rows,
        "autoshard::sum_rows.default": products.sum_rows,
        "autoshard::attention.default": attention.attention,
        "autoshard::attention_backward.default": attention.attention_backward,
        "autoshard::neighborhood_attention.default": patches.neighborhood_attention,
        "autoshard::neighborhood_attention_backward.default": patches.neighborhood_attention_backward,
        **_rows(convolution.convolution, "convolution"),
        **_rows(convolution.convolution_backward, "convolution_backward"),
        **_rows(views.transform, "_fft_r2c _fft_c2r _fft_c2c"),
        **_rows(products.int_product, "_int_mm"),
        **_rows(products.scaled_product, "_scaled_mm"),
        **_rows(empty_safe(spec("... m d, ... n d -> ... m n; d: whole")), "_cdist_forward"),
        **_rows(
            empty_safe(spec("... m n, ... m d, ... n d, ... m n -> ... m d; n: sum; linear: 0")),
            "_cdist_backward",
        ),
        # matrices
        **_rows(products.batched("2 -> 2"), "cholesky cholesky_inverse"),
        **_rows(products.batched("2 -> 2", localize=views.in_rows), "linalg_matrix_exp"),
        **_rows(products.batched("2 -> 1"), "_linalg_eigvals"),
        **_rows(products.batched("2 -> 2 0"), "linalg_inv_ex linalg_cholesky_ex"),
        **_rows(products.batched("2 -> 2 1 0"), "linalg_lu_factor_ex linalg_ldl_factor_ex"),
        **_rows(products.batched("2 -> 2 2 2"), "linalg_lu"),
        **_rows(products.batched("2 1 -> 2 2 2"), "lu_unpack"),
        **_rows(products.batched("2 -> 2 2"), "linalg_qr"),
        **_rows(products.batched("2 -> 2 1 2"), "_linalg_svd"),
        **_rows(products.batched("2 -> 1 2"), "_linalg_eigh linalg_eig"),
        **_rows(products.batched("2 -> 2 1"), "geqrf"),
        **_rows(products.batched("2 1 -> 2"), "linalg_householder_product"),
        **_rows(products.batched("2 1 2 -> 2"), "ormqr"),
        **_rows(products.batched("2 0 0 -> 2"), "linalg_pinv.atol_rtol_tensor"),
        **_rows(products.batched("2 2 -> 2", "B"), "linalg_solve_triangular"),
        **_rows(products.batched("2 2 -> 2", "self"), "cholesky_solve"),
        **_rows(products.batched("2 2 -> 2 2"), "triangular_solve"),
        **_rows(products.batched("2 1 2 -> 2", "B"), "linalg_lu_solve linalg_ldl_solve"),
        # patches
        **_rows(patches.patches, "im2col"),
        **_rows(patches.patches_back, "col2im"),
        **_rows(patches.windows_along, "unfold"),
        **_rows(patches.windows_along_back, "unfold_backward"),
        # pooling
        **{
            key: builder
            for space in (2, 3)
            for name, build in (
                ("max_pool{}d_with_indices", pooling.max_pool),
                ("max_pool{}d_with_indices_backward", pooling.max_pool_backward),
                ("avg_pool{}d", pooling.average_pool),
                ("avg_pool{}d_backward", pooling.average_pool_backward),
                ("_adaptive_avg_pool{}d", pooling.adaptive_average),
                ("_adaptive_avg_pool{}d_backward", pooling.adaptive_average_backward),
                ("adaptive_max_pool{}d", pooling.adaptive_max),
                ("adaptive_max_pool{}d_backward", pooling.adaptive_max_backward),
            )
            for key, builder in _rows(build(space), name.format(space)).items()
        },
        # padding
        **{
            f"aten::{kind}_pad{space}d{suffix}.default": build(space)
            for kind in ("reflection", "replication")
            for space in (1, 2, 3)
            for suffix, build in (("", resizing.edge_pad), ("_backward", resizing.edge_pad_backward))
        },
        # resizing
        **{
            f"aten::{name}{suffix}.default": build(space)
            for space, names in (
                (1, "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
                (2, "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d"),
                (2, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
                (3, "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d"),
            )
            for name in names.split()
            for suffix, build in (("", resizing.resize), ("_backward", resizing.resize_backward))
        },
    }
)
"""Op name, "namespace::op.overload", -> how its rule is made."""
