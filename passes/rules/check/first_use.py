"""A rule that a user registered is tried when an op of a graph is first asked for it, and refused if it is wrong.

Tried are random values in small shapes of the same pattern (dims that are equal stay equal), which 2, 3 and 2 x 2 ranks
split unevenly; where the op does not take those, in multiples of 16, and then in its own shapes, if they have no more
than 65,536 elements. On the CPU first, then on the graph's device, in float64 first, then in the graph's dtypes: so a
kernel is tried where it runs on this machine, and not where a plan is made for another.

Not refused is what cannot be tried: an op that raises on such values, is random, or has no kernel here. Nor is an op
that raises on parts of some sizes alone, as one that takes multiples of 8, nor what differs by less than 5 % of a
result's values, as kernels do that compute in bfloat16 inside. Rules of this package are not tried: its tests do that.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from cost_model.errors import ShardingError
from passes.ir.joint import map_operands, node_values, tensor_operands
from passes.ir.op_traits import op_signature
from passes.rules.check.discover import WrongClaim, discover_rule, wrong_claims
from passes.rules.check.trial import Trial, call_node
from passes.rules.core.rule import OpRule
from passes.rules.core.rule_registry import USER_RULES, rule_for

_MOST_ELEMENTS = 65_536

_Shapes = list[tuple[int, ...]]


def tried_rule(node: fx.Node) -> OpRule:
    """The rule of one op, as `rule_for`.

    Raises ShardingError if it is a user's, and wrong for ops like this one.
    """
    rule = rule_for(node)
    place = USER_RULES.tried_at(node.target)
    if place is None or not any(way.splittable or way.linear for way in rule.ways):
        return rule
    if not all(isinstance(operand.meta["val"], Tensor) for operand in tensor_operands(node)):
        return rule  # it is given a number that the graph computes
    signature = op_signature(node)
    if signature not in USER_RULES.tried:
        with torch.no_grad(), torch.random.fork_rng(_devices(node)[1:]), torch.device("cpu"):
            _try(node, rule, place)
        USER_RULES.tried.add(signature)
    return rule


def _try(node: fx.Node, rule: OpRule, place: str) -> None:
    for shapes, odd in _shapes(node, rule):
        for device, wide in itertools.product(_devices(node), (True, False)):
            call = _call(node, shapes, device, wide)
            if call is not None:
                wrong = _wrong(call, odd)
                if wrong is not None:
                    raise ShardingError(_refusal(call, wrong, place))
                return


def _devices(node: fx.Node) -> list[torch.device]:
    """The CPU, and the graph's device where it is here."""
    found = {operand.meta["val"].device for operand in tensor_operands(node)}
    here = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device("cpu"), *(d for d in found if here is not None and d.type == here.type)]


def _shapes(node: fx.Node, rule: OpRule) -> Iterator[tuple[_Shapes, bool]]:
    """Of the operands, what to try first first, and whether they are of any length, not of multiples alone."""
    real = [tuple(operand.meta["val"].shape) for operand in tensor_operands(node)]
    of = lambda sizes, dims: tuple(math.prod(sizes[f] for f in dim) for dim in dims)
    if not rule.windows and real == [of(rule.sizes, dims) for dims in rule.operands]:
        for unit in (1, 16):
            small = _small(rule.sizes.values(), unit)
            sizes = {factor: small[size] for factor, size in rule.sizes.items()}
            operands, results = ([of(sizes, dims) for dims in ends] for ends in (rule.operands, rule.results))
            if _elements([*operands, *results]) <= _MOST_ELEMENTS:
                yield operands, unit == 1
    results = [tuple(value.shape) for value in node_values(node) if value is not None]
    if _elements([*real, *results]) <= _MOST_ELEMENTS:
        yield real, False


def _small(lengths: Iterable[int], unit: int) -> dict[int, int]:
    """Each length in small: the longer ones multiples of `unit` that neither 2 nor 3 ranks split evenly in units."""
    longer = (unit * n for n in itertools.count(5, 2) if n % 3)
    return {n: n if n < 5 * unit else next(longer) for n in sorted(set(lengths))}


def _elements(shapes: Iterable[Sequence[int]]) -> int:
    return sum(map(math.prod, shapes))


