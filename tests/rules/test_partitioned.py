"""One op through the real strategies and the real partitioner: the same claims, without the oracle's own
reading of a rule. Every strategy, every rank; local results together must be the global result."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import GraphInput, GraphOutput, JointGraph, node_values, result_shapes, tensor_operands
from passes.ir.op_work import global_flops
from passes.ir.torch_sizes import fresh_fakes
from passes.layout.layout import KEYS, RING, Layout, NodeLayouts
from passes.lower.partition import partition
from passes.rules.check.trial import call_node
from passes.rules.core.rule_registry import rule_for
from passes.simulate.lockstep import simulate
from passes.strategies.strategies import enumerate_strategies
from tests.rules.registered import Draw, aten
from tests.schedule.planned import unmerged

MESHES = [MeshSpec({"a": 2}), MeshSpec({"a": 3}), MeshSpec({"a": 2, "b": 2})]
D = Draw(0)
ops = torch.ops.autoshard


def faked(node: fx.Node) -> None:
    """Metas become FakeTensors of one mode, as in a captured graph."""
    sources, value = list(dict.fromkeys(tensor_operands(node))), node.meta["val"]
    results = list(value) if isinstance(value, (tuple, list)) else [value]
    fakes = iter(fresh_fakes([n.meta["val"] for n in sources] + [r for r in results if r is not None]))
    for source in sources:
        source.meta["val"] = next(fakes)
    fake_results = [None if r is None else next(fakes) for r in results]
    node.meta["val"] = tuple(fake_results) if isinstance(value, (tuple, list)) else fake_results[0]


def joint_of(node: fx.Node) -> JointGraph:
    """The graph of one op whose results are all returned."""
    value = node.meta["val"]
    several = isinstance(value, (tuple, list))
    results: list[fx.Node | None] = []
    for index, result in enumerate(value if several else [value]):
        if not several or result is None:
            results.append(None if several else node)
            continue
        results.append(node.graph.call_function(operator.getitem, (node, index)))
        results[-1].meta["val"] = result  # type: ignore[union-attr]
    node.graph.output(tuple(results))
    return JointGraph(
        fx.GraphModule(torch.nn.Module(), node.graph),
        tuple(GraphInput("input", n.name, i) for i, n in enumerate(tensor_operands(node))),
        tuple(GraphOutput("output", "", i) for i, _ in enumerate(results)),
    )


def shard(value: torch.Tensor, layout: Layout, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """`rank`'s part; of a pending sum the whole on the first rank of its group, and zeros elsewhere."""
    for dim in range(value.ndim):
        low, high = layout.interval(value.shape, mesh, dim, rank) if value.ndim else (0, 0)
        value = value.narrow(dim, low, high - low)
    first = all(mesh.coordinate(rank)[axis] == 0 for axis, _ in layout.partial)
    return value.clone() if first else torch.zeros_like(value)


def summed(parts: list[Any], layout: Layout, mesh: MeshSpec, whole: torch.Tensor) -> torch.Tensor:
    """All of `whole`, added up from the summands of a halo and of pending sums; copies count once."""
    result = torch.zeros_like(whole)
    seen: set[tuple[int, ...]] = set()
    for rank, part in enumerate(parts):
        home = tuple(mesh.coordinate(rank)[axis] for axis in layout.axes)
        if home not in seen:
            seen.add(home)
            spans = (layout.interval(whole.shape, mesh, d, rank) for d in range(whole.ndim))
            result[tuple(slice(*span) for span in spans)] += part
    return result


def total(parts: list[Any], layout: Layout, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """What `rank` has once every pending reduction of `layout` is done."""
    group = mesh.group(rank, [axis for axis, _ in layout.partial])
    stacked = torch.stack([parts[r] for r in group])
    op = layout.partial[0][1] if layout.partial else "max"
    return stacked.sum(0) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0)


def strategies_of(node: fx.Node, mesh: MeshSpec) -> tuple[NodeLayouts, ...]:
    shapes = [n.meta["val"].shape for n in tensor_operands(node)]
    rule = rule_for(node)
    return enumerate_strategies(rule, shapes, result_shapes(node), mesh, ways=rule.ways)


