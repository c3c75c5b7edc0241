import pytest
import torch

from cost_model.errors import AutoshardError, ShardingError
from cost_model.memory import ADAMW, parse_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_states_are_as_large_as_the_parameter(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(24, 10, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    held = [state for name, state in optimizer.state[parameter].items() if name != "step"]
    assert sum(state.nbytes for state in held) == ADAMW.states * parameter.nbytes


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
        parse_bytes(bad)  # pyright: ignore[reportArgumentType]
    assert isinstance(caught.value, AutoshardError)
    message = str(caught.value)
    assert message.startswith(f"memory_limit is {bad!r}") and 'try: "70GB"' in message
