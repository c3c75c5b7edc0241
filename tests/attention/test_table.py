"""Which kernel computes an attention on CUDA, from fakes: no GPU and no CUDA build of torch is needed.

The expected kernels are written by hand from torch's own conditions (sdp_utils.cpp), not from our table.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import fx

from cost_model.errors import UnsupportedOpError
from passes.compile.bind_device import expand_ops
from passes.ops.attention_choice import Case, choose
from passes.ops.attention_table import TABLE, Chip, check_layout, contract_of
from tests.attention.graphs import MASKS, Call, copies_of, expanded, graph_of, kernels_of

HALF, WIDE, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
AMPERE, HOPPER = (8, 0), (9, 0)
FLASH = ("flash", "flash_backward")
EFFICIENT = ("efficient", "efficient_backward")
MATH = ("math",)


def _check(module: fx.GraphModule, call: Call) -> None:
    """Every node that is read has a value; results look as the op's fakes say."""
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        assert "val" in node.meta and (node.op == "placeholder" or node.users), node.format_node()
    wanted = next(n for n in graph_of(call).graph.nodes if n.op == "output").args[0]
    made = next(n for n in module.graph.nodes if n.op == "output").args[0]
    for old, new in zip(wanted, made, strict=True):
        a, b = old.meta["val"], new.meta["val"]
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        assert _strides(a) == _strides(b)


def _strides(x: torch.Tensor) -> list[int]:
    """Of a dim of size 1 it says nothing."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


# On compute capability 8.0 and 9.0: (dtype is half, has a mask, causal with unequal lengths) decides; the head size
# only above 256, which flash attention has not.
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [HALF, WIDE, SINGLE, DOUBLE], ids=str)
def test_kernel_by_dtype_mask_and_head_size(dtype: torch.dtype, mask: str) -> None:
    heads = {DOUBLE: (64, 20), HALF: (64, 20, 288)}.get(dtype, (64, 20, 72, 200, 256, 288))
    for d, (s, t), causal in itertools.product(heads, ((64, 64), (50, 77)), (False, True)):
        if causal and mask != "none":
            continue
        call = Call(dtype, mask, causal, d, s=s, t=t)  # type: ignore[arg-type]
        if dtype == DOUBLE:
            wanted = MATH
        elif dtype == SINGLE or mask != "none" or d == 288 or (causal and s != t):
            wanted = EFFICIENT
        else:
            wanted = FLASH
        module = expanded(call, HOPPER)
        assert kernels_of(module) == wanted, call
        _check(module, call)


BY_CHIP: list[tuple[tuple[int, int], torch.dtype, int, tuple[str, ...]]] = [
    # head sizes 193 to 224 are padded to 200 to 224
    *((chip, WIDE, d, FLASH) for chip in ((8, 0), (9, 0), (10, 0)) for d in (64, 192, 193, 224, 256)),
    *((chip, WIDE, d, FLASH) for chip in ((8, 6), (8, 9), (12, 0)) for d in (64, 192, 225, 256)),
    *(
        (chip, dtype, d, EFFICIENT)
        for chip in ((8, 6), (8, 9), (12, 0))
        for dtype in (HALF, WIDE)
        for d in (193, 224)
    ),
    ((7, 5), HALF, 64, EFFICIENT),
    ((7, 5), SINGLE, 64, EFFICIENT),
    ((7, 5), WIDE, 64, MATH),
    ((13, 0), WIDE, 64, MATH),  # torch has no fused kernel above 12.1
    ((12, 1), WIDE, 64, FLASH),
]


@pytest.mark.parametrize(("capability", "dtype", "d", "wanted"), BY_CHIP, ids=str)
def test_kernel_by_compute_capability(
    capability: tuple[int, int], dtype: torch.dtype, d: int, wanted: tuple[str, ...]
) -> None:
    call = Call(dtype, d=d)
    module = expanded(call, capability)
    assert kernels_of(module) == wanted
    _check(module, call)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (Call(WIDE, d=64, e=32), EFFICIENT),  # flash attention has one head size
        (Call(WIDE, d=20, e=24), EFFICIENT),
        (Call(WIDE, "bool", causal=True), MATH),
        (Call(WIDE, b=70000, s=1, t=1, d=8), MATH),  # a launch grid ends at 65535
        (Call(WIDE, s=1, t=1, d=8, causal=True), FLASH),
        (Call(WIDE, "row", s=50, t=1), EFFICIENT),
        (Call(WIDE, "bool", s=1, t=9), EFFICIENT),
    ],
    ids=str,
)
def test_kernel_of_odd_calls(call: Call, wanted: tuple[str, ...]) -> None:
    module = expanded(call, AMPERE)
    assert kernels_of(module) == wanted
    _check(module, call)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("d", [64, 72, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_aligned_operands_are_not_copied(dtype: torch.dtype, d: int, causal: bool) -> None:
    module = expanded(Call(dtype, causal=causal, d=d), HOPPER)
    assert copies_of(module) == []
    calls = [n for n in module.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]
    assert {str(n.target).split(".")[1] for n in calls} <= {
        f"_scaled_dot_product_{'flash' if dtype == HALF else 'efficient'}_attention{suffix}"
        for suffix in ("", "_backward")
    } | {"empty", "new_empty"}


def test_an_aligned_bias_is_neither_copied_nor_written_out() -> None:
    """[b, 1, 1, t] and [b, h, s, t] of q's dtype are read where they lie, broadcast dims with stride 0."""
    for mask, stride in (("row", (64, 0, 0, 1)), ("float", (4 * 64 * 64, 64 * 64, 64, 1))):
        module = expanded(Call(WIDE, mask), HOPPER)  # type: ignore[arg-type]
        assert copies_of(module) == []
        calls = [n for n in module.graph.nodes if "efficient_attention" in str(n.target)]
        assert [n.args[3 if "backward" not in str(n.target) else 4].meta["val"].stride() for n in calls] == [
            stride
        ] * 2


