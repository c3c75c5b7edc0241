"""docs/trace.md: one small layer through every stage, written from what the code gives."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoshard import MeshSpec, Plan, find_plan
from autoshard.plan.judged import prices_of
from cost_model.memory import format_seconds
from cost_model.mesh import simulated_group_axes, simulated_groups
from cost_model.profile import Profile
from passes.canonicalize import canonicalize
from passes.capture import capture
from passes.ir.joint import JointGraph, result_shapes, tensor_operands
from passes.layout.layout import NodeLayouts
from passes.lower.phases import Phases, split_phases
from passes.lower.rank_program import rank_program
from passes.plan.decide import decide
from passes.plan.describe import short_dtype
from passes.predict.predict_program import predict_phases
from passes.rules.core.rule_registry import rule_for
from passes.strategies.prices import Prices, strategy_seconds
from passes.strategies.strategies import enumerate_strategies
from tests.profiles import slow_compute

__all__ = ["trace"]

MESH = MeshSpec({"dp": 2, "tp": 2})
SHOWN = 6  # strategies


class Layer(nn.Module):
    """The layer of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x)).mean()


def profile() -> Profile:
    profile = slow_compute(1e3)
    links = tuple(replace(link, shares_memory=False) for link in profile.links)
    return replace(profile, overlap_efficiency=0.9, links=links)


def trace() -> str:
    """The whole page."""
    torch.manual_seed(0)
    x = torch.zeros(4, 8)
    captured = capture(Layer(), (x,), {})
    plan = find_plan(Layer(), MESH, (x,), profile=profile(), backend="eager")
    joint = canonicalize(captured.joint)
    plan.check_graph(joint)
    prices = prices_of(profile(), MESH, "eager")
    return "\n".join(_page(captured.joint, joint, plan, prices)) + "\n"


def _page(raw: JointGraph, joint: JointGraph, plan: Plan, prices: Prices) -> Iterator[str]:
    program = rank_program(joint, plan.planned, MESH, 0, simulated_groups(MESH))
    split = split_phases(program.local.module, joint.inputs, joint.outputs)
    ordered = program.usual()
    yield INTRODUCTION
    yield from _section("capture", CAPTURE, _graph(raw.graph))
    yield from _section("canonicalize", CANONICALIZE, _graph(joint.graph))
    product = next(node for node in joint.graph.nodes if "contract" in str(node.target))
    yield from _section("rules", RULES, _rule(product))
    yield from _section(
        "strategies", STRATEGIES, _strategies(product, plan.planned.layouts[product.name], prices)
    )
    yield from _section("redistribution", REDISTRIBUTION, _steps(joint, plan, prices))
    yield from _section("plan", PLAN, plan.to_text().splitlines())
    yield from _section("partition", PARTITION, _graph(program.local.module.graph))
    yield from _section("split", SPLIT, _phases(split))
    yield from _section("schedule", SCHEDULE, _orders(ordered))
    yield from _section("predict", PREDICT, _timeline(ordered, prices))
    yield END


def _section(name: str, text: str, listing: Any) -> Iterator[str]:
    lines = [line for line in listing if line]
    yield from (f"## {name}", "", text.strip(), "", "```", *lines, "```", "")


