"""Every script of docs/scripts.md: on two ranks as in one process, or refused on both in the words of the page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.ranks import RankFailure, RankPool
from tests.scripts.catalog import MODULES
from tests.scripts.script import alone, refusal_of, scripts_in, stops, together


def cases() -> list[Any]:
    return [
        pytest.param(module, name, id=name) for module, found in MODULES.items() for name in scripts_in(found)
    ]


# All of them take minutes, which CI has not: `pytest -m slow tests/scripts`.
@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), cases())
def test_situation(ranks: RankPool, module: str, name: str) -> None:
    script = scripts_in(MODULES[module])[name]
    refusal = refusal_of(script)
    if stops(script):
        with pytest.raises(RankFailure, match=refusal):
            ranks.run(together, script, world=2)
        return
    wanted, outcomes = alone(script), ranks.run(together, script, world=2)
    for outcome in outcomes:
        assert refusal in outcome.error and bool(outcome.error) == bool(refusal), outcome.text or outcome
        if not refusal:
            assert outcome.collectives > 0, "nothing was split"
            assert_same(outcome.value, wanted)


ROUNDING = {torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Of single ops in that dtype, which ranks do on parts; 1e-5 and, relative, 1e-4 for others."""


def assert_same(got: Any, wanted: Any) -> None:
    """Numbers within rounding; all else equal."""
    ours, ours_spec = pytree.tree_flatten(got)
    theirs, theirs_spec = pytree.tree_flatten(wanted)
    assert ours_spec == theirs_spec
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, float | torch.Tensor):
            rounding = ROUNDING.get(getattr(b, "dtype", torch.float32))
            tolerance = {"rtol": rounding or 1e-4, "atol": rounding or 1e-5}
            torch.testing.assert_close(a, b, **tolerance)
        else:
            assert a == b