@pytest.mark.parametrize(
    ("dtype", "cudnn", "heads"), [(WIDE, 0, 2), (WIDE, 92000, 4), (SINGLE, 0, 4)], ids=str
)
def test_grouped_heads_are_written_out_where_a_kernel_needs_it(
    dtype: torch.dtype, cudnn: int, heads: int
) -> None:
    call = Call(dtype, causal=True, g=2)
    module = expand_ops(graph_of(call), Chip(HOPPER, cudnn=cudnn))
    _check(module, call)
    calls = [n for n in module.graph.nodes if "attention" in str(n.target)]
    keys = [n.args[1 + ("backward" in str(n.target))].meta["val"] for n in calls]
    assert [key.shape[1] for key in keys] == [heads] * 2


@pytest.mark.parametrize("mask", ["turned", "sliced", "broadcast"])
@pytest.mark.parametrize("t", [64, 77, 1])
def test_a_bias_has_contiguous_aligned_rows(mask: str, t: int) -> None:
    module = expanded(Call(WIDE, mask, s=50, t=t), HOPPER)  # type: ignore[arg-type]
    biases = [n.args[3 if "backward" not in str(n.target) else 4] for n in _efficient_calls(module)]
    assert len(biases) == 2
    for bias in biases:
        value = bias.meta["val"]
        assert value.shape == (2, 4, 50, t) and value.stride(-1) == 1 and value.storage_offset() % 8 == 0
        assert all(stride % 8 == 0 for stride in value.stride()[:-1])


def _efficient_calls(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if "efficient_attention" in str(n.target)]


