"""Hugging Face models whose forward asks for values: captured, planned on 2 x 2 and verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import MeshSpec, find_plan, verify

Example = tuple[nn.Module, dict[str, Any]]

pytestmark = pytest.mark.slow


def detr() -> Example:
    """Clamps behind a test for infinity."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=8,
        dropout=0.0,
    )
    return DetrForObjectDetection(config).train(), {"pixel_values": torch.randn(4, 3, 32, 32)}


@pytest.mark.parametrize("example", [detr], ids=lambda example: example.__name__)
def test_planned_and_verified(example: Callable[[], Example]) -> None:
    torch.manual_seed(0)
    model, call = example()
    mesh = MeshSpec({"dp": 2, "tp": 2})
    plan = find_plan(model, mesh, ((), call), profile="cpu", refine="off")
    report = verify(model, plan, ((), call))
    assert report.ok, report
