"""Networks split in space over several GPUs: halos over NCCL, uneven rows, empty shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoshard import MeshSpec, Plan, autoshard, find_plan
from tests.cuda.gpus import Axes, GpuPool, axes_of, gpu_mesh
from tests.cuda.programs import PRECISIONS, gradients, model_and_inputs, prepared, relative_error
from tests.profiles import slow_compute
from tests.spatial.restricted import restricted
from tests.spatial.whole import splits

ROWS = (frozenset({"y0"}),)
ROWS_AND_COLUMNS = (frozenset({"y0"}), frozenset({"y1"}))


def planned(name: str, axes: Axes, path: Path) -> Plan:
    """A plan in which every op with a window splits rows, or rows and columns."""
    model, inputs = model_and_inputs(name)
    with restricted(splits(ROWS if len(axes) == 1 else ROWS_AND_COLUMNS)):
        plan = find_plan(
            model, MeshSpec(dict(axes), device_type="cuda"), ((), inputs), profile=slow_compute()
        )
    plan.save(path)
    return plan


def on_rank(rank: int, name: str, axes: Axes, path: str, backend: str) -> dict[str, Any]:
    kind = PRECISIONS["float32"]
    model, inputs = prepared(name, kind)
    autoshard(model, gpu_mesh(axes), None, plan=path, backend=backend)
    return gradients(model, inputs, kind)


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(1, marks=pytest.mark.cuda(gpus=2), id="rows"),
        pytest.param(2, marks=pytest.mark.cuda(gpus=4), id="rows and columns"),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["unet", "resnet", "weather", "even_vit"])
def test_split_in_space_equals_one_gpu(
    gpus: GpuPool, name: str, backend: str, dims: int, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    axes, kind = axes_of(dims), PRECISIONS["float32"]
    plan = planned(name, axes, tmp_path / "plan.json")
    halos = sum(layout.has_halo for layouts in plan.planned.layouts.values() for layout in layouts.operands)
    assert halos > 0
    model, inputs = prepared(name, kind)
    wanted = gradients(model, inputs, kind)
    world = math.prod(size for _, size in axes)
    runs = gpus.run(on_rank, name, axes, str(tmp_path / "plan.json"), backend, world=world)
    floor = 1e-3 * max(float(v.abs().max()) for n, v in wanted.items() if n != "loss")
    errors = {n: max(relative_error(run[n], v, floor) for run in runs) for n, v in wanted.items()}
    worst = max(errors, key=lambda n: errors[n])
    record_property("error", f"{errors[worst]:.1e}")
    # cuDNN sums in another order for every size of image, and may use TF32 in convolutions.
    assert errors[worst] <= 20 * kind.tolerance, worst
