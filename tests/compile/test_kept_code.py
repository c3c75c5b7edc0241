"""Code compiled before is found by the graph that it is of, and by no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config

from passes.compile import compile_graph as compiling
from passes.compile.compile_graph import compile_graph
from passes.compile.kept_code import code_name
from tests.runtime.graphs import Local

aten = torch.ops.aten


def scaled(
    factor: Any = 2.0, rows: int = 4, dtype: torch.dtype = torch.float32, serves: str = ""
) -> fx.GraphModule:
    local = Local()
    x = local.input(rows, 4)
    x.meta["val"] = x.meta["val"].to(dtype)
    y = local.call(aten.mul.Tensor, x, factor)
    y.meta["serves"] = serves
    return local.module(y, local.call(aten.sin.default, y))


def test_the_second_time_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(4, 4)
    first = compile_graph(scaled())([value])

    def refuse(*given: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "compile_with_inductor", refuse)
    for wanted, before, now in zip(
        (2 * value, (2 * value).sin()), first, compile_graph(scaled())([value]), strict=True
    ):
        torch.testing.assert_close(now, wanted)
        assert torch.equal(now, before)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="compiled again"):
        compile_graph(scaled(3.0))


def test_what_decides_the_code_is_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [
        scaled(),
        scaled(3.0),
        scaled(2),
        scaled(rows=5),
        scaled(dtype=torch.float64),
        scaled(serves="w"),
    ]
    names = [code_name(graph) for graph in graphs]
    with config.patch({"cpp.threads": 7}):
        names.append(code_name(graphs[0]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    names.append(code_name(graphs[0]))
    assert None not in names
    assert len(set(names)) == len(names)
    assert code_name(scaled()) == names[-1]


@torch.library.custom_op("kept::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_code_with_an_op_whose_body_may_change_has_none() -> None:
    twice.register_fake(torch.empty_like)
    local = Local()
    x = local.input(4, 4)
    assert code_name(local.module(local.call(torch.ops.kept.twice.default, x))) is None
