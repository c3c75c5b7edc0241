"""Other kinds of call of a model in stages: other branches, no loss, several outputs, inputs with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.api.programs import assert_close, full, parallel
from tests.ranks import RankPool

TWO = (("pp", 2),)


class Branches(nn.Module):
    """An auxiliary head that training alone reads, one in the middle, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.middle = nn.Linear(8, 3)
        self.head = nn.Linear(8, 3)
        self.never = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, wanted: Tensor | None = None) -> Any:
        self.calls += 1
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        early = self.middle(x) if self.training else None
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        out = self.head(x)
        if wanted is None:
            return out
        loss = (out - wanted).square().mean()
        return loss if early is None else loss + 0.3 * (early - wanted).square().mean()


def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches().double()


def data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    draw = lambda width: torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return draw(8), draw(3)


def calls(model: nn.Module) -> dict[str, Any]:
    """A training step; one of a smaller batch; evaluation; outputs without a loss, differentiated; in turns."""
    found: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(name: str, loss: Tensor) -> None:
        loss.backward()
        found[name] = (
            float(full(loss)),
            {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None},
        )
        optimizer.step()
        optimizer.zero_grad()

    step("train", model(*data(8)))
    step("smaller", model(*data(3)))
    x, wanted = data(6)
    x.requires_grad_()
    step("outputs", (model(x) - wanted).square().mean() * 2.0)
    found["of x"] = full(x.grad)
    model.eval()
    with torch.no_grad():
        found["eval"] = full(model(data(5)[0]))
    model.train()
    step("again", model(*data(8)))
    found["state"] = full(model.state_dict())
    return found


def in_stages(rank: int) -> dict[str, Any]:
    model = branches()
    parallel(model, TWO, stages="pp", micro_batches=4)
    return calls(model)


def test_every_kind_of_call_is_that_of_one_process(ranks: RankPool) -> None:
    wanted = calls(branches())
    for found in ranks.run(in_stages, world=2):
        assert_close(found, wanted, 1e-11)
