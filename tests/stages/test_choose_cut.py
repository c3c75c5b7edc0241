"""The chosen cut is the best of all cuts, by trying all of them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from torch import fx

from cost_model.errors import InfeasibleError
from passes.ir.joint import results_nbytes
from passes.stages.cut_costs import CutCosts, Segment, choose_cut, cut_costs, narrow_places, stage_seconds
from passes.stages.graph_parts import graph_parts
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs
from passes.stages.stage_places import gradient_sums
from tests.stages.stage_models import MODELS, canonical


def priced(name: str, seed: int = 0) -> CutCosts:
    """Every op has seconds of its own, the same for ops alike."""
    return cut_costs(
        canonical(name)[0], lambda n: random.Random(f"{seed} {n.target} {n.meta['val']}").random()
    )


def slow(nbytes: int) -> float:
    return 0.1 + nbytes / 500


def held_nbytes(segment: Segment) -> int:
    return sum(results_nbytes(n) for n in segment.held) + 3 * sum(results_nbytes(n) for n in segment.forward)


@pytest.mark.parametrize("limit", [None, 9000, 6500])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_no_cut_is_better(seed: int, stages: int, limit: int | None) -> None:
    costs = priced("mlp", seed)
    fits = None if limit is None else lambda segment: held_nbytes(segment) <= limit
    best = float("inf")
    for places in itertools.combinations(costs.places, stages - 1):
        ends = [0, *(place.position for place in places), len(costs.parts.forward)]
        segments = [Segment(costs, a, b) for a, b in itertools.pairwise(ends)]
        if fits is None or all(map(fits, segments)):
            best = min(best, max(stage_seconds(costs, [place.op for place in places], slow)))
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            choose_cut(costs, stages, slow, fits=fits)
        return
    found = choose_cut(costs, stages, slow, fits=fits)
    assert max(found.seconds) == pytest.approx(best, rel=1e-12)
    assert found.seconds == stage_seconds(costs, found.cut, slow)
    assert found.bound <= best * (1 + 1e-12)
    assert fits is not None or found.gap == pytest.approx(0.0, abs=1e-12)


def passing_nbytes(graph: StageGraph) -> tuple[int, int]:
    """Of one piece: what the forward sends on, and the gradients that the backward sends back."""
    nbytes = lambda crossings: sum(math.prod(one.shape) * one.dtype.itemsize for one in crossings)
    sent, returned = [c for c in graph.sent if c.value], [c for c in graph.received if c.gradient]
    return nbytes(sent), nbytes(returned)


def test_seconds_of_a_stage_are_those_of_its_ops_and_what_it_sends() -> None:
    """By hand from the stages' graphs: a cut between layers, where every op has one place only."""
    joint, _ = canonical("mlp")
    costs = cut_costs(joint, lambda n: 1.0)
    cut = [n.name for n in graph_parts(joint).forward if str(n.target) == "autoshard.contract.default"][2:5:2]
    graphs = stage_graphs(joint, cut)
    ops = [
        [n for n in g.joint.graph.nodes if n.op == "call_function" and "use" not in n.name] for g in graphs
    ]
    wanted = [len(own) + sum(passing_nbytes(g)) / 1000 for own, g in zip(ops, graphs, strict=True)]
    assert stage_seconds(costs, cut, lambda nbytes: nbytes / 1000) == pytest.approx(wanted)


@pytest.mark.parametrize("name", MODELS)
def test_what_passes_a_place_is_what_the_stages_send(name: str) -> None:
    joint, _ = canonical(name)
    costs = cut_costs(joint, lambda n: 1.0)
    for place in random.Random(name).sample(costs.places, 8):
        one, other = stage_graphs(joint, [place.op])
        valued = [crossing for crossing in one.sent if crossing.value]
        if all(c.name in {n.name for n in costs.forward.reach} for c in valued):
            assert (place.sent, place.sent_nbytes) == (len(valued), passing_nbytes(one)[0])
        assert passing_nbytes(other)[1] <= place.returned_nbytes or not all(c.value for c in one.sent)


