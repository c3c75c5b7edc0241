"""Sizes as symbols: numbers of torch's (`torch.SymInt`) that know how they are computed, and all that was asked of them
while a graph was made. Private torch APIs are used as in `passes.ir.torch_compat`, and supported as there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.ir.torch_dispatch import onednn_off, replaced_attribute, replaced_kernels

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

Evaluation = Callable[[Sequence[int]], list[Any] | None]
"""Of values of the sizes: what some numbers are, or None where something does not hold."""
Look = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device, bool]
"""Of a tensor: its shape, strides, offset, dtype, device, and whether it requires grad."""


class SizesLost(Exception):
    """What is asked of a call is no expression of its sizes."""


class SizeSymbols:
    """sizes: one symbol for each of `hints`, which are what they count as while a graph is made: at least 2.

    Whatever asks of an expression of them (`if size > 8`) is told what holds of the hints, and that is noted: the graph
    is that of all sizes for which the same holds. `ShapeEnv` since torch 2.0.

    traced: ops of graphs of these sizes, in ATen ops (`expand_ops`): tracing with symbols is slow.
    """

    def __init__(self, hints: Sequence[int]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self.hints, self.env = tuple(hints), ShapeEnv()
        self.traced: dict[Any, fx.Graph] = {}
        names = [ConstantSource(f"size_{place}") for place, _ in enumerate(hints)]
        make = self.env.create_symbol
        self._symbols = [
            make(h, n, dynamic_dim=DimDynamic.DYNAMIC) for h, n in zip(hints, names, strict=True)
        ]
        pairs = zip(self._symbols, hints, strict=True)
        self.sizes: list[Any] = [self.env.create_symintnode(symbol, hint=hint) for symbol, hint in pairs]

    @property
    def are_fixed(self) -> list[bool]:
        """Whether each turned out to be always the same."""
        return [not isinstance(fixed(size), SYMBOLIC) for size in self.sizes]

    def known(self) -> Iterator[Any]:
        """What holds of the sizes of a graph, in torch's expressions."""
        if self.env.deferred_runtime_asserts:
            raise SizesLost("it depends on values of tensors")
        yield from (symbol >= 2 for symbol in self._symbols)
        yield from dict.fromkeys(guard.expr for guard in self.env.guards)

    def code(self, expression: Any) -> str:
        """One of torch's expressions as code, in which the sizes are s0, s1, ... (`evaluation`)."""
        from torch.utils._sympy.printers import PythonPrinter

        if unknown := expression.free_symbols - self._named.keys():
            raise SizesLost(f"it depends on {unknown}")
        return PythonPrinter().doprint(expression.xreplace(self._named))

    @cached_property
    def _named(self) -> dict[Any, Any]:
        named: Any = type(self._symbols[0]) if self._symbols else None
        return {s: named(f"s{i}", **s.assumptions0) for i, s in enumerate(self._symbols)}


@dataclass(frozen=True)
class SymbolicShapes:
    """shapes: of a call's tensors, in numbers and in `symbols`."""

    symbols: SizeSymbols
    shapes: Sequence[tuple[Any, ...]]


def evaluation(count: int, holds: Sequence[str], numbers: Sequence[str]) -> Evaluation:
    """holds, numbers: code that `SizeSymbols` of so many sizes wrote, here or on another rank."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    names = ", ".join(f"s{place}" for place in range(count))
    every = " and ".join(f"({one})" for one in (*holds, "True"))  # one may be "a or b"
    code = f"lambda {names}: [{', '.join(numbers)}] if {every} else None"
    evaluated = eval(code, dict(SYMPY_INTERP))
    return lambda sizes: evaluated(*sizes)


def marked_dims(tensor: torch.Tensor) -> frozenset[int]:
    """Those that `torch._dynamo.mark_dynamic` was called for. Since 2.0."""
    return frozenset(getattr(tensor, "_dynamo_dynamic_indices", ()))


def expression_of(number: Any) -> Any:
    """How a symbolic number is computed; what is computed alike has equal ones. Since 2.0."""
    return number.node.expr


def fixed(number: Any) -> Any:
    """A plain number where a symbolic one turned out to be always the same. Since 2.0."""
    value = number.node.expr if isinstance(number, SYMBOLIC) else number
    return type(number.node.hint)(value) if value is not number and value.is_number else number


def counts_as(number: Any) -> Any:
    """A number, or what a symbolic one counts as: for choices of which each is right for all sizes. Since 2.0."""
    return number.node.hint if isinstance(number, SYMBOLIC) else number


def sizes_in(arguments: Any) -> list[Any]:
    """The sizes that the symbolic numbers among arguments are computed from. Since 2.0."""
    found: dict[Any, Any] = {}
    for number in pytree.tree_leaves(arguments):
        if isinstance(number, SYMBOLIC):
            env = number.node.shape_env
            for symbol in sorted(number.node.expr.free_symbols, key=str):
                found.setdefault(symbol, env.create_symintnode(symbol, hint=None))
    return list(found.values())


def with_sizes(arguments: Any, sizes: Sequence[tuple[Any, int]]) -> Any:
    """Arguments where every size in them, of `sizes_in`, is a number. Since 2.0."""
    values = {size.node.expr: value for size, value in sizes}
    plain = lambda n: int(n.node.expr.subs(values)) if isinstance(n, SYMBOLIC) else n
    return pytree.tree_map(plain, arguments)


def fakes_of(looks: Sequence[Look], symbols: SizeSymbols | None = None) -> list[torch.Tensor]:
    """Fakes of one new mode. symbols: that their shapes may have. Since 2.0."""
    from torch._subclasses import FakeTensorMode

    def made(look: Look) -> torch.Tensor:
        shape, stride, offset, dtype, device, grad = look
        if offset:
            length = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n > 1)
            fake = torch.empty(length, dtype=dtype, device=device).as_strided(shape, stride, offset)
        else:
            fake = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return fake.requires_grad_(grad)

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=None if symbols is None else symbols.env)
    mode.cache_enabled = symbols is None  # as in `fake_tensors`
    with mode, torch.no_grad(), torch.inference_mode(False):
        return [made(look) for look in looks]


def fakes_on(device: torch.device, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fakes of the sizes, strides, offsets and dtypes of `values` on `device`, of one new mode. Since 2.0."""
    return fakes_of([(v.shape, v.stride(), int(v.storage_offset()), v.dtype, device, False) for v in values])