def lowered(node: fx.Node, strategy: NodeLayouts, mesh: MeshSpec) -> list[fx.GraphModule]:
    """What every rank runs of a graph of one op."""
    faked(node)
    joint = joint_of(node)
    assignment = {node.name: strategy}
    for source, layout in zip(tensor_operands(node), strategy.operands, strict=True):
        assignment[source.name] = NodeLayouts((), (layout,))
    pairs = zip(strategy.results, node_values(node), strict=True)
    assignment[joint.output_node.name] = NodeLayouts(tuple(x for x, r in pairs if r is not None), ())
    planned = unmerged(joint, assignment, None, {})
    ranks, groups = range(mesh.device_count), simulated_groups(mesh)
    return [partition(joint, planned, mesh, rank, groups).module for rank in ranks]


def check_all(op: Callable[..., Any], args: tuple[Any, ...], mesh: MeshSpec) -> int:
    strategies = strategies_of(call_node(op, args), mesh)
    for strategy in strategies:
        node = call_node(op, args)
        operands = [n.meta["val"] for n in tensor_operands(node)]
        results = node_values(node)
        ranks, held = range(mesh.device_count), list(zip(operands, strategy.operands, strict=True))
        modules = lowered(node, strategy, mesh)
        outputs = simulate(modules, [[shard(t, x, mesh, rank) for t, x in held] for rank in ranks], mesh)
        for index, (whole, layout) in enumerate(zip(results, strategy.results, strict=True)):
            if whole is None:
                continue
            if layout.has_halo:
                got = summed([parts[index] for parts in outputs], layout, mesh, whole)
                torch.testing.assert_close(got, whole, msg=lambda m, s=strategy: f"{s}\n{m}")
                continue
            for rank in range(mesh.device_count):
                got = total([parts[index] for parts in outputs], layout, mesh, rank)
                want = shard(whole, Layout(layout.dims, (), layout.sizes), mesh, rank)
                torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m, s=strategy: f"{s}\n{m}")
    return len(strategies)


