"""Published runs as their frameworks are configured: what is read is what ran, and what is printed is what is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoshard.planner import readers
from autoshard.planner.priced_runs import MetaModel
from benchmarks.published_parallel import CONFIGURATIONS, configured_rows, table_row

RUNS = {one.file: one for one in configured_rows()}


def test_every_file_is_of_a_row() -> None:
    assert {path.name for path in CONFIGURATIONS.iterdir()} == set(RUNS)
    assert {one.framework for one in RUNS.values()} == {"torchtitan", "megatron", "accelerate"}


@pytest.mark.parametrize("file", RUNS)
def test_a_file_is_what_ran(file: str) -> None:
    one = RUNS[file]
    given = one.given if one.framework == "megatron" else Path(one.given)
    found, row = getattr(readers, one.framework)(given, one.row.gpus), one.row.configuration
    assert (found.axes, found.recompute) == (row.axes, row.recompute)
    assert found.pieces(row.batch) == row.pieces(row.batch)
    assert found.batch in (row.batch, 0) and found.sequence in (row.sequence, 0)
    if row.experts > 1:
        assert found.routing.once == row.routing.once
    if found.pieces(row.batch) > 1:  # else weights are gathered once, whichever it says
        assert found.each_piece == row.each_piece


def test_models_have_the_parameters_that_are_published() -> None:
    """Of MPT 3B, whose layers have no biases, 2,651,837,440. [llm-foundry]"""
    (mpt,) = (one for one in RUNS.values() if one.row.model == "MPT-3B")
    count = MetaModel.of(mpt.row.transformers, torch.bfloat16).parameters()
    assert count == pytest.approx(2_651_837_440, rel=0.001)


PRINTED = """\
model       gpt2, 2.65 billion parameters; 480 samples of 2,048 tokens a step, on 16 devices
runs        accelerate: shard=16; not compiled
step        2.12 s, 463,004 tokens a second (20,000 of each device), MFU 49.4%, 62.36GB of 80GB
autoshard   2.09 s, 470,101 tokens a second (30,000 of each device), MFU 50.1%, 76.88GB of 80GB
distance    +1.5% of a step against autoshard's, +4.3% against the bound 2.03 s
better      {0}: 2.12 s, 463,004 tokens a second (25,000 of each device), MFU 49.4%,
            62.36GB of 80GB
"""


@pytest.mark.parametrize(
    ("better", "told"),
    [
        ("dynamo_backend: INDUCTOR", "dynamo_backend: INDUCTOR: 25,000 (+25.0%)"),
        ("as it is", "none: it is the best"),
    ],
)
def test_a_row_of_the_table(better: str, told: str) -> None:
    """20,000 of 23,422 are 14.6 % less; 30,000 of 20,000 half as much again."""
    cells = table_row(RUNS["mpt-3b.yaml"], PRINTED.format(better)).strip("| ").split(" | ")
    assert cells == [
        "MPT-3B, 2,048, 128 x H100", "accelerate: shard=16; not compiled", "23,422", "20,000", "-14.6%",
        "62.36GB of 80GB", "30,000 (+50.0%)", told,
    ]  # fmt: skip
