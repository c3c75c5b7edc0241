"""`find_plan`, `verify` and a failed `autoshard` leave the model and the global random numbers as they were."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoshard import CaptureError, MeshSpec, find_plan, verify
from autoshard.plan.plan import Plan
from tests.profiles import slow_compute

MESH = MeshSpec({"x": 2})


class Notes:
    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []


class Busy(nn.Module):
    """Its forward changes whatever a module can hold, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 12)
        self.count = 0
        self.log: list[Any] = []
        self.table = {"calls": [0]}
        self.names: set[str] = set()
        self.last: deque[int] = deque([1, 2], maxlen=2)
        self.notes = Notes()
        self.nested = ([],)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.log.append(x)
        self.table["calls"][0] += 1
        self.table[f"call {self.count}"] = [x]
        self.names.add(str(self.count))
        self.last.append(self.count)
        self.notes.calls += 1
        self.notes.seen.append(self.count)
        self.nested[0].append(x)
        self.steps = self.steps + 1
        if not getattr(self, "_hooked", False):
            self._hooked = True
            self.up.register_forward_hook(lambda module, args, output: output * 2)
        random.random()
        np.random.rand()
        return self.up(x)


def held(model: Busy) -> Any:
    lists = (
        list(model.log),
        dict(model.table),
        list(model.table["calls"]),
        set(model.names),
        list(model.last),
    )
    notes = (model.notes.calls, list(model.notes.seen), list(model.nested[0]))
    hooks = (dict(model.up._forward_hooks), hasattr(model, "_hooked"))
    return model.count, lists, notes, hooks, model.steps.item(), sorted(vars(model))


def drawn() -> list[float]:
    """The next number of every generator, without taking it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    numbers = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return numbers


def planned(model: nn.Module, *args: Any) -> Plan:
    return find_plan(model, MESH, args, profile=slow_compute(), backend="eager")


def test_all_that_a_module_can_hold() -> None:
    model, x = Busy(), torch.randn(8, 10, requires_grad=True)
    model.up.weight.grad = torch.ones(12, 10)
    before, numbers = held(model), drawn()
    plan = planned(model, x)
    assert held(model) == before and drawn() == numbers
    assert verify(model, plan, (x,)).ok
    assert held(model) == before and drawn() == numbers
    assert x.grad is None and torch.equal(model.up.weight.grad, torch.ones(12, 10))


def test_hooks_that_run_on_gradients_do_not_run() -> None:
    model = nn.Linear(10, 12)
    stepped: list[Tensor] = []
    model.weight.register_post_accumulate_grad_hook(stepped.append)
    x = torch.randn(8, 10)
    assert verify(model, planned(model, x), (x,)).ok
    assert not stepped and model.weight.grad is None


class Plain(nn.Module):
    """A tensor that no state dict knows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up = nn.Linear(10, 12)
        self.way = way
        self.tables = [torch.zeros(12)]

    def forward(self, x: Tensor) -> Tensor:
        (table,) = self.tables
        if self.way == "constant":
            table.add_(1)
        elif self.way == "data":
            table.data.mul_(0).add_(2)
        else:
            table.add_(self.up(x).mean(0).detach())
        return self.up(x) + table


@pytest.mark.parametrize("way", ["constant", "data", "values"])
def test_a_plain_tensor_changed_in_place(way: str) -> None:
    model = Plain(way)
    with pytest.raises(CaptureError, match="in place") as caught:
        planned(model, torch.randn(8, 10))
    assert "try: self.register_buffer" in str(caught.value)
    named = (
        "changes tables[0] in place" if way == "constant" else "test_left_alone.py"
    )  # torch refuses the others
    assert named in str(caught.value)
    assert torch.equal(model.tables[0], torch.zeros(12))


def test_output_hooks_of_transformers_are_installed_once() -> None:
    """Two layers have three hidden states; installed twice, the hooks return more."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=11
    )
    model = BertModel(config).eval()
    ids = torch.arange(8).reshape(2, 4)
    planned(model, ids)
    planned(model, ids)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3


def test_a_failed_call_leaves_no_forward(ranks: Any) -> None:
    for own, installed in ranks.run(failed, world=2):
        assert own and not installed


def failed(rank: int) -> tuple[bool, bool]:
    """Whether a `forward` of the instance's own is kept, and whether one is left on a model that had none."""
    from autoshard import autoshard
    from cost_model.errors import AutoshardError
    from tests.api.programs import device_mesh

    plain, patched = nn.Linear(10, 4), nn.Linear(10, 4)
    own = patched.forward = lambda x: x.undefined  # type: ignore[method-assign,attr-defined]
    mesh = device_mesh((("x", 2),))
    for model in (plain, patched):
        try:
            autoshard(model, mesh, (torch.randn(8, 7),), profile=slow_compute(), backend="eager")
        except AutoshardError:
            continue
        raise AssertionError("accepted")
    return vars(patched)["forward"] is own, "forward" in vars(plain)
