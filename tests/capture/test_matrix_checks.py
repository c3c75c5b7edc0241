"""Inverses, solutions and factors of matrices: torch checks for singular ones, and so does each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from autoshard import MeshSpec, find_plan, verify
from autoshard.runtime.call_program import Checks, Otherwise
from cost_model.errors import CaptureError
from passes.capture import capture
from tests.capture.running import check

L = torch.linalg
Of = Callable[[Tensor, Tensor], Tensor]


class Matrices(nn.Module):
    """A function of a batch of positive-definite matrices, and of others. x: [batch, 3, 3]."""

    def __init__(self, of: Of) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(3, 3), of

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return self.of(h @ h.mT + self.linear.bias.exp().diag(), h)


def jittered(a: Tensor, h: Tensor) -> Tensor:
    """As GPyTorch does."""
    factor, info = L.cholesky_ex(a)
    if not torch.any(info):
        return factor
    return L.cholesky_ex(a + (info > 0)[:, None, None] * torch.eye(3))[0]


OF: dict[str, Of] = {
    "jittered": jittered,
    "inv": lambda a, h: L.inv(a),
    "solve": L.solve,
    "cholesky": lambda a, h: L.cholesky(a),
    "cholesky_solve": lambda a, h: torch.cholesky_solve(h, L.cholesky(a)),
    "normal": lambda a, h: MultivariateNormal(h[..., 0], a).log_prob(h[..., 1]),
    "power": lambda a, h: L.matrix_power(a, -2),
    "lu_solve": lambda a, h: L.lu_solve(*L.lu_factor(a), h),
    "tensorinv": lambda a, h: L.tensorinv(a[0].reshape(3, 3, 1), 1),
    "checked": lambda a, h: L.inv_ex(a, check_errors=True).inverse,
    "eigvals": lambda a, h: L.eigvals(a).abs(),  # its backward solves
    "lstsq": lambda a, h: L.lstsq(a[:, :, :2], h).solution,
    "lstsq, its residuals": lambda a, h: L.lstsq(a[..., :2], h[..., 0], driver="gels").residuals,
    "lstsq of few rows": lambda a, h: (
        L.lstsq(a[:, :2], h[:, :2, 0], 1e-9, driver="gelsy")[0] * L.lstsq(a, h).rank[0]
    ),
    "in_place": lambda a, h: L.inv(a).neg().mul_(2),
}


@pytest.mark.parametrize("of", OF.values(), ids=OF)
def test_values_and_gradients(of: Of) -> None:
    check(Matrices(of), torch.randn(2, 3, 3))


def test_on_a_mesh() -> None:
    def several(a: Tensor, h: Tensor) -> Tensor:
        return L.inv(a) + L.solve(a, h) + L.cholesky(a)

    model, x = Matrices(several), torch.randn(4, 3, 3)
    plan = find_plan(model, MeshSpec({"dp": 2}), (x,), profile="cpu", refine="off")
    assert verify(model, plan, (x,)).ok


def test_an_orthogonal_parameter() -> None:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley")
    check(layer, torch.randn(2, 3))


def test_a_singular_matrix_raises_what_it_does_in_one_process() -> None:
    model = Matrices(lambda a, h: L.inv(h))
    call = capture(model, (torch.randn(2, 3, 3),), {}).call
    ((index, asked),) = call.checks
    assert isinstance(asked.error, L.LinAlgError) and "linalg.inv" in str(asked.error)
    outputs = [torch.tensor(False)] * (index + 1)
    Checks(call)(outputs, later=False)()
    with pytest.raises(Otherwise, match=r"test_matrix_checks\.py"):
        Checks(call)([torch.tensor(True)] * (index + 1), later=False)
    nn.init.zeros_(model.linear.bias)
    with pytest.raises(L.LinAlgError, match=r"linalg\.inv"):
        model(torch.zeros(2, 3, 3))


@pytest.mark.parametrize(
    ("of", "remedy"),
    [
        (lambda a, h: L.lstsq(a, h)[1].sum(), "driver='gels'"),
        (lambda a, h: h * torch.add(L.lstsq(a, h).residuals, 1), "driver='gels'"),
        (lambda a, h: L.lstsq(a, h, driver="gelss")[0], "driver='gelsy'"),
    ],
)
def test_what_least_squares_leave_open(of: Of, remedy: str) -> None:
    with pytest.raises(CaptureError, match=f"test_matrix_checks.*\n.*{remedy}"):
        capture(Matrices(of), (torch.randn(2, 3, 3),), {})
