"""State dicts and checkpoints of a pipelined model: whole, sharded, to other meshes and back to one process."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from autoshard.runtime.attachments import accept_any_state
from cost_model.errors import ShardingError
from tests.ranks import RankPool
from tests.runtime.placing import distribute_parameters
from tests.runtime.stage_models import CASES, TIED, Case, Net, give_gradients, net, net_of_stages, same, whole

KINDS: list[tuple[str, dict[str, Any]]] = [("AdamW", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9})]


def _made(case: Case | None, kind: int, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """case: None is one process, and `_everywhere` a mesh without stages."""
    model = net(seed) if case is None else net_of_stages(case, seed=seed)
    name, options = KINDS[kind]
    return model, getattr(torch.optim, name)(model.parameters(), **options)


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def _expected(kind: int, steps: int) -> dict[str, Tensor]:
    model, optimizer = _made(None, kind)
    _stepped(model, optimizer, range(steps))
    return whole(model)


def _full(rank: int, case: Case, kind: int) -> None:
    """Full states, as one process has them, on all ranks and on the first; into another model and optimizer."""
    reference, its = _made(None, kind)
    _stepped(reference, its, range(2))
    model, optimizer = _made(case, kind)
    _stepped(model, optimizer, range(2))
    full = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=full)
    same(state, dict(reference.state_dict()))  # type: ignore[arg-type]
    on_first = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert list(on_first) == (list(state) if rank == 0 else [])
    numbers: Any = get_optimizer_state_dict(model, optimizer, options=full)
    theirs: Any = get_optimizer_state_dict(reference, its)
    for name, state_of in theirs["state"].items():
        same(numbers["state"][name], state_of, name)
    for options, mine in (
        (full, True),
        (StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), rank == 0),
    ):
        twin, other = _made(case, kind, seed=1)
        set_model_state_dict(twin, dict(state) if mine else {}, options=options)
        set_optimizer_state_dict(twin, other, _copy(numbers) if mine else {}, options=options)
        same(whole(twin), dict(reference.state_dict()), options)
        _stepped(twin, other, range(2, 4))
        same(whole(twin), _expected(kind, 4), options)


def _copy(numbers: Any) -> Any:
    """`set_optimizer_state_dict` takes out of what it is given."""
    file = io.BytesIO()
    torch.save(numbers, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(("case", "kind"), [(CASES[1], 1), (CASES[2], 0)], ids=str)
def test_full_states(ranks: RankPool, case: Case, kind: int) -> None:
    ranks.run(_full, case, kind, world=case.world)


def _save(rank: int, path: str, case: Case | None, kind: int) -> None:
    model, optimizer = _made(case, kind)
    _stepped(model, optimizer, range(2))
    model.steps.fill_(7.0)  # type: ignore[operator]
    state, numbers = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": numbers}, checkpoint_id=path)


def _load(rank: int, path: str, case: Case | None, kind: int) -> dict[str, Tensor]:
    model, optimizer = _made(case, kind, seed=1)
    state, numbers = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": numbers}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=numbers)
    _stepped(model, optimizer, range(2, 4))
    return whole(model)


@pytest.mark.parametrize(
    ("saved", "loaded", "kind"),
    [
        (CASES[1], CASES[2], 0),
        (CASES[2], TIED, 1),
        (TIED, CASES[3], 0),
        (CASES[3], None, 0),
        (None, CASES[2], 1),
    ],
    ids=str,
)
def test_a_checkpoint_from_one_mesh_to_another(
    ranks: RankPool, saved: Case | None, loaded: Case | None, kind: int
) -> None:
    expected = _expected(kind, 4)
    expected["steps"] = torch.full((2,), 7.0)
    with tempfile.TemporaryDirectory() as path:
        ranks.run(_save, path, saved, kind, world=saved.world if saved else 1)
        for found in ranks.run(_load, path, loaded, kind, world=loaded.world if loaded else 1):
            same(found, expected)


def _loaded(rank: int, case: Case) -> None:
    """`load_state_dict` of whole tensors, of another pipeline's, of a mesh without stages; and of the optimizer's."""
    reference, its = _made(None, 0)
    _stepped(reference, its, range(2))
    model, optimizer = _made(case, 0, seed=1)
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(its.state_dict())
    _stepped(model, optimizer, range(2, 4))
    same(whole(model), _expected(0, 4))

    placed = {**case.placed(), "up.weight": case.placed()["down.weight"]}
    assert placed["up.weight"].holders != case.placed()["up.weight"].holders
    everywhere = net(2)
    distribute_parameters(everywhere, case.mesh(), {})
    accept_any_state(everywhere)
    everywhere.load_state_dict(model.state_dict())
    same(whole(everywhere), _expected(0, 4))
    twin, other = _made(case, 0, seed=3)
    twin.load_state_dict(everywhere.state_dict())
    other.load_state_dict(optimizer.state_dict())
    _stepped(twin, other, range(4, 5))
    same(whole(twin), _expected(0, 5))


@pytest.mark.parametrize("case", [CASES[1], CASES[2]], ids=str)
def test_loading(ranks: RankPool, case: Case) -> None:
    ranks.run(_loaded, case, world=case.world)


def _differing(rank: int, case: Case) -> str:
    model = net_of_stages(case)
    with pytest.raises(ShardingError) as error:
        model.load_state_dict(net(seed=rank).state_dict())
    same(whole(model), dict(net().state_dict()))
    return str(error.value).splitlines()[0]


def test_whole_states_that_differ_are_refused_on_all_stages(ranks: RankPool) -> None:
    for text in ranks.run(_differing, CASES[1], world=4):
        assert text.startswith("state_dict has other values of ")


def _through_a_file(rank: int, folder: str, case: Case) -> None:
    """Each rank's own shards, by torch.save."""
    model = net_of_stages(case)
    path = Path(folder) / f"{rank}.pt"
    torch.save(model.state_dict(), path)
    state = torch.load(path)
    twin = net_of_stages(case, seed=1)
    twin.load_state_dict(state)
    same(whole(twin), dict(net().state_dict()))
    value = state["up.weight"]
    assert isinstance(value, DTensor)
    assert torch.equal(value.full_tensor(), net().up.weight)


def test_shards_in_files(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_through_a_file, str(tmp_path), CASES[2], world=4)
