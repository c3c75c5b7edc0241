"""Llama-3-8B's real configuration is planned for 256 devices without any of them, and without its weights."""

from __future__ import annotations

import pytest
import torch

from autoshard import MeshSpec, find_plan
from benchmarks.models import llama_3_8b


@pytest.mark.slow
def test_one_layer_on_256_devices() -> None:
    mesh = MeshSpec({"dp": 32, "tp": 8}, device_type="cuda")
    tokens = torch.zeros(64, 8192, dtype=torch.int64, device="meta")
    model = llama_3_8b(1)
    plan = find_plan(
        model,
        mesh,
        ((), {"input_ids": tokens, "labels": tokens}),
        profile="h100",
        memory_limit="80GB",
        out_placements="keep",
    )
    # One layer cannot balance its streams as many can: docs/search.md.
    assert plan.gap < 0.03
    assert plan.cost == pytest.approx(plan.step_time, rel=0.02)
    assert plan.peak_memory <= 80e9
    assert plan.fallbacks == ()
    assert set(plan.parameter_layouts) == {name for name, _ in model.named_parameters()}
    # 1.3e9 parameters in bfloat16, with gradient and AdamW's states, would be 10 GB on each device.
    split = [name for name, layout in plan.parameter_layouts.items() if any(layout.dims)]
    assert "model.embed_tokens.weight" in split
    assert "lm_head.weight" in split
    assert all(parameter.is_meta for parameter in model.parameters())
