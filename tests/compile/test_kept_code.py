"""Code compiled before is found by the graph that it is of, and by no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config

from passes.compile import compile_graph as compiling
from passes.compile.compile_graph import code_name, compile_graph, compile_sized
from passes.ir.torch_compat import fake_mode_of
from passes.ir.torch_sizes import SizeSymbols, evaluation, fakes_of, symbolic_sizes
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


def squared(hints: tuple[int, int]) -> tuple[fx.GraphModule, SizeSymbols]:
    """x times itself turned, in symbols: nothing of it is written in C++."""
    symbols, graph = SizeSymbols(hints), fx.Graph()
    rows, columns = symbols.sizes
    with symbolic_sizes():
        look = (rows, columns), (columns, 1), 0, torch.float32, torch.device("cpu"), False
        (x,) = fakes_of([look], symbols)
        node = graph.placeholder("x")
        turned = graph.call_function(aten.permute.default, (node, [1, 0]))
        product = graph.call_function(aten.mm.default, (node, turned))
        flat = graph.call_function(aten.view.default, (product, [rows * rows]))
        with fake_mode_of(x):
            values = x, x.t(), x @ x.t(), (x @ x.t()).view(rows * rows)
    for one, value in zip((node, turned, product, flat), values, strict=True):
        one.meta["val"] = value
    graph.output((flat,))
    return fx.GraphModule(nn.Module(), graph), symbols


def compiled(module: fx.GraphModule, symbols: SizeSymbols) -> Any:
    with symbolic_sizes():
        return compile_sized(module, symbols, "inductor")


def test_code_in_symbols_is_kept_with_what_was_asked_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module, symbols = squared((6, 5))
    assert symbols.sizes[0] > 4  # as a compiler asks
    compiled(module, symbols)
    monkeypatch.setattr(compiling, "compile_with_inductor", lambda *given: 1 / 0)
    module, symbols = squared((5, 7))
    run, numbers = compiled(module, symbols)
    holds, codes = [symbols.code(one) for one in symbols.known()], [n.node.expr for n in numbers]
    evaluate = evaluation(2, holds, [symbols.code(one) for one in codes])
    assert evaluate((4, 7)) is None
    for size in ((5, 7), (9, 2)):
        x = torch.randn(size)
        (found,) = run([x, *(evaluate(size) or ())])
        torch.testing.assert_close(found, (x @ x.t()).flatten())
    with pytest.raises(ZeroDivisionError):  # that did not hold
        compiled(*squared((4, 7)))


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
