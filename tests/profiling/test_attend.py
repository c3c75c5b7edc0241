"""The attention that is timed is the one that runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.profiling.startup import attend
from cost_model.measure.kernel_work import attention_work, kernel_series

CPU = torch.device("cpu")


class Calls(TorchDispatchMode):
    """Names of the ops that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_it_is_torchs_attention() -> None:
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    torch.testing.assert_close(attend(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_the_series_times_the_op_of_plans_and_its_gradient_without_copies() -> None:
    series = next(s for s in kernel_series(CPU, None, attend) if s.name == "attention")
    work = series.prepare(series.sizes[0])
    with Calls() as calls:
        work()
    ours = [name for name in calls.names if name.startswith("autoshard")]
    assert ours == ["autoshard.attention.default", "autoshard.attention_backward.default"]
    assert not any(name.startswith(("aten.clone", "aten._scaled")) for name in calls.names)


def test_without_one_it_is_torchs_own() -> None:
    work = attention_work((1, 2, 8, 16), torch.float32, CPU)
    with Calls() as calls:
        work()
    assert not any(name.startswith("autoshard") for name in calls.names)