def test_narrow_places_of_a_transformer_are_its_residual_stream() -> None:
    for name, count in (("gpt2", 4), ("llama", 4)):
        costs = priced(name)
        places = narrow_places(costs)
        assert {place.sent_nbytes for place in places} <= {2 * 16 * 32 * 8, 4}
        assert sum(place.sent_nbytes == 2 * 16 * 32 * 8 for place in places) >= count
        found = choose_cut(costs, 3, slow, places=places)
        assert set(found.cut) <= {place.op for place in places} and found.gap >= 0.0


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "t5"])
def test_at_narrow_places_every_op_runs_with_its_home(name: str) -> None:
    """But for the sum of a tied weight's gradients, which no stage makes, and scalars at the end of the loss."""
    costs = priced(name)
    sums = {n for found in gradient_sums(costs.parts).values() for n in found.ops}
    for place in (place for place in narrow_places(costs) if place.sent_nbytes > 8):
        graphs = stage_graphs(costs.parts.joint, [place.op])
        names = [{n.name for n in graph.joint.graph.nodes} for graph in graphs]
        for node, home in costs.homes.items():
            assert node in sums or node.name in names[home >= place.position]


def test_ops_alike_are_priced_once() -> None:
    asked: list[fx.Node] = []
    one, two = canonical("gpt2")[0], canonical("llama")[0]
    for joint in (one, two):
        asked.clear()
        costs = cut_costs(joint, lambda n: asked.append(n) or 1.0)  # type: ignore[func-returns-value]
        count = len(costs.parts.forward) + len(costs.parts.backward)
        assert len(asked) < 0.7 * count and costs.seconds[-1] == count


def test_too_few_layers() -> None:
    costs = priced("mlp")
    with pytest.raises(
        InfeasibleError, match=f"into 99 stages: too few layers; it has {len(costs.places)} places"
    ):
        choose_cut(costs, 99, slow)


def test_one_op_too_large_for_any_stage() -> None:
    costs = priced("gpt2")
    giant = max(map(results_nbytes, Segment(costs, 0, len(costs.parts.forward)).held))
    fits = lambda segment: all(results_nbytes(n) < giant for n in segment.held)
    with pytest.raises(InfeasibleError, match=r"one op is too large[^\n]*\n  %\w+ = .*contract.*mlp.c_fc"):
        choose_cut(costs, 2, slow, fits=fits)


def test_too_large_together() -> None:
    costs = priced("mlp")
    fits = lambda segment: segment.stop - segment.start < 4
    with pytest.raises(InfeasibleError, match=r"though each of \d+ parts alone fits"):
        choose_cut(costs, 3, slow, fits=fits)


def test_a_buffer_that_changes_closes_places() -> None:
    costs = priced("normed")
    open_places = {place.op for place in costs.places}
    for place in costs.places:
        stage_graphs(costs.parts.joint, [place.op])
    assert any(n.name not in open_places for n in costs.parts.forward[1:])


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(2))
def test_no_cut_is_more_even(seed: int, stages: int) -> None:
    """Of all cuts whose longest stage is at most a tenth longer than it must be."""
    costs = priced("mlp", seed)
    cuts = [[place.op for place in places] for places in itertools.combinations(costs.places, stages - 1)]
    seconds = [stage_seconds(costs, cut, slow) for cut in cuts]
    longest = 1.1 * min(map(max, seconds))
    best = min(sum(s**2 for s in own) for own in seconds if max(own) <= longest * (1 + 1e-12))
    found = choose_cut(costs, stages, slow, within=0.1)
    assert sum(s**2 for s in found.seconds) == pytest.approx(best, rel=1e-12)
    assert max(found.seconds) <= longest * (1 + 1e-12)
    assert 0.0 <= found.gap <= 0.1 + 1e-12
