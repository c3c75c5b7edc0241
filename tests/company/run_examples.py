"""The examples with other libraries, small, in one process or as a rank that torchrun started.

torchrun --nproc-per-node 2 tests/company/run_examples.py FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from autoshard.data.loader import Order, rank_loader
from autoshard.demo import GPTConfig
from autoshard.integrations.accelerate import AutoshardAccelerator
from autoshard.integrations.lightning import AutoshardStrategy
from cost_model.mesh import MeshSpec
from tests.company.loops import (
    accelerate_each_its_own,
    accelerate_stopped_and_resumed,
    lightning_stopped_and_resumed,
)
from tests.profiles import slow_compute

ROOT = Path(__file__).parents[2]
STEPS = 3
GPT = GPTConfig(context=16, width=32, heads=2, layers=1)
SMALL = ["--hidden", "32", "--intermediate", "64", "--layers", "1", "--context", "16", "--batch", "4"]
SMALL += ["--steps", "4", "--every", "2", "--lr", "1e-2"]
Losses = dict[str, list[float]]


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alone(folder: Path) -> Losses:
    """The same training without autoshard; what goes on from a checkpoint does from that of the ranks."""
    plain = lambda: Accelerator(cpu=True)
    return {
        "accelerate": example("with_accelerate").train(plain(), STEPS, GPT),
        **accelerate_stopped_and_resumed(folder / "alone-accelerate", folder / "accelerate", plain),
        **accelerate_each_its_own(plain(), batch=4),
        **trainer_stopped_and_resumed(folder / "alone", {}),
        **lightning_stopped_and_resumed(folder / "alone-lightning", folder / "lightning", lambda: "auto"),
        "lightning": example("with_lightning").train(STEPS, GPT),
        "llama3": llama_alone(),
    }


def trainer_stopped_and_resumed(folder: Path, options: dict[str, Any]) -> Losses:
    """Ranks pass their own rows in what goes on from a checkpoint. Without torchrun: the Trainer, in one process."""
    with_trainer = example("with_trainer")
    trainer = with_trainer.make_trainer(
        STEPS, str(folder), options, save_steps=2, per_device_eval_batch_size=2
    )
    trainer.train()
    trainer.save_model()
    rows = trainer.train_dataset[:5]
    resumed = with_trainer.make_trainer(STEPS, str(folder), {**options, "batch": "per_rank"}, save_steps=2)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    # In batches of 2, 2 and 1 rows, or on two ranks of 4 and 1.
    predicted, again = trainer.predict(rows), trainer.evaluate(rows)
    return {
        "trainer": with_trainer.losses(trainer),
        "trainer, resumed": with_trainer.losses(resumed),
        "trainer, evaluated": [predicted.metrics["test_loss"], *predicted.predictions[:, 0, 0].tolist()],
        "trainer, evaluated again": [again["eval_loss"]],
    }


def llama_alone() -> list[float]:
    llama3 = example("train_llama3")
    arguments = llama3.parsed(SMALL)
    model: nn.Module = llama3.llama(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    order = Order(arguments.batch, shuffle=True, drop_last=True)
    loader = rank_loader(llama3.Text(arguments.context), MeshSpec({"dp": 1}), 0, [Shard(0)], order)
    losses: list[float] = []
    for tokens, _ in zip(loader, range(arguments.steps), strict=False):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def llama_stopped_and_resumed(folder: Path, options: dict[str, Any]) -> list[float]:
    """Two steps on one mesh of two axes, two on another."""
    llama3 = example("train_llama3")
    losses: dict[int, float] = {}
    for sizes, stop in (((2, 1), "2"), ((1, 2), "4")):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        arguments = llama3.parsed([*SMALL, "--stop", stop, "--folder", str(folder / "llama3")])
        found = llama3.train(arguments, mesh, **options)
        assert not losses.keys() & found.keys()
        losses.update(found)
    return [losses[step] for step in sorted(losses)]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options: dict[str, Any] = {"profile": slow_compute(), "backend": "eager"}
    accelerator = lambda: AutoshardAccelerator(cpu=True, options=options)
    strategy = lambda: AutoshardStrategy({"dp": 2, "tp": 1}, options)
    losses = {
        "llama3": llama_stopped_and_resumed(folder, options),
        "accelerate": example("with_accelerate").train(accelerator(), STEPS, GPT),
        **accelerate_stopped_and_resumed(folder / "accelerate", folder / "accelerate", accelerator),
        **accelerate_each_its_own(
            AutoshardAccelerator(cpu=True, options={**options, "batch": "per_rank"}), batch=2
        ),
        **trainer_stopped_and_resumed(folder / "parallel", options),
        "lightning": example("with_lightning").train(STEPS, GPT, strategy()),
        **lightning_stopped_and_resumed(folder / "lightning", folder / "lightning", strategy),
    }
    for again in (
        accelerate_stopped_and_resumed(folder / "drop-a", folder / "drop-a", accelerator, drop=0.5),
        lightning_stopped_and_resumed(folder / "drop-l", folder / "drop-l", strategy, drop=0.5),
    ):
        trained, resumed = (losses for name, losses in again.items() if name.endswith(("trained", "resumed")))
        torch.testing.assert_close(resumed, trained[3:], rtol=2e-4, atol=2e-4)
    (folder / f"losses-{os.environ['RANK']}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
