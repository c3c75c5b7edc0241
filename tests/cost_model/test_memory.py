import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_model.compute import ComputePrices
from cost_model.errors import AutoshardError, ShardingError
from cost_model.memory import (
    ADAMW,
    ADAMW_FUSED,
    SGD,
    ModelState,
    live_bytes,
    model_state,
    optimizer_step_seconds,
    parse_bytes,
    peak_live_bytes,
)
from cost_model.profile import Profile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_state_is_what_adamw_holds(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(24, 10, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    assert parameter.grad is not None
    held = optimizer.state[parameter]
    assert model_state(240, dtype.itemsize) == ModelState(
        parameter_bytes=parameter.nbytes,
        gradient_bytes=parameter.grad.nbytes,
        optimizer_bytes=sum(held[name].nbytes for name in ("exp_avg", "exp_avg_sq")),
    )


def test_frozen_parameters_and_other_optimizers() -> None:
    assert model_state(10, 4, requires_grad=False) == ModelState(40, 0, 0)
    assert model_state(10, 4, optimizer=SGD) == ModelState(40, 40, 0)


def test_model_states_add_up() -> None:
    total = model_state(10, 4) + model_state(5, 2, requires_grad=False)
    assert total == ModelState(50, 40, 80)
    assert total.total == 170
    assert sum((model_state(1, 4) for _ in range(3)), ModelState()).total == 48


def test_optimizer_step_moves_bytes_and_launches(round_profile: Profile) -> None:
    prices = ComputePrices(round_profile)  # 2 us a launch, 1 TB/s
    assert optimizer_step_seconds(prices, 1e6) == pytest.approx(8 * 2e-6 + 20e6 / 1e12)
    assert optimizer_step_seconds(prices, 1e6, ADAMW_FUSED) == pytest.approx(2e-6 + 7e6 / 1e12)
    assert optimizer_step_seconds(prices, 0, ADAMW) == 0.0


def test_liveness_by_hand() -> None:
    #  step:   0   1   2   3
    #  a 100   *   *
    #  b  50       *   *   *
    #  c  70           *
    intervals, sizes = [(0, 2), (1, 4), (2, 3)], [100, 50, 70]
    assert live_bytes(intervals, sizes).tolist() == [100, 150, 120, 50]
    assert peak_live_bytes(intervals, sizes) == (150, 1)


def test_an_interval_ends_before_its_end_and_may_be_empty() -> None:
    assert peak_live_bytes([(0, 1), (1, 2)], [10, 10]) == (10, 0)
    assert peak_live_bytes([(3, 3)], [10]) == (0, 0)
    assert peak_live_bytes([], []) == (0, 0)


def test_more_bytes_than_32_bits() -> None:
    assert peak_live_bytes([(0, 1)] * 3, [2**40] * 3) == (3 * 2**40, 0)


@pytest.mark.parametrize(
    ("intervals", "sizes", "problem"),
    [
        ([(2, 1)], [1], "ends before its start"),
        ([(-1, 1)], [1], "before step 0"),
        ([(0, 1)], [-1], "negative"),
        ([(0, 1)], [1, 2], "1 intervals, 2 sizes"),
    ],
)
def test_liveness_arguments(intervals: list[tuple[int, int]], sizes: list[int], problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        peak_live_bytes(intervals, sizes)


SPAN = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(st.tuples(SPAN, st.integers(0, 10**12)), max_size=12))
def test_liveness_against_counting(values: list[tuple[tuple[int, int], int]]) -> None:
    spans, sizes = [span for span, _ in values], [size for _, size in values]
    counted = [sum(size for (a, b), size in values if a <= step < b) for step in range(13)]
    peak, step = peak_live_bytes(spans, sizes)
    assert peak == max(counted)
    assert step == counted.index(peak)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("70GB", 70 * 1000**3),
        ("64GiB", 64 * 1024**3),
        (" 1.5 tb ", 1_500_000_000_000),
        ("0.1KB", 100),
        ("512", 512),
        ("512B", 512),
        ("9007199254740993", 2**53 + 1),
        (123, 123),
    ],
)
def test_parse_bytes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("bad", ["", "GB", "70 gigs", "-5GB", "nan", "1e9", "0GB", 0, -1, True, 1.5, None])
def test_parse_bytes_refuses(bad: object) -> None:
    with pytest.raises(ShardingError) as caught:
        parse_bytes(bad, "memory_limit")  # pyright: ignore[reportArgumentType]
    assert isinstance(caught.value, AutoshardError)
    message = str(caught.value)
    assert message.startswith(f"memory_limit is {bad!r}") and 'try: "70GB"' in message
