"""Which rule an op has: a user's if there is one, else the table's, else pointwise, else none; and whether by it the op
works on every row by itself.

The table is immutable. Users' rules live in a `RuleTable`: pass one explicitly, or register into
`USER_RULES`, the one mutable object of this package, which is used where no table is passed. Adding
a rule changes what later plans may contain and nothing that has been planned or compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from cost_model.errors import ShardingError, reject, shown
from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.ir.op_traits import op_signature, writes_at_places, written_arguments
from passes.ir.routing import BALANCED, Routing
from passes.ir.torch_compat import op_key
from passes.layout.layout import ROUTED, nested_sizes
from passes.rules.core.assemble import neutral_where_empty, pointwise, whole_rule
from passes.rules.core.notation import Notation, parse
from passes.rules.core.rule import Builder, Dim, Localize, OpCall, OpRule, describe
from passes.rules.core.rule_table import TABLE

EXPERTS = "g"
"""The factor that counts experts, as in the rules of products with them."""


@dataclass(frozen=True)
class RoutedRows:
    """What is known of an op that works on every row by itself, in the meta "rows" of its node.

    experts:  how many there are.
    operands: of which a row may count on the rank of its expert alone, each with how it is pending then.
    pending:  how results are, where experts are split: `ROUTED`, or a sum; None: they have a dim of experts.
    routing:  how many rows each expert has.
    """

    experts: int
    operands: frozenset[tuple[int, str]]
    pending: str | None
    routing: Routing = BALANCED

    def fullest(self, ways: Sequence[int]) -> float:
        """Of all rows those of the rank with the most, of ranks that share experts so many ways after each other."""
        return self.routing.share(nested_sizes(self.experts, tuple(ways)))


def rows_passed_on(node: fx.Node, count: int) -> dict[str, RoutedRows]:
    """The meta "rows" of what is one of `count` operands that have the value of `node`, if it has any."""
    rows = result_index(node)[0].meta.get("rows")
    return (
        {"rows": replace(rows, operands=frozenset((i, ROUTED) for i in range(count)))}
        if rows and rows.pending == ROUTED
        else {}
    )


def with_experts(rule: OpRule, rows: RoutedRows) -> OpRule:
    """`rule`, by which experts may be split as well, over ranks that have their rows."""
    pending = {} if rows.pending is None else {EXPERTS: rows.pending}
    return replace(
        rule,
        sizes={**rule.sizes, EXPERTS: rows.experts},
        reductions={**rule.reductions, **pending},
        routed={i: (EXPERTS, op) for i, op in rows.operands},
    )


_POINTWISE = pointwise()


@dataclass
class RuleTable:
    """Rules that a user added, by op: "namespace::op.overload", or "namespace::op" for all overloads.

    places: by op, the line that registered its rule, where that is to be tried.
    made: rules made so far where this table was asked, with their builders: by the builder's id and what it was told.
    tried: the ops for which the rules there are were tried and hold (`passes.rules.check.first_use`).
    """

    builders: dict[str, Builder] = field(default_factory=dict)
    made: dict[tuple[int, Hashable], tuple[Any, OpRule]] = field(
        default_factory=dict, repr=False, compare=False
    )
    places: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    tried: set[Hashable] = field(default_factory=set, repr=False, compare=False)

    def register(
        self,
        op: Any,
        rule: str | Builder,
        *,
        linear: Iterable[Iterable[int]] = (),
        localize: Localize | None = None,
        trial: bool = True,
    ) -> None:
        """Say how `op` may be split; a rule given earlier for the same op is replaced.

            table.register("mylib::scale", "b t d, d -> b t d", linear=[{0}, {1}])

        op:       "namespace::op", "namespace::op.overload", an operator of `torch.ops`, or what
                  `torch.library.custom_op` returned.
        rule:     in the notation of RULES.md, or a function from `OpCall` to `OpRule`.
        linear:   sets of operand positions in which the op is linear (see `OpRule`).
        localize: emits one rank's part of the op, for an op that takes a shape or an offset.
        trial:    when a plan first asks for the rule, it is tried on random values where the op runs on this machine,
                  and an error if it is wrong (`passes.rules.check.first_use`). False: it holds for other values alone.

        With a rule in the notation the op is never run on empty tensors: a rank without any of a
        split factor contributes nothing (`neutral_where_empty`).

        Raises ShardingError for a rule that cannot be read, an op that is not one, or one that writes to its arguments.
        """
        name = op if isinstance(op, str) else op_key(op)
        sets = _checked_sets(linear)
        if localize is not None and not callable(localize):
            raise reject("localize", localize, "a function that emits one rank's part of the op, or None")
        if not isinstance(trial, bool):
            raise reject("trial", trial, "True, or False for a rule that holds for some values alone")
        if name is None or "::" not in name:
            raise ShardingError(
                f"cannot register a rule for {shown(op)}: not an operator\n"
                "  try: 'mylib::op', torch.ops.mylib.op, or what torch.library.custom_op returned"
            )
        written = written_arguments(name)
        if written:  # capture wraps such an op in another, whose rule would be asked instead
            raise ShardingError(
                f"cannot register a rule for {name}: it writes to its argument {', '.join(written)}\n"
                "  try: an op that returns new tensors (mutates_args=()), and a rule for that"
            )
        if not isinstance(rule, str) and not callable(rule):
            raise reject("rule", rule, "'b t d, d -> b t d', or a function from OpCall to OpRule")
        if isinstance(rule, str):
            self.builders[name] = _from_notation(parse(rule).with_linear(sets), localize)
        else:
            self.builders[name] = rule
        self.tried.clear()
        self.places.pop(name, None)
        if trial:
            self.places[name] = _users_line()

    def tried_at(self, target: Any) -> str | None:
        """The line that registered the rule of an op; None if it is none of these, or not to be tried."""
        key = op_key(target) if self.builders else None
        names = [] if key is None else [key, key.partition(".")[0]]
        return next((self.places.get(name) for name in names if name in self.builders), None)

    def lookup(self, key: str) -> Builder | None:
        """The builder for "namespace::op.overload"."""
        return self.builders.get(key) or self.builders.get(key.partition(".")[0])


def _users_line() -> str:
    """Where the user's code called this package: "train.py:12"."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("passes."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _checked_sets(linear: Any) -> list[frozenset[int]]:
    """Sets of operand positions; ShardingError for anything else."""
    remedy = "sets of operand positions, such as [{0}, {1}]"
    if not isinstance(linear, (list, tuple)):
        raise reject("linear", linear, remedy)
    for members in linear:
        if not isinstance(members, (set, frozenset, list, tuple)) or not all(type(m) is int for m in members):
            raise reject("an entry of linear", members, remedy)
    return [frozenset(members) for members in linear]