def fresh_fakes(
    values: Sequence[torch.Tensor], counted: Sequence[tuple[int, int] | None] = ()
) -> list[torch.Tensor]:
    """Fakes like `values` (same sizes, strides, dtype, device) of a new FakeTensorMode. Since 2.0.

    Its ShapeEnv is that of the symbols among the sizes, or a new one: without any Inductor passes its cache by.
    counted: dims that may have any size; which dim, and a number that is the same for all whose size is the same.
    `ignore_fresh_unbacked_symbols` since 2.4.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    symbolic = (size for v in values for size in v.shape if isinstance(size, torch.SymInt))
    known = next((size.node.shape_env for size in symbolic), None)
    env, sizes = known or ShapeEnv(), dict[int, Any]()

    def made(value: torch.Tensor, place: tuple[int, int] | None) -> torch.Tensor:
        if place is None:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        dim, number = place
        if number not in sizes:
            with env.ignore_fresh_unbacked_symbols():
                sizes[number] = env.create_unbacked_symint()
            torch._check(sizes[number] >= 0)
        shape = [*value.shape[:dim], sizes[number], *value.shape[dim + 1 :]]
        order = sorted(range(value.ndim), key=lambda d: -value.stride(d))
        return torch.empty_permuted(shape, order, dtype=value.dtype, device=value.device)

    mode = FakeTensorMode(shape_env=env)
    mode.cache_enabled = known is None  # as in `fake_tensors`
    with mode:
        return list(map(made, values, counted or [None] * len(values)))


@contextmanager
def symbols_unwarned() -> Generator[None]:
    """torch warns of graphs that hold symbolic numbers. Since torch 2.13."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Raw Sym")
        yield


_SIZED_LIKE = {
    "softshrink_backward hardshrink_backward": lambda grad, *_: torch.empty_like(grad),
    """
    upsample_nearest1d_backward upsample_nearest3d_backward _upsample_nearest_exact1d_backward
    _upsample_nearest_exact3d_backward upsample_linear1d_backward upsample_bilinear2d_backward
    upsample_trilinear3d_backward upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward
    """: lambda grad, _, shape, *__: grad.new_empty(shape),
}
"""What looks like the results of ops of which torch says it in C++ alone, for plain sizes: all that have rules."""


@contextmanager
def results_sized() -> Generator[None]:
    """Inside, every op says of sizes in symbols what its results look like, and asks of none which library would be
    faster."""
    with ExitStack() as stack:
        stack.enter_context(onednn_off())
        stack.enter_context(torch.backends.nnpack.flags(enabled=False))
        for names, made in _SIZED_LIKE.items():
            for name in names.split():
                op = getattr(torch.ops.aten, name).default
                stack.enter_context(replaced_kernels(op, {"Meta": made}))
        yield


@contextmanager
def symbolic_sizes() -> Generator[None]:
    """Inside, passes may be given graphs whose sizes are symbols. These can be keys: numbers that are computed alike
    are the same, and all others differ, whatever they count as, those of another graph's sizes too, which may have the
    names of this one's, or have turned out to be always the same. torch gives them no hash, since two that are equal
    for some sizes are told apart by it: not for a user's code, which may mean something by that.

    Some ops take symbols only where torch's kernels in Python come first: `enable_python_dispatcher` since 2.0."""
    from torch._dispatch.python import enable_python_dispatcher

    # A plain number's is never its; what remembers it keeps its sizes.
    hashed = lambda number: hash(("a size", number.node.expr, id(number.node.shape_env)))
    with (
        replaced_attribute(torch.SymInt, "__hash__", hashed),
        replaced_attribute(torch.SymFloat, "__hash__", hashed),
        symbols_unwarned(),
        results_sized(),
        enable_python_dispatcher(),
    ):
        yield


def computed(
    nodes: Iterable[fx.Node], values: Mapping[fx.Node, Any], sizes: Sequence[tuple[Any, int]] = ()
) -> dict[fx.Node, Any]:
    """The values of `nodes`, which are in order, and `values`, which they are computed from. sizes: what those in
    symbols are."""
    results = dict(values)
    for node in nodes:
        if node not in results:
            args, kwargs = fx.map_arg(with_sizes((node.args, node.kwargs), sizes), results.__getitem__)
            results[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return results
