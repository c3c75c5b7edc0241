"""docs/attention.md has the table as it is in the code."""

from __future__ import annotations

from pathlib import Path

import torch

from passes.ops.attention_table import TABLE, Contract

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def line(row: Contract) -> str:
    """The columns of the page's table."""
    chips = (
        ""
        if row.capabilities is None
        else " {}.{} to {}.{}".format(*row.capabilities[0], *row.capabilities[1])
    )
    lowest = None if row.capabilities is None else row.capabilities[0]
    dtypes = ", ".join(
        _name(dtype) + ("" if least in (None, lowest) else " (from {}.{})".format(*least))
        for dtype, least in row.dtypes.items()
    )
    heads = (
        f"{'any' if row.largest_head is None else f'up to {row.largest_head}'}, padded to {row.head_multiple}"
    )
    heads += ", one for q and v" if row.equal_heads else ""
    return (
        f"| {row.kernel} | {row.device}{chips} | {dtypes} | {heads} | {', '.join(sorted(row.masks))} "
        f"| {'top left' if row.causal_unequal else 'refused'} | {'yes' if row.causal_masked else 'refused'} "
        f"| {row.blind_rows} | {row.deterministic} |"
    )


def test_the_page_has_every_row() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    missing = [line(row) for row in TABLE if line(row) not in lines]
    assert not missing, "\n".join(missing)


def test_the_page_says_where_there_is_no_backward() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for row in TABLE:
        for first, last, low, high in row.refused_heads:
            assert f"{low} to {high} on {first[0]}.{first[1]} to {last[0]}.{last[1]}" in text
