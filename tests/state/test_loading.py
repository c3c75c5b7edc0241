"""State dicts, whole or sharded, come to a parallel model whenever they are loaded; so do states of optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from cost_model.errors import ShardingError
from tests.api.programs import Axes, Normed, assert_close, data, full, normed, parallel, trained
from tests.ranks import RankPool

LINE: Axes = (("x", 2),)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def other() -> tuple[Normed, torch.optim.Optimizer]:
    """A plain model of other values and its optimizer, trained for two steps."""
    torch.manual_seed(5)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained(model, optimizer, 2)
    return model, optimizer


def check(model: nn.Module, state: Any) -> None:
    assert_close(full(model.state_dict()), full(state))


def plain_into_parallel(model: nn.Module) -> None:
    plain, plain_optimizer = other()
    state = copy.deepcopy(plain.state_dict())
    model.load_state_dict(state)
    check(model, state)
    before = model.up.weight
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    model.load_state_dict(zeros, assign=True)
    check(model, zeros)
    assert model.up.weight is not before and isinstance(model.up.weight, DTensor)
    assert model.up.weight.placements == before.placements
    model.up.load_state_dict({"weight": state["up.weight"]})
    assert_close(full(model.up.weight), state["up.weight"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(state)
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    assert_close(trained(model, optimizer, 2), trained(plain, plain_optimizer, 2))


def through_torchs_functions(rank: int, model: nn.Module) -> None:
    """Whole state dicts of torch.distributed.checkpoint, from rank 0 alone for the model."""
    plain, plain_optimizer = other()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, copy.deepcopy(plain.state_dict()) if rank == 0 else {}, options=options)
    check(model, plain.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.zero_grad()  # torch makes room for an optimizer's state only where there are no gradients
    state = get_optimizer_state_dict(plain, plain_optimizer)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=WHOLE)
    assert_close(trained(model, optimizer, 1), trained(plain, plain_optimizer, 1))
    got = get_model_state_dict(model, options=WHOLE)
    assert list(got) == (list(plain.state_dict()) if rank == 0 else [])
    if rank == 0:
        assert_close(got, dict(plain.state_dict()))


def before_the_first_call(sharded: nn.Module) -> None:
    """Whole tensors, then the DTensors of another parallel model."""
    model = parallel(normed(), LINE)
    plain, _ = other()
    model.load_state_dict(plain.state_dict())
    check(model, plain.state_dict())
    model.load_state_dict(sharded.state_dict())
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    check(model, sharded.state_dict())


def loading(rank: int) -> None:
    model = parallel(normed(), LINE, (data()[0],))
    assert any(p.placements[0].is_shard() for p in model.parameters() if isinstance(p, DTensor))
    plain_into_parallel(model)
    through_torchs_functions(rank, model)
    before_the_first_call(model)
    before = full(model.state_dict())
    state = full(model.state_dict())
    state["down.bias"] += rank
    with pytest.raises(ShardingError, match=r"other values of down.bias on rank 1 than on rank 0"):
        model.load_state_dict(state)
    check(model, before)


def test_any_state_dict_at_any_time(ranks: RankPool) -> None:
    ranks.run(loading, world=2)


class Scaled(nn.Module):
    """Buffers of three kinds: persistent, not persistent, and without a value that never occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 6)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)
        self.register_buffer("mask", torch.arange(6) > 2, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, self.linear(x) * self.scale * self.count, 0.0)


def emptied(rank: int) -> list[str]:
    torch.manual_seed(0)
    plain = Scaled()
    with torch.device("meta"):
        model = Scaled()
    x = data()[0]
    parallel(model, LINE, (x,))
    with pytest.raises(ShardingError, match=r"is on meta, without values\n  try: model\.to_empty"):
        model(x)
    model.to_empty(device="cpu")
    said: list[str] = []
    model.linear.reset_parameters()
    with pytest.raises(ShardingError) as first:
        model(x)
    said.append(str(first.value))
    model.load_state_dict(plain.state_dict())
    model.mask.copy_(plain.mask)
    with pytest.raises(ShardingError) as second:
        model(x)
    said.append(str(second.value))
    model.scale.data.copy_(plain.scale)
    assert_close(full(model(x)), full(plain(x)))
    return said


def unmade(rank: int) -> str:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    x = torch.ones(4, 8)
    parallel(model, LINE, (x,))
    with pytest.raises(ShardingError) as caught:
        model(x)
    return str(caught.value)


def test_a_parameter_on_meta_is_named(ranks: RankPool) -> None:
    for said in ranks.run(unmade, world=2):
        assert said.startswith("weight is on meta, without values\n  try: model.to_empty(device='cpu')")


def test_buffers_without_values_are_named(ranks: RankPool) -> None:
    (first, second), other_rank = ranks.run(emptied, world=2)
    assert [first, second] == other_rank
    assert first == (
        "the model was on meta, and to_empty left buffers without values: count, scale, mask\n"
        "  try: model.get_buffer('count').copy_(...) after to_empty, load_state_dict if persistent, "
        "or make buffers outside torch.device('meta')"
    )
    assert second.splitlines()[0].endswith("without values: scale")


def pretrained(rank: int, folder: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    before = copy.deepcopy(dict(model.state_dict()))
    tokens = torch.arange(16).view(2, 8)
    parallel(model, LINE, ((), {"input_ids": tokens, "use_cache": False}))
    assert any(p.placements[0].is_shard() for p in model.parameters() if isinstance(p, DTensor))
    model.save_pretrained(folder)
    read = GPT2LMHeadModel.from_pretrained(folder)
    assert_close(dict(read.state_dict()), before)


def test_save_pretrained_writes_whole_tensors(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(pretrained, str(tmp_path), world=2)
    assert (tmp_path / "model.safetensors").exists()
