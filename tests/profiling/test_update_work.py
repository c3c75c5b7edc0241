"""What stands for the optimizer's update: on GPUs many parameters are updated by one kernel."""

from __future__ import annotations

import torch

from cost_model.measure.kernel_work import update_work, updated_together, with_kernel_rates
from cost_model.measurements import DeviceRates, MatmulRates, SampledCurve


def test_a_gpu_updates_sixteen_parameters_together() -> None:
    """By hand: 32 us for 16 parameters of one number are 2 us each; 4 MB more take 1 ms more."""
    made = lambda sizes, seconds: SampledCurve(sizes, seconds, (0.0, 0.0), seconds)
    flat = made((1, 2), (1e-3, 2e-3))
    update = made((64, 64 + 4_000_000), (32e-6, 1032e-6))
    rates = DeviceRates(1e-6, 1e12, (MatmulRates("float32", (1.0,), (1e12,), (0.0,)),))
    for device, launch in (("cuda", 2e-6), ("cpu", 32e-6)):
        found = with_kernel_rates(rates, (flat, flat, flat, flat, update), torch.device(device)).update
        assert found is not None
        assert abs(found.launch_seconds - launch) < 1e-12
        assert abs(found.bytes_per_second - 4e9) < 1.0


def test_the_step_of_a_cpu_is_of_one_parameter_of_that_size() -> None:
    step = update_work(4096, torch.device("cpu"), None)
    (group,) = step.__self__.param_groups  # type: ignore[attr-defined]
    assert [p.numel() * 4 for p in group["params"]] == [4096]
    assert updated_together(torch.device("cpu")) == 1
    step()
