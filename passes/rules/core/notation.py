"""The notation rules are written in.

    m k, k n -> m n                     k, shared by two operands and gone, is summed
    ..., ... -> ...                     broadcasting, aligned at the right
    v d, *t -> *t d; v: sum             *t: any number of dims
    (a b) c -> a b c                    a product of factors, major first
    a k -> a; k: max                    max, min or sum over a factor of one operand
    n c *x -> n c *y; *x: whole         may not be split
    ..., ... -> ...; linear: 0; linear: 1        linear in each operand alone
    ..., ... -> ...; linear: 0 1        linear in both together
    b 1 d -> b d                        a dim of size 1

A factor that only a result has is whole: nothing says how to compute a part of it. A factor that
one operand alone has, and no result, needs a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from cost_model.errors import ShardingError
from passes.rules.core.assemble import assemble
from passes.rules.core.rule import Builder, Dim, Localize, OpCall, OpRule

_ELLIPSIS = "..."
_REDUCTIONS = ("sum", "max", "min")
_TOKEN = re.compile(r"\(|\)|\.\.\.|\*?[A-Za-z_]\w*|1|\S")

Term = tuple[Dim, ...]


@dataclass(frozen=True)
class Notation:
    """A parsed rule; `bind` makes it an `OpRule` for given shapes.

    operands, results: per tensor, per dim, its factors; ("...",) and ("*x",) stand for many dims.
    reductions, whole: by factor name ("*x" for all of its dims). linear: sets of operand positions.
    """

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    reductions: Mapping[str, str]
    whole: frozenset[str]
    linear: tuple[frozenset[int], ...]

    def with_linear(self, linear: Iterable[Iterable[int]]) -> Notation:
        """The same with these linear sets added. Raises ShardingError for a position that is not there."""
        sets = tuple(frozenset(s) for s in linear)
        _check_linear(self.text, sets, len(self.operands))
        return replace(self, linear=(*self.linear, *sets))

    def bind(
        self,
        operand_shapes: Sequence[Sequence[int]],
        result_shapes: Sequence[Sequence[int]],
        localize: Localize | None = None,
    ) -> OpRule:
        """The rule for an op with these global shapes.

        Raises ShardingError if the number of tensors or dims is not what the notation says, or if
        two dims disagree about the size of a factor.
        """
        for kind, terms, shapes in (
            ("operand", self.operands, operand_shapes),
            ("result", self.results, result_shapes),
        ):
            if len(terms) != len(shapes):
                raise ShardingError(
                    f"rule {self.text!r} has {len(terms)} {kind}s, the op has {len(shapes)}\n"
                    f"  the op's {kind} shapes are {[tuple(s) for s in shapes]}"
                )
        shapes = [*operand_shapes, *result_shapes]
        counts = self._counts(shapes)
        terms = [_expand(term, len(shape), counts) for term, shape in zip(self._terms, shapes, strict=True)]
        try:
            return assemble(
                shapes,
                terms[: len(self.operands)],
                terms[len(self.operands) :],
                reductions={f: op for name, op in self.reductions.items() for f in _names(name, counts)},
                whole=[f for name in self.whole for f in _names(name, counts)],
                linear=self.linear,
                localize=localize,
            )
        except ShardingError as error:
            shown = ", ".join(str(tuple(s)) for s in shapes)
            raise ShardingError(f"rule {self.text!r} does not fit shapes {shown}: {error}") from None

    @property
    def _terms(self) -> tuple[Term, ...]:
        return (*self.operands, *self.results)

    def _counts(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """How many dims "..." and each "*x" stand for; "..." may stand for fewer in some tensors."""
        counts: dict[str, int] = {}
        for term, shape in zip(self._terms, shapes, strict=True):
            many = _variadic(term)
            extra = len(shape) - sum(dim != (many,) for dim in term)
            wrong = extra < 0 or (many is None and extra > 0)
            if many is not None and many != _ELLIPSIS and counts.setdefault(many, extra) != extra:
                wrong = True
            if wrong:
                raise ShardingError(
                    f"rule {self.text!r} does not fit a tensor of shape {tuple(shape)}\n"
                    f"  it describes the dims {_show(term)!r}"
                )
            if many == _ELLIPSIS:
                counts[many] = max(counts.get(many, 0), extra)
        return counts


@cache
def parse(text: str) -> Notation:
    """Read a rule. Raises ShardingError, quoting the part that is wrong and a remedy."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ShardingError(f"rule {text!r} has no '->'\n  try: 'm k, k n -> m n'")
    right, notes = _split_notes(right)
    operands = tuple(_term(text, part) for part in left.split(",")) if left.strip() else ()
    results = tuple(_term(text, part) for part in right.split(","))
    reductions, whole, linear = _parse_notes(text, notes)
    _check_linear(text, linear, len(operands))
    in_operands = [_factors(term) for term in operands]
    in_results: set[str] = set().union(*(_factors(term) for term in results))
    for name in (*reductions, *whole):
        if name not in in_results.union(*in_operands):
            raise ShardingError(f"rule {text!r} has a note on {name!r}, which is no factor of it")
    for name in sorted(set().union(*in_operands) - in_results - set(reductions) - whole):
        if name == _ELLIPSIS:
            whole |= {name}
        elif sum(name in factors for factors in in_operands) < 2:
            raise ShardingError(
                f"rule {text!r} does not say what happens to {name!r}, which is in no result\n"
                f"  try: '{text}; {name}: sum' (or max, min), or '{name}: whole' if it cannot be split"
            )
        else:
            reductions[name] = "sum"
    whole |= in_results.difference(*in_operands, reductions)
    return Notation(text, operands, results, reductions, whole, linear)


