"""What a laptop does: `python -m tests.cuda.laptop MODEL PRECISION AXES FILE` plans for GPUs and saves the plan.

The model and its inputs are on the CPU; the calls are under CUDA's autocast where the precision says so.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoshard import MeshSpec, find_plan
from autoshard.planner.plan_command import parse_mesh
from tests.cuda.programs import PRECISIONS, model_and_inputs
from tests.profiles import slow_compute


def main(name: str, precision: str, axes: str, path: str) -> None:
    assert not torch.cuda.is_available()
    kind = PRECISIONS[precision]
    model, inputs = model_and_inputs(name)
    cast = lambda t: t.to(kind.dtype) if t.is_floating_point() else t
    inputs = pytree.tree_map_only(Tensor, cast, inputs)
    spec = MeshSpec(parse_mesh(axes), device_type="cuda")
    autocast = torch.bfloat16 if kind.autocast else None
    plan = find_plan(model.to(kind.dtype), spec, ((), inputs), profile=slow_compute(), autocast=autocast)
    plan.save(Path(path))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
