"""Optimizers over DTensors of uneven parts (some empty) on a 2x2 mesh, against the same ones over whole tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.runtime.optimizers import ELEMENTWISE
from autoshard.runtime.parameters import complete_dtensor_ops
from tests.ranks import RankPool

PLACED = {
    "rows": ((7, 3), (Shard(0), Shard(0))),
    "columns": ((4, 5), (Replicate(), Shard(1))),
    "both": ((5, 3), (Shard(0), Shard(1))),
    "few": ((2,), (Shard(0), Shard(0))),  # nothing on two ranks
    "number": ((), (Replicate(), Replicate())),
}
STEPS = 4

Options = dict[str, Any]
Kind = tuple[str, Options]

KINDS: list[Kind] = [
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("AdamW", {"foreach": False, "weight_decay": 0.1}),
    ("Adam", {"lr": torch.tensor(0.05)}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("SGD", {}),
    ("Adadelta", {}),
    ("Adagrad", {"fused": True}),
    ("Adagrad", {"foreach": True}),
    ("Adamax", {}),
    ("ASGD", {}),
    ("NAdam", {}),
    ("RAdam", {"foreach": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}),
]


class _Model(nn.Module):
    """The parameters of `PLACED`."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, (shape, placed) in PLACED.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(
                name, nn.Parameter(value if mesh is None else distribute_tensor(value, mesh, placed))
            )

    def gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            value = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                parameter.grad = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            else:
                parameter.grad = value

    def overflow(self) -> None:
        columns = self.get_parameter("columns")
        grad = columns.grad
        assert grad is not None
        value = _whole(grad).clone()
        value[0, 0] = torch.inf
        same = isinstance(grad, DTensor)
        columns.grad = distribute_tensor(value, grad.device_mesh, grad.placements) if same else value

    def values(self) -> dict[str, Tensor]:
        return {n: _whole(p.detach()) for n, p in self.named_parameters()}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


