"""The tensors between the programs of a step in pieces: what a piece is given, what pieces leave, what is returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from passes.lower.piecewise import Collected, PieceInput, RankPieces

IN_PLACE = {"sum": torch.Tensor.add_, "max": torch.maximum, "min": torch.minimum}
"""How a piece's value is added to what those before it have left, in that one's place where possible."""


def given_values(given: Sequence[PieceInput], known: Mapping[str, Tensor]) -> list[Tensor]:
    """The inputs of a piece's forward and backward, parts as views. known: placeholders and what was made before."""
    return [
        known[one.source] if one.part is None else known[one.source].narrow(*one.part).contiguous()
        for one in given
    ]


def leave(left: Sequence[Collected], values: Sequence[Tensor], known: dict[str, Tensor]) -> None:
    """Add what a piece leaves, `values`, to what those before it have left in `known`."""
    for one, value in zip(left, values, strict=True):
        found = known.get(one.name)
        if one.how == "cat":
            if found is None:
                shape = [one.length if d == one.dim else n for d, n in enumerate(value.shape)]
                found = known[one.name] = value.new_empty(shape)
            found.narrow(one.dim, one.start, value.shape[one.dim]).copy_(value)
        elif found is None or one.how == "own":
            known[one.name] = value
        else:
            known[one.name] = IN_PLACE[one.how](found, value)


def step_results(
    parts: RankPieces, known: Mapping[str, Tensor], leaves: Sequence[str]
) -> list[Tensor | None]:
    """The results of the step, none of which shares storage with one of `leaves` or another. known: all values."""
    taken, found = set(leaves), list[Tensor | None]()
    for name in parts.results:
        value = None if name is None else known[name]
        found.append(value.clone() if value is not None and name in taken else value)
        taken.add(str(name))
    return found
