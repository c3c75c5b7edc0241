"""Whether communicators may be in flight together, by what NCCL was asked for and can do."""

from __future__ import annotations

import pytest
import torch
from torch.cuda import nccl

from autoshard.planning import ask_for_host_order, in_host_order


@pytest.mark.parametrize(
    ("asked", "version", "wanted"),
    [("1", (2, 29, 7), True), ("1", (2, 26, 0), True), ("1", (2, 25, 1), False), ("0", (2, 29, 7), False)],
)
def test_in_host_order(
    monkeypatch: pytest.MonkeyPatch, asked: str, version: tuple[int, int, int], wanted: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nccl, "version", lambda: version)
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    assert not in_host_order()
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", asked)
    assert in_host_order() is wanted


def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    ask_for_host_order()
    assert not in_host_order()
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    ask_for_host_order()
    assert in_host_order()