USER_RULES = RuleTable()
"""The rules registered with `register_rule`."""


register_rule = USER_RULES.register
"""Say how an op may be split, for all plans made from now on."""


def _from_notation(notation: Notation, localize: Localize | None) -> Builder:
    def build(call: OpCall) -> OpRule:
        n = len(call.operands)
        return neutral_where_empty(notation.bind(call.shapes[:n], call.shapes[n:], localize))

    return build


def rule_for(node: fx.Node, rules: RuleTable | None = None) -> OpRule:
    """The rule of one op; of an op nobody described, that nothing can be split.

    `node` and its tensor operands carry meta "val" with global shapes. A tensor without elements is
    never split. Raises ShardingError if a user's rule does not fit the op's shapes.
    """
    builder = _builder(node.target, rules)
    key = (id(builder), op_signature(node))
    table = USER_RULES if rules is None else rules
    made = table.made
    if key not in made:
        if len(made) >= 10_000:  # a process that plans for days keeps not all
            made.clear()
            table.tried.clear()
        made[key] = builder, _made(node, builder)  # with the builder, so that its id stays its own
    return made[key][1]


def rules_of(joint: JointGraph) -> Mapping[fx.Node, OpRule]:
    """The rules of all ops of a graph that no pass changes any more, but of those that select a result."""
    ops = lambda: (n for n in joint.graph.nodes if n.op == "call_function" and result_index(n)[0] is n)
    users = tuple(USER_RULES.builders.values())
    return joint.known(("rules", *map(id, users)), lambda: ({n: rule_for(n) for n in ops()}, users))[0]


def _made(node: fx.Node, builder: Builder | None) -> OpRule:
    call = describe(node)
    n = len(call.operands)
    results = call.shapes[n:]
    if (
        builder is None
        or any(0 in shape for shape in call.shapes[:n])
        or all(0 in shape for shape in results)
    ):
        return whole_rule(call)
    try:
        rule, rows = builder(call), node.meta.get("rows")
        return rule if rows is None else with_experts(rule, rows)
    except ShardingError as error:
        raise ShardingError(f"{node.target} at {node.name}: {error}") from None


