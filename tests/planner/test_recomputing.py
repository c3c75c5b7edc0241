"""What of a model of transformers is computed again, by the names that Megatron-LM has for its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from autoshard.planner.priced_runs import MetaModel
from autoshard.planning import canonical_capture
from passes.states.offers import users_choice

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128}
MIXTURE = SIZES | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
LLAMA = SIZES | {"model_type": "llama", "intermediate_size": 96}


def again(config: Mapping[str, Any], recompute: str) -> set[str]:
    captured = canonical_capture(*MetaModel.of(config, torch.bfloat16).call(2, 8, recompute))
    return set(users_choice(captured.joint))


def products(config: Mapping[str, Any], recompute: str) -> int:
    return sum(name.startswith(("contract", "routed_mm")) for name in again(config, recompute))


def test_norms_of_a_block_run_again_and_no_product() -> None:
    """But for the one before experts: what is sent to these is kept as it arrived."""
    for config, count in ((MIXTURE, 1), (LLAMA, 2)):
        assert sum(name.startswith("rsqrt") for name in again(config, "layernorm")) == count
        assert products(config, "layernorm") == 0


def test_of_experts_the_activation_runs_again() -> None:
    found = again(MIXTURE, "moe_act")
    assert any(name.startswith("silu") for name in found) and len(found) <= 3


@pytest.mark.parametrize(
    ("config", "recompute", "count"),
    [
        (MIXTURE, "moe", 3),  # the router's, and two of experts
        (MIXTURE, "mlp", 0),
        (LLAMA, "mlp", 3),
        (LLAMA, "moe", 0),
        (LLAMA, "full", 7),
    ],
)
def test_modules_run_again_with_their_products(config: Mapping[str, Any], recompute: str, count: int) -> None:
    assert products(config, recompute) == count


def test_names_join() -> None:
    both = again(MIXTURE, "layernorm moe_act")
    assert both == again(MIXTURE, "layernorm") | again(MIXTURE, "moe_act")