def _call(node: fx.Node, shapes: _Shapes, device: torch.device, wide: bool) -> fx.Node | None:
    """The op called with random operands; None if it does not take these, or says another thing the next time."""
    generator = torch.Generator().manual_seed(0)
    below = max(1, min([5, *(n for shape in shapes for n in shape)]))  # numbers of places that there are
    try:
        dtypes = [operand.meta["val"].dtype for operand in tensor_operands(node)]
        values = [
            _value(s, d, below, generator, wide).to(device) for s, d in zip(shapes, dtypes, strict=True)
        ]
        args, kwargs = map_operands(node, values)
        first, again = (call_node(node.target, args, kwargs) for _ in range(2))  # type: ignore[arg-type]
        rule_for(first)
        results = zip(node_values(first), node_values(again), strict=True)
        same = all(one is None or (one.device == device and _equal(one, two)) for one, two in results)
        return first if same else None
    except (
        Exception
    ):  # of the op, whatever it is, of a rule that is made for other shapes, of types none can compare
        return None


def _value(
    shape: Sequence[int], dtype: torch.dtype, below: int, generator: torch.Generator, wide: bool
) -> Tensor:
    if not dtype.is_floating_point and not dtype.is_complex:
        high = 2 if dtype == torch.bool else below
        return torch.randint(high, shape, generator=generator).to(dtype)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=exact).to(exact if wide else dtype)


def _equal(one: Any, two: Any) -> bool:
    return one.shape == two.shape and bool(torch.isclose(one, two, rtol=0, atol=0, equal_nan=True).all())


def _wrong(call: fx.Node, odd: bool) -> WrongClaim | None:
    """A claim that does not hold. Parts in which the op raises count where it takes any length, and for no number of
    ranks a part that it takes."""
    results = [value for value in node_values(call) if value is not None]
    rtol = max(_tolerance(value.dtype) for value in results)
    scales = [value.double().abs().nanmean().item() for value in results if value.dtype.is_floating_point]
    atol = rtol * min([scale for scale in scales if 0 < scale < math.inf], default=1.0)
    raised: Counter[object] = Counter()
    for way in rule_for(call).ways:
        for wrong in wrong_claims(call, way, rtol, atol=atol, most=64):
            raised[wrong.chosen] += wrong.raised
            if not wrong.raised or (odd and len(wrong.mesh) == 1 and raised[wrong.chosen] == 2):
                return wrong
    return None


def _tolerance(dtype: torch.dtype) -> float:
    """Above rounding, of kernels that compute in a narrower type inside too."""
    return {1: 0.3, 2: 0.1}.get(dtype.itemsize, 0.05) if dtype.is_floating_point else 0.05


def _refusal(call: fx.Node, wrong: WrongClaim, place: str) -> str:
    args, kwargs = map_operands(call, [operand.meta["val"] for operand in tensor_operands(call)])
    try:
        found = f"{discover_rule(call.target, args, kwargs)!r}, which autoshard.discover_rule finds"  # type: ignore[arg-type]
    except Exception:  # of the op, or of a search that would be too long
        found = "a rule with fewer factors, the others noted as whole ('d: whole')"
    mesh = ", ".join(f"{name}={size}" for name, size in zip("xy", wrong.mesh, strict=False))
    return (
        f"the rule of {call.target}, registered at {place}, is wrong: {_row(wrong.trial)} on mesh ({mesh}), "
        f"{wrong.problem}\n  try: {found}; or trial=False, if it holds for all values that the op is given"
    )


def _row(trial: Trial) -> str:
    """What the trial claims, as layouts: "[@x, -], [-, -] -> [@x, -]"."""
    rule, count = trial.rule, len(trial.rule.operands)

    def term(index: int) -> str:
        dims = rule.operands_and_results[index]
        firsts = map(rule.head, dims)
        axes = lambda factor: [n for n, c in zip("xy", trial.chosen, strict=False) if c.factor == factor]
        split = ["@" + ",".join(axes(f)) if f is not None and axes(f) else "-" for f in firsts]
        pending = trial.pending(dims) if index >= count else dict.fromkeys(trial.partial_axes(index), "sum")
        return f"[{', '.join(split)}]" + "".join(f"+{'xy'[axis]}:{op}" for axis, op in pending.items())

    terms = [term(index) for index in range(len(rule.operands_and_results))]
    return f"{', '.join(terms[:count])} -> {', '.join(terms[count:])}"
