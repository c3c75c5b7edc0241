"""A rank of a program that `benchmarks.cluster.launcher` starts. It imports torch, which what starts ranks does not."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["answered"]


def answered(out: Path, made: Callable[[], Any]) -> None:
    """Rank 0 writes as JSON what `made` returns, on one thread and a gloo group of all ranks: the other end of
    `benchmarks.cluster.answer`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = made()
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