CASES: list[tuple[Callable[..., Any], tuple[Any, ...], int]] = [
    (ops.contract.default, (D.floats(4, 5), D.floats(5, 3), "m k, k n -> m n"), 6),
    (aten.add.Tensor, (D.floats(4, 5), D.floats(5)), 4),
    (aten.amax.default, (D.floats(4, 2), [1]), 3),
    (aten.reshape.default, (D.floats(4, 6), [4, 3, 2]), 4),
    (aten.reshape.default, (D.floats(4, 3, 2), [4, 6]), 4),
    (aten.reshape.default, (D.floats(4, 1, 2), [4, 2]), 4),
    (aten.expand.default, (D.floats(1, 4), [3, 4]), 4),
    (aten.embedding.default, (D.floats(4, 3), D.ints(4, 5)), 5),
    (aten.embedding_dense_backward.default, (D.floats(5, 3), D.ints(4, 5), 4, 1, False), 5),
    (aten.select.int, (D.floats(4, 3), 0, 1), 4),
    (aten.scatter.value, (D.floats(4, 5), 1, D.ints(5, 4, 1), 2.0), 3),
    (aten.arange.start_step, (7, -1, -2), 2),
    (ops.contract.default, (D.floats(2, 3, 4), D.floats(5, 4), "b s k, n k -> b s n"), 7),
    (ops.uniform.default, ([4, 5], [0, 0], [4, 5], torch.tensor(3), 1), 3),
    (aten.topk.default, (D.floats(4, 5), 2), 2),
    (aten.convolution.default, (D.floats(2, 3, 5), D.floats(4, 3, 2), D.floats(4), [1], [0], [1], False, [0], 1), 7),
]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("op", "args", "count"), CASES)
def test_every_strategy(op: Callable[..., Any], args: tuple[Any, ...], count: int, mesh: MeshSpec) -> None:
    found = check_all(op, args, mesh)
    if len(mesh.names) == 1:
        assert found == count


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_results_made_one_by_one(mesh: MeshSpec) -> None:
    """On 3 ranks a batch of 2 leaves one without any: its rule makes the results itself."""
    x, weight = D.floats(2, 4, 5), D.floats(4, 4, 2)
    rest: list[Any] = [[4], [1], [0], [1], False, [0], 1]
    check_all(
        aten.convolution_backward.default, (D.floats(2, 4, 4), x, weight, *rest, [True, True, True]), mesh
    )
    check_all(
        aten.convolution_backward.default, (D.floats(2, 4, 4), x, weight, *rest, [True, False, True]), mesh
    )
    check_all(aten.max_pool2d_with_indices.default, (D.floats(2, 2, 4, 4), [2, 2], [2, 2]), mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_attention(mesh: MeshSpec) -> None:
    q, k, v = D.floats(2, 2, 3, 4), D.floats(2, 2, 3, 4), D.floats(2, 2, 3, 4)
    check_all(ops.attention.default, (q, k, v, None, False, 0.5), mesh)
    out, lse = ops.attention.default(q, k, v, None, False, 0.5)
    check_all(
        ops.attention_backward.default, (D.floats(*out.shape), q, k, v, None, out, lse, False, 0.5), mesh
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 4), (7, 5), (7, 9)])
def test_causal_attention(mesh: MeshSpec, queries: int, keys: int) -> None:
    """As many keys as queries also pass by all ranks; of 4 over 3 ranks one has none."""
    q, k, v = D.floats(1, 2, queries, 4), D.floats(1, 2, keys, 4), D.floats(1, 2, keys, 3)
    check_all(ops.attention.default, (q, k, v, None, True, 0.5), mesh)
    out, lse = ops.attention.default(q, k, v, None, True, 0.5)
    check_all(
        ops.attention_backward.default, (D.floats(*out.shape), q, k, v, None, out, lse, True, 0.5), mesh
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(6, 3), (6, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_grouped_heads(mesh: MeshSpec, heads: int, groups: int, kind: str) -> None:
    """Split by groups, and within them: of 6 heads in 3 groups a rank of 4 has one and a half groups."""
    q, k, v = D.floats(1, heads, 5, 4), D.floats(1, groups, 5, 4), D.floats(1, groups, 5, 3)
    flags = D.floats(1, heads, 5, 5) if kind == "masked" else None, kind == "causal", 0.5
    check_all(ops.attention.default, (q, k, v, *flags), mesh)
    out, lse = ops.attention.default(q, k, v, *flags)
    grad = D.floats(*out.shape)
    check_all(ops.attention_backward.default, (grad, q, k, v, flags[0], out, lse, *flags[1:]), mesh)


@pytest.mark.parametrize("mesh", [*MESHES, MeshSpec({"a": 4})], ids=str)
@pytest.mark.parametrize(
    ("groups", "length", "window"), [(4, 7, 3), (4, 11, 1), (1, 11, 8), (2, 11, 5), (2, 7, 6), (1, 3, 2)]
)
def test_attention_within_a_window(mesh: MeshSpec, groups: int, length: int, window: int) -> None:
    """Keys are read with a halo, of up to three ranks; of 3 over 4 ranks one has none."""
    q, k, v = D.floats(1, 4, length, 4), D.floats(1, groups, length, 4), D.floats(1, groups, length, 3)
    flags = None, True, 0.5, window
    check_all(ops.attention.default, (q, k, v, *flags), mesh)
    out, lse = ops.attention.default(q, k, v, *flags)
    check_all(
        ops.attention_backward.default, (D.floats(*out.shape), q, k, v, None, out, lse, *flags[1:]), mesh
    )
    split = {
        split.factor
        for s in strategies_of(call_node(ops.attention.default, (q, k, v, *flags)), mesh)
        for split in s.splits
    }
    assert "s" in split and RING not in split


def cache_masks(queries: int, seen: int, keys: int) -> dict[str, torch.Tensor | None]:
    """By which the last of the queries sees the first `seen` of the keys, each before one less."""
    shown = torch.arange(keys) <= torch.arange(seen - queries, seen)[:, None]
    least = torch.finfo(torch.float64).min
    floats = {"least": least, "infinite": -torch.inf}
    bias = torch.linspace(-1, 1, keys).double()
    masks = {name: bias.where(shown, value).expand(1, 1, queries, keys) for name, value in floats.items()}
    return {"all": None, "bools": shown.expand(2, 1, queries, keys), **masks}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (6, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["all", "bools", "least", "infinite"])
@pytest.mark.parametrize(("queries", "seen", "keys"), [(1, 3, 8), (3, 4, 5), (2, 2, 2)])
def test_keys_in_parts(
    mesh: MeshSpec, heads: int, groups: int, kind: str, queries: int, seen: int, keys: int
) -> None:
    """Of a cache some ranks have what no query sees, or nothing."""
    q, k, v = D.floats(2, heads, queries, 4), D.floats(2, groups, keys, 4), D.floats(2, groups, keys, 3)
    flags = cache_masks(queries, seen, keys)[kind], False, 0.5
    check_all(ops.attention.default, (q, k, v, *flags), mesh)
    node = call_node(ops.attention.default, (q, k, v, *flags))
    assert any(split.factor == KEYS for s in strategies_of(node, mesh) for split in s.splits)
    out, lse = ops.attention.default(q, k, v, *flags)
    grad = D.floats(*out.shape)
    check_all(ops.attention_backward.default, (grad, q, k, v, flags[0], out, lse, *flags[1:]), mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(3, 8), (5, 7), (1, 4)])
def test_keys_in_parts_of_a_prompt(mesh: MeshSpec, heads: int, groups: int, queries: int, keys: int) -> None:
    """Causal, before keys that are yet to come: some ranks have none that is seen."""
    q, k, v = D.floats(1, heads, queries, 4), D.floats(1, groups, keys, 4), D.floats(1, groups, keys, 3)
    flags = None, True, 0.5
    check_all(ops.attention.default, (q, k, v, *flags), mesh)
    node = call_node(ops.attention.default, (q, k, v, *flags))
    assert any(split.factor == KEYS for s in strategies_of(node, mesh) for split in s.splits)
    out, lse = ops.attention.default(q, k, v, *flags)
    check_all(
        ops.attention_backward.default, (D.floats(*out.shape), q, k, v, None, out, lse, True, 0.5), mesh
    )


def test_of_a_prompt_a_rank_multiplies_with_the_keys_that_are_seen() -> None:
    """Of 6 queries and 12 keys: 4 with 4 behind each other and 2 behind these; 2 with 2; none."""
    q, k = D.floats(1, 1, 6, 4), D.floats(1, 1, 12, 4)
    args = q, k, k, None, True, 0.5
    found = operations(ops.attention.default, args, MeshSpec({"a": 3}), KEYS)
    each = 4 * 4.0
    assert found == [each * (4 * 4 / 2 + 2 * 4), each * 2 * 2 / 2, 0.0]
    way = rule_for(call_node(ops.attention.default, args)).splitting([KEYS])
    pairs = [sum(way.work[KEYS](4 * rank, 4 * rank + 4)) * 6 * 6 / 2 for rank in range(3)]
    assert [each * n for n in pairs] == pytest.approx(found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_documents(mesh: MeshSpec, heads: int, groups: int, causal: bool, rows: int) -> None:
    """As a mask of them says. Of some samples' keys a rank has none of a query's document."""
    q, k, v = D.floats(2, heads, 7, 4), D.floats(2, groups, 7, 4), D.floats(2, groups, 7, 3)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [3, 1, 1, 1, 1, 1, 1]])[:rows].view(rows, 1, 7, 1)
    seen = ids == ids.transpose(2, 3)
    masked = q, k, v, seen.tril() if causal else seen, False, 0.5
    args = q, k, v, None, causal, 0.5, 0, ids, ids
    out, lse = ops.attention.default(*args)
    torch.testing.assert_close((out, lse), ops.attention.default(*masked))
    check_all(ops.attention.default, args, mesh)
    grad = D.floats(*out.shape)
    backward = grad, q, k, v, None, out, lse, causal, 0.5, 0, ids, ids
    found = ops.attention_backward.default(*backward)
    wanted = ops.attention_backward.default(grad, *masked[:4], out, lse, False, 0.5)
    torch.testing.assert_close(found, wanted)
    check_all(ops.attention_backward.default, backward, mesh)