def _split_notes(right: str) -> tuple[str, list[str]]:
    """Results and notes: a note is "word: word", after a semicolon, a comma or a space."""
    first = re.search(r";|(\*?\w+\s*:)", right)
    if first is None:
        return right, []
    results, notes = right[: first.start()], right[first.start() :]
    return results.rstrip().rstrip(","), [n.strip() for n in re.split(r"[;,]", notes) if n.strip()]


def _parse_notes(
    text: str, notes: Sequence[str]
) -> tuple[dict[str, str], frozenset[str], tuple[frozenset[int], ...]]:
    reductions: dict[str, str] = {}
    whole: set[str] = set()
    linear: list[frozenset[int]] = []
    for note in notes:
        name, _, value = (part.strip() for part in note.partition(":"))
        if name == "linear" and re.fullmatch(r"\d+(\s+\d+)*", value):
            linear.append(frozenset(int(word) for word in value.split()))
        elif value == "whole":
            whole.add(name)
        elif value in _REDUCTIONS:
            reductions[name] = value
        else:
            raise ShardingError(
                f"rule {text!r} has a note {note!r} that is not understood\n"
                "  try: 'k: sum', 'k: max', 'k: min', 'k: whole' or 'linear: 0 1'"
            )
    return reductions, frozenset(whole), tuple(linear)


def _check_linear(text: str, sets: Iterable[frozenset[int]], n_operands: int) -> None:
    for members in sets:
        if not members or max(members) >= n_operands:
            raise ShardingError(
                f"rule {text!r} cannot be linear in operands {sorted(members)}: "
                f"it has {n_operands} operands\n"
                "  operands are counted from 0"
            )


def _term(text: str, part: str) -> Term:
    """ "(a b) c" -> (("a", "b"), ("c",))."""
    found: list[Dim] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(part):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            found.append(tuple(group))
            group = None
        elif token == "1" and group is None:
            found.append(())
        elif re.fullmatch(r"[A-Za-z_]\w*", token):
            if group is None:
                found.append((token,))
            else:
                group.append(token)
        elif group is None and (token == _ELLIPSIS or (token.startswith("*") and len(token) > 1)):
            found.append((token,))
        else:
            raise ShardingError(f"rule {text!r} has an unexpected {token!r} in {part.strip()!r}")
    if group is not None:
        raise ShardingError(f"rule {text!r} has an unclosed '(' in {part.strip()!r}")
    flat = [f for dim in found for f in dim]
    repeated = next((f for f in flat if flat.count(f) > 1), None)
    if repeated is not None:
        raise ShardingError(f"rule {text!r} has {repeated!r} twice in {part.strip()!r}")
    if sum(_is_variadic(f) for f in flat) > 1:
        raise ShardingError(f"rule {text!r} has two of '...' and '*x' in {part.strip()!r}")
    return tuple(found)


def _is_variadic(factor: str) -> bool:
    return factor == _ELLIPSIS or factor.startswith("*")


def _variadic(term: Term) -> str | None:
    return next((dim[0] for dim in term if dim and _is_variadic(dim[0])), None)


def _factors(term: Term) -> set[str]:
    return {factor for dim in term for factor in dim}


def _expand(term: Term, ndim: int, counts: Mapping[str, int]) -> Term:
    """`term` with one dim per dim of a tensor of `ndim`. "..." is numbered from its right end."""
    many = _variadic(term)
    if many is None:
        return term
    wanted = ndim - (len(term) - 1)
    new = tuple((name,) for name in _names(many, counts)[counts[many] - wanted :])
    at = term.index((many,))
    return (*term[:at], *new, *term[at + 1 :])


def _names(name: str, counts: Mapping[str, int]) -> list[str]:
    """The factors that `name` stands for: *x -> x0, x1, ...; "..." -> ...0, ...1, ..."""
    if not _is_variadic(name):
        return [name]
    stem = name if name == _ELLIPSIS else name[1:]
    return [f"{stem}{i}" for i in range(counts.get(name, 0))]


def _show(term: Term) -> str:
    return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in term)


def spec(text: str, localize: Localize | None = None) -> Builder:
    """`text` in the notation of notation.py, for ops that always have the same operands. Results that the op was told
    not to compute have no dims."""
    notation = parse(text)

    def build(call: OpCall) -> OpRule:
        n = len(call.operands)
        made = zip(notation.results, call.results, strict=True)
        there = replace(notation, results=tuple(() if result is None else term for term, result in made))
        return there.bind(call.shapes[:n], call.shapes[n:], localize)

    return build
