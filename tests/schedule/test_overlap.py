"""Orders worked out by hand, and what holds of every reordered graph."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import fx

from cost_model.mesh import MeshSpec
from passes.redistribution.lower_redistribute import collective_nodes
from passes.schedule.overlap import Overlap
from passes.simulate.lockstep import simulate
from tests.schedule.by_hand import Script, aten, in_flight, order


def test_the_weights_gradient_runs_while_the_inputs_is_reduced() -> None:
    s = Script()
    g, w, x = s.matrix("g"), s.matrix("w"), s.matrix("x")
    dw = s.mm("dw", g, x)
    dx = s.all_reduce("reduce", s.mm("dx", g, w))
    module = s.module(s.mm("next", dx, w), dw)
    assert order(module) == "dw dx reduce wait_reduce next"
    assert order(Overlap()(module)) == "dx reduce dw wait_reduce next"


def two_tensor_parallel_layers() -> fx.GraphModule:
    """A backward: per layer the weight's gradient, the input's, its all-reduce, the op before."""
    s = Script()
    g, x = s.matrix("g"), s.matrix("x")
    results: list[fx.Node] = []
    for i in (2, 1):
        w = s.matrix(f"w{i}")
        results.append(s.mm(f"dw{i}", g, x))
        g = s.relu(f"relu{i}", s.all_reduce(f"reduce{i}", s.mm(f"dx{i}", g, w)))
    return s.module(s.mm("dw0", g, x), *results)


def test_two_layers_in_turn() -> None:
    assert order(Overlap()(two_tensor_parallel_layers())) == (
        "dx2 reduce2 dw2 wait_reduce2 relu2 dx1 reduce1 dw1 wait_reduce1 relu1 dw0"
    )


def gathered_layers(count: int) -> fx.GraphModule:
    """A forward with parameters in shards: gather, wait, product; gather, wait, product."""
    s = Script()
    x, shards = s.matrix("x"), [s.matrix(f"w{i}") for i in range(count)]
    for i, shard in enumerate(shards):
        x = s.mm(f"layer{i}", x, s.all_gather(f"gather{i}", shard))
    return s.module(x)


def test_gathers_run_ahead_of_two_layers() -> None:
    assert order(Overlap()(gathered_layers(2))) == (
        "gather0 gather1 wait_gather0 mine_gather0 layer0 wait_gather1 mine_gather1 layer1"
    )


def test_no_more_gathers_ahead_than_allowed() -> None:
    assert order(Overlap(prefetch=1)(gathered_layers(3))) == (
        "gather0 wait_gather0 gather1 mine_gather0 layer0 "
        "wait_gather1 gather2 mine_gather1 layer1 wait_gather2 mine_gather2 layer2"
    )


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_gathers_in_flight_are_bounded(prefetch: int) -> None:
    assert in_flight(Overlap(prefetch=prefetch)(gathered_layers(8))) == max(prefetch, 1)


def test_without_prefetch_every_gather_stays_at_its_reader() -> None:
    module = gathered_layers(3)
    before = order(module)
    assert order(Overlap(prefetch=0)(module)) == before


def reduced_gradients(count: int) -> fx.GraphModule:
    """A data-parallel backward as it is lowered: all reductions at the end, in the order of the outputs."""
    s = Script()
    g, x = s.matrix("g"), s.matrix("x")
    gradients: list[fx.Node] = []
    for i in range(count):
        w = s.matrix(f"w{i}")
        gradients.append(s.mm(f"dw{i}", g, x))
        g = s.mm(f"dx{i}", g, w)
    turns = reversed([*enumerate(gradients)])
    return s.module(g, *(s.all_reduce(f"reduce{turn}", dw, turn) for turn, dw in turns))


def test_gradients_are_reduced_as_they_come_and_waited_for_at_the_end() -> None:
    assert order(Overlap()(reduced_gradients(2))) == (
        "dw0 reduce0 dx0 dw1 reduce1 dx1 wait_reduce1 wait_reduce0"
    )


def test_pending_reductions_are_bounded_by_waiting_for_the_oldest() -> None:
    assert order(Overlap(pending=1)(reduced_gradients(3))) == (
        "dw0 reduce0 dx0 dw1 reduce1 wait_reduce0 dx1 dw2 reduce2 wait_reduce1 dx2 wait_reduce2"
    )


def test_what_is_kept_of_a_reduction_is_taken_out_of_it_where_it_is_waited_for() -> None:
    """So its buffer is free."""
    s = Script()
    g, x = s.matrix("g"), s.matrix("x")
    results: list[fx.Node] = []
    for i in range(3):
        w = s.matrix(f"w{i}")
        part = s.op(f"part{i}", aten.slice.Tensor, s.all_reduce(f"reduce{i}", s.mm(f"dw{i}", g, x)), 0, 0, 2)
        results.append(s.op(f"own{i}", aten.clone.default, part))
        g = s.mm(f"dx{i}", g, w)
    module = s.module(g, *results)
    assert order(Overlap(pending=1)(module)) == (
        "dw0 reduce0 dx0 dw1 reduce1 wait_reduce0 part0 own0 dx1 "
        "dw2 reduce2 wait_reduce1 part1 own1 dx2 wait_reduce2 part2 own2"
    )


def test_fewer_reductions_are_pending_where_their_meta_says_so() -> None:
    """At most two when the last starts; one when each of the others does."""
    module = reduced_gradients(3)
    for node in module.graph.nodes:
        if node.name in ("reduce0", "reduce1", "reduce2"):
            node.meta["ahead"] = 2 if node.name == "reduce2" else 1
    assert order(Overlap()(module)) == (
        "dw0 reduce0 dx0 dw1 reduce1 wait_reduce0 dx1 dw2 reduce2 dx2 wait_reduce2 wait_reduce1"
    )


def test_views_of_a_last_result_do_not_wait_early() -> None:
    s = Script()
    g, x, w = s.matrix("g"), s.matrix("x"), s.matrix("w")
    reduced = s.all_reduce("reduce", s.mm("dw", g, x))
    halved = s.op("halved", aten.slice.Tensor, reduced, 0, 0, 2)
    module = s.module(halved, s.mm("dx", g, w))
    assert order(Overlap()(module)) == "dw reduce dx wait_reduce halved"


def test_an_op_that_reads_something_else_is_not_put_off_to_the_end() -> None:
    """It would keep `y` alive."""
    s = Script()
    g, x, w = s.matrix("g"), s.matrix("x"), s.matrix("w")
    y = s.relu("y", x)
    total = s.op("total", aten.add.Tensor, s.all_reduce("reduce", s.mm("dw", g, x)), y)
    module = s.module(total, s.mm("dx", g, w))
    assert order(Overlap()(module)) == "dw reduce y wait_reduce total dx"


def test_what_prepares_an_operand_goes_with_it() -> None:
    """Gradients are cut and stacked for their reduction where it stands; that must not hold it back."""
    s = Script()
    g, x, w = s.matrix("g"), s.matrix("x"), s.matrix("w")
    dw, dx = s.mm("dw", g, x), s.mm("dx", g, w)
    turned = s.op("turned", aten.permute.default, dw, [1, 0])
    stacked = s.op("stacked", aten.clone.default, turned)
    module = s.module(dx, s.all_reduce("reduce", stacked))
    assert order(Overlap()(module)) == "dw turned stacked reduce dx wait_reduce"


def far_reduction() -> fx.GraphModule:
    s = Script()
    g, w = s.matrix("g"), s.matrix("w")
    results: list[fx.Node] = []
    for i in range(6):
        results.append(s.mm(f"dw{i}", g, w))
        g = s.mm(f"dx{i}", g, w)
    return s.module(s.mm("next", s.all_reduce("reduce", g), w), *results)


def test_operands_are_fetched_from_within_reach_only() -> None:
    """Twelve products lead to the all-reduce; the last four products may be rearranged for it."""
    assert order(Overlap(reach=4)(far_reduction())) == (
        "dw0 dx0 dw1 dx1 dw2 dx2 dw3 dx3 dx4 dx5 reduce dw4 dw5 wait_reduce next"
    )
    assert order(Overlap(reach=0)(far_reduction())).endswith("dw5 dx5 reduce wait_reduce next")


def test_turns_decide_the_order_and_not_readiness() -> None:
    def graph(first: int, second: int) -> fx.GraphModule:
        s = Script()
        g, x = s.matrix("g"), s.matrix("x")
        one = s.all_reduce("one", s.mm("a", g, x), first)
        two = s.all_reduce("two", s.mm("b", x, g), second)
        return s.module(s.mm("end", one, two))

    assert order(Overlap()(graph(0, 1))) == "a one b two wait_one wait_two end"
    assert order(Overlap()(graph(1, 0))) == "b two a one wait_one wait_two end"


def test_steps_of_one_transfer_follow_each_other_when_the_next_could_start() -> None:
    s = Script()
    g, x = s.matrix("g"), s.matrix("x")
    first, second = s.mm("dw", g, x), s.mm("dv", x, g)
    a = s.all_reduce("a2", s.all_reduce("a1", first))
    b = s.all_reduce("b2", s.all_reduce("b1", second))
    assert order(Overlap()(s.module(a, b))) == ("dw a1 dv wait_a1 a2 b1 wait_b1 b2 wait_a2 wait_b2")


def random_graph(seed: int) -> fx.GraphModule:
    """Products, sums and collectives at random, the values that nothing reads returned."""
    rng = random.Random(seed)
    s = Script()
    values = [s.matrix(f"x{i}") for i in range(4)]
    for i in range(rng.randint(5, 40)):
        a, b = rng.choice(values), rng.choice(values[-6:])
        kind = rng.randrange(6)
        if kind == 0:
            made = s.all_reduce(f"r{i}", b)
        elif kind == 1:
            made = s.all_gather(f"g{i}", b)
        elif kind == 2:
            made = s.relu(f"u{i}", b)
        elif kind == 3:
            made = s.op(f"a{i}", aten.add.Tensor, a, b)
        else:
            made = s.op(f"n{i}", aten.clamp.default, s.mm(f"m{i}", a, b), -9, 9)
        values.append(made)
    return s.module(*(v for v in values if not v.users), *rng.sample(values, 2))


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_compute_the_same(seed: int) -> None:
    """The same nodes, each after its operands, collectives in the same order, the same results."""
    rng = random.Random(seed)
    options = Overlap(rng.randint(0, 3), rng.randint(0, 3), rng.randint(0, 9))
    module, again = random_graph(seed), random_graph(seed)
    before = list(module.graph.nodes)
    issued = [n.name for n in collective_nodes(module.graph)]
    operands = {n: list(n.all_input_nodes) for n in before}
    mesh = MeshSpec({"tp": 2})
    inputs = [[torch.randint(-3, 4, (4, 4)).float() for _ in range(4)] for _ in range(2)]
    wanted = simulate([copy.deepcopy(module)] * 2, inputs, mesh)
    assert options(module) is module
    after = list(module.graph.nodes)
    assert set(after) == set(before) and len(after) == len(before)
    place = {n: i for i, n in enumerate(after)}
    assert all(place[o] < place[n] for n in after for o in n.all_input_nodes)
    assert all(list(n.all_input_nodes) == operands[n] for n in after)
    assert [n.name for n in collective_nodes(module.graph)] == issued
    for got, want in zip(simulate([module] * 2, inputs, mesh), wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert order(options(again)) == order(module), "not deterministic"


@pytest.mark.parametrize("seed", range(20))
def test_no_wait_is_earlier_than_it_was_but_to_free_a_buffer(seed: int) -> None:
    """Ops between a collective and its wait: never fewer in all than before."""
    module = random_graph(seed)
    before = _hidden(module)
    assert _hidden(Overlap(prefetch=99, pending=99)(module)) >= before


def _hidden(module: fx.GraphModule) -> int:
    place = {n: i for i, n in enumerate(module.graph.nodes)}
    return sum(place[next(iter(c.users))] - place[c] for c in collective_nodes(module.graph))


def test_an_order_against_the_dependencies_is_refused() -> None:
    s = Script()
    g = s.matrix("g")
    first = s.all_reduce("first", g, 1)
    module = s.module(s.all_reduce("second", s.relu("between", first), 0))
    with pytest.raises(AssertionError, match="second has an earlier turn than first"):
        Overlap()(module)