def users_rules(graph: fx.Graph) -> list[str]:
    """The registered rules of ops of `graph`, in words that are the same in every process for the same rules."""
    asked = (node for node in graph.nodes if node.op == "call_function" and USER_RULES.builders)
    keys = ((node, op_key(node.target)) for node in asked)
    return [f"{node.name} {_text(rule_for(node))}" for node, key in keys if key and USER_RULES.lookup(key)]


def _text(value: Any) -> str:
    """All of a rule but `localize`, which emits the same op split as the rule says."""
    if isinstance(value, OpRule):
        value = [getattr(value, f.name) for f in fields(value) if f.name != "localize"]
    elif isinstance(value, (Mapping, Set)):
        value = sorted(map(_text, value.items() if isinstance(value, Mapping) else value))
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, (list, tuple)) else str(value)


def has_rule(target: Callable[..., Any] | str, rules: RuleTable | None = None) -> bool:
    """Whether ops with this target have a rule."""
    return _builder(target, rules) is not None


def is_fallback(node: fx.Node, rules: RuleTable | None = None) -> bool:
    """Whether `node` is an op that runs replicated because it has no rule."""
    return node.op == "call_function" and not has_rule(node.target, rules)


def _builder(target: Any, rules: RuleTable | None) -> Builder | None:
    key = op_key(target)
    if key is None:
        return None
    table = USER_RULES if rules is None else rules
    found = table.lookup(key) or TABLE.get(key)
    if found is None and torch.Tag.pointwise in getattr(target, "tags", ()):
        return _POINTWISE
    return found


Rows = tuple[int, ...]
"""The dims of a tensor that count its rows."""


def is_by_rows(node: fx.Node, shape: Sequence[int]) -> bool:
    """Whether an op works on every row by itself, where rows are the first dims, of `shape`."""
    if node.op != "call_function":
        return False
    first = tuple(range(len(shape)))
    rows = {n: first for n in node.all_input_nodes if has_rows(n, shape)}
    found = rows_through(node, rows) if rows else None
    return found is not None and all(dims == first for dims in found)


def has_rows(node: fx.Node, shape: Sequence[int]) -> bool:
    """Whether the first dims are of `shape`. Numbers are compared before symbols, of which it would be a question."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.ndim < len(shape):
        return False
    pairs = sorted(
        zip(value.shape, shape, strict=False), key=lambda pair: sum(type(n) is not int for n in pair)
    )
    return all(a == b for a, b in pairs)


def rows_through(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> tuple[Rows | None, ...] | None:
    """Per result the dims of the rows, None where the op has reduced them; None for an op whose results would not be
    the same rows in another order, given its operands in that order.

    rows: values -> their dims of the rows, in the same order for all. Operands that are not in it have no rows.
    """
    rule, operands = rule_for(node), tensor_operands(node)
    given = {i: rows[operand] for i, operand in enumerate(operands) if operand in rows}
    kinds = {tuple(rule.operands[i][d] for d in dims) for i, dims in given.items()}
    if len(kinds) != 1 or rule.others or not all(len(dim) <= 1 for dim in (*kinds,)[0]):
        return None
    dims = kinds.pop()
    factors = {factor for dim in dims for factor in dim}
    if len(factors) != sum(map(len, dims)) or factors & rule.whole or _combined(rule, factors):
        return None
    for i in range(len(operands)):
        if i not in given and factors & {f for dim in rule.operands[i] for f in dim}:
            return None
    if writes_at_places(node) and not factors <= {f for dim in rule.operands[-1] for f in dim}:
        return None
    first = next(iter(given.values()))
    results = tuple(_found(dims, first, result) for result in rule.results)
    lost = any(found is None and any(dims) and not factors <= rule.reductions.keys() for found in results)
    return None if lost or any(found == () for found in results) else results


def _combined(rule: OpRule, factors: set[str]) -> bool:
    """Whether rows are seen through a window, or flattened with something else."""
    tensors = enumerate(rule.operands_and_results)
    return any(
        factors & set(dim) and (len(dim) > 1 or (t, d) in rule.windows)
        for t, tensor in tensors
        for d, dim in enumerate(tensor)
    )


def _found(dims: tuple[Dim, ...], first: Rows, result: tuple[Dim, ...]) -> Rows | None:
    """Where a result has the rows: a dim of size 1, which is no factor, where the operand had it. None: nowhere; ():
    some of them."""
    if any(dims) and not any(dim and dim in result for dim in dims):
        return None
    places = [
        result.index(dim)
        if dim and dim in result
        else place
        if not dim and result[place : place + 1] == ((),)
        else -1
        for dim, place in zip(dims, first, strict=True)
    ]
    return () if -1 in places else tuple(places)
