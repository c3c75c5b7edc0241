"""Check: models and inputs come to the ranks' GPUs, steps do not wait for them, communicators are those of the plan.

python -m tests.mock_cuda.checks.devices
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from tests.mock_cuda.checks.launch import run_logged, torchrun
from tests.mock_cuda.checks.report import Report

_RANK = "tests.mock_cuda.checks.devices_rank"


def found(output: str, ranks: int) -> list[dict[str, Any]]:
    """What every rank printed, by rank. Lines of several ranks may run into each other."""
    said = [json.loads(text) for text in re.findall(r"found (\{[^}]*\})", output)]
    assert len(said) == ranks, output[-3000:]
    return sorted(said, key=lambda entry: entry["rank"])


def trained(mesh: str, ranks: int, implicit: str, made: int) -> None:
    """made: communicators of a rank, by hand: of all ranks and of each axis; on three, one more of the two over which
    one weight is pinned, where the other is on the third."""
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = implicit
    output, agreement = run_logged(torchrun(ranks, "-m", _RANK, "trained", "--mesh", mesh))
    counts = {entry["communicators"] for entry in found(output, ranks)}
    mine = {sum(number in c.members.values() for c in agreement.communicators) for number in range(ranks)}
    print(f"  {agreement}; a rank has {mine}, its plan says {counts}")
    assert counts == mine == {made}, (counts, mine)
    # Rank 0 says so where communicators wait for each other, which they need not where NCCL orders them.
    assert ("will not overlap" in output) == (implicit == "0")


def main() -> None:
    report = Report()
    for mesh, ranks, implicit, made in (
        ("4", 4, "1", 1),
        ("2,2", 4, "1", 3),
        ("2,2", 4, "0", 3),
        ("2,2,2", 8, "1", 5),
    ):
        with report.case(
            f"a model on the CPU, {ranks} ranks ({mesh}), NCCL_LAUNCH_ORDER_IMPLICIT={implicit}"
        ):
            trained(mesh, ranks, implicit, made)
    with report.case("scatter, gather, halos and a mean"):
        output, _ = run_logged(torchrun(4, "-m", _RANK, "data"))
        for entry in found(output, 4):
            assert entry["refused"] == "halo_exchange: x is on cpu, and the mesh is one of cuda devices", (
                entry
            )
    with report.case("a model on the first GPU on all ranks"):
        output, _ = run_logged(torchrun(4, "-m", _RANK, "misplaced"))
        # Rank 0 has nothing to complain about: it says what another rank said.
        for entry in found(output, 4):
            rank = entry["rank"] or 1
            wanted = f"the model has tensors on cuda:0, and this rank's part of the mesh is cuda:{rank}"
            assert entry["refused"] == wanted, entry
    report.exit()


if __name__ == "__main__":
    main()
