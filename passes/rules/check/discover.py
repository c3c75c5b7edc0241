"""Find an op's rule by running it on shards of example inputs [EasyDist's ShardCombine]; and the numerical oracle of op
rules: everything a rule claims, run on simulated ranks, must equal the op.

The oracle knows no rules. It takes an op call and a rule, and tries every combination of one choice per mesh axis (a
factor, a linear set with random summands, or nothing) on meshes of 2, 3 and 2 x 2 ranks. With small dims that gives
uneven shards, and ranks that hold nothing.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from cost_model.errors import ShardingError, error_line, reject
from passes.ir.joint import map_operands, tensor_operands
from passes.rules.check.trial import REDUCTIONS, Choice, Trial, call_node, choices
from passes.rules.core.assemble import neutral_where_empty
from passes.rules.core.notation import parse
from passes.rules.core.rule import OpRule

MESHES = ((2,), (3,), (2, 2))


@dataclass(frozen=True)
class WrongClaim:
    """What of a rule does not hold, and how that shows. raised: the op, or its part on a rank, raised an error."""

    trial: Trial
    problem: str
    raised: bool

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.trial.mesh

    @property
    def chosen(self) -> tuple[Choice, ...]:
        return self.trial.chosen


def wrong_claims(
    node: fx.Node, rule: OpRule, rtol: float = 1e-9, *, atol: float | None = None, most: int | None = None
) -> Iterator[WrongClaim]:
    """The claims of `rule` that are wrong for the call `node` (of `call_node`). most: to try on a mesh."""
    for mesh in MESHES:
        for chosen in itertools.islice(choices(rule, len(mesh)), most):
            trial = Trial(node, rule, mesh, chosen, rtol=rtol, atol=atol)
            try:
                problem, raised = trial.mismatch(), False
            except Exception as error:  # of the op, whatever it is
                problem, raised = f"{type(error).__name__}: {error}", True
            if problem is not None:
                yield WrongClaim(trial, problem, raised)


@dataclass(frozen=True)
class _Factor:
    """dims: per operand the dim it splits, or None. outcomes: per result the dim in which the parts
    join (an int), the reduction that combines them (a str), or None if every part is the whole."""

    dims: tuple[int | None, ...]
    outcomes: tuple[int | str | None, ...]

    @property
    def reduction(self) -> str | None:
        return next((o for o in self.outcomes if isinstance(o, str)), None)


def discover_rule(
    op: Callable[..., Any], example_args: Sequence[Any], example_kwargs: dict[str, Any] | None = None
) -> str:
    """The rule of `op` that its behaviour on `example_args` shows, in the notation of docs/rules.md.

        discover_rule(torch.ops.aten.mm.default, (torch.randn(4, 5), torch.randn(5, 6)))
        -> "a b, b c -> a c; b: sum; linear: 0; linear: 1"

    Every assignment of one factor to dims of the operands is tried by running the op on two shards;
    what was found is then checked on meshes of 2, 3 and 2 x 2 ranks, and what fails is left out. It is
    a proposal: a coincidence of the examples looks like a rule. Use small random values (float64 where
    the op takes it), with sizes that differ and are at least 3; dims of size 1 say nothing.

    Raises ShardingError if the op does not return tensors, or has too many dims to try them all.
    """
    node = _called(op, example_args, example_kwargs)
    operands = [operand.meta["val"] for operand in tensor_operands(node)]
    results = _results(node.meta["val"])
    if not all(isinstance(r, Tensor) for r in results):
        returned = type(node.meta["val"]).__name__
        raise ShardingError(
            f"cannot discover a rule for {op}: it returns {returned}, not tensors\n  try: an op that returns tensors"
        )
    factors = _compatible(_candidates(node, operands, results))
    while True:
        rule = _write(factors, operands, results)
        wrong = _wrong_factor(node, _bind(rule, operands, results))
        if wrong is None:
            break
        factors = [f for i, f in enumerate(factors) if string.ascii_letters[i] != wrong]
    linear = _linear_sets(node, _bind(rule, operands, results), operands)
    return rule + "".join(f"; linear: {' '.join(map(str, sorted(s)))}" for s in linear)


def _results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _bind(rule: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> OpRule:
    return neutral_where_empty(parse(rule).bind([t.shape for t in operands], [t.shape for t in results]))


def _candidates(node: fx.Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> list[_Factor]:
    """Every assignment that works, those of most operands, and joining rather than reducing, first."""
    options = [[None, *(d for d in range(t.ndim) if t.shape[d] > 1)] for t in operands]
    count = math.prod(map(len, options))
    if count > 20_000:
        raise ShardingError(
            f"cannot discover a rule for {node.target}: {count} assignments of dims to try\n"
            "  try: examples with fewer dims, or register_rule with a rule of your own"
        )
    found: list[_Factor] = []
    for dims in itertools.product(*options):
        sizes = {t.shape[d] for t, d in zip(operands, dims, strict=True) if d is not None}
        if len(sizes) == 1:
            outcomes = _try(node, operands, results, dims)
            if outcomes is not None:
                found.append(_Factor(dims, outcomes))
    return sorted(found, key=lambda f: (f.reduction is not None, sum(d is None for d in f.dims)))


def _try(
    node: fx.Node, operands: Sequence[Tensor], results: Sequence[Tensor], dims: Sequence[int | None]
) -> tuple[int | str | None, ...] | None:
    """What the results on two shards make together; None if not the whole op."""
    halves = [t.chunk(2, d) if d is not None else (t, t) for t, d in zip(operands, dims, strict=True)]
    parts: list[list[Any]] = []
    for rank in (0, 1):
        args, kwargs = map_operands(node, [half[rank].clone() for half in halves])
        try:
            parts.append(_results(node.target(*args, **kwargs)))  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None
    outcomes: list[int | str | None] = []
    for whole, *pair in zip(results, *parts, strict=True):
        outcome = next(_outcomes(whole, pair), "none")
        if outcome == "none":
            return None
        outcomes.append(outcome)
    reductions = {o for o in outcomes if isinstance(o, str)}
    if len(reductions) > 1 or all(o is None for o in outcomes):
        return None
    return tuple(outcomes)


def _outcomes(whole: Tensor, parts: Sequence[Any]) -> Iterator[int | str | None]:
    """Ways in which `parts` make `whole`."""
    if not all(isinstance(p, Tensor) and p.ndim == whole.ndim and p.dtype == whole.dtype for p in parts):
        return
    for dim in range(whole.ndim):
        rest = [[n for d, n in enumerate(t.shape) if d != dim] for t in (whole, *parts)]
        if rest[0] == rest[1] == rest[2] and _equal(torch.cat(list(parts), dim), whole):
            yield dim
    if all(p.shape == whole.shape for p in parts):
        if all(_equal(p, whole) for p in parts):
            yield None
        for name, reduce in REDUCTIONS.items():
            if not whole.dtype.is_complex and _equal(reduce(torch.stack(list(parts))).to(whole.dtype), whole):
                yield name


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = _tolerance(b)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def _compatible(candidates: Sequence[_Factor]) -> list[_Factor]:
    """The first of the candidates such that no dim has two factors."""
    taken: set[tuple[str, int, int]] = set()
    chosen: list[_Factor] = []
    for factor in candidates:
        dims = {("operand", i, d) for i, d in enumerate(factor.dims) if d is not None}
        dims |= {("result", i, o) for i, o in enumerate(factor.outcomes) if isinstance(o, int)}
        if not dims & taken:
            taken |= dims
            chosen.append(factor)
    return chosen


def _called(op: Any, args: Any, kwargs: Any) -> fx.Node:
    """The op run once on its examples; ShardingError if it cannot be."""
    if not callable(op) or isinstance(op, (type, nn.Module)):
        raise reject("op", op, "an operator, such as torch.ops.mylib.op")
    if not isinstance(args, (list, tuple)):
        raise reject("example_args", args, "a tuple of the op's arguments")
    named = isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)
    if kwargs is not None and not named:
        raise reject("example_kwargs", kwargs, "a dict of the op's keyword arguments, or None")
    try:
        return call_node(op, args, kwargs)
    except Exception as error:  # of the op, whatever it is
        raise ShardingError(
            f"cannot discover a rule for {op}: it raises {error_line(error)}\n  try: arguments that the op takes"
        ) from error


def _write(factors: Sequence[_Factor], operands: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    """The notation: found factors get the first letters, dims without one are whole."""
    names = iter(string.ascii_letters[len(factors) :])
    whole: list[str] = []

    def term(tensor: Tensor, dim_of: Callable[[_Factor], int | str | None], note: bool) -> str:
        words = ["1" if n == 1 else "" for n in tensor.shape]
        for letter, factor in zip(string.ascii_letters, factors, strict=False):
            at = dim_of(factor)
            if isinstance(at, int):
                words[at] = letter
        for at, word in enumerate(words):
            if not word:
                words[at] = next(names)
                whole.extend(words[at] if note else "")
        return " ".join(words)

    left = ", ".join(term(t, lambda f, i=i: f.dims[i], True) for i, t in enumerate(operands))
    right = ", ".join(term(t, lambda f, i=i: f.outcomes[i], False) for i, t in enumerate(results))
    notes = [
        f"{letter}: {f.reduction}"
        for letter, f in zip(string.ascii_letters, factors, strict=False)
        if f.reduction is not None
    ]
    return "; ".join([f"{left} -> {right}", *notes, *(f"{letter}: whole" for letter in whole)])


def _wrong_factor(node: fx.Node, rule: OpRule) -> str | None:
    """A factor whose claim fails on some mesh."""
    for wrong in wrong_claims(node, rule, _tolerance(*_results(node.meta["val"]))):
        named = [choice.factor for choice in wrong.chosen if choice.factor is not None]
        if named:
            return named[-1]
    return None


def _linear_sets(node: fx.Node, rule: OpRule, operands: Sequence[Tensor]) -> list[frozenset[int]]:
    """The smallest sets of floating-point operands in which the op is linear."""
    able = [i for i, t in enumerate(operands) if t.dtype.is_floating_point]
    found: list[frozenset[int]] = []
    for size in range(1, len(able) + 1):
        for members in map(frozenset, itertools.combinations(able, size)):
            known = any(smaller <= members for smaller in found)
            trial = Trial(
                node, rule, (3,), (Choice(linear=members),), rtol=_tolerance(*_results(node.meta["val"]))
            )
            if not known and _holds(trial):
                found.append(members)
    return found


def _tolerance(*values: Tensor) -> float:
    """Of values that are sums of parts: whole numbers and wide floats are exact."""
    return max(
        1e-9 if v.dtype in (torch.float64, torch.complex128) or not v.dtype.is_floating_point else 1e-4
        for v in values
    )


def _holds(trial: Trial) -> bool:
    try:
        return trial.mismatch() is None
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
