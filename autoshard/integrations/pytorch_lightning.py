"""`AutoshardStrategy`: a strategy of `pytorch_lightning`, Lightning's earlier name."""

from __future__ import annotations

try:
    from lightning_fabric.utilities.data import _auto_add_worker_init_fn
    from pytorch_lightning.strategies import ModelParallelStrategy

    from autoshard.integrations.lightning_steps import ParallelSteps
except ImportError as error:
    raise ImportError(
        f"AutoshardStrategy needs pytorch_lightning: {error}\n  try: pip install 'autoshard[lightning]'"
    ) from error


class AutoshardStrategy(ParallelSteps, ModelParallelStrategy):  # type: ignore[misc]
    """`autoshard.integrations.lightning.AutoshardStrategy`, for a Trainer and modules of `pytorch_lightning`."""

    add_worker_init = staticmethod(_auto_add_worker_init_fn)
