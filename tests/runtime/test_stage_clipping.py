"""Norms, clipping and scaling of gradients of several stages, against one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.ranks import RankPool
from tests.runtime.stage_models import (
    CASES,
    TIED,
    Case,
    Net,
    give_gradients,
    net,
    net_of_stages,
    same,
    whole,
    whole_of,
)

ORDERS = (2.0, 1.0, 3.0, 0.0, math.inf, -math.inf)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _same_gradients(ours: nn.Module, theirs: nn.Module, what: object) -> None:
    values = [{str(i): whole_of(g) for i, g in enumerate(_gradients(model))} for model in (ours, theirs)]
    same(values[0], values[1], what)


def _clipped(rank: int, case: Case) -> None:
    mesh = case.mesh()
    ours, theirs = net_of_stages(case, mesh), net()
    for order in ORDERS:
        for foreach in (None, False, True):
            norms = []
            for model in (ours, theirs):
                give_gradients(model, 0)
                norms.append(nn.utils.get_total_norm(_gradients(model), order, foreach=foreach))
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.5, order, foreach=foreach))
            for ours_, theirs_ in zip(norms[:2], norms[2:], strict=True):
                assert isinstance(ours_, DTensor) and ours_.device_mesh == mesh
                torch.testing.assert_close(ours_.full_tensor(), theirs_)
                # A number of it needs no other rank.
                torch.testing.assert_close(ours_.to_local(), theirs_)
            _same_gradients(ours, theirs, (order, foreach))
    for model in (ours, theirs):
        give_gradients(model, 1)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
    _same_gradients(ours, theirs, "value")
    for model in (ours, theirs):
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(4.0))
    _same_gradients(ours, theirs, "given norm")


@pytest.mark.parametrize("case", [CASES[0], CASES[2], TIED], ids=str)
def test_clipping_is_exact_over_stages(ranks: RankPool, case: Case) -> None:
    ranks.run(_clipped, case, world=case.world)


def _counted(rank: int, case: Case) -> tuple[int, int]:
    """All-reduces and broadcasts of one clipping."""
    model = net_of_stages(case)
    give_gradients(model, 0)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "broadcast"):
            made = getattr(dist, name)

            def counting(*args: object, name: str = name, made: Any = made, **options: object) -> Any:
                calls.append(name)
                return made(*args, **options)

            patch.setattr(dist, name, counting)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    return calls.count("all_reduce"), calls.count("broadcast")


def test_clipping_communicates_once(ranks: RankPool) -> None:
    assert ranks.run(_counted, CASES[2], world=4) == [(1, 0)] * 4


def _imported_before(rank: int, case: Case) -> None:
    """torch's own functions, which a module has that imported them before anything was wrapped.

    Not imported here: a rank of the pool may be of an earlier test, and be wrapped, or not.
    """
    ours, theirs = net_of_stages(case), net()
    get_total_norm = nn.utils.get_total_norm.wrapped  # type: ignore[attr-defined]
    clip_grads_with_norm_ = nn.utils.clip_grads_with_norm_.wrapped  # type: ignore[attr-defined]
    clip_grad_value_ = nn.utils.clip_grad_value_.wrapped  # type: ignore[attr-defined]
    for model in (ours, theirs):
        give_gradients(model, 0)
        clip_grad_value_(model.parameters(), 0.7)
    _same_gradients(ours, theirs, "value")
    found = []
    for model in (ours, theirs):
        total = get_total_norm(_gradients(model))
        clip_grads_with_norm_(model.parameters(), 1.0, total)
        found.append(
            {"total": whole_of(total), "clipped": whole_of(nn.utils.clip_grad_norm_(model.parameters(), 0.5))}
        )
    same(found[0], found[1])
    _same_gradients(ours, theirs, "norm")


@pytest.mark.parametrize("case", [CASES[2]], ids=str)
def test_functions_that_were_imported_before_are_right_too(ranks: RankPool, case: Case) -> None:
    ranks.run(_imported_before, case, world=case.world)


def _not_finite(rank: int, case: Case, value: float) -> None:
    """A NaN or infinity that one stage has reaches all ranks, in every order."""
    model = net_of_stages(case)
    for order in (2.0, math.inf, -math.inf):
        give_gradients(model, 0)
        gradient = whole_of(model.down.bias.grad)  # type: ignore[arg-type]
        gradient[4] = value
        model.down.bias.grad.copy_(gradient)  # type: ignore[union-attr]
        total = whole_of(nn.utils.get_total_norm(_gradients(model), order))
        expected = torch.linalg.vector_norm(
            torch.cat([whole_of(g).flatten() for g in _gradients(model)]), order
        )
        torch.testing.assert_close(total, expected, equal_nan=True)
        if not total.isfinite():
            with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_so_everywhere(ranks: RankPool, value: float) -> None:
    ranks.run(_not_finite, CASES[2], value, world=4)


def _half(rank: int, case: Case) -> None:
    """Gradients of several dtypes."""
    found = []
    for model in (net_of_stages(case), net()):
        give_gradients(model, 0)
        model.down.to(torch.bfloat16)
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append(
            {"total": whole_of(total), **{str(i): whole_of(g) for i, g in enumerate(_gradients(model))}}
        )
    same(found[0], found[1], rtol=0.01, atol=0.01)


def test_several_dtypes(ranks: RankPool) -> None:
    ranks.run(_half, CASES[2], world=4)


def _scaled(rank: int, case: Case) -> None:
    for name, options in (("SGD", {"momentum": 0.9}), ("AdamW", {"fused": True}), ("AdamW", {})):
        found = []
        for model in (net_of_stages(case), net()):
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.zeros(()))
            for step in range(4):
                give_gradients(model, step)
                if step == 1:  # one element of the last stage: no rank may take this step
                    _overflow(model)
                if step == 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            found.append({**whole(model), "scale": torch.tensor(scaler.get_scale())})
        same(found[0], found[1], name)


def _overflow(model: Net) -> None:
    gradient = model.down.weight.grad
    assert gradient is not None
    value = whole_of(gradient)
    value[4, 6] = math.inf
    gradient.copy_(value)


@pytest.mark.parametrize("case", [CASES[3]], ids=str)
def test_a_scaler_skips_the_same_step_everywhere(ranks: RankPool, case: Case) -> None:
    ranks.run(_scaled, case, world=case.world)