def _graph(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op == "output":
            yield f"return ({', '.join(map(_shown, node.args[0]))})"
        elif node.op == "placeholder":
            yield f"%{node.name}: {_type(node)} = input"
        else:
            arguments = [_shown(argument) for argument in node.args]
            arguments += [
                f"{k}={_shown(v)}" for k, v in node.kwargs.items() if k not in ("device", "pin_memory")
            ]
            yield f"%{node.name}: {_type(node)} = {_op(node)}({', '.join(arguments)})"


def _op(node: fx.Node) -> str:
    return re.sub(r"^(autoshard|_c10d_functional)\.|\.default$", "", str(node.target))


def _type(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{short_dtype(value.dtype)}{list(value.shape)}"


def _shown(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    return repr(value) if isinstance(value, str) else str(value)


def _rule(node: fx.Node) -> Iterator[str]:
    rule = rule_for(node)
    yield str(node.args[2])
    yield "sizes:    " + ", ".join(f"{factor} {size}" for factor, size in rule.sizes.items())
    yield "operands: " + ", ".join(str([*map("".join, dims)]) for dims in rule.operands).replace("'", "")
    yield "results:  " + ", ".join(str([*map("".join, dims)]) for dims in rule.results).replace("'", "")
    yield "reduced:  " + ", ".join(f"{factor} by {how}" for factor, how in rule.reductions.items())


def _strategies(node: fx.Node, chosen: NodeLayouts, prices: Prices) -> Iterator[str]:
    rule = rule_for(node)
    shapes = [tuple(operand.meta["val"].shape) for operand in tensor_operands(node)]
    every = enumerate_strategies(rule, shapes, result_shapes(node), MESH)
    seconds = strategy_seconds(node, rule, every, prices.traffic(node), MESH, prices.compute)
    first = [*range(SHOWN)] if every.index(chosen) < SHOWN else [*range(SHOWN - 1), every.index(chosen)]
    for i in first:
        splits = ", ".join(f"{s.factor} over {' '.join(s.axes)}" for s in every[i].splits) or "nothing split"
        layouts = ", ".join(map(str, every[i].operands)) + " -> " + str(every[i].results[0])
        mark = "    chosen" if every[i] == chosen else ""
        yield f"{splits:22} {layouts:44} {format_seconds(float(seconds[i]))}{mark}"
    yield f"... {len(every)} in all"


def _steps(joint: JointGraph, plan: Plan, prices: Prices) -> Iterator[str]:
    planned = decide(joint, plan.planned.layouts, prices)
    assert planned == plan.planned
    for (reader, position), steps in planned.steps.items():
        phase, turn = planned.turns[reader, position]
        moved = planned.reads[reader, position].transfers
        for step, seconds in zip(steps, (one.seconds for one in moved), strict=True):
            what = f"operand {position} of {reader}"
            where = f"{('forward', 'backward')[phase]} {turn}"
            yield f"{what:24} {step.before} -> {step.after}: {step.text()}, {format_seconds(seconds)}, turn {where}"


def _phases(phases: Phases) -> Iterator[str]:
    backward = phases.backward
    assert backward is not None
    results = list(phases.forward.graph.nodes)[-1].args[0]
    inputs = [node for node in phases.forward.graph.nodes if node.op == "placeholder"]
    yield from _order("forward", phases.forward)
    yield f"saved:     {', '.join(str(results[i]) for i in backward.saved)}"
    yield f"handed on: {', '.join(str(inputs[i]) for i in backward.passed)}"
    yield from _order("backward", backward.module)


def _orders(phases: Phases) -> Iterator[str]:
    assert phases.backward is not None
    yield from _order("forward", phases.forward)
    yield from _order("backward", phases.backward.module)


def _order(name: str, module: fx.GraphModule) -> Iterator[str]:
    """Inputs, ops and results by name."""
    *nodes, output = module.graph.nodes
    inputs = ", ".join(node.name for node in nodes if node.op == "placeholder")
    ops = " ".join(node.name for node in nodes if node.op == "call_function")
    yield f"{name}({inputs}):"
    yield from textwrap.wrap(ops, 108, initial_indent="  ", subsequent_indent="  ")
    yield f"  return ({', '.join(map(str, output.args[0]))})"


def _timeline(phases: Phases, prices: Prices) -> Iterator[str]:
    found = predict_phases(phases, prices, simulated_group_axes)
    for phase in found.phases:
        exposed = f", of which communication adds {format_seconds(phase.exposed)}" if phase.exposed else ""
        yield f"{phase.name:10} {format_seconds(phase.seconds)}{exposed}"
    for one in found.collectives:
        name = f"{one.kind}[{','.join(one.axes)}]"
        times = f"starts at {format_seconds(one.start)}, takes {format_seconds(one.seconds)}"
        yield f"{name:20} {one.nbytes} bytes, {times}, adds {format_seconds(one.exposed)}"
    yield f"step       {format_seconds(found.seconds)}"


INTRODUCTION = """# One layer through every stage

`pytest tests/structure/test_trace.py --update-golden` writes this page from what the code gives; the test compares the
two. The stages are those of [the architecture](architecture.md).

```python
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 6)

    def forward(self, x):  # x: f32[4, 8]
        return torch.relu(self.up(x)).mean()


find_plan(Layer(), MeshSpec({"dp": 2, "tp": 2}), (x,), profile=slow_kernels, backend="eager")
```

The prices are the nominal CPU's with kernels a thousand times slower: otherwise one rank would do such a small layer
by itself. Nothing on this page was timed.
"""

CAPTURE = """
`passes/capture/` traces forward and backward as one graph of ATen ops, with global shapes. The tangent is the gradient
of the loss that the caller hands in.
"""

CANONICALIZE = """
`passes/canonicalize/__init__.py` writes the same in fewer words. Products are `contract`, which names its loops;
the permutes
went into them. `use` stands for the two readers of one value: what they both need moves once.
"""

RULES = """
`passes/rules/` says of every op which dims belong together. The first product in the notation: a letter is a factor, a
loop of the op. A factor that the result does not have is summed.
"""

STRATEGIES = """
`passes/strategies/strategies.py` gives every mesh axis a factor to split, or none. `[@tp, -]` is a layout: the first
dim is
split over tp, the second is whole. `+tp:sum`: each rank holds a part of a sum. `passes/strategies/prices.py` prices
the rank
with the largest parts.
"""

REDISTRIBUTION = """
`passes/search/` picks one strategy per node, at the least seconds of all together. Where a reader wants another layout
than a value has, `passes/redistribution/redistribute.py` finds the cheapest steps; `passes/plan/decide.py` writes
them down, with a turn
in the one order that all ranks follow.
"""

PLAN = """
`autoshard/plan/plan.py` holds all of this as data; nothing behind it reads a price. Its text form, with the seconds
of each
line. A parameter's are those of its optimizer update.
"""

PARTITION = """
`passes/lower/partition.py` writes each rank's own graph, of plain tensors and collectives. This is rank 0's. The bias
has 3 elements on the two ranks of tp: rank 0 holds 2 of them, the other one. The gather brings 4, and the last, which
is padding, is cut off.
"""

SPLIT = """
`passes/lower/phases.py` makes two programs of it. What only gradients need runs in the backward. What both need is
saved, or
computed again, at the fewest bytes.
"""

SCHEDULE = """
`passes/schedule/schedule.py` puts each program into the order in which it runs: `passes/schedule/bucket.py` merges
collectives of one
turn, `passes/schedule/overlap.py` starts them early and waits late. After each of these passes, and after those of the
canonicalization, tests check what must hold (`passes/ir/graph_properties.py`).
"""

PREDICT = """
`passes/predict/predict_step.py` runs kernels and collectives on streams of a timeline. A collective adds to the
step what no
kernel hides.
"""

END = """After that `passes/compile/compile_graph.py` compiles the two programs, and `autoshard/runtime/` runs them."""
