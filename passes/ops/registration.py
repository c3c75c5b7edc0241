"""How operators are registered with torch: kernel, fake kernel and gradient of each in one call."""

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
