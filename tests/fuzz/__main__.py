"""Random modules, meshes and options: planned, and verified against the unsharded model on simulated ranks.

    python -m tests.fuzz                               # 500 cases
    python -m tests.fuzz --seed 7 --cases 1 --reduce   # one; a fault with the least of its module that shows it

A module is a few random ops, a line each (`op_table.py`), in float64. Its plan is made where splitting pays, and run
in lockstep, forward and backward. A case is ok, or refused by an error of ours with a remedy; all else is a fault and
printed. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch

from tests.fuzz.cases import ALONE, FAULT, OK, REFUSED, Outcome, drawn_case, examined
from tests.fuzz.reduce import reduced


def table(found: Sequence[Outcome]) -> str:
    states = Counter(one.state for one in found)
    reasons = Counter((one.state, one.reason) for one in found if one.state in (REFUSED, FAULT))
    rows = [f"| {' | '.join(('cases', OK, ALONE, REFUSED, FAULT))} |", "| --- " * 5 + "|"]
    rows.append(
        f"| {' | '.join(str(n) for n in (len(found), *(states[s] for s in (OK, ALONE, REFUSED, FAULT))))} |"
    )
    return "\n".join(
        [*rows, "", *(f"{count} {state}: {reason}" for (state, reason), count in reasons.most_common())]
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, help="no case begins after so many of the process's time")
    parser.add_argument("--reduce", action="store_true", help="print faults with fewer lines")
    given = parser.parse_args(words)
    os.environ.setdefault("AUTOSHARD_VERIFY", "1")
    os.environ.setdefault("AUTOSHARD_PROGRESS", "0")
    torch.set_num_threads(1)
    found: list[Outcome] = []
    for number in range(given.seed, given.seed + given.cases):
        if given.seconds is not None and time.process_time() > given.seconds:
            break
        case = drawn_case(number)
        found.append(examined(case))
        if found[-1].state == FAULT:
            case = reduced(case, found[-1]) if given.reduce else case
            print(f"FAULT {number}: {found[-1].said}\n{case}\n", flush=True)
        seconds = f"{time.process_time():.0f} CPU s"
        print(f"{number} {found[-1].state} {found[-1].reason}, {seconds}", file=sys.stderr, flush=True)
    print(table(found))
    return int(any(one.state == FAULT for one in found))


if __name__ == "__main__":
    sys.exit(main())