class _Dispatched(TorchDispatchMode):
    """Names of the ops that were called on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def _made() -> DeviceMesh:
    complete_dtensor_ops(torch.device("cpu"))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def _optimizer(model: nn.Module, kind: Kind) -> torch.optim.Optimizer:
    name, options = kind
    return getattr(torch.optim, name)(model.parameters(), **copy.deepcopy({"lr": 0.05, **options}))


def _all_kinds(rank: int) -> None:
    mesh = _made()
    for kind in KINDS:
        ours, theirs = _Model(mesh), _Model(None)
        optimizers = [_optimizer(m, kind) for m in (ours, theirs)]
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
        for step in range(STEPS):
            for model, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
                model.gradients(step)
                if step == STEPS - 1:
                    nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
                with _Dispatched() as seen:
                    optimizer.step()
                scheduler.step()
                # The first step makes the state; later ones compute on shards alone.
                assert step == 0 or not seen.ops, (kind, seen.ops)
        _same(ours.values(), theirs.values(), kind)
        _check_state(optimizers[0], kind)


def _check_state(optimizer: torch.optim.Optimizer, kind: Kind) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in optimizer.state)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                assert isinstance(value, DTensor) and isinstance(parameter, DTensor), (kind, name)
                assert value.placements == parameter.placements


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: Any, **tolerances: float) -> None:
    for name in theirs:
        message = lambda text, name=name: f"{what} {name}: {text}"
        torch.testing.assert_close(ours[name], theirs[name], msg=message, **tolerances)  # type: ignore[arg-type]


def test_an_update_of_shards_is_that_of_the_whole(ranks: RankPool) -> None:
    ranks.run(_all_kinds, world=4)


def test_every_public_update_has_a_case() -> None:
    covered = {name.lower() for name, _ in KINDS}
    assert covered == set(ELEMENTWISE)


def _with_closures(rank: int) -> None:
    mesh = _made()
    for kind in (("SGD", {"momentum": 0.9}), ("AdamW", {"foreach": True})):
        found = []
        for model in (_Model(mesh), _Model(None)):
            optimizer = _optimizer(model, kind)

            def closure(model: _Model = model) -> float:
                """Its gradients follow from the parameters that it sees, as those of a loss do."""
                for parameter in model.parameters():
                    parameter.grad = 2 * (parameter.detach() - 1)
                return sum(float(((value - 1) ** 2).sum()) for value in model.values().values())

            losses = [optimizer.step(closure) for _ in range(STEPS)]
            found.append({**model.values(), "losses": torch.tensor(losses)})
        _same(found[0], found[1], kind)


def test_closures_see_the_parameters(ranks: RankPool) -> None:
    ranks.run(_with_closures, world=4)


WHOLE_KINDS: list[Kind] = [
    ("Muon", {}),
    ("Muon", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    ("Adafactor", {"foreach": True}),
    ("Adafactor", {"foreach": False, "weight_decay": 0.1}),
    ("Adafactor", {}),
]


def _of_wholes(rank: int, kind: Kind) -> None:
    """Those that take norms or products of parameters, so that no element is updated by itself."""
    mesh = _made()
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "bfloat16", Tensor.clone)  # Muon's products, whose rounding would hide errors
        for model in (_Model(mesh).double(), _Model(None).double()):
            if kind[0] == "Muon":
                del model.few, model.number
            _step(model, _optimizer(model, kind), range(STEPS))
            found.append(model.values())
    _same(found[0], found[1], kind, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", WHOLE_KINDS, ids=str)
def test_an_update_of_norms_and_products_sees_whole_parameters(ranks: RankPool, kind: Kind) -> None:
    ranks.run(_of_wholes, kind, world=4)


def _scaled(rank: int) -> None:
    mesh = _made()
    for fused in (True, False):
        found = []
        for model in (_Model(mesh), _Model(None)):
            optimizer = _optimizer(model, ("AdamW", {"fused": fused}))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.zeros(()))
            for step in range(STEPS):
                model.gradients(step)
                if step == 1:  # one element: no rank may take this step
                    model.overflow()
                scaler.step(optimizer)
                scaler.update()
            found.append(model.values())
        _same(found[0], found[1], fused)


def test_a_scaler_skips_the_same_step_everywhere(ranks: RankPool) -> None:
    ranks.run(_scaled, world=4)


def _continued(rank: int) -> None:
    """Half of the steps, a checkpoint of the state, the other half by a new optimizer."""
    mesh = _made()
    for kind, whole in (
        (("SGD", {"momentum": 0.9}), False),
        (("AdamW", {"fused": True}), False),
        (("AdamW", {}), True),
    ):
        options = StateDictOptions(full_state_dict=whole)
        reference, model = _Model(None), _Model(mesh)
        _step(reference, _optimizer(reference, kind), range(STEPS))
        first, second = (_optimizer(model, kind) for _ in range(2))
        _step(model, first, range(STEPS // 2))
        saved: Any = copy.deepcopy(get_optimizer_state_dict(model, first, options=options))
        for name, state in saved["state"].items():
            shape = model.get_parameter(name).shape
            assert all(value.shape in (shape, ()) for value in state.values())
        model.zero_grad()
        set_optimizer_state_dict(model, second, saved, options=options)
        _step(model, second, range(STEPS // 2, STEPS))
        _same(model.values(), reference.values(), kind)


def _step(model: _Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model.gradients(step)
        optimizer.step()


def test_a_checkpoint_holds_whole_state(ranks: RankPool) -> None:
    ranks.run(_continued, world=4)


def _loaded(rank: int) -> None:
    """The states of one process, into an optimizer that was made of DTensors."""
    reference, model = _Model(None), _Model(_made())
    before = _optimizer(reference, ("Adam", {}))
    _step(reference, before, range(STEPS // 2))
    with torch.no_grad():
        for name, value in reference.named_parameters():
            model.get_parameter(name).copy_(value)
    after = _optimizer(model, ("Adam", {}))
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for one, optimizer in ((reference, before), (model, after)):
        one.zero_grad()
        _step(one, optimizer, range(STEPS // 2, STEPS))
    _same(model.values(), reference.values(), "loaded")


def test_an_optimizer_takes_the_states_of_one_process(ranks: RankPool) -> None:
    ranks.run(_loaded, world=4)


def _mixed(rank: int) -> None:
    """Gradients that are not cut as their parameters, and plain parameters beside DTensors."""
    mesh = _made()
    ours, theirs = _Model(mesh), _Model(None)
    loose = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    found = []
    for model, parameter in zip((ours, theirs), loose, strict=True):
        optimizer = torch.optim.SGD([*model.parameters(), parameter], 0.05, 0.9)
        for step in range(STEPS):
            model.gradients(step)
            parameter.grad = torch.arange(3.0)
            columns = model.get_parameter("columns")
            if step == 2 and isinstance(columns.grad, DTensor):
                columns.grad = columns.grad.redistribute(mesh, [Replicate(), Replicate()])
            optimizer.step()
        found.append({**model.values(), "loose": parameter.detach()})
    _same(found[0], found[1], "mixed")


def test_what_is_not_cut_alike_is_updated_too(ranks: RankPool) -> None:
    ranks.run(_mixed, world=4)


def _outdated(rank: int) -> str:
    mesh = _made()
    model = _Model(mesh)
    model.gradients(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rows = model.get_parameter("rows")
    loss = (rows * rows).sum()
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_autograd_notices_an_update_between_forward_and_backward(ranks: RankPool) -> None:
    for text in ranks.run(_outdated, world=4):
        assert "modified by an inplace operation" in text
