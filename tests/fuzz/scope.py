"""What a line of a random module may read: the values so far, with their shapes, and parameters made for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Scope", "Unfit", "Written"]

Written = str | Sequence[str]
"""An expression; or statements, `{0}` in them the name of what they make."""

APART = 1e-4
"""Values that are sorted differ by so much at least: where two are equal, ranks may order them otherwise."""


class Unfit(Exception):
    """An op that no value suits."""


@dataclass
class Scope:
    """values: by name, those of the example. parts: of the module, by name as Python makes them."""

    rng: random.Random
    sizes: tuple[int, ...]
    module: nn.Module = field(default_factory=nn.Module)
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    parts: dict[str, str] = field(default_factory=dict[str, str])
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of what the text is run in."""
    made: int = 0
    """Parts, also those that are gone."""

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def n(self, least: int, most: int) -> int:
        if most < least:
            raise Unfit
        return self.rng.randint(least, most)

    def any(self, fits: Callable[[Tensor], bool]) -> str:
        """One that fits, later ones more often."""
        found = [name for name, value in self.values.items() if fits(value)]
        if not found:
            raise Unfit
        return found[max(self.rng.randrange(len(found)) for _ in range(3))]

    def f(self, *ndims: int, least: int = 0, fits: Callable[[Tensor], bool] = lambda x: True) -> str:
        """A float64 with one of those numbers of dims, or at least so many."""
        dims = lambda x: x.ndim in ndims if ndims else x.ndim >= least
        return self.any(lambda x: x.dtype == torch.float64 and x.numel() > 0 and dims(x) and fits(x))

    def ids(self, *ndims: int) -> str:
        dims = lambda x: not ndims or x.ndim in ndims
        return self.any(lambda x: x.dtype == torch.int64 and x.numel() > 0 and dims(x))

    def mask(self) -> str:
        return self.any(lambda x: x.dtype == torch.bool)

    def complex(self, least: int = 0) -> str:
        return self.any(lambda x: x.is_complex() and x.ndim >= least)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def ndim(self, name: str) -> int:
        return self.values[name].ndim

    def dim(self, name: str, least: int = 1) -> int:
        """One of at least that size, counted from either end."""
        found = [d for d, size in enumerate(self.shape(name)) if size >= least]
        if not found:
            raise Unfit
        dim = self.rng.choice(found)
        return dim - self.rng.choice((0, self.ndim(name)))

    def dims(self, name: str) -> list[int]:
        if not self.ndim(name):
            raise Unfit
        return sorted(self.rng.sample(range(self.ndim(name)), self.rng.randint(1, self.ndim(name))))

    def size(self, name: str, dim: int) -> int:
        return self.shape(name)[dim]

    def like(self, name: str) -> str:
        """A value that broadcasts with it, or a parameter made to."""
        shape = self.shape(name)
        if self.rng.random() < 0.7:
            try:
                return self.f(fits=lambda x: _broadcast(tuple(x.shape), shape))
            except Unfit:
                pass
        kept = shape[self.rng.randint(0, len(shape)) :]
        return self.param(*(1 if self.rng.random() < 0.2 else size for size in kept))

    def same(self, name: str) -> str:
        """Another of its shape, or itself."""
        return self.f(fits=lambda x: tuple(x.shape) == self.shape(name))

    def untied(self, dim_least: int = 2) -> tuple[str, int]:
        """A value and a dim along which no two are equal."""
        name = self.f(least=1)
        dim = self.dim(name, dim_least)
        rows = self.values[name].detach().sort(dim).values.diff(dim=dim)
        if not rows.numel() or rows.min() < APART:
            raise Unfit
        return name, dim

    def param(self, *shape: int) -> str:
        """A parameter, now and then one that there is: tied."""
        fits = [
            name
            for name, value in self.module.named_parameters()
            if tuple(value.shape) == shape and "." not in name
        ]
        if fits and self.rng.random() < 0.4:
            return f"self.{self.rng.choice(fits)}"
        return self.part(f"nn.Parameter(torch.randn({shape}) * 0.5)")

    def buffer(self, made: str) -> str:
        return self.part(made, buffer=True)

    def part(self, made: str, buffer: bool = False) -> str:
        """Its values are of its name alone, whatever else there is."""
        self.made += 1
        name = f"p{self.made}"
        made = f"self.register_buffer({name!r}, {made})" if buffer else f"self.{name} = {made}"
        self.parts[name] = f"torch.manual_seed({self.made}); {made}"
        exec(self.parts[name], self.names, {"self": self.module})
        self.module.double()
        return f"self.{name}"

    def keep(self, words: Collection[str]) -> None:
        """Of the parts those that are among the words."""
        for name in [name for name in self.parts if name not in words]:
            del self.parts[name]
            delattr(self.module, name)


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        torch.broadcast_shapes(one, other)
    except RuntimeError:
        return False
    return True
