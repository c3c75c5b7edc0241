"""`verify_parallel` of parallel code as people write it: what is right passes, and what is not is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from autoshard import MeshSpec, ShardingError, VerifyReport, verify_parallel
from tests.ranks import RankFailure, RankPool
from tests.verification import by_hand
from tests.verification.by_hand import (
    WIDTH,
    Columns,
    InMicroBatches,
    Noted,
    OfAllTokens,
    Rows,
    SequenceParts,
    coarse_decoder,
    decoder,
    in_columns_and_rows,
    logits,
    noted,
    noted_without_dropout,
    packed,
    reduced,
)

SIZES = torch.Generator().manual_seed(1)
TOKENS = torch.randint(by_hand.VOCABULARY, (2, 4, 8), generator=SIZES).unbind()
X = (torch.randn(4, 6, WIDTH, dtype=torch.float64, generator=SIZES),)
DATA: Mapping[str, Any] = {"batch_axes": ("ranks",)}
SEQUENCE: Mapping[str, Any] = {"sequence_axes": ("ranks",)}


def by_column_and_row(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return in_columns_and_rows(model)


def logits_in_parts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A part of the vocabulary on each rank."""
    return parallelize_module(model, mesh, {"head": ColwiseParallel()})


class LossParallel(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, model.loss = model, False

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return F.cross_entropy(self.model(ids, labels).flatten(0, 1), labels.flatten())


def loss_in_parts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    tokens = RowwiseParallel(input_layouts=Replicate())
    return LossParallel(parallelize_module(model, mesh, {"head": head, "tokens": tokens}))


def packed_in_parts(model: Any, mesh: DeviceMesh) -> nn.Module:
    """A rank has a part of the queries, one of the keys and one of the values."""
    weight, bias = model.qkv.weight.detach(), model.qkv.bias.detach()
    mine = lambda one: nn.Parameter(torch.cat([of.chunk(2)[dist.get_rank()] for of in one.chunk(3)]))
    model.qkv, model.o = Columns(model.qkv), Rows(model.o)
    model.qkv.weight, model.qkv.bias = mine(weight), mine(bias)
    return model


def in_micro_batches(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return InMicroBatches(fully_shard(model, mesh=mesh))


def of_all_tokens(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Losses are summands, and so are gradients."""
    model.loss = False
    return OfAllTokens(reduced(model, 1.0))


def sequence_parts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return reduced(SequenceParts(model), 2.0)


def sequence_ends(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return reduced(SequenceParts(model, ends=True), 2.0)


def in_bfloat16(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def products_in_parts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class MeansReduced(Noted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean((0, 1))
        dist.all_reduce(mean)
        self.mean.lerp_(mean / 2.0, 0.1)
        return x * self.drawn + self.down(self.up(x).relu())


def means_reduced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    model.__class__ = MeansReduced
    return reduced(model, 2.0)


def verified(
    rank: int, make_model: Any, make: Callable[..., nn.Module], inputs: tuple[Any, ...], options: Any
) -> VerifyReport:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    return verify_parallel(make_model, make, inputs, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("make_model", "make", "inputs", "options"),
    [
        (decoder, by_column_and_row, TOKENS, {}),
        (logits, logits_in_parts, TOKENS, {}),
        (decoder, loss_in_parts, TOKENS, {}),
        (packed, packed_in_parts, X, {}),
        (decoder, in_micro_batches, TOKENS, DATA),
        (decoder, of_all_tokens, TOKENS, DATA),
        (decoder, sequence_parts, TOKENS, SEQUENCE),
        (logits, sequence_parts, TOKENS, SEQUENCE),
        (logits, sequence_ends, TOKENS, SEQUENCE),
        (noted, products_in_parts, X, {}),
        (noted_without_dropout, means_reduced, X, DATA),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_right(ranks: RankPool, make_model: Any, make: Any, inputs: Any, options: Any) -> None:
    reports = ranks.run(verified, make_model, make, inputs, options, world=2)
    assert all(report == reports[0] for report in reports)
    assert reports[0].ok and reports[0].max_error < 1e-12, reports[0]


def test_a_narrow_dtype_is_coarser(ranks: RankPool) -> None:
    """Rounding of bfloat16 passes, unless a tolerance is asked for."""
    report = ranks.run(verified, coarse_decoder, in_bfloat16, TOKENS, DATA, world=2)[0]
    assert report.ok and 1e-3 < report.max_error < 0.05, report
    asked = {**DATA, "tolerance": 1e-4}
    report = ranks.run(verified, coarse_decoder, in_bfloat16, TOKENS, asked, world=2)[0]
    assert not report.ok and report.first_divergence is not None


def test_outputs_in_parts_are_said_to_be(ranks: RankPool) -> None:
    report = ranks.run(verified, logits, logits_in_parts, TOKENS, {}, world=2)[0]
    assert "output 0, in parts over ranks" in report.errors


def bias_everywhere(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return in_columns_and_rows(model, everywhere=True)


def not_summed_back(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return in_columns_and_rows(model, once=False)


def with_biases_of_zero() -> nn.Module:
    model = decoder()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def averaged_twice(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return reduced(model, 4.0)


def bfloat16_averaged_twice(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for parameter in (model := in_bfloat16(model, mesh)).parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    return model


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(2.0)


def never_synchronized(model: Any, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh).set_requires_gradient_sync(False)
    return model


def not_shifted(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return reduced(SequenceParts(model, shifted=False), 2.0)


def keys_not_summed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return reduced(SequenceParts(model, summed=False), 2.0)


def means_of_each_rank(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return reduced(model, 2.0)


def seeded_by_rank(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return products_in_parts(model, mesh)


def wrong_in_micro_batches(model: Any, mesh: DeviceMesh) -> nn.Module:
    last = model.layers[1].down
    last.forward = lambda x: F.linear(x, last.weight, 2.0 * last.bias)
    return InMicroBatches(reduced(model, 2.0))


@pytest.mark.parametrize(
    ("make_model", "make", "inputs", "options", "node", "said"),
    [
        (decoder, bias_everywhere, TOKENS, {}, "layers.1.down", "its output"),
        (with_biases_of_zero, bias_everywhere, TOKENS, {}, "layers.1.down", "its output"),
        (decoder, not_summed_back, TOKENS, {}, "layers.1.attention.o", "the gradient of its output"),
        (decoder, averaged_twice, TOKENS, DATA, "tokens.weight", "its gradient, 0.5 times the model's"),
        (
            coarse_decoder,
            bfloat16_averaged_twice,
            TOKENS,
            DATA,
            "tokens.weight",
            "its gradient, 0.5 times the model's",
        ),
        (decoder, never_synchronized, TOKENS, DATA, "tokens.weight", "its gradient, which a rank lacks"),
        (decoder, not_shifted, TOKENS, SEQUENCE, "layers.0.attention.o", "its output"),
        (decoder, keys_not_summed, TOKENS, SEQUENCE, "layers.1.attention.v", "the gradient of its output"),
        (noted_without_dropout, means_of_each_rank, X, DATA, "mean", "its value after the call"),
        (noted, seeded_by_rank, X, {}, "drop", "its output"),
        (decoder, wrong_in_micro_batches, TOKENS, DATA, "layers.1.down", "its output"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_wrong(
    ranks: RankPool, make_model: Any, make: Any, inputs: Any, options: Any, node: str, said: str
) -> None:
    reports = ranks.run(verified, make_model, make, inputs, options, world=2)
    assert all(str(report) == str(reports[0]) for report in reports)
    first = reports[0].first_divergence
    assert not reports[0].ok and first is not None and first.node == node, reports[0]
    assert re.sub(r"0\.(49|50)\d* times", "0.5 times", first.op) == said, first


def test_what_draws_is_said(ranks: RankPool) -> None:
    report = ranks.run(verified, noted, seeded_by_rank, X, {}, world=2)[0]
    assert "(Dropout, which draws random numbers)" in str(report)


def none(model: nn.Module, mesh: DeviceMesh) -> None:
    products_in_parts(model, mesh)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Noted()


@pytest.mark.parametrize(
    ("make_model", "make", "said"),
    [
        (noted, none, "what make_parallel returns is None\n  try: return model"),
        (on_meta, products_in_parts, "make_model returns a model on `meta`"),
    ],
)
def test_functions_that_do_not_fit(ranks: RankPool, make_model: Any, make: Any, said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        ranks.run(verified, make_model, make, X, {}, world=2)


class Late(nn.Module):
    """Makes a buffer when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("seen", x.detach().mean((0, 1)))
        return self.up(x)


def late() -> nn.Module:
    return Late().double()


def test_a_buffer_that_is_made_in_the_call(ranks: RankPool) -> None:
    report = ranks.run(verified, late, means_of_each_rank, X, DATA, world=2)[0]
    assert report.first_divergence is not None and report.first_divergence.node == "seen"


class Returning(nn.Module):
    """What is made of the columns of a product. how: "spectrum", complex; "ids", whole numbers; "twice"; "nothing"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: torch.Tensor) -> Any:
        y = self.up(x)
        made = {"spectrum": torch.fft.fft(y), "ids": y.argmax(-1), "twice": (y, [y, 3]), "nothing": None}
        return made[self.how]


@pytest.mark.parametrize("how", ["spectrum", "ids", "twice", "nothing"])
def test_what_a_model_returns(ranks: RankPool, how: str) -> None:
    make_model = partial(_returning, how)
    if how == "nothing":
        with pytest.raises(RankFailure, match="the model returns no tensor"):
            ranks.run(verified, make_model, means_of_each_rank, X, DATA, world=2)
        return
    right = ranks.run(verified, make_model, wrapped, X, DATA, world=2)[0]
    assert right.ok and "output 0" in right.errors
    wrong = ranks.run(verified, make_model, moved, X, DATA, world=2)[0]
    assert wrong.first_divergence is not None and wrong.first_divergence.node == "up"


def _returning(how: str) -> nn.Module:
    return Returning(how).double()


def wrapped(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    computed = any(parameter.requires_grad for parameter in model.parameters())
    return DistributedDataParallel(model, static_graph=True) if computed else model


def moved(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Another weight on each rank."""
    with torch.no_grad():
        model.up.weight.copy_(model.up.weight.roll(1 + dist.get_rank(), 0))
    return model


def test_axes_that_do_not_fit() -> None:
    for options, named in [
        ({"sequence_axes": ("cp",)}, "sequence_axes names 'cp'"),
        ({"batch_axes": ("dp",), "sequence_axes": ("dp",)}, "which batch_axes has too"),
        ({"tolerance": "1"}, "tolerance is '1'"),
    ]:
        with pytest.raises(ShardingError) as caught:
            verify_parallel(packed, packed_in_parts, X, mesh=MeshSpec({"dp": 2}), **options)
        assert named in str(caught.value) and "\n  try: " in str(caught.value)
