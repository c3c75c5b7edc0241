"""How operators are registered with torch, kernel, fake kernel and gradient in one call; ops that only mark values.

    use(x)                                the identity, standing for all readers of a value in one phase
    either(kept, again)                   a value that the backward reads either as the forward kept it or as it
                                          computed it again. In graphs that are searched only; the plan says which
    piece(x, dim, start, length)          [n, ...] -> [length, ...], a piece's part of a dim, where a tensor enters what
                                          is run piece after piece
    collect(x, how, dim, start, length)   what one piece adds to the whole: "sum", "max", "min": x itself, to be reduced
                                          over the pieces; "cat": [n, ...] -> [length, ...], x at its place, else 0

Lowering drops the marks, or replaces them. A value that several nodes read is redistributed once and then used many
times. With one `use` between the value and its readers of a phase, the search prices that redistribution once.
`passes.micro_batches` writes pieces; `passes.lower.piecewise` lowers them to the places where a program is called
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

OURS = "autoshard"


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any], namespace: str = OURS) -> Any:
    """The operator of `schema`, "name(...) -> ...", without a gradient. run: on real tensors, of any device; fake: an
    empty result of the same shape, dtype and strides."""
    name, _, signature = schema.partition("(")
    full = f"{namespace}::{name}"
    torch.library.define(full, f"({signature}")
    torch.library.impl(full, "CompositeExplicitAutograd", run)
    torch.library.register_fake(full, fake)
    return getattr(getattr(torch.ops, namespace), name).default


def differentiable_operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> CustomOpDef:
    """The same as an operator that a gradient may be registered for."""
    name, _, signature = schema.partition("(")
    made = torch.library.custom_op(f"{OURS}::{name}", run, mutates_args=(), schema=f"({signature}")
    made.register_fake(fake)
    return made


def differentiated_by(made: CustomOpDef, backward: Callable[..., Any], saved: slice) -> None:
    """The gradient of `made` is `backward(grad, *saved tensors, *what comes after them)`, with respect to its first
    arguments; the others have none. saved: which arguments are tensors that it reads."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[saved])
        ctx.options, ctx.count = inputs[saved.stop :], len(inputs)

    def gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = backward(grad, *ctx.saved_tensors, *ctx.options)
        gradients = found if isinstance(found, tuple) else (found,)
        return *gradients, *(None,) * (ctx.count - len(gradients))

    made.register_autograd(gradient, setup_context=setup)


__all__: list[str] = []


def _resized(x: Tensor, dim: int, length: int) -> list[int]:
    return [length if d == dim else n for d, n in enumerate(x.shape)]


def _collect(x: Tensor, how: str, dim: int, start: int, length: int) -> Tensor:
    if how != "cat":
        return x.clone()
    whole = x.new_zeros(_resized(x, dim, length))
    whole.narrow(dim, start, x.shape[dim]).copy_(x)
    return whole


# An operator may not return its operand.
operator("use(Tensor x) -> Tensor", lambda x: x.clone(), torch.empty_like)
operator(
    "either(Tensor kept, Tensor again) -> Tensor",
    lambda kept, again: kept.clone(),
    lambda kept, again: torch.empty_like(kept),
)
operator(
    "piece(Tensor x, int dim, SymInt start, SymInt length) -> Tensor",
    lambda x, dim, start, length: x.narrow(dim, start, length).clone(),
    lambda x, dim, start, length: x.new_empty(_resized(x, dim, length)),
)
operator(
    "collect(Tensor x, str how, int dim, SymInt start, SymInt length) -> Tensor",
    _collect,
    lambda x, how, dim, start, length: (
        x.new_empty(_resized(x, dim, length)) if how == "cat" else torch.empty_like(x)
    ),
)
