"""Lines that pick, move, reduce and scan values."""

# ruff: noqa: E501  # An op is a line.
from __future__ import annotations

from tests.fuzz.scope import Scope, Unfit, Written

__all__ = ["centred", "pairs", "picked", "reduced", "rows", "scanned", "sliced", "viewed"]


def reduced(s: Scope) -> str:
    a = s.f(least=1)
    dims, kept = s.dims(a), s.pick(True, False)
    op = s.pick("sum", "mean", "amax", "amin", "logsumexp", "var", "std", "norm", "prod", "nansum")
    if op in ("var", "std") and min(s.size(a, d) for d in dims) < 2:
        raise Unfit
    if op == "prod":
        return f"{a}.prod({dims[0]}, keepdim={kept})"
    if op == "norm":
        return f"torch.linalg.vector_norm({a}, {s.pick(1, 2, 3)}, {dims}, keepdim={kept})"
    return f"{a}.{op}({dims}, keepdim={kept})"


def centred(s: Scope) -> str:
    a = s.f(least=1)
    d = s.dim(a, 2)
    return s.pick(
        f"{a} - {a}.mean({d}, keepdim=True)",
        f"{a} / ({a}.square().sum({d}, keepdim=True) + 1)",
        f"{a}.softmax({d})",
        f"{a}.log_softmax({d})",
        f"F.normalize({a}, dim={d}, eps=0.1)",
        f"{a} - {a}.amax({d}, keepdim=True)",
        f"{a} - {a}.mean()",
    )


def picked(s: Scope) -> Written:
    a, d = s.untied()
    k = s.n(1, s.size(a, d))
    return s.pick(
        f"{a}.max({d})[0]",
        f"{a}.min({d}, keepdim=True).values",
        f"{a}.median({d}).values",
        f"{a}.topk({k}, {d})[0]",
        f"{a}.topk({k}, {d})[1]",
        f"{a}.topk({k}, {d}, largest=False).values",
        f"{a}.sort({d}, descending={s.pick(True, False)})[0]",
        f"{a}.sort({d})[1]",
        f"{a}.argsort({d}, stable=True)",
        f"{a}.argmax({d})",
        f"{a}.argmin({d}, keepdim=True)",
        f"{a}.kthvalue({k}, {d}).values",
        f"{a}.cummax({d})[0]",
        f"{a}.cummin({d}).values",
        f"torch.take_along_dim({a}, {a}.argsort({d}), {d})",
        f"{a}.gather({d}, {a}.topk({k}, {d}).indices)",
        f"torch.zeros_like({a}).scatter({d}, {a}.topk({k}, {d})[1], 1.0) * {a}",
        f"{a}.masked_fill({a} < {a}.topk({k}, {d})[0].amin({d}, keepdim=True), 0.0)",
        f"F.one_hot({a}.argmax({d}), {s.size(a, d)}).double()",
        f"{a}.quantile(0.3, {d})",
    )


def scanned(s: Scope) -> str:
    a = s.f(least=1)
    d = s.dim(a, 2)
    return s.pick(
        f"{a}.cumsum({d})",
        f"{a}.tanh().cumprod({d})",
        f"torch.logcumsumexp({a}, {d})",
        f"{a}.flip({d}).cumsum({d}).flip({d})",
        f"({a} > 0).cumsum({d})",
        f"{a}.diff(dim={d})",
        f"torch.cumsum({a}, {d}) / torch.arange(1, {s.size(a, d) + 1}).view({[-1] + [1] * (s.ndim(a) - 1 - d % s.ndim(a))})",
        f"torch.trapezoid({a}, dim={d})",
    )


def rows(s: Scope) -> Written:
    """Indexing by values and by numbers."""
    a, ids = s.f(least=1), s.ids(1, 2)
    d = s.dim(a)
    size = s.size(a, d)
    flat = f"({ids}.flatten() % {size})"
    count = s.values[ids].numel()
    shape = list(s.shape(a))
    shape[d] = count
    new = s.param(*shape)
    return s.pick(
        f"{a}.index_select({d}, {flat})",
        f"{a}[{ids} % {s.size(a, 0)}]",
        f"{a}.index_add({d}, {flat}, {new})",
        f"torch.zeros_like({a}).index_add_({d}, {flat}, {new}) + {a}",
        f"{a}.index_put(({ids}.flatten() % {s.size(a, 0)},), torch.ones(()).double(), accumulate=True)",
        f"{a}.scatter_add({d}, {flat}.view({_at(s, a, d)}).expand({shape}), {new})",
        f"{a}.gather({d}, {flat}.view({_at(s, a, d)}).expand({shape}))",
        f"{a}.scatter_reduce({d}, {flat}.view({_at(s, a, d)}).expand({shape}), {new}, 'sum')",
        f"{a}.index_fill({d}, {flat}, 0.5)",
        f"torch.take({a}, {ids} % {s.values[a].numel()})",
        f"F.one_hot({ids} % 5, 5).double()",
        f"torch.bincount({flat}, minlength={size}).double()",
        f"{ids} % 3",
        f"({ids} + 1).double()",
        f"{ids} == {s.n(0, 3)}",
    )


