"""What the tests of the public surface share: small models, meshes by rank, full values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import autoshard
from cost_model.errors import AutoshardError
from tests.models import TwoLinear
from tests.profiles import slow_compute

Axes = tuple[tuple[str, int], ...]


class Normed(nn.Module):
    """Linear, batch norm, ReLU, linear: buffers that training changes.

    No bias before the norm: its gradient is rounding noise, which AdamW would blow up to full steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def device_mesh(axes: Axes) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes))


def two_linear() -> TwoLinear:
    """The same in every process."""
    torch.manual_seed(0)
    return TwoLinear()


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed()


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    """x [rows, 10] and y [rows, 5], the same in every process."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 10, generator=generator), torch.randn(rows, 5, generator=generator)


def parallel(model: nn.Module, axes: Axes, example_inputs: Any = None, **options: Any) -> nn.Module:
    """`autoshard` with prices under which splitting pays, without compiling."""
    settings = {"profile": slow_compute(), "backend": "eager", **options}
    return autoshard(model, device_mesh(axes), example_inputs, **settings)


def full(value: Any) -> Any:
    """A detached copy, whole if it was a DTensor; dicts and lists of them likewise."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: full(entry) for key, entry in value.items()}
    return copy.deepcopy(value)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: float | None = None
) -> list[float]:
    """Losses of `steps` on `data()`."""
    x, y = data()
    losses: list[float] = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def refusal(model: nn.Module, attempt: Callable[[], Any]) -> str:
    """ "ErrorName: message" of what `attempt` raises, having left the model as it was."""
    parameters = dict(model.named_parameters())
    values = full(model.state_dict())
    try:
        attempt()
    except AutoshardError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return "no error"
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not hasattr(model, "autoshard_plan")
    return text
