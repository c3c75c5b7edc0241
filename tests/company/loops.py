"""Loops of Lightning and accelerate with all that they do beside steps, stopped and resumed: in one process, or on
ranks whose own seeds differ."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
Losses = dict[str, list[float]]


def _seed(number: int) -> None:
    """Of rank 0, whose values and order count; others have another."""
    torch.manual_seed(number + 100 * int(os.environ.get("RANK", "0")))


def _rows(drop: float) -> TensorDataset:
    """Fourteen, which batches of four do not divide; twelve where layers drop."""
    generator, count = torch.Generator().manual_seed(1), 12 if drop else 14
    x, y = torch.randn(count, 32, generator=generator), torch.randint(4, (count,), generator=generator)
    return TensorDataset(x, y)


def _layers(drop: float) -> nn.Sequential:
    """The last has the first one's weight."""
    layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, 32))
    layers[3].weight = layers[0].weight
    return layers


def _in_another_order(layers: Any) -> list[Tensor]:
    return [*layers[3].parameters(), layers[0].bias]


class Classifier(lightning.LightningModule):
    """Its loss is outside of its forward."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.layers = _layers(drop)
        self.rows = torchmetrics.SumMetric()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_start(self) -> None:
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/first.ckpt")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, batch_size=len(batch[0]))
        self.log("sum", loss, batch_size=len(batch[0]), sync_dist=True, reduce_fx="sum")
        self.rows.update(len(batch[0]))
        self.log("rows", self.rows)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(_in_another_order(self.layers), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def lightning_stopped_and_resumed(
    folder: Path, saved: Path, strategy: Callable[[], Any], drop: float = 0.0
) -> Losses:
    """Two epochs, of which each is saved in `folder`; the second again, from what is `saved`."""

    def trainer(path: Path) -> lightning.Trainer:
        return lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            strategy=strategy(),
            max_epochs=2,
            gradient_clip_val=0.1,
            num_sanity_val_steps=0,
            default_root_dir=path,
            callbacks=ModelCheckpoint(path, "{epoch}", save_top_k=-1),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    loader, rows = (
        DataLoader(_rows(drop), batch_size=4, shuffle=drop == 0),
        DataLoader(_rows(drop), batch_size=4),
    )
    _seed(0)
    module, first = Classifier(drop), trainer(folder)
    first.fit(module, loader, rows)
    metrics = first.validate(module, rows, verbose=False)[0]
    _seed(1)
    again, second = Classifier(drop), trainer(folder / "resumed")
    second.fit(again, loader, rows, ckpt_path=str(saved / "epoch=0.ckpt"))
    return {
        "lightning, trained": module.losses,
        "lightning, validated": [float(metrics[name]) for name in ("loss", "sum", "rows")],
        "lightning, resumed": again.losses,
    }


def accelerate_stopped_and_resumed(
    folder: Path, saved: Path, accelerator: Callable[[], Accelerator], drop: float = 0.0
) -> Losses:
    """An epoch, which is saved in `folder`, and another; that again, from there and from what is `saved`. What is saved
    before a step changes none."""

    def prepared() -> Any:
        model = _layers(drop)
        optimizer = torch.optim.AdamW(_in_another_order(model), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        loader = DataLoader(_rows(drop), batch_size=4, shuffle=True)
        one = accelerator()
        return one, *one.prepare(model, optimizer, loader, schedule)

    def epoch(one: Accelerator, model: Any, optimizer: Any, loader: Any, schedule: Any) -> list[float]:
        losses: list[float] = []
        for x, y in loader:
            with one.accumulate(model):
                loss = cross_entropy(model(x), y)
                one.backward(loss)
                one.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    _seed(0)
    run = prepared()
    run[0].save_state(str(folder / "first"))
    first = epoch(*run)
    run[0].save_state(str(folder))
    second = epoch(*run)
    run[0].load_state(str(folder))
    again = epoch(*run)
    streamed = run[0].prepare(DataLoader(Streamed(), batch_size=4))
    rows = [
        sum(len(run[0].gather_for_metrics(torch.ones(4))) for _ in loader) for loader in (run[3], streamed)
    ]
    _seed(1)
    run = prepared()
    run[0].load_state(str(saved))
    return {
        "accelerate, trained": [*first, *second],
        "accelerate, resumed": epoch(*run),
        "accelerate, rolled back": again,
        "accelerate, evaluated": [*rows, float(run[0].reduce(torch.ones(())))],
    }


class Streamed(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(6, 1)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(0.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x), y)


def accelerate_each_its_own(accelerator: Accelerator, batch: int) -> Losses:
    """batch: rows of each process's own."""
    _seed(0)
    model = WithLoss()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(_rows(0.5), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for x, y in loader:
        loss = model(x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"accelerate, each its own": losses}
