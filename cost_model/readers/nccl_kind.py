"""Which collective a table of nccl-tests is of: by the program's name and by what its rows look like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from cost_model.measurements import KINDS
from cost_model.readers.points import Place, busbw_factor, refuse
from cost_model.readers.printed import agree
from cost_model.readers.result_rows import Row

__all__ = ["ITEM_BYTES", "PROGRAMS", "kind_of", "programs_in_name"]

PROGRAMS: dict[str, str | None] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "point_to_point",
    # No redistribution uses these; they have no price.
    "alltoallv": None,
    "gather": None,
    "hypercube": None,
    "reduce": None,
    "scatter": None,
}
"""Program without `_perf` -> kind of collective."""

ITEM_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "int", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}


def programs_in_name(file: str) -> tuple[str, ...]:
    """Programs that a file name speaks of: `h100-all_gather.txt` -> ("all_gather",). The longest only."""
    name = PurePath(file).name.replace("-", "_")
    found = [program for program in PROGRAMS if program in name]
    return tuple(p for p in found if not any(p != q and p in q for q in found))


def kind_of(place: Place, rows: Sequence[Row], n: int, program: str | None, file: str) -> str | None:
    """The kind of `rows` over n ranks; None for a program that has no price.

    program: named in the text, without `_perf`; if None, the name of the file counts. The rows must look
    like it (all-gather and all-to-all look alike, others do not).
    Raises ProfileError if the rows do not fit the name, or fit several kinds and there is no name.
    """
    named = (program,) if program is not None else programs_in_name(file)
    if len(named) == 1:
        kind = PROGRAMS[named[0]]
        if kind is not None:
            _check_looks(kind, named[0], n, rows)
        return kind
    fitting = [kind for kind in KINDS if all(_looks(kind, row, n) and _scales(kind, row, n) for row in rows)]
    kinds = [kind for kind in fitting if not named or kind in [PROGRAMS[name] for name in named]]
    if len(kinds) == 1:
        return kinds[0]
    refuse(
        place,
        f"nothing names the collective, and the rows look like {' or '.join(kinds) or 'none that has a price'} "
        f"over {n} ranks",
        rows[0].text,
        "keep the line '# Collective test starting: ...', or name the file after the program "
        "(all_gather_perf.txt)",
    )


def _check_looks(kind: str, program: str, n: int, rows: Sequence[Row]) -> None:
    for row in rows:
        if not _looks(kind, row, n):
            refuse(
                row.place,
                f"the row is not one of {program}_perf over {n} ranks: size, count, type, redop and root "
                "do not fit together",
                row.text,
                "the whole output of one run, with the lines of all its ranks",
            )


def _looks(kind: str, row: Row, n: int) -> bool:
    """Size against count, operation and root of a row."""
    shared = kind in ("all_gather", "all_to_all", "reduce_scatter")
    reduces = kind in ("all_reduce", "reduce_scatter")
    if row.nbytes != row.count * row.item_bytes * (n if shared else 1):
        return False
    if kind != "point_to_point" and reduces != (row.redop != "none"):
        return False
    return (row.root >= 0) == (kind == "broadcast")


def _scales(kind: str, row: Row, n: int) -> bool:
    """Bus bandwidth against algorithm bandwidth."""
    factor = busbw_factor(kind, n)
    return all(agree(side.algbw.times(factor), side.busbw) for side in row.sides)