@pytest.mark.parametrize("order", ["bshd", "bhsd", "sliced", "turned"])
@pytest.mark.parametrize("d", [64, 20])
@pytest.mark.parametrize("dtype", [WIDE, SINGLE], ids=str)
def test_operands_lie_as_the_backward_reads_them(order: str, d: int, dtype: torch.dtype) -> None:
    """The efficient kernel takes row m of `out` to begin at m x heads x head size, whatever its strides say
    (`o_strideM`), and the flash kernel reads lse without strides: other layouts give wrong gradients, and no error."""
    call = Call(dtype, d=d, order=order, s=50, t=77)  # type: ignore[arg-type]
    module = expanded(call, HOPPER)
    _check(module, call)
    (node,) = [n for n in module.graph.nodes if "attention_backward" in str(n.target)]
    flash = "flash" in str(node.target)
    grad, q, k, v, *_ = (a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args)
    out, lse = (node.args[i].meta["val"] for i in ((4, 5) if flash else (5, 6)))
    width = -(-d // 8) * 8
    for x in (grad, out):
        assert x.stride() == (50 * 4 * width, width, 4 * width, 1) and x.storage_offset() % 8 == 0
    for x in (q, k, v):
        assert x.stride(-1) == 1 and x.storage_offset() % 8 == 0 and all(n % 8 == 0 for n in x.stride()[:-1])
    rows = 50 if flash else 64
    assert lse.stride() == (4 * rows, rows, 1) and lse.shape[-1] == rows


@pytest.mark.parametrize("turned", [(0, 1, 2, 3), (2, 3, 0, 1)], ids=str)
def test_a_saved_result_that_was_laid_out_otherwise_is_put_right(turned: tuple[int, ...]) -> None:
    """`out` and lse as a collective may leave them."""
    for dtype in (WIDE, SINGLE):
        graph = graph_of(Call(dtype)).graph
        node = next(n for n in graph.nodes if str(n.target) == "autoshard.attention_backward.default")
        for index, order in ((5, turned), (6, (2, 0, 1))):
            if node.args[4] is None:
                saved = node.args[index]
                value = saved.meta["val"]
                with value.fake_mode:
                    back = [order.index(i) for i in range(value.ndim)]
                    laid = value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
                with graph.inserting_before(node):
                    held = graph.placeholder(f"held{index}")
                held.meta["val"] = laid
                node.update_arg(index, held)
        module = expand_ops(fx.GraphModule(torch.nn.Module(), graph), Chip(HOPPER))
        (call,) = [n for n in module.graph.nodes if "attention_backward" in str(n.target)]
        out, lse = (call.args[i].meta["val"] for i in ((4, 5) if dtype == WIDE else (5, 6)))
        assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()


def test_a_device_that_is_not_here_must_be_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device to ask")
    with pytest.raises(UnsupportedOpError, match="not known on a machine without CUDA\n  try: chip="):
        expand_ops(graph_of(Call(WIDE)))


BROKEN = [
    (
        "k",
        1,
        lambda x: x.to(SINGLE),
        "attention by flash: k is torch.float32, and q torch.bfloat16\n  try: k.to",
    ),
    ("v", 2, lambda x: x.narrow(1, 0, 2), r"attention by flash: v is \[2, 2, 64, 64\], not \[2, 4, 64, 64\]"),
    (
        "mask",
        3,
        lambda x: x.new_empty(2, 1, 64, 64, dtype=torch.int64),
        "mask is torch.int64\n  try: a bool mask",
    ),
    (
        "mask",
        3,
        lambda x: x.new_empty(2, 3, 64, 64),
        r"mask is \[2, 3, 64, 64\]\n  try: a shape that broadcasts",
    ),
    ("k", 1, lambda x: x.to("cpu"), "k is on cpu, q on cuda:0"),
]


@pytest.mark.parametrize(("name", "index", "change", "message"), BROKEN, ids=lambda x: str(x)[:24])
def test_a_broken_contract_is_an_error_of_expansion(
    name: str, index: int, change: object, message: str
) -> None:
    graph = graph_of(Call(WIDE)).graph
    node = next(n for n in graph.nodes if str(n.target) == "autoshard.attention.default")
    value = node.args[0].meta["val"]
    with value.fake_mode:
        other = change(node.args[index].meta["val"] if node.args[index] is not None else value)  # type: ignore[operator]
    with graph.inserting_before(node):
        placeholder = graph.placeholder(f"{name}_")
    placeholder.meta["val"] = other
    node.update_arg(index, placeholder)
    with pytest.raises(UnsupportedOpError, match=message):
        expand_ops(fx.GraphModule(torch.nn.Module(), graph), Chip(HOPPER))


def test_a_layout_that_a_kernel_would_misread_is_refused() -> None:
    row = contract_of("efficient")
    for name, x in (
        ("q", torch.empty(2, 4, 8, 20)),
        ("out", torch.empty(2, 4, 8, 16)),
        ("lse", torch.empty(2, 33)[:, 1:]),
    ):
        with pytest.raises(
            UnsupportedOpError, match=f"attention by efficient: {name} of shape.*\n  try: {name}.contig"
        ):
            check_layout(row, name, x)


def test_every_row_is_a_kernel_that_is_used() -> None:
    assert [row.kernel for row in TABLE] == ["cudnn", "flash", "efficient", "cpu_flash", "math"]
    case = Case("cuda", WIDE, 2, 4, 64, 64, 64, 64)
    assert choose(case, Chip(HOPPER, cudnn=91900)) == "cudnn"
    assert choose(case, Chip(HOPPER)) == "flash"
    assert choose(replace(case, mask="bool"), Chip(HOPPER)) == "efficient"
    assert choose(case, Chip(HOPPER, hip=True)) == "math"
    assert choose(replace(case, device="cpu"), None) == "cpu_flash"
    assert choose(replace(case, device="cpu", e=32), None) == "math"
    assert choose(replace(case, device="mps"), None) == "math"
    assert choose(replace(case, s=0), Chip(HOPPER)) == "empty"


@pytest.mark.parametrize(
    ("chip", "change", "wanted"),
    [
        (Chip(HOPPER, cudnn=92000), {"is_causal": True}, "cudnn"),
        (Chip(HOPPER, cudnn=92000), {"is_causal": True, "s": 48}, "cudnn"),  # it aligns at the top left
        (Chip(HOPPER, cudnn=92000), {"d": 64, "e": 32}, "cudnn"),
        (Chip(HOPPER, cudnn=92000), {"dtype": SINGLE}, "efficient"),
        (Chip(HOPPER, cudnn=92000), {"mask": "bool"}, "efficient"),  # pytorch#196678
        (Chip(HOPPER, cudnn=92000), {"s": 1}, "flash"),  # cudnn-frontend#1072
        (Chip(HOPPER, cudnn=92000), {"d": 136, "e": 136}, "flash"),
        (Chip(HOPPER, cudnn=91800), {}, "flash"),
        (Chip(HOPPER, cudnn=92100), {}, "flash"),
        (Chip(AMPERE, cudnn=92000), {}, "flash"),
        (Chip((10, 0), cudnn=92000), {}, "flash"),
    ],
    ids=str,
)
def test_cudnn_is_chosen_where_it_was_compared(chip: Chip, change: dict[str, object], wanted: str) -> None:
    case = replace(Case("cuda", WIDE, 2, 4, 64, 64, 64, 64), **change)  # type: ignore[arg-type]
    assert choose(case, chip) == wanted


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_of_cudnn_copies_nothing_that_is_aligned(causal: bool) -> None:
    call = Call(WIDE, causal=causal, d=64)
    module = expand_ops(graph_of(call), Chip(HOPPER, cudnn=92000))
    assert kernels_of(module) == ("cudnn", "cudnn_backward")
    assert copies_of(module) == []
    _check(module, call)


def test_no_seed_is_a_scalar_that_a_compiler_would_write() -> None:
    """What is read only with dropout has a dim: of such tensors Inductor makes no kernel."""
    for dtype in (WIDE, SINGLE):
        for chip in (Chip(HOPPER), Chip(HOPPER, cudnn=92000)):
            module = expand_ops(graph_of(Call(dtype, d=64)), chip)
            made = [n.meta["val"] for n in module.graph.nodes if "new_empty" in str(n.target)]
            assert made and all(value.ndim == 1 for value in made)
