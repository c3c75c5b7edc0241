"""Ops that capture writes in ops that have rules: the values and gradients of eager torch, in whatever layout, and
nothing left without a rule."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_model.errors import CaptureError
from passes.canonicalize import canonicalize
from passes.capture.capture import capture
from passes.ir.joint import JointGraph
from passes.rules.core.rule_registry import is_fallback
from tests.canonicalize.graphs import joint_of, run
from tests.capture.running import check

aten = torch.ops.aten


def _chosen(x: Tensor) -> Tensor:
    return x.detach()[..., :1] > 0


def _matrices(x: Tensor) -> Tensor:
    """[3, 4, 5] -> invertible matrices [3, 4, 4]."""
    return x @ x.mT + torch.eye(4)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "all in another order": lambda x: torch.as_strided(x * 1, [5, 1, 12], [1, 7, 5]),
    "rows of a batch": lambda x: torch.as_strided(x * 1, [3, 5, 6], [20, 3, 1]),
    "from the middle": lambda x: torch.as_strided(x.permute(1, 0, 2) * 1, [2, 2], [7, 2], 3),
    "adaptive pool": lambda x: nn.AdaptiveAvgPool1d(1)((x * 2).transpose(1, 2)),
    "strided scatter": lambda x: torch.as_strided_scatter(x * 1, x[0, :2, :2] * 5, [2, 2], [7, 2], 3),
    "strided scatter of all": lambda x: torch.as_strided_scatter(x * 1, x.permute(2, 0, 1) * 5, [5, 3, 4], [1, 20, 5]),
    "masked scatter of rows": lambda x: x.masked_scatter(_chosen(x).expand_as(x), x.flip(0) * 5),
    "masked scatter": lambda x: x.masked_scatter(x.detach() > 0, x.sin()),
    "masked scatter, broadcast": lambda x: x[0].masked_scatter(_chosen(x), x.cos()),
    "repeated, in rows": lambda x: (x * 2).permute(2, 0, 1).repeat(2, 1, 1).view(30, 4),
    "det": lambda x: torch.linalg.det(_matrices(x)),
    "det of a transposed": lambda x: torch.linalg.det(_matrices(x).tril().mT),
    "slogdet": lambda x: torch.linalg.slogdet(_matrices(x).tril(1)).logabsdet,
    "solve": lambda x: torch.linalg.solve_ex(_matrices(x).tril(2), x).result,
    "solve for vectors": lambda x: torch.linalg.solve_ex(_matrices(x).tril(2).mT, x[..., 0]).result,
    "solve from the right": lambda x: torch.linalg.solve_ex(_matrices(x).tril(2), x.mT, left=False).result,
    "inverse": lambda x: torch.linalg.inv_ex(_matrices(x)).inverse,
    "cholesky": lambda x: torch.linalg.cholesky_ex(_matrices(x)).L,
    "qr": lambda x: torch.linalg.qr(x.mT).R,
    "eigh": lambda x: torch.linalg.eigh(_matrices(x)).eigenvalues,
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "matrix exp": lambda x: torch.linalg.matrix_exp(_matrices(x) / 50),
    "every third": lambda x: torch.slice_scatter(x * 1, x[..., 1:3] * 5, 2, 1, 5, 3),
    "every second, to the end": lambda x: torch.slice_scatter(x * 1, x[:, ::2] * 5, 1, -4, 10, 2),
    "diagonal": lambda x: x.diagonal(1, 0, 2) * x.diagonal(1, 0, 2),
    "diagonal, below": lambda x: x.diagonal(-2, 1, 2).exp(),
    "diagonal scatter": lambda x: torch.diagonal_scatter(x * 1, x[0, :, :3] * 5, -1, 2, 0),
    "trace": lambda x: torch.trace(x[0]),
    "cdist": lambda x: torch.cdist(x, x * 2),
    "pdist": lambda x: nn.functional.pdist(torch.cat([x[0], x[0, :1]])) * nn.functional.pdist(x[1].repeat(2, 1)[:5], 1),
    "place of a number": lambda x: (
        x.sum() * torch.searchsorted(torch.arange(5), 2.0, side="right")
        + x.sum() * torch.bucketize(2, torch.arange(0.0, 5.0), out_int32=True)
    ),
    "cdist by products": lambda x: torch.cdist(x, x * 2, compute_mode="use_mm_for_euclid_dist"),
    "grid sample": lambda x: nn.functional.grid_sample(x[None], x[None, ..., :2] / 5, align_corners=False),
    "unpool": lambda x: nn.functional.max_unpool2d(
        *nn.functional.max_pool2d(x[None], (2, 5), return_indices=True), (2, 5)
    ),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "index fill": lambda x: (
        x.index_fill(1, torch.arange(0, 3, 2), 3.0) + x.index_copy(0, torch.arange(1, 2), x[:1] * 2)
    ),
    "take": lambda x: torch.take(x, torch.arange(5, 35, 5).reshape(2, 3)),
    "shrink": lambda x: nn.functional.softshrink(x) * nn.functional.hardshrink(x, 0.1),
    "middle": lambda x: x.median(1).values + x.kthvalue(2, 1).values + x.nanmedian(1).values,
    "statistics": lambda x: (
        torch.std_mean(x, 1)[0] + x.nansum(1) + torch.dist(x, x * 3, 3) + torch.vdot(x[0, 0], x[0, 1])
    ),
    "cross": lambda x: torch.linalg.cross(x[..., :3], x[..., 2:]),
    "frames": lambda x: torch.stft(x.reshape(3, 20), 8, 4, window=x[0, 0, :1].expand(8), return_complex=True).abs(),
}  # fmt: skip


def _left(joint: JointGraph) -> set[str]:
    nodes = canonicalize(joint).graph.nodes
    return {str(n.target) for n in nodes if n.target is not operator.getitem and is_fallback(n)}


def test_values_gradients_and_rules() -> None:
    values = torch.randn(3, 4, 5, dtype=torch.float64)
    for name, function in CALLS.items():
        x = values.clone().requires_grad_()
        wanted = function(x)
        tangent = torch.randn(wanted.shape, dtype=wanted.dtype)
        gradient = torch.autograd.grad(wanted, x, tangent)
        joint = joint_of(function, values)
        found = run(joint, [values, tangent])
        for mine, eager in zip(found, (wanted, *gradient), strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-9, atol=1e-9, msg=name)
        assert not _left(joint), f"{name}: {_left(joint)}"


LABELS = torch.tensor([[3, 1, -1, 2, 0], [-1, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 0, -1, -1, 1]])


def test_labels_behind_the_first_that_is_none_do_not_count() -> None:
    """Those of a row end at -1; torch's own traced form counts what is behind it as label 0."""

    class Loss(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            each = nn.MultiLabelMarginLoss(reduction="none")(x, labels)
            return each, nn.functional.multilabel_margin_loss(x[0], labels[0])

    check(Loss(), torch.randn(4, 5, requires_grad=True), LABELS)


class _Warped(nn.Module):
    """A transformer of space whose weight is normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.turn(x.mean((1, 2))).reshape(-1, 2, 3)
        grid = nn.functional.affine_grid(theta, [x.shape[0], 4, 3, 5], align_corners=True)
        return nn.functional.grid_sample(x.permute(0, 3, 1, 2), grid, align_corners=True)


def test_gradients_of_modules() -> None:
    model, x = _Warped().double(), torch.randn(3, 4, 2, 4, dtype=torch.float64)
    joint = capture(model, (x,), {}).joint
    assert not _left(joint)
    wanted = model(x)
    tangent = torch.randn_like(wanted)
    given = dict(model.named_parameters())
    values = [{"tangent": tangent, "input": x}.get(end.kind, given.get(end.name)) for end in joint.inputs]
    with torch.no_grad():
        found = joint.module(*values)
    torch.testing.assert_close(found[0], wanted)
    gradients = torch.autograd.grad(wanted, list(given.values()), tangent)
    grads = {end.name: value for end, value in zip(joint.outputs, found, strict=True) if end.kind == "grad"}
    for name, gradient in zip(given, gradients, strict=True):
        torch.testing.assert_close(grads[name], gradient, msg=name)


class _Beyond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:].as_strided([2, 2], [4, 1], 0)


def test_memory_of_others_is_an_error() -> None:
    with pytest.raises(CaptureError, match=r"not the tensor's own\n  at .*as_strided.*\n  try: view, slice"):
        capture(_Beyond(), (torch.randn(3, 4),), {})


class _Loss(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.up(x), y)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss])
def test_losses_of_no_rows(loss: Callable[..., Tensor]) -> None:
    model, x, y = _Loss(loss), torch.zeros(0, 4), torch.zeros(0, 3)
    joint = capture(model, (x, y), {}).joint
    given = {**dict(model.named_parameters()), "args[0]": x, "args[1]": y}
    with torch.no_grad():
        value, *gradients = joint.module(*(given.get(end.name, torch.ones(())) for end in joint.inputs))
    assert value.isnan() and [float(one.abs().sum()) for one in gradients] == [0.0, 0.0]
