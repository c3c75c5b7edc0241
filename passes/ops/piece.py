"""`autoshard::piece` and `autoshard::collect`: where a tensor enters and leaves what is run piece after piece.

    piece(x, dim, start, length)          [n, ...] -> [length, ...], the piece's part of a dim
    collect(x, how, dim, start, length)   what one piece adds to the whole: "sum", "max", "min": x itself, to be reduced
                                          over the pieces; "cat": [n, ...] -> [length, ...], x at its place, else 0

`passes.micro_batches` writes them; `passes.lower.piecewise` lowers them to the places where a program is called again.
"""

from __future__ import annotations

import torch

__all__: list[str] = []


def _piece(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return x.narrow(dim, start, length).clone()


def _collect(x: torch.Tensor, how: str, dim: int, start: int, length: int) -> torch.Tensor:
    if how != "cat":
        return x.clone()
    whole = x.new_zeros([length if d == dim else n for d, n in enumerate(x.shape)])
    whole.narrow(dim, start, x.shape[dim]).copy_(x)
    return whole


def _collect_shape(x: torch.Tensor, how: str, dim: int, start: int, length: int) -> torch.Tensor:
    if how != "cat":
        return torch.empty_like(x)
    return x.new_empty([length if d == dim else n for d, n in enumerate(x.shape)])


torch.library.define("autoshard::piece", "(Tensor x, int dim, int start, int length) -> Tensor")
torch.library.impl("autoshard::piece", "CompositeExplicitAutograd", _piece)
torch.library.register_fake(
    "autoshard::piece",
    lambda x, dim, start, length: x.new_empty([length if d == dim else n for d, n in enumerate(x.shape)]),
)
torch.library.define("autoshard::collect", "(Tensor x, str how, int dim, int start, int length) -> Tensor")
torch.library.impl("autoshard::collect", "CompositeExplicitAutograd", _collect)
torch.library.register_fake("autoshard::collect", _collect_shape)