def _at(s: Scope, a: str, d: int) -> list[int]:
    shape = [1] * s.ndim(a)
    shape[d] = -1
    return shape


def pairs(s: Scope) -> str:
    """Two indices at once, and a mask."""
    a, ids = s.f(least=2), s.ids(1)
    one, two = f"{ids} % {s.size(a, 0)}", f"({ids} + 1) % {s.size(a, 1)}"
    return s.pick(
        f"{a}[{one}, {two}]",
        f"{a}[:, {two}]",
        f"{a}[({one})[:, None], ({two})[None]]",
        f"{a}[..., None, {s.n(0, s.size(a, -1) - 1)}]",
        f"{a}[torch.arange({s.size(a, 0)}), {s.n(0, s.size(a, 1) - 1)}]",
        f"{a}.index_put(({one}, {two}), {a}[{one}, {two}] * 2)",
    )


def sliced(s: Scope) -> str:
    a = s.f(least=1)
    d = s.dim(a, 2) % s.ndim(a)
    size = s.size(a, d)
    start = s.n(0, size - 1)
    stop = s.n(start + 1, size)
    at = ":, " * d
    return s.pick(
        f"{a}[{at}{start}:{stop}]",
        f"{a}[{at}::2]",
        f"{a}[{at}1:]",
        f"{a}[{at}:-1]",
        f"{a}[{at}{start}]",
        f"{a}[{at}{start}:{stop}] * {a}[{at}-{stop - start}:]",
        f"{a}.narrow({d}, {start}, {stop - start})",
        f"{a}.chunk(2, {d})[{s.pick(0, -1)}]",
        f"torch.cat([{a}[{at}{start}:], {a}[{at}:{start}]], {d})",
        f"{a}.unbind({d})[{start}]",
        f"{a}.tensor_split(2, {d})[1]",
        f"{a}.select({d}, {start})",
        f"{a}.split({[start, size - start]}, {d})[1]",
        f"{a}.unfold({d}, {stop - start}, {s.n(1, 2)})",
    )


def viewed(s: Scope) -> str:
    a = s.f(least=1)
    d, n = s.dim(a) % s.ndim(a), s.ndim(a)
    order = s.rng.sample(range(n), n)
    size = s.size(a, d)
    parts = [k for k in range(1, size + 1) if size % k == 0]
    k = s.pick(*parts)
    first = s.n(0, n - 1)
    return s.pick(
        f"{a}.permute({order})",
        f"{a}.transpose({d}, {s.n(0, n - 1)})",
        f"{a}.unflatten({d}, ({k}, {size // k}))",
        f"{a}.flatten({first}, {s.n(first, n - 1)})",
        f"{a}.reshape(-1)",
        f"{a}.reshape({k}, -1)",
        f"{a}.transpose(0, -1).reshape({list(s.shape(a))})",
        f"{a}.unsqueeze({s.n(0, n)})",
        f"{a}.squeeze()",
        f"{a}.movedim({d}, {s.n(0, n - 1)})",
        f"{a}.flip({d})",
        f"{a}.roll({s.n(-2, 2)}, {d})",
        f"{a}.unsqueeze({d}).expand({[*s.shape(a)[:d], s.n(1, 3), *s.shape(a)[d:]]})",
        f"{a}.repeat({[s.n(1, 2) for _ in range(n)]})",
        f"{a}.repeat_interleave({s.n(1, 3)}, {d})",
        f"{a}.view({list(s.shape(a)[:d])} + [{k}, {size // k}] + {list(s.shape(a)[d + 1 :])}).transpose({d}, {d + 1})",
        f"{a}.unflatten({d}, ({k}, {size // k})).sum({d})",
        f"{a}.expand_as({a}).mT" if n > 1 else f"{a}.expand(3, -1)",
        f"torch.stack([{a}, {s.same(a)}], {s.n(0, n)})",
        f"torch.cat([{a}, {s.same(a)} * 2], {d})",
        f"F.pad({a}, ({s.n(0, 2)}, {s.n(0, 2)}))",
        f"F.pad({a}, ({', '.join('0' for _ in range(2 * (n - 1 - d)))}{', ' if d < n - 1 else ''}1, {s.n(-1, 1)}), value=0.3)",
        f"torch.rot90({a}, 1, (0, -1))" if n > 1 else f"{a}.tile(2)",
        f"{a}.swapaxes(0, -1)",
    )
