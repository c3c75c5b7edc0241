import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.collectives import CollectivePrices
from cost_model.errors import ProfileError, ShardingError, UnsupportedOpError
from cost_model.groups import floor_slope, mesh_occupancies
from cost_model.measurements import KINDS, CollectiveSamples
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile

MB = 1_000_000
SHIPPED = [Profile.named(name) for name in Profile.names()]


def seconds(
    profile: Profile, kind: str, sizes: dict[str, int], axes: tuple[str, ...], nbytes: float
) -> float:
    return CollectivePrices(profile, MeshSpec(sizes)).seconds(kind, axes, nbytes)


# By hand, in a node of four: hop 1 us, 100 GB/s (10 us for 1 MB), 5 us to start.
@pytest.mark.parametrize(
    ("kind", "micros"),
    [
        ("all_gather", 5 + 3 * 1 + 3 / 4 * 10),
        ("reduce_scatter", 5 + 3 * 1 + 3 / 4 * 10),
        ("all_reduce", 5 + 6 * 1 + 6 / 4 * 10),
        ("all_to_all", 5 + 3 * 1 + 3 / 4 * 10),
        ("broadcast", 5 + 3 * 1 + 10),
        ("point_to_point", 5 + 1 + 10),
    ],
)
def test_inside_a_node(round_profile: Profile, kind: str, micros: float) -> None:
    mesh = {"dp": 2, "tp": 4}
    assert seconds(round_profile, kind, mesh, ("tp",), MB) == pytest.approx(micros * 1e-6)


# One rank in each of four nodes: hop 10 us, 10 GB/s (100 us for 1 MB).
@pytest.mark.parametrize(
    ("kind", "micros"),
    [
        ("all_gather", 5 + 3 * 10 + 3 / 4 * 100),
        ("all_reduce", 5 + 6 * 10 + 6 / 4 * 100),
        ("all_to_all", 5 + 3 * 10 + 3 / 4 * 100),
        ("broadcast", 5 + 3 * 10 + 100),
        ("point_to_point", 5 + 10 + 100),
    ],
)
def test_strided_over_nodes(round_profile: Profile, kind: str, micros: float) -> None:
    mesh = {"dp": 4, "tp": 4}
    assert seconds(round_profile, kind, mesh, ("dp",), MB) == pytest.approx(micros * 1e-6)


def test_groups_in_a_node_and_between_nodes_are_over_different_links() -> None:
    h100, mesh = CollectivePrices(Profile.named("h100"), MeshSpec({"pp": 2, "dp": 8, "tp": 4})), ("dp", "tp")
    assert [h100.link(axes) for axes in (("tp",), ("dp",), ("pp",), mesh)] == [0, 1, 1, 1]
    one_node = CollectivePrices(Profile.named("h100"), MeshSpec({"dp": 2, "tp": 4}))
    assert one_node.link(("dp",)) == one_node.link(mesh) == 0
    # Four ranks from the third on leave their node of eight.
    assert CollectivePrices(Profile.named("h100"), MeshSpec({"dp": 3, "tp": 6})).link(("tp",)) == 1
    assert CollectivePrices(Profile.named("cpu"), MeshSpec({"dp": 64})).link(("dp",)) == 0


# All 8 ranks of two nodes: four ports of 10 GB/s between them carry the ring (25 us for 1 MB), 6 + 1 hops.
# An exchange sends half of every rank's buffer to the other node through its own port.
@pytest.mark.parametrize(
    ("kind", "micros"),
    [
        ("all_gather", 5 + 6 * 1 + 10 + 7 / 8 * 25),
        ("all_reduce", 5 + 2 * (6 * 1 + 10 + 7 / 8 * 25)),
        ("all_to_all", 5 + 3 * 1 + 10 + 4 / 8 * 100),
        ("broadcast", 5 + 6 * 1 + 10 + 25),
        ("point_to_point", 5 + 10 + 100),
    ],
)
def test_over_whole_nodes(round_profile: Profile, kind: str, micros: float) -> None:
    mesh = {"dp": 2, "tp": 4}
    assert seconds(round_profile, kind, mesh, ("dp", "tp"), MB) == pytest.approx(micros * 1e-6)


