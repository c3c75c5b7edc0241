"""Lines that write in place, change buffers, cast, draw, and do what Python does around ops."""

# ruff: noqa: E501  # An op is a line.
from __future__ import annotations

import torch

from tests.fuzz.point_ops import UNARY
from tests.fuzz.scope import Scope, Unfit, Written

__all__ = ["again", "cast", "drawn", "in_place", "several", "state"]


def state(s: Scope) -> Written:
    """Buffers that a forward changes."""
    a = s.f(least=1)
    shape = list(s.shape(a)[1:])
    moved = s.buffer(f"torch.zeros({shape})")
    count = s.buffer("torch.zeros(())")
    last = s.buffer(f"torch.zeros({list(s.shape(a))})")
    return s.pick(
        [f"{moved}.mul_(0.9).add_({a}.detach().mean(0), alpha=0.1)", f"{{0}} = {a} + {moved}"],
        [f"{count} += 1", f"{{0}} = {a} / {count}"],
        [f"{{0}} = {a} + {last}", f"{last}.copy_({a}.detach())"],
        [f"{last} = {last} + {a}.detach()", f"{{0}} = {last} * {a}"],
        [f"{last}[0] = {a}[0].detach()", f"{{0}} = {last} + {a}"],
        [f"with torch.no_grad(): {count}.add_({a}.abs().amax())", f"{{0}} = {a} * 2"],
        [f"{{0}} = {a} * {count}.add(1)"],
    )


def in_place(s: Scope) -> Written:
    """On a copy, or on a value as it is: what would lack it in the backward is refused by torch itself."""
    a = s.f(least=1)
    d = s.dim(a) % s.ndim(a)
    size, at = s.size(a, d), ":, " * d
    b, row = s.like(a), s.n(0, size - 1)
    if torch.broadcast_shapes(_shape(s, b), s.shape(a)) != s.shape(a):
        b = "0.5"
    to = s.pick("{0}", "{0}", a)
    before = (
        [f"{{0}} = {a}.{s.pick('clone()', 'clone()', 'mul(2)', 'contiguous() + 0')}"] if to == "{0}" else []
    )
    return [
        *before,
        s.pick(
            f"{to}.add_({b})", f"{to}.mul_({b})", f"{to} += {b}", f"{to}[{at}{row}] = 0.5", f"{to}[{at}{row}:] *= 2", f"{to}[{at}{row}] += {to}[{at}0].detach()",
            f"{to}.select({d}, {row}).mul_(3)", f"{to}.view(-1)[::2] = 1.0", f"{to}.view(-1).mul_(2)", f"{to}.relu_()", f"{to}.masked_fill_({to} > 0.5, 0.0)", f"{to}.clamp_(-1, 1)",
            f"{to}.t_()" if s.ndim(a) == 2 else f"{to}.zero_()", f"{to}.unsqueeze_({d})", f"{to}[{to} > 0.3] = 0.1", f"{to}.transpose(0, -1).add_(1)", f"{to}.fill_(0.3)", f"{to}.copy_({b})" if b != "0.5" else f"{to}.neg_()",
            f"{to}[{at}::2].sub_(1)", f"{to}.diagonal(dim1=0, dim2=-1).add_(1)" if s.ndim(a) > 1 else f"{to}.exp_()", f"torch.add({to}.detach(), 1, out={to}.detach())", f"{to}.index_fill_({d}, torch.tensor([{row}]), 0.2)",
            f"{to}.index_copy_({d}, torch.tensor([{row}]), {to}.narrow({d}, 0, 1).clone() * 2)", f"{to}.scatter_({d}, torch.full({[1] * s.ndim(a)}, {row}), 0.7)", f"{to}.unbind({d})[{row}].add_(1)", f"F.silu({to}, inplace=True)",
            f"{to}[{at}{row}:{row + 1}], {to}[{at}:1] = {to}[{at}:1].clone(), {to}[{at}{row}:{row + 1}].clone()", f"{to}.squeeze_()", f"{to}.flatten()[:1].add_(1)", f"{to}.chunk(2, {d})[0].mul_(2)", f"{to}.set_({to}.detach() * 2)" if s.rng.random() < 0.1 else f"{to}.sin_()",
            f"{to}.index_put_((torch.tensor([0, {row}]),), torch.ones(()).double(), accumulate=True)" if d == 0 else f"{to}.tril_()" if s.ndim(a) > 1 else f"{to}.cumsum_(0)",
        ),
    ]  # fmt: skip


def _shape(s: Scope, name: str) -> tuple[int, ...]:
    return tuple(s.module.get_parameter(name[5:]).shape) if name.startswith("self.") else s.shape(name)


def drawn(s: Scope) -> str:
    a = s.f(least=1)
    return s.pick(
        f"{a} + torch.rand_like({a})",
        f"F.dropout({a}, 0.3)",
        f"{a} * torch.randn({list(s.shape(a))}).double()",
        f"{a} * torch.bernoulli(torch.full_like({a}, 0.5))",
        f"{a}[torch.randperm({s.size(a, 0)})]",
    )


def again(s: Scope) -> str:
    a, b = s.f(), s.like
    return s.pick(
        f"checkpoint(lambda x: {s.pick(*UNARY).format('x.tanh()')}, {a}, use_reentrant=False)",
        f"torch.autograd.functional.vjp(torch.tanh, {a}, torch.ones_like({a}))[1]",
        f"torch.func.vmap(lambda x, y: x.sum() * y)({a}, {b(a)})" if s.ndim(a) else f"{a} + 1",
    )


def several(s: Scope) -> Written:
    """Python's own loops and branches."""
    a = s.f(least=1)
    d = s.dim(a)
    if s.size(a, d) > 6:
        raise Unfit
    step = s.pick("h * 0.5 + x", "torch.tanh(h + x)", "torch.maximum(h, x)", "h + x * h")
    return s.pick(
        ["h, r = 0.5, []", f"for x in {a}.unbind({d}): h = {step.replace('torch.maximum(h, x)', 'h + x')}; r.append(h)", f"{{0}} = torch.stack(r, {d})"],
        ["h = 0.1", f"for x in {a}.split(1, {d}): h = {step.replace('torch.maximum(h, x)', 'h - x')}", "{0} = h"],
        [f"{{0}} = {a}", f"for x in {a}.chunk(2, {d}): {{0}} = {{0}} + x.mean({d}, keepdim=True)"],
        [f"{{0}} = {a} * 2 if {a}.shape[{d}] > 2 else {a}"],
    )  # fmt: skip


def cast(s: Scope) -> str:
    a = s.f()
    return s.pick(
        f"{a}.float().double()", f"({a} * 3).long()", f"{a}.to(torch.int32).double() + {a}", f"({a} > 0).double()", f"{a}.bool()", f"({a} > 0).long()",
        f"{a}.new_ones({list(s.shape(a))}) * {a}", f"torch.full_like({a}, 0.5) + {a}", f"({a} * 2).round().detach() + {a}", f"{a}.floor() + {a}", f"{a}.fmod(0.7)", f"{a}.frac()",
        f"{a} + torch.arange({s.size(a, -1)})" if s.ndim(a) else f"{a} + 1", f"{a} * torch.linspace(0, 1, {s.size(a, -1)}, dtype=torch.float64)" if s.ndim(a) else f"{a} * 2",
        f"torch.tensor([0.5, 2.0]).double().mean() * {a}", f"{a}.float().softmax(-1)[..., :1].double() * {a}" if s.ndim(a) else f"{a}.float().double()",
    )  # fmt: skip
