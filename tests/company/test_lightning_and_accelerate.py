"""What `AutoshardStrategy` and `AutoshardAccelerator` refuse; that they train is tested with the examples."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autoshard.integrations.accelerate import AutoshardAccelerator
from autoshard.integrations.lightning import AutoshardStrategy
from autoshard.integrations.pytorch_lightning import AutoshardStrategy as EarlierStrategy
from autoshard.runtime.session import Session
from cost_model.errors import ShardingError
from tests.profiles import slow_compute

OPTIONS: dict[str, Any] = {"profile": slow_compute(), "backend": "eager", "tune": "first"}


class Plain(lightning.LightningModule):
    """Steps that call a child."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.layer(x).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pair(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.head(self.layer(x)).sum()


class Bypassed(Plain):
    """It has a forward, which its steps do not call."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Listed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([nn.Linear(2, 2)])


class Owning(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class OnMeta(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device="meta")


@pytest.fixture
def one_process() -> Iterator[None]:
    """Lightning makes a process group, of one, and says so in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def fit(module: lightning.LightningModule, **given: Any) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AutoshardStrategy(**{"options": OPTIONS, **given}),
        max_steps=1,
        gradient_clip_val=1.0 if module.automatic_optimization else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(1, 2, 2), batch_size=None))


@pytest.mark.filterwarnings("ignore")  # of Lightning, about workers
@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Plain, {"mesh": {"dp": 2}}, "2 devices, and 1 processes run"),
        (Plain, {"options": {"batch": "per_rank"}}, "options={'batch': 'per_rank'} does not go"),
        (Plain, {"options": {"in_placements": []}}, "in_placements"),
        (Plain, {"modules": ["head"]}, "Plain, which has no 'head'"),
        (Bypassed, {}, "Bypassed.training_step called nothing that is parallel: Bypassed\n.*'layer'"),
        (Listed, {}, r"more \(ModuleList\), which has no forward"),
        (Owning, {}, "scale, a trained parameter outside of layer"),
        (OnMeta, {}, "a model on meta"),
    ],
)
def test_what_the_strategy_cannot_keep(
    kind: type[Plain], given: dict[str, Any], said: str, one_process: None
) -> None:
    with pytest.raises(ShardingError, match=said) as raised:
        fit(kind(), **given)
    assert "\n  try: " in str(raised.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "modules", "parallel"),
    [(Plain, None, ["layer"]), (Pair, None, ["layer", "head"]), (Bypassed, ["layer"], ["layer"])],
)
def test_what_is_made_parallel(
    kind: type[Plain], modules: list[str] | None, parallel: list[str], one_process: None
) -> None:
    module = kind()
    fit(module, modules=modules)
    named = [name for name, one in module.named_modules() if hasattr(one, "autoshard_plan")]
    assert named == parallel


class Toggled(Pair):
    """Its first call of the head is beside `toggle_optimizer` of the layer, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, x: Tensor, index: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.head(self.layer(x)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layer, self.head)]


@pytest.mark.filterwarnings("ignore")
def test_parameters_toggled_in_the_first_step(one_process: None) -> None:
    module = Toggled()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    fit(module)
    for old, new in zip(before, module.parameters(), strict=True):
        assert new.requires_grad and not torch.equal(old, new.full_tensor())  # type: ignore[attr-defined]


class Earlier(pytorch_lightning.LightningModule):
    """Of the package of the earlier name; its forward is its layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss = (self(x) - 3.0).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def earlier_losses(strategy: Any, path: Path) -> list[float]:
    """Of two steps, and of two more from what was saved."""
    losses: list[float] = []
    for last, start in ((2, None), (4, str(path))):
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy(),
            max_steps=last,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Earlier()
        trainer.fit(module, DataLoader(torch.ones(2, 2, 2), batch_size=None), ckpt_path=start)
        trainer.save_checkpoint(path)
        losses += module.losses
        assert (Session.of(module) is not None) == (strategy is not auto)
    return losses


def auto() -> str:
    return "auto"


@pytest.mark.filterwarnings("ignore")
def test_the_package_of_the_earlier_name(one_process: None, tmp_path: Path) -> None:
    """Trained, saved and resumed as without it."""
    alone = earlier_losses(auto, tmp_path / "alone.ckpt")
    assert len(alone) == 4
    strategy = lambda: EarlierStrategy(options=OPTIONS)
    assert earlier_losses(strategy, tmp_path / "parallel.ckpt") == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_package_that_is_missing(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; import autoshard.integrations.{name}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert f"AutoshardStrategy needs {name}: " in found.stderr
    assert found.stderr.endswith("\n  try: pip install 'autoshard[lightning]'\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": {"dp": 2}}, "torchrun did not start this process"),
        ({"options": {"in_placements": []}}, "in_placements does not go with accelerate's loaders"),
        ({"project_config": ProjectConfiguration(save_on_each_node=True)}, "save_on_each_node=True"),
    ],
)
def test_what_the_accelerator_cannot_keep(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ShardingError, match=said) as raised:
        AutoshardAccelerator(cpu=True, **given)
    assert "\n  try: " in str(raised.value)