def test_a_small_all_reduce_over_many_nodes_takes_the_tree(round_profile: Profile) -> None:
    # 16 nodes of 4: down 3 hops inside and log2(16) between, and up again; 1 KB twice through 4 ports.
    micros = 5 + 2 * (3 * 1 + 4 * 10) + 2 * 0.025
    assert seconds(round_profile, "all_reduce", {"x": 64}, ("x",), 1000) == pytest.approx(micros * 1e-6)


def test_the_group_that_straddles_nodes_decides(round_profile: Profile) -> None:
    # tp groups of 3 on nodes of 4: (0 1 2) sits in a node, (3 4 5) has one rank in the first.
    alone = seconds(round_profile, "all_gather", {"tp": 3}, ("tp",), MB)
    assert alone == pytest.approx((5 + 2 + 2 / 3 * 10) * 1e-6)
    assert seconds(round_profile, "all_gather", {"dp": 4, "tp": 3}, ("tp",), MB) == pytest.approx(
        (5 + 1 + 10 + 2 / 3 * 100) * 1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_rank_is_free(round_profile: Profile, kind: str) -> None:
    assert seconds(round_profile, kind, {"a": 1, "b": 4}, ("a",), MB) == 0.0
    assert seconds(round_profile, kind, {"a": 1, "b": 4}, (), MB) == 0.0


def test_order_of_axes_does_not_matter(round_profile: Profile) -> None:
    prices = CollectivePrices(round_profile, MeshSpec({"a": 2, "b": 3, "c": 2}))
    assert prices.seconds("all_gather", ("a", "c"), MB) == prices.seconds("all_gather", ("c", "a"), MB)


@pytest.mark.parametrize("axes", [(), ("x",)])
def test_unknown_kind_is_never_free(round_profile: Profile, axes: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedOpError, match="no price for collective 'gossip'"):
        seconds(round_profile, "gossip", {"x": 1}, axes, MB)
    with pytest.raises(UnsupportedOpError, match="no price for collective 'gossip'"):
        CollectivePrices(round_profile, MeshSpec({"x": 2})).confidence("gossip", ("x",))


def test_unknown_axis(round_profile: Profile) -> None:
    with pytest.raises(ShardingError, match="no axis 'pp'"):
        seconds(round_profile, "all_gather", {"x": 2}, ("pp",), MB)


def test_links_that_end_at_the_node(round_profile: Profile) -> None:
    one_node = replace(round_profile, links=round_profile.links[:1])
    with pytest.raises(ProfileError, match="at most 4 consecutive ranks"):
        seconds(one_node, "all_gather", {"x": 8}, ("x",), MB)


SIZES = st.integers(0, 2**34)
KIND = st.sampled_from(KINDS)
PROFILE = st.sampled_from(SHIPPED)
POWER = st.integers(0, 5).map(lambda k: 2**k)


@given(PROFILE, KIND, st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data(), SIZES, SIZES)
def test_never_falls_with_bytes_nor_beats_the_links(
    profile: Profile, kind: str, sizes: list[int], data: st.DataObject, one: int, two: int
) -> None:
    mesh = MeshSpec({f"axis{i}": size for i, size in enumerate(sizes)})
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.names), unique=True)))
    prices = CollectivePrices(profile, mesh)
    low, high = sorted((one, two))
    assert 0 <= prices.seconds(kind, axes, low) <= prices.seconds(kind, axes, high) < math.inf
    if mesh.size(*axes) > 1:
        slope = max(
            floor_slope(kind, group, profile.links)
            for group in mesh_occupancies(mesh, axes, profile.link_domains)
        )
        assert prices.seconds(kind, axes, high) > slope * high


@given(PROFILE, KIND, POWER, POWER, st.integers(0, 10), SIZES)
def test_never_falls_with_ranks(
    profile: Profile, kind: str, stride: int, more: int, doublings: int, nbytes: int
) -> None:
    fewer = seconds(profile, kind, {"x": 2**doublings, "rest": stride}, ("x",), nbytes)
    larger = seconds(profile, kind, {"x": 2**doublings * more, "rest": stride}, ("x",), nbytes)
    assert larger >= fewer


