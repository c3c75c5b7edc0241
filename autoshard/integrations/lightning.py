"""`AutoshardStrategy`: a strategy of Lightning that makes a LightningModule parallel on a mesh."""

from __future__ import annotations

try:
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn
    from lightning.pytorch.strategies import ModelParallelStrategy

    from autoshard.integrations.lightning_steps import ParallelSteps
except ImportError as error:
    raise ImportError(
        f"AutoshardStrategy needs lightning: {error}\n  try: pip install 'autoshard[lightning]'"
    ) from error


class AutoshardStrategy(ParallelSteps, ModelParallelStrategy):
    """A strategy of Lightning that makes a LightningModule parallel on a mesh of all processes.

        trainer = lightning.Trainer(devices=8, strategy=AutoshardStrategy({"dp": 4, "tp": 2}))
        trainer.fit(module, loader)

    mesh:    a DeviceMesh, or its sizes by name; None: one axis of all processes.
    options: of `autoshard`, such as {"memory_limit": "70GB"}; a batch is "global".
    modules: names of the parts of the LightningModule that its steps call, each made parallel by itself. None: the
             whole, called as `self(...)`, where it has a `forward` of its own, else each child with parameters.

    A loader's batch is the whole batch: every rank reads the same, and no sampler is put in. Values that are logged are
    those of all rows. Checkpoints are those of one process, and continue on any number of processes. There is no sanity
    check before training, whose call would decide the layouts of parameters.

    Raises ShardingError for a mesh of another number of devices, and for what a parallel model cannot keep.
    """

    add_worker_init = staticmethod(_auto_add_worker_init_fn)
