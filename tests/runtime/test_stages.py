"""A model in stages on real processes: losses, gradients, updates and evaluation are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, PipelinePlan, find_plan
from tests.api.programs import Axes, assert_close, full, parallel
from tests.models import gpt2, llama
from tests.profiles import slow_compute
from tests.ranks import RankPool
from tests.spatial.networks import UNet
from tests.stages.stage_models import Mlp

TWO: Axes = (("pp", 2),)
FOUR: Axes = (("pp", 4),)
WITH_TENSOR: Axes = (("pp", 2), ("tp", 2))
WITH_DATA: Axes = (("dp", 2), ("pp", 2))
WITH_BOTH: Axes = (("dp", 2), ("pp", 2), ("tp", 2))

Call = tuple[tuple[Any, ...], dict[str, Any]]
BATCH = 6


@dataclass(frozen=True)
class Case:
    """A model in float64, and its call for a batch of so many samples. tolerance: of what it computes."""

    model: Callable[[], nn.Module]
    call: Callable[[int], Call]
    tolerance: float = 1e-11


class Loss(nn.Module):
    """Of a model of texts its loss alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        """In float64, as the models' own losses are not."""
        logits = self.inner(**inputs).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Tied(nn.Module):
    """The first stage's table is the last one's head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(x @ self.table.weight.T, wanted)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    start: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, **start
    )  # fmt: skip
    return T5ForConditionalGeneration(config).train()


def _tokens(batch: int) -> Call:
    tokens = torch.randint(1, 96, (batch, 17), generator=torch.Generator().manual_seed(batch))
    return (), {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def _two_texts(batch: int) -> Call:
    tokens = torch.randint(1, 96, (batch, 26), generator=torch.Generator().manual_seed(batch))
    one, two, wanted = tokens[:, :8].contiguous(), tokens[:, 8:17].contiguous(), tokens[:, 17:].contiguous()
    return (), {"input_ids": one, "decoder_input_ids": two, "labels": wanted}


def _image(batch: int) -> Call:
    shape, generator = (batch, 1, 9, 10, 12), torch.Generator().manual_seed(batch)
    return (torch.randn(shape, generator=generator, dtype=torch.float64),), {}


def _rows(batch: int) -> Call:
    generator = torch.Generator().manual_seed(batch)
    draw = lambda width: torch.randn(batch, width, generator=generator, dtype=torch.float64)
    return (draw(6), draw(3)), {}


def _words(batch: int) -> Call:
    words = torch.randint(0, 12, (2, batch), generator=torch.Generator().manual_seed(batch))
    return (words[0], words[1]), {}


CASES = {
    "tied": Case(Tied, _words),
    "mlp": Case(Mlp, _rows),
    "gpt2": Case(lambda: Loss(gpt2(layers=4)[0]), _tokens),
    "gpt2-small": Case(lambda: Loss(gpt2(layers=2)[0]), _tokens),
    "llama": Case(lambda: Loss(llama(layers=4)[0]), _tokens),
    "t5": Case(lambda: Loss(_t5()), _two_texts, 1e-5),  # its norms are computed in float32
    "unet": Case(UNet, _image),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].model().double()


def trained(
    name: str, model: nn.Module, steps: int
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(per step the loss and the norm of all gradients; the gradients of the last step; the state after it, and of an
    evaluation of another batch)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args, kwargs = CASES[name].call(BATCH)
    numbers: list[float] = []
    gradients: dict[str, Tensor] = {}
    for _ in range(steps):
        loss = model(*args, **kwargs)
        (loss * 2.0).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        numbers += [float(full(loss)), float(full(norm))]
        gradients = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    args, kwargs = CASES[name].call(3)
    with torch.no_grad():
        numbers.append(float(full(model(*args, **kwargs))))
    return numbers, gradients, full(model.state_dict())


def in_stages(rank: int, name: str, axes: Axes, count: int, schedule: str | None, steps: int) -> Any:
    model = made(name)
    parallel(model, axes, stages="pp", micro_batches=count, schedule=schedule)
    found = trained(name, model, steps)
    plan = model.autoshard_plan
    assert isinstance(plan, PipelinePlan) and plan.micro_batches == count
    assert schedule in (None, plan.schedule)
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    return found, held


def one_process(name: str, steps: int) -> Any:
    return trained(name, made(name), steps)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "axes", "count", "schedule", "steps"),
    [
        ("tied", TWO, 4, "zero_bubble", 3),
        slow("gpt2-small", TWO, 4, "zero_bubble", 3),
        ("mlp", FOUR, 5, "1f1b", 3),
        slow("mlp", WITH_TENSOR, 5, None, 2),
        ("unet", WITH_DATA, 4, "gpipe", 2),
        slow("mlp", FOUR, 5, "1f1b", 10),
        slow("llama", WITH_TENSOR, 5, None, 2),
        slow("t5", TWO, 4, "gpipe", 2),
        slow("unet", WITH_DATA, 4, "1f1b", 2),
        slow("gpt2", FOUR, 4, "gpipe", 10),
        slow("gpt2", WITH_DATA, 5, "1f1b", 10),
        slow("gpt2", WITH_TENSOR, 4, "zero_bubble", 10),
        slow("llama", TWO, 4, "zero_bubble", 10),
        slow("llama", FOUR, 4, "1f1b", 10),
        slow("llama", WITH_BOTH, 4, None, 10),
        slow("t5", FOUR, 4, "1f1b", 10),
        slow("t5", WITH_DATA, 5, "gpipe", 10),
        slow("unet", TWO, 4, "zero_bubble", 10),
        slow("mlp", TWO, 4, "interleaved", 10),
        slow("llama", TWO, 4, "interleaved", 10),
        slow("unet", FOUR, 4, "gpipe", 10),
    ],
)
def test_training_is_that_of_one_process(
    ranks: RankPool, name: str, axes: Axes, count: int, schedule: str | None, steps: int
) -> None:
    world = 1
    for _, size in axes:
        world *= size
    wanted = one_process(name, steps)
    found = ranks.run(in_stages, name, axes, count, schedule, steps, world=world)
    for numbers, _ in found:
        assert_close(numbers, wanted, CASES[name].tolerance)
    total = sum(p.numel() for p in made(name).parameters())
    # No rank holds all parameters.
    assert all(held < total for _, held in found)


@pytest.mark.slow
def test_a_part_of_a_received_gradient_may_be_a_result() -> None:
    """Cut at a residual stream that is held in parts, a stage passes on a slice of what it receives, which no op of its
    backward made."""
    plan = find_plan(
        made("gpt2"),
        MeshSpec({"pp": 2, "tp": 2}),
        CASES["gpt2"].call(BATCH),
        profile=slow_compute(),
        backend="eager",
        stages="pp",
        micro_batches=4,
        schedule="zero_bubble",
    )
    assert isinstance(plan, PipelinePlan) and plan.schedule == "zero_bubble"