@given(PROFILE, KIND, st.integers(2, 7), st.integers(1, 40), SIZES)
def test_never_falls_with_whole_nodes_or_one_rank_of_each(
    profile: Profile, kind: str, ranks: int, nodes: int, nbytes: int
) -> None:
    for axes in (("node",), ("node", "rank")):
        few = seconds(profile, kind, {"node": nodes, "rank": 8}, axes, nbytes)
        assert seconds(profile, kind, {"node": nodes + 1, "rank": 8}, axes, nbytes) >= few
    inside = seconds(profile, kind, {"x": ranks}, ("x",), nbytes)
    assert seconds(profile, kind, {"x": ranks + 1}, ("x",), nbytes) >= inside


# ---- measured


def measured(round_profile: Profile, *samples: CollectiveSamples) -> Profile:
    return replace(round_profile, collectives=samples)


GATHER_4 = CollectiveSamples("all_gather", ((4, 1),), (1000, 100_000, 10 * MB), (20e-6, 40e-6, 400e-6))


def test_measured_points_come_back(round_profile: Profile) -> None:
    profile = measured(round_profile, GATHER_4)
    for nbytes, time in zip(GATHER_4.nbytes, GATHER_4.seconds, strict=True):
        assert seconds(profile, "all_gather", {"x": 4}, ("x",), nbytes) == pytest.approx(time)


def test_between_measured_points(round_profile: Profile) -> None:
    # Ten times the bytes, ten times more steps to come: 40 us -> 400 us over two decades of bytes.
    found = seconds(measured(round_profile, GATHER_4), "all_gather", {"x": 4}, ("x",), MB)
    assert found == pytest.approx(40e-6 * math.sqrt(10))


def test_beyond_the_measured_sizes_alpha_beta(round_profile: Profile) -> None:
    profile = measured(round_profile, GATHER_4)
    beta = (400e-6 - 40e-6) / (10 * MB - 100_000)
    assert seconds(profile, "all_gather", {"x": 4}, ("x",), 20 * MB) == pytest.approx(400e-6 + 10 * MB * beta)
    alpha = 20e-6 - 1000 * (40e-6 - 20e-6) / (100_000 - 1000)
    assert seconds(profile, "all_gather", {"x": 4}, ("x",), 0) == pytest.approx(alpha)


def test_a_flat_end_of_the_measurement_does_not_outrun_the_links(round_profile: Profile) -> None:
    flat = CollectiveSamples("all_gather", ((4, 1),), (1000, 2000), (50e-6, 50e-6))
    # At the peak of 200 GB/s, 3/4 of 1 GB takes 3.75 ms.
    found = seconds(measured(round_profile, flat), "all_gather", {"x": 4}, ("x",), 1e9)
    assert found == pytest.approx(50e-6 + 0.75 * (1e9 - 2000) / 200e9)


def test_the_stride_is_part_of_the_key(round_profile: Profile) -> None:
    profile = measured(round_profile, GATHER_4)
    prices = CollectivePrices(profile, MeshSpec({"dp": 4, "tp": 4}))
    assert prices.seconds("all_gather", ("tp",), 10 * MB) == pytest.approx(400e-6)
    assert prices.seconds("all_gather", ("dp",), 10 * MB) == pytest.approx((5 + 30 + 750) * 1e-6)


