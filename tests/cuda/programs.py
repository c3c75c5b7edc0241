"""Models, data and steps on GPUs, and what plain torch makes of them on one GPU."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.models import MODELS, seeded
from tests.spatial.networks import NETWORKS, network
from tests.training.steps import train

__all__ = [
    "PRECISIONS",
    "Precision",
    "copied",
    "gradients",
    "loss_of",
    "losses_of_training",
    "model_and_inputs",
    "prepared",
    "relative_error",
    "synchronisations",
    "whole",
]


@dataclass(frozen=True)
class Precision:
    """dtype of the weights; autocast: to bfloat16, in the calls. tolerance: relative, of a loss or of a gradient
    against its largest element, between two orders of the same sums."""

    name: str
    dtype: torch.dtype
    autocast: bool
    tolerance: float

    def scope(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.autocast else nullcontext()


PRECISIONS: Mapping[str, Precision] = {
    p.name: p
    for p in (
        Precision("float32", torch.float32, False, 1e-4),
        Precision("bfloat16", torch.bfloat16, False, 5e-2),
        Precision("autocast", torch.float32, True, 5e-2),
    )
}


def model_and_inputs(name: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model of `tests.models` or a network of `tests.spatial`, and a global batch, in float32 on the CPU;
    values are the same in every process."""
    if name in NETWORKS and name not in MODELS:
        model, x = network(name, options.get("batch", 2))
        return model, {"x": x}
    return seeded(name, **options)


def prepared(name: str, precision: Precision, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The same on this process's GPU, in the dtype of `precision`."""
    model, inputs = model_and_inputs(name, **options)
    cast = lambda t: t.to("cuda", precision.dtype if t.is_floating_point() else None)
    return model.to("cuda", precision.dtype), pytree.tree_map_only(Tensor, cast, inputs)


def loss_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result["loss"]


def whole(value: Tensor) -> Tensor:
    """A detached copy in float64 on the CPU, whole if it was a DTensor."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().double().cpu().clone()


def gradients(model: nn.Module, inputs: Mapping[str, Any], precision: Precision) -> dict[str, Tensor]:
    """{"loss": ..., parameter: its gradient} of one call, whole."""
    with precision.scope():
        loss = loss_of(model(**inputs))
    loss.backward()
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": whole(loss), **found}


def relative_error(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Largest |difference| over the largest |wanted|, or over `floor` if that is more; infinite for NaN."""
    if not wanted.numel():
        return 0.0
    error = float((got - wanted).abs().max()) / max(float(wanted.abs().max()), floor, 1e-300)
    return math.inf if math.isnan(error) else error


def losses_of_training(
    model: nn.Module, inputs: Mapping[str, Any], precision: Precision, steps: int, rate: float = 1e-3
) -> list[float]:
    """AdamW with clipped gradients; the batch rolls from step to step."""

    def call(step: int) -> Tensor:
        batch = {
            k: v.roll(step, -1) if isinstance(v, Tensor) and v.ndim > 1 else v for k, v in inputs.items()
        }
        with precision.scope():
            return loss_of(model(**batch))

    return train(model, call, steps, rate)


def synchronisations(step: Callable[[], object]) -> Sequence[str]:
    """Where the host waited for the GPU while `step` ran, by torch's own count."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
