"""What `AutoshardTrainer` refuses, before anything is made parallel; that it trains is tested with the examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import TrainingArguments

from autoshard.integrations.transformers import AutoshardTrainer
from cost_model.errors import ShardingError

PER_RANK = {"batch": "per_rank"}


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        ({}, {}, "torchrun did not start this process"),
        ({}, {"options": {"in_placements": []}}, "in_placements does not go with the Trainer's loaders"),
        ({"eval_use_gather_object": True}, {}, "eval_use_gather_object=True"),
        ({"train_sampling_strategy": "batch_rebalance"}, {}, "batch_rebalance"),
        ({"eval_strategy": "epoch"}, {"options": PER_RANK}, "evaluation, which needs all rows"),
        ({"label_smoothing_factor": 0.1}, {"options": PER_RANK}, "a loss outside the model"),
        ({"average_tokens_across_devices": False}, {"options": PER_RANK}, "items of one rank alone"),
        ({}, {"model": None, "model_init": nn.Linear}, "model_init"),
    ],
)
def test_what_a_parallel_model_cannot_keep(
    arguments: dict[str, Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **arguments)
    with pytest.raises(ShardingError, match=said) as raised:
        AutoshardTrainer(**{"model": nn.Linear(2, 2), "args": args, "mesh": {"dp": 2}, **given})
    assert "\n  try: " in str(raised.value)