def test_a_modelled_price_stays_between_measured_ones(round_profile: Profile) -> None:
    # The model says 11.7 us for 3 ranks and 1 MB; 2 ranks were measured to take 300 us, 4 ranks 126 us.
    slow = CollectiveSamples("all_gather", ((2, 1),), (1000, MB), (300e-6, 300e-6))
    fast = CollectiveSamples("all_gather", ((8, 1),), (1000, MB), (13e-6, 22e-6))
    two_known = measured(round_profile, slow, GATHER_4)
    assert seconds(two_known, "all_gather", {"x": 3}, ("x",), MB) == pytest.approx(300e-6)
    assert seconds(two_known, "all_gather", {"x": 4}, ("x",), MB) == pytest.approx(300e-6)
    # The model says 5 + 4 + 10 + 4/5 * 100 us for 5 ranks in two nodes; 8 ranks were measured to take 22.
    assert seconds(measured(round_profile, fast), "all_gather", {"x": 5}, ("x",), MB) == pytest.approx(22e-6)


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from([2, 3, 4, 6, 8, 16]),
        st.lists(st.floats(1e-4, 1e-1), min_size=3, max_size=3).map(sorted),
        min_size=1,
    ),
    KIND,
    st.integers(0, 10 * MB),
    st.integers(0, 10 * MB),
)
def test_measured_noise_never_makes_prices_fall(
    round_profile: Profile, times: dict[int, list[float]], kind: str, one: int, two: int
) -> None:
    samples = (
        CollectiveSamples(kind, ((n, 8),), (1000, 10_000, 100_000), tuple(t)) for n, t in times.items()
    )
    profile = measured(round_profile, *samples)
    low, high = sorted((one, two))
    last = 0.0
    for ranks in range(1, 20):
        prices = CollectivePrices(profile, MeshSpec({"x": ranks, "rest": 8}))
        assert prices.seconds(kind, ("x",), low) <= prices.seconds(kind, ("x",), high) * (1 + 1e-12)
        now = prices.seconds(kind, ("x",), low)
        assert now >= last * (1 - 1e-12)
        last = now


# ---- confidence


def test_confidence_says_where_a_price_comes_from(round_profile: Profile) -> None:
    profile = measured(round_profile, GATHER_4)
    mesh = MeshSpec({"one": 1, "dp": 4, "tp": 4})
    prices, nominal = CollectivePrices(profile, mesh), CollectivePrices(replace(profile, nominal=True), mesh)
    assert prices.confidence("all_gather", ("tp",)) == "measured"
    assert prices.confidence("all_gather", ("tp",), 5000) == "measured"
    assert prices.confidence("all_gather", ("tp",), 1e9) == "extrapolated"
    assert prices.confidence("all_gather", ("dp",)) == "modelled"
    assert prices.confidence("all_reduce", ("tp",)) == "modelled"
    assert prices.confidence("all_gather", ("one",)) is None
    assert nominal.confidence("all_gather", ("tp",)) == "nominal"


def summing(profile: Profile, rate: float = 80e9) -> Profile:
    """`profile` with switches inside its nodes that sum."""
    return replace(
        profile, links=(replace(profile.links[0], reduced_bytes_per_second=rate), profile.links[1])
    )


def test_switches_that_sum(round_profile: Profile) -> None:
    """To the switch and back, 1 us each; 1 MB at 80 GB/s takes 12.5 us. Two ranks are faster by themselves."""
    inside = summing(round_profile)
    assert seconds(inside, "all_reduce", {"tp": 4}, ("tp",), MB) == pytest.approx((5 + 2 + 12.5) * 1e-6)
    assert seconds(inside, "all_reduce", {"tp": 2}, ("tp",), MB) == pytest.approx((5 + 2 + 10) * 1e-6)
    for kind in set(KINDS) - {"all_reduce"}:
        same = seconds(round_profile, kind, {"tp": 4}, ("tp",), MB)
        assert seconds(inside, kind, {"tp": 4}, ("tp",), MB) == same
    between = seconds(round_profile, "all_reduce", {"tp": 8}, ("tp",), MB)
    assert seconds(inside, "all_reduce", {"tp": 8}, ("tp",), MB) == between


def test_switches_are_no_faster_than_their_ports(round_profile: Profile) -> None:
    with pytest.raises(
        ProfileError, match=r"links\[0\].reduced_bytes_per_second is 2.5e\+11, above the peak of 2e"
    ):
        summing(round_profile, 250e9)
    profile = summing(round_profile)
    assert Profile.from_json(profile.to_json(), "text") == profile
    assert profile.hash() != round_profile.hash()


def test_published_rates_of_a_node_of_8_h100() -> None:
    """All-reduce: a bus bandwidth of 480 GB/s in its switches, 370 in rings, as the others. [nccl-tests issue 212]"""
    h100 = Profile.named("h100")
    reduce, gather = (
        seconds(h100, kind, {"x": 8}, ("x",), 8 * 2**30) for kind in ("all_reduce", "all_gather")
    )
    assert 2 * 7 / 8 * 8 * 2**30 / reduce == pytest.approx(480e9, rel=0.01)
    assert 7 / 8 * 8 * 2**30 / gather == pytest.approx(370e9, rel=0.03)
