"""Timed kernels and collectives in place of modelled prices: equal shapes, near shapes, others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cost_model.collectives import CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile, with_timed_collectives
from cost_model.timed import KernelKey, KernelWork, TimedCollective, TimedKernel, TimedPrices

ROWS, COLUMNS = (8, 16), (16, 4)
KEY = KernelKey("aten.mm.default(f32, f32)", (ROWS, COLUMNS), ((0, 1), (0, 1)))
WORK = KernelWork(flops=1024.0, nbytes=896.0, dtype="float32")


def shaped(rows: int, columns: int, form: str = KEY.form) -> KernelKey:
    return KernelKey(form, ((rows, 16), (16, columns)), KEY.orders)


def prices(*kernels: TimedKernel) -> ComputePrices:
    return ComputePrices(Profile.named("cpu"), timed=TimedPrices(kernels))


def test_equal_shapes_take_what_was_timed() -> None:
    timed = prices(TimedKernel(KEY, WORK, 7.0))
    assert timed.work_seconds(WORK, KEY) == 7.0 and timed.priced(KEY) == "timed"
    modelled = ComputePrices(Profile.named("cpu"))
    assert (
        timed.work_seconds(WORK)
        == modelled.work_seconds(WORK, KEY)
        == modelled.work_seconds(KernelWork(1024.0, 896.0, "float32"))
    )
    assert modelled.priced(KEY) == timed.priced(None) == "modelled"


def test_near_shapes_take_the_ratio_of_the_nearest() -> None:
    """Rows 8 and 32 were timed; 16 is as near to both, and takes that of the fewer; 14 is nearer to 8."""
    model = ComputePrices(Profile.named("cpu"))
    large = replace(WORK, flops=4096.0, nbytes=3000.0)
    one, two = (
        TimedKernel(KEY, WORK, 2 * model.work_seconds(WORK)),
        TimedKernel(shaped(32, 4), large, 5 * model.work_seconds(large)),
    )
    timed, between = prices(one, two), replace(WORK, flops=2048.0)
    expected = {14: 2.0, 16: 2.0, 20: 5.0, 33: 5.0, 64: 5.0, 4: 2.0}
    for rows, ratio in expected.items():
        key = shaped(rows, 4)
        assert timed.work_seconds(between, key) == pytest.approx(ratio * model.work_seconds(between)), rows
        assert timed.priced(key) == "near"


@pytest.mark.parametrize(
    "key", [shaped(17, 4), shaped(8, 9), shaped(8, 0), shaped(8, 4, "aten.mm.default(f64, f64)")]
)
def test_other_shapes_are_modelled(key: KernelKey) -> None:
    timed = prices(TimedKernel(KEY, WORK, 7.0))
    assert timed.work_seconds(WORK, key) == ComputePrices(Profile.named("cpu")).work_seconds(WORK)
    assert timed.priced(key) == "modelled"


def test_a_kind_that_the_model_has_wrong_is_scaled_by_its_median() -> None:
    """2, 3 and 9 times as long as modelled; two are too few, and another kind says nothing."""
    model = ComputePrices(Profile.named("cpu")).work_seconds(WORK)
    kernels = [TimedKernel(shaped(8 * 100**i, 4), WORK, ratio * model) for i, ratio in enumerate((2, 3, 9))]
    far = shaped(3, 400)
    assert prices(*kernels).work_seconds(WORK, far) == pytest.approx(3 * model)
    assert prices(*kernels).priced(far) == "modelled"
    assert prices(*kernels[:2]).work_seconds(WORK, far) == model
    pointwise = replace(WORK, kind=None)
    other = ComputePrices(Profile.named("cpu")).work_seconds(pointwise)
    assert prices(*kernels).work_seconds(pointwise, far) == other


def test_a_fused_group_takes_what_the_ops_in_its_loop_leave_of_its_time() -> None:
    """They are priced apart, by the model: all of the group together is what was timed."""
    model = ComputePrices(Profile.named("cpu"))
    inner = replace(WORK, kind=None, launched=False, nbytes=64e6)
    alone = model.work_seconds(inner)
    timed = prices(TimedKernel(KEY, WORK, 3 * alone, (inner, inner)))
    assert timed.work_seconds(WORK, KEY) + 2 * timed.work_seconds(inner) == pytest.approx(3 * alone)
    near = shaped(16, 4)
    assert timed.work_seconds(WORK, near) == pytest.approx(alone)
    shorter = prices(TimedKernel(KEY, WORK, alone, (inner, inner)))
    assert shorter.work_seconds(WORK, KEY) == 0.0


def test_reductions_are_not_scaled_as_products_are() -> None:
    """Three products took three times as long as modelled: that says nothing of what memory traffic decides."""
    model = ComputePrices(Profile.named("cpu"))
    kernels = [TimedKernel(shaped(8 * 100**i, 4), WORK, 3 * model.work_seconds(WORK)) for i in range(3)]
    reduction = replace(WORK, flops=0.0)
    far = shaped(3, 400)
    assert prices(*kernels).work_seconds(reduction, far) == model.work_seconds(reduction)


def test_strides_of_their_own_come_first() -> None:
    turned = replace(KEY, orders=((1, 0), (0, 1)))
    timed = prices(TimedKernel(turned, WORK, 9.0), TimedKernel(KEY, WORK, 7.0))
    unknown = replace(KEY, orders=((0, 1), (1, 0)))
    assert [timed.work_seconds(WORK, key) for key in (KEY, turned, unknown)] == [7.0, 9.0, 7.0]


@pytest.mark.parametrize(
    ("ratios", "change"),
    [((1.3, 1.4, 9.0), 1.4), ((0.5, 0.6, 0.7), 0.6), ((1.3, 1.4), 1.0), ((1.05, 1.08, 9.0), 1.0), ((), 1.0)],
)
def test_kernels_timed_again_say_how_the_machine_changed(ratios: tuple[float, ...], change: float) -> None:
    """By their median; too few, or next to nothing, say nothing."""
    before = TimedPrices(tuple(TimedKernel(shaped(2 + i, 4), WORK, 2.0 + i) for i in range(4)))
    now = tuple(TimedKernel(k.key, WORK, r * k.seconds) for k, r in zip(before.kernels, ratios, strict=False))
    new = TimedKernel(shaped(99, 4), WORK, 1e3)
    assert before.change_to(TimedPrices((*now, new))) == pytest.approx(change)


def test_on_another_machine_kernels_take_as_much_longer_and_collectives_what_they_took() -> None:
    collective = TimedCollective("all_reduce", ((2, 1),), 4096, 5e-3)
    timed = TimedPrices((TimedKernel(KEY, WORK, 7.0),), (collective,)).kernels_times(2.0)
    assert timed == TimedPrices((TimedKernel(KEY, WORK, 14.0),), (collective,))


def test_the_newer_time_counts() -> None:
    collective = TimedCollective("all_reduce", ((2, 1),), 4096, 5e-3)
    old = TimedPrices((TimedKernel(KEY, WORK, 7.0),), (collective,))
    new = TimedPrices(
        (TimedKernel(KEY, WORK, 6.0),), (replace(collective, seconds=4e-3), replace(collective, nbytes=8192))
    )
    both = old.joined(new)
    assert [kernel.seconds for kernel in both.kernels] == [6.0]
    assert {c.nbytes: c.seconds for c in both.collectives} == {4096: 4e-3, 8192: 5e-3}


def test_one_hash_in_whatever_order() -> None:
    kernels = TimedKernel(KEY, WORK, 7.0), TimedKernel(shaped(32, 4), WORK, 8.0)
    assert TimedPrices(kernels).hash == TimedPrices(kernels[::-1]).hash != TimedPrices(kernels[:1]).hash
    assert msgspec.json.decode(msgspec.json.encode(TimedPrices(kernels)), type=TimedPrices) == TimedPrices(
        kernels
    )


def test_timed_collectives_are_samples_of_their_group() -> None:
    mesh = MeshSpec({"dp": 2, "tp": 2})
    profile = Profile.named("cpu")
    timed = TimedPrices(
        collectives=tuple(
            TimedCollective("all_reduce", ((2, 2),), nbytes, s) for nbytes, s in ((4096, 0.5), (16384, 0.7))
        )
    )
    priced = CollectivePrices(with_timed_collectives(profile, mesh, timed.collectives), mesh)
    assert [priced.seconds("all_reduce", ("dp",), n) for n in (4096, 16384)] == [0.5, 0.7]
    assert 0.5 < priced.seconds("all_reduce", ("dp",), 8192) < 0.7
    assert with_timed_collectives(profile, MeshSpec({"dp": 4}), timed.collectives) is profile
    kinds = [
        timed.collective_priced("all_reduce", ((2, 2),), n) for n in (1024, 2048, 4096, 9000, 32768, 65536)
    ]
    assert kinds == ["modelled", "near", "timed", "near", "near", "modelled"]
    assert timed.collective_priced("all_reduce", ((2, 1),), 4096) == "modelled"
