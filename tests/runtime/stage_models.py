"""A model whose parameters are held by stages, and the same one whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autoshard.runtime.attachments import accept_any_state
from autoshard.runtime.parameters import StagePlaced
from autoshard.runtime.sharding import like_parameter
from tests.runtime.placing import distribute_stage_parameters

__all__ = [
    "CASES",
    "TIED",
    "Case",
    "Net",
    "give_gradients",
    "net",
    "net_of_stages",
    "same",
    "whole",
    "whole_of",
]


@dataclass(frozen=True)
class Case:
    """A mesh, and the stages that hold the tied weight."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    tied: tuple[int, ...]

    @property
    def world(self) -> int:
        return torch.Size(self.sizes).numel()

    @property
    def stages(self) -> int:
        return self.sizes[self.names.index("pp")]

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", self.sizes, mesh_dim_names=self.names)

    def placed(self) -> dict[str, StagePlaced]:
        """Embedding and scale first, what is frozen and `down` last; `up.bias` is on no stage, so everywhere."""
        last = self.stages - 1
        return {
            "embed.weight": self._on(self.tied, 0),
            "scale": self._on((0,), None),
            "up.weight": self._on((0,), 1),
            "down.weight": self._on((last,), 0),
            "down.bias": self._on((last,), 0),
            "frozen": self._on((last,), None),
        }

    def _on(self, holders: tuple[int, ...], dim: int | None) -> StagePlaced:
        cut: Placement = Replicate() if dim is None else Shard(dim)
        return StagePlaced(holders, tuple(Replicate() if name == "pp" else cut for name in self.names))


CASES = (
    Case((2,), ("pp",), (0, 1)),
    Case((4,), ("pp",), (0, 3)),
    Case((2, 2), ("pp", "tp"), (0,)),
    Case((2, 2), ("tp", "pp"), (0, 1)),
)
TIED = Case((3, 2), ("pp", "tp"), (0, 2))
"""Six ranks: two stages of three hold the tied weight, cut over the other axis."""


class Net(nn.Module):
    """A tied weight, uneven ones (10 and 7 rows), a number, a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 5)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.register_buffer("steps", torch.zeros(2))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def net_of_stages(case: Case, mesh: DeviceMesh | None = None, seed: int = 0) -> Net:
    model = net(seed)
    distribute_stage_parameters(model, case.mesh() if mesh is None else mesh, "pp", case.placed())
    accept_any_state(model)
    return model


def give_gradients(model: nn.Module, step: int) -> None:
    """The same for the same step, in shards where parameters are."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        if p.requires_grad:
            gradient = torch.randn(p.shape, generator=generator)
            p.grad = like_parameter(gradient, p) if isinstance(p, DTensor) else gradient


def whole_of(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole_of(value) for name, value in model.state_dict().items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: object = "", **tolerances: float) -> None:
    assert list(ours) == list(theirs), what
    for name in theirs:
        message = lambda text, name=name: f"{what} {name}: {text}"
        torch.testing.assert_close(ours[name], theirs[name], msg=message, **tolerances)  # type: ignore[arg-type]
