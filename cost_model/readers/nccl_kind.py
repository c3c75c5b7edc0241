"""Which collective a table of nccl-tests is of: by the program's name and by what its rows look like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from cost_model.measurements import KINDS
from cost_model.readers.points import Place, busbw_factor, refuse
from cost_model.readers.printed import agree
from cost_model.readers.rows import Row

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


def kind_of(place: Place, rows: Sequence[Row], n: int, hints: Iterable[str], file: str) -> str | None:
    """The kind of `rows` over n ranks; None for a program that has no price.

    hints: programs named in the text near the table, the surest last; if there are none, the name of
    the file counts. The rows must fit: all-gather and all-to-all look alike, others do not.
    Raises ProfileError if the rows do not fit the name, or fit several kinds and there is no name.
    """
    named = list(hints)[-1:] or list(programs_in_name(file))
    if len(named) == 1 and PROGRAMS[named[0]] is None:
        return None
    fitting = [kind for kind in KINDS if all(_fits(kind, row, n) for row in rows)]
    wanted = [PROGRAMS[name] for name in named]
    kinds = [kind for kind in fitting if kind in wanted] if wanted else fitting
    if len(kinds) == 1:
        return kinds[0]
    looks = " or ".join(fitting) or "no collective that has a price"
    refuse(
        place,
        f"the rows look like {looks} over {n} ranks, and the name says {', '.join(named) or 'nothing'}",
        rows[0].text,
        "keep the line '# Collective test starting: ...', or name the file after the program "
        "(all_gather_perf.txt)",
    )


def _fits(kind: str, row: Row, n: int) -> bool:
    """Size against count, operation and root of a row, and the factor of its bus bandwidth."""
    shared = kind in ("all_gather", "all_to_all", "reduce_scatter")
    reduces = kind in ("all_reduce", "reduce_scatter")
    if row.nbytes != row.count * row.item_bytes * (n if shared else 1):
        return False
    if kind != "point_to_point" and reduces != (row.redop != "none"):
        return False
    if (row.root >= 0) != (kind == "broadcast"):
        return False
    factor = busbw_factor(kind, n)
    return all(agree(side.algbw.times(factor), side.busbw) for side in row.sides)