def test_of_keys_in_parts_what_is_found_moves_and_no_keys() -> None:
    """A row of 8 and its log-sum-exp of each of 4 heads, of 32 keys."""
    q, k = D.floats(1, 4, 1, 8), D.floats(1, 1, 32, 8)
    node, mesh = call_node(ops.attention.default, (q, k, k, None, False, 0.5)), MeshSpec({"a": 4})
    (strategy,) = (s for s in strategies_of(node, mesh) if [split.factor for split in s.splits] == [KEYS])
    assert not any(layout.axes for layout in strategy.results)
    for module in lowered(node, strategy, mesh):
        moved = [n for n in module.graph.nodes if "c10d" in str(n.target) and "wait" not in str(n.target)]
        assert [n.args[0].meta["val"].numel() for n in moved] == [4 * (8 + 1)]  # type: ignore[union-attr]


def test_in_a_ring_of_three_the_one_in_the_middle_swaps_with_none() -> None:
    x = D.floats(1, 1, 7, 4)
    check_all(ops.attention.default, (x, x, x, None, True, 0.5), MeshSpec({"a": 3}))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_ring_passes_the_heads_of_keys_that_there_are(groups: int) -> None:
    """4 keys and values of 8 a rank, in three rounds; half of q, k, v and of results is swapped."""
    q, k = D.floats(1, 4, 16, 8), D.floats(1, groups, 16, 8)
    node, mesh = call_node(ops.attention.default, (q, k, k, None, True, 0.5)), MeshSpec({"a": 4})
    (ring,) = (s for s in strategies_of(node, mesh) if [split.factor for split in s.splits] == [RING])
    graph = lowered(node, ring, mesh)[1].graph
    sent = [n.args[0].meta["val"].numel() for n in graph.nodes if "all_to_all" in str(n.target)]  # type: ignore[union-attr]
    keys = 2 * 4 * 8 * groups
    assert sent == [2 * 4 * 8 + keys // 2, keys, keys, keys, 2 * 4 * (8 + 1)]


@pytest.mark.parametrize(
    ("factor", "window", "shares"),
    [
        ("s", 0, (0.5, 1.5, 2.5, 3.5)),
        (RING, 0, (2.0, 2.0, 2.0, 2.0)),
        ("s", 1, (1.0, 1.0, 1.0, 1.0)),
        ("s", 5, (1.0, 2.0, 2.0, 2.0)),
        ("s", 9, (1.0, 2.0, 3.0, 3.0)),
    ],
)
def test_ranks_multiply_with_the_keys_that_their_queries_see(
    factor: str, window: int, shares: tuple[float, ...]
) -> None:
    """Of squares of 4 x 4: of keys in front of their queries all, of their own a half; mirrored pieces have equal work.
    In a block within a window, all of its keys. Backward there are five products for two. Prices are of the most."""
    x, flags = D.floats(1, 1, 16, 4), (True, 0.5, window)
    out, lse = ops.attention.default(x, x, x, None, *flags)
    forward, backward = (x, x, x, None, *flags), (out, x, x, x, None, out, lse, *flags)
    square = 4 * 4 * 4 * 4.0
    for op, args, products in (
        (ops.attention.default, forward, 1.0),
        (ops.attention_backward.default, backward, 2.5),
    ):
        found = operations(op, args, MeshSpec({"a": 4}), factor)
        assert found == [square * products * n for n in shares]
        way = rule_for(node := call_node(op, args)).splitting([factor])
        parts = [sum(way.work[factor](4 * rank, 4 * rank + 4)) for rank in range(4)]
        assert [global_flops(node) * part for part in parts] == pytest.approx(found)


def operations(op: Callable[..., Any], args: tuple[Any, ...], mesh: MeshSpec, factor: str) -> list[float]:
    """Of every rank, where the mesh splits that factor."""
    node = call_node(op, args)
    (strategy,) = (s for s in strategies_of(node, mesh) if [split.factor for split in s.splits] == [factor])
    modules = lowered(node, strategy, mesh)
    return [sum(map(global_flops, m.graph.find_nodes(op="call_function", target=op))) for m in modules]
