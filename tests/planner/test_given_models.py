"""Models of a step that is asked for: by their config.json, or by a framework's options."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from autoshard import ShardingError
from autoshard.planner import plan_command
from autoshard.planner.priced_runs import MetaModel
from tests.conftest import Command

GEMMA = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "model_type": "gemma3_text"}


def test_of_text_and_images_the_text_is_planned() -> None:
    model = MetaModel.of({"model_type": "gemma3", "text_config": GEMMA}, torch.bfloat16)
    assert (model.name, model.depth) == ("gemma3_text", 3)


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": 100, "num_attention_heads": 32}, {"hidden_size": "4096"}, {"vocab_size": -1}]
)
def test_sizes_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ShardingError, match="transformers builds no llama") as caught:
        MetaModel.of({"model_type": "llama", **wrong}, torch.bfloat16)
    assert "\n  try: " in str(caught.value)


def test_what_is_taken_is_said(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(plan_command, "_beside", Mock())
    words = (
        "--bf16 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 8"
    )
    code, out, _ = command("plan", "--gpus", "2", "--megatron", words)
    assert code == 0 and "\ntaken       --vocab-size 50304\n" in out
    code, _, err = command("plan", "--gpus", "2", "--megatron", f"{words} --num-experts 4")
    assert code == 1 and "a model with --num-experts is of no known sizes\n  try: --hf" in err
