"""Lines of what layers are made of: products, norms, convolutions, attention, experts, losses."""

# ruff: noqa: E501  # An op is a line.
from __future__ import annotations

from tests.fuzz.scope import Scope, Unfit, Written

__all__ = [
    "attention",
    "complex",
    "convolved",
    "einsum",
    "embedded",
    "loss",
    "matrix",
    "norm",
    "product",
    "rare",
    "routed",
]


def matrix(s: Scope) -> str:
    a = s.f(least=2)
    return s.pick(
        f"{a}.tril()",
        f"{a}.triu({s.n(-1, 1)})",
        f"{a}.diagonal(dim1=-2, dim2=-1)",
        f"{a}.diagonal({s.n(0, 1)}, 0, 1)",
        f"torch.diag_embed({a}.mean(-1))",
        f"{a} @ {a}.mT",
        f"torch.linalg.solve({a}.mT @ {a} / {s.size(a, -2)} + 2 * torch.eye({s.size(a, -1)}).double(), {a}.mT)",
        f"torch.linalg.cholesky({a} @ {a}.mT / {s.size(a, -1)} + 2 * torch.eye({s.size(a, -2)}).double())",
        f"torch.linalg.inv({a} @ {a}.mT / {s.size(a, -1)} + 2 * torch.eye({s.size(a, -2)}).double())",
        f"torch.cdist({a} + 1, {s.param(3, s.size(a, -1))})",
        f"{a}.mT @ {s.same(a)}",
        f"torch.kron({a}.flatten(0, -2), {s.param(1, 2)})",
        f"{a}.unsqueeze(-1) * {a}.unsqueeze(-2)",
        f"torch.linalg.det({a} @ {a}.mT / {s.size(a, -1)} + torch.eye({s.size(a, -2)}).double())",
        f"torch.corrcoef({a}.flatten(0, -2) + torch.arange({s.size(a, -1)}))"
        if s.size(a, -1) > 3
        else f"{a}.mT",
    )


def product(s: Scope) -> str:
    a = s.f(least=1)
    k = s.size(a, -1)
    m = s.pick(*s.sizes)
    return s.pick(
        f"F.linear({a}, {s.param(m, k)}, {s.param(m)})",
        f"{a} @ {s.param(k, m)}",
        f"{s.part(f'nn.Linear({k}, {m})')}({a})",
        f"F.linear({a}, {s.param(m, k)})",
        f"torch.einsum('...k,km->...m', {a}, {s.param(k, m)})",
        f"torch.tensordot({a}, {s.param(k, m)}, 1)",
        f"({a} @ {s.param(k, m)}).relu() @ {s.param(m, k)}",
        f"{a} @ {s.param(k)}",
        f"F.bilinear({a}, {a}, {s.param(3, k, k)})",
    )


def einsum(s: Scope) -> str:
    """Two values or a parameter, by letters of their sizes."""
    a = s.f(1, 2, 3)
    b = s.f(1, 2, 3) if s.rng.random() < 0.5 else s.param(*(s.pick(*s.sizes) for _ in range(2)))
    sizes = s.module.get_parameter(b[5:]).shape if b.startswith("self.") else s.values[b].shape
    letters, by_letter = [], dict[str, int]()
    for shape in (s.shape(a), tuple(sizes)):
        own: list[str] = []
        for size in shape:
            fits = [x for x, known in by_letter.items() if known == size and (x not in own)]
            letter = s.pick(*fits) if fits and s.rng.random() < 0.7 else "abcdefg"[len(by_letter)]
            by_letter[letter] = size
            own.append(letter)
        letters.append("".join(own))
    result = [x for x in by_letter if s.rng.random() < 0.6]
    s.rng.shuffle(result)
    return f"torch.einsum('{letters[0]},{letters[1]}->{''.join(result)}', {a}, {b})"


def norm(s: Scope) -> str:
    a = s.f(least=2)
    k, c = s.size(a, -1), s.size(a, 1)
    if k < 2:
        raise Unfit
    groups = s.pick(*(g for g in range(1, c + 1) if c % g == 0))
    deep = s.ndim(a) > 2
    return s.pick(
        f"{s.part(f'nn.LayerNorm({k})')}({a})",
        f"F.layer_norm({a}, ({k},))",
        f"{s.part(f'nn.RMSNorm({k}, eps=1e-3)')}({a})",
        f"{s.part(f'nn.GroupNorm({groups}, {c})')}({a})"
        if deep
        else f"F.layer_norm({a}, {list(s.shape(a))}, eps=0.01)",
        f"{s.part(f'nn.BatchNorm1d({c}, eps=0.1)')}({a}.flatten(2))"
        if deep
        else f"{s.part(f'nn.BatchNorm1d({c}, eps=0.1)')}({a})",
        f"F.instance_norm({a}.flatten(2), eps=0.1)" if deep else f"{a} / ({a}.std(0) + 1)",
        f"{s.part(f'nn.BatchNorm1d({c}, affine=False, track_running_stats=False, eps=0.1)')}({a}.flatten(2))"
        if deep
        else f"{a} - {a}.mean(0)",
    )


def convolved(s: Scope) -> str:
    a = s.f(3, 4, fits=lambda x: x.shape[-1] > 2 and x.shape[-2] > 2)
    n, c, size = s.ndim(a) - 2, s.size(a, 1), s.size(a, -1)
    out, k, stride, pad = s.pick(2, 3, 4, 6), s.pick(1, 2, 3), s.pick(1, 1, 2), s.pick(0, 1)
    groups = s.pick(1, 1, *(g for g in (2, 3) if c % g == 0 and out % g == 0))
    at = f"{c}, {out}, {k}, {stride}, {pad}"
    mode = s.pick("zeros", "zeros", "zeros", "circular", "reflect") if pad else "zeros"
    pool = "({0}, 2)" if n == 1 or s.size(a, -2) > 1 else "({0}, 1)"
    return s.pick(
        f"{s.part(f'nn.Conv{n}d({at}, groups={groups}, padding_mode={mode!r})')}({a})",
        f"{s.part(f'nn.Conv{n}d({at}, bias=False, dilation={s.pick(1, 2)})')}({a})",
        f"{s.part(f'nn.ConvTranspose{n}d({at}, groups={groups})')}({a})",
        f"F.avg_pool{n}d{pool.format(a)}",
        f"F.max_pool{n}d{pool.format(a)}",
        f"F.avg_pool{n}d({a}, 3, 1, 1, count_include_pad={s.pick(True, False)})",
        f"F.adaptive_avg_pool{n}d({a}, {s.n(1, 3)})",
        f"F.interpolate({a}, scale_factor=2, mode={s.pick('nearest', 'linear' if n == 1 else 'bilinear')!r})",
        f"F.interpolate({a}, size={s.n(2, 7)})",
        f"F.pad({a}, (1, 1), mode={s.pick('reflect', 'replicate', 'circular')!r})"
        if n == 1
        else f"F.pad({a}, (1, 1, 1, 1), mode={s.pick('reflect', 'replicate', 'circular')!r})",
        f"F.unfold({a}, 2)" if n == 2 else f"F.conv1d({a}, {s.param(c, 1, k)}, groups={c}, padding={pad})",
        f"F.pixel_unshuffle({a}[..., :2, :2], 2)" if n == 2 else f"{a}.unfold(2, {min(3, size)}, 1).mean(-1)",
        f"{s.part(f'nn.Conv{n}d({c}, {c}, 3, padding=1, groups={c})')}({a}) + {a}",
    )


def attention(s: Scope) -> str:
    a = s.f(3, fits=lambda x: x.shape[-1] > 1 and x.shape[-2] > 1)
    t, k = s.size(a, 1), s.size(a, -1)
    heads = s.pick(*(h for h in (1, 2, 4) if k % h == 0))
    split = f".unflatten(-1, ({heads}, {k // heads})).transpose(1, 2)"
    q, k_, v = (f"({a} @ {s.param(k, k)}){split}" for _ in range(3))
    how = s.pick(
        "",
        ", is_causal=True",
        f", attn_mask={s.param(t, t)}",
        f", attn_mask=torch.ones({t}, {t}, dtype=torch.bool).tril(){'.triu(-1)' if heads == 2 else ''}",
        ", scale=0.3",
    )
    return s.pick(
        f"F.scaled_dot_product_attention({q}, {k_}, {v}{how}).transpose(1, 2).flatten(2)",
        f"F.scaled_dot_product_attention({q}, {k_}, {v}{how}).transpose(1, 2).flatten(2)",
        f"F.scaled_dot_product_attention({q}, {k_}[:, :1], {v}[:, :1], enable_gqa=True).transpose(1, 2).flatten(2)",
        f"({a} @ {a}.mT).masked_fill(torch.ones({t}, {t}, dtype=torch.bool).triu(1), float('-inf')).softmax(-1) @ {a}",
        f"{s.part(f'nn.MultiheadAttention({k}, {heads}, batch_first=True)')}({a}, {a}, {a})[0]",
    )


def embedded(s: Scope) -> str:
    ids = s.ids()
    rows, width = s.pick(5, 7, 8), s.pick(*s.sizes)
    table = s.param(rows, width)
    flat = f"({ids} % {rows})"
    bag = s.values[ids].ndim == 2
    return s.pick(
        f"F.embedding({flat}, {table})",
        f"{table}[{flat}]",
        f"{s.part(f'nn.Embedding({rows}, {width}, padding_idx=0)')}({flat})",
        f"F.embedding_bag({flat}, {table}, mode={s.pick('sum', 'mean')!r})"
        if bag
        else f"{table}.index_select(0, {flat}.flatten())",
        f"F.one_hot({flat}, {rows}).double() @ {table}",
    )


def routed(s: Scope) -> Written:
    """Rows sent to experts."""
    a = s.f(2, 3, fits=lambda x: x.shape[-1] > 1)
    k, e = s.size(a, -1), s.pick(2, 3, 4, 5)
    m, top = s.pick(*s.sizes), s.pick(1, 2)
    flat = a if s.ndim(a) == 2 else f"{a}.flatten(0, 1)"
    gate, up, down = s.param(k, e), s.param(e, k, m), s.param(e, m, k)
    begin = [f"r = {flat}", f"w, e = (r @ {gate}).softmax(-1).topk({top})"]
    sort = [
        "o = e.flatten().argsort(stable=True)",
        f"n = F.one_hot(e.flatten(), {e}).sum(0).cumsum(0).to(torch.int32)",
        f"g = r[o // {top}]",
    ]
    return s.pick(
        [*begin, "{0} = torch.zeros_like(r)", *(f"y, z = torch.where(e == {i}); {{0}} = {{0}}.index_add(0, y, torch.relu(r[y] @ {up}[{i}]) @ {down}[{i}] * w[y, z, None])" for i in range(e))],
        [*begin, *sort, f"h = F.grouped_mm(F.grouped_mm(g, {up}, offs=n).relu(), {down}, offs=n)", f"{{0}} = torch.zeros_like(r).index_add(0, o // {top}, h * w.flatten()[o, None])"],
        [*begin, *sort, f"h = F.grouped_mm(g, {up}, offs=n)[o.argsort()]", f"{{0}} = (h.unflatten(0, (-1, {top})) * w[..., None]).sum(1)"],
        [*begin, f"{{0}} = torch.einsum('nk,nskm->nsm', r, {up}[e]).mul(w[..., None]).sum(1)"],
        [*begin, f"d = torch.zeros(r.shape[0], {e}).double().scatter(1, e, w)", f"{{0}} = torch.einsum('ne,nk,ekm->nm', d, r, {up})"],
        [*begin, f"c = F.one_hot(e, {e}).sum(1).cumsum(0) - 1", "b = torch.where(c < 3, c, 3).clamp(min=0).gather(1, e)", f"{{0}} = torch.zeros({e}, 4, r.shape[1]).double().index_put((e, b), r[:, None] * w[..., None], accumulate=True)"],
    )  # fmt: skip


def loss(s: Scope) -> str:
    a = s.f(least=1)
    b = s.same(a)
    return s.pick(
        f"F.mse_loss({a}, {b}.detach() + 1)", f"F.smooth_l1_loss({a}, {b} + 0.3, reduction={s.pick('sum', 'mean', 'none')!r})", f"{a}.square().mean()", f"F.kl_div({a}.log_softmax(-1), {b}.softmax(-1), reduction='batchmean')",
        f"F.cross_entropy({a}.reshape(-1, {s.size(a, -1)}), torch.arange({s.values[a].numel() // s.size(a, -1)}) % {s.size(a, -1)})", f"F.binary_cross_entropy_with_logits({a}, ({b} > 0).double())",
        f"F.cross_entropy({a}.reshape(-1, {s.size(a, -1)}), {b}.detach().reshape(-1, {s.size(a, -1)}).softmax(-1))", f"F.nll_loss({a}.flatten(0, -2).log_softmax(-1), {a}.flatten(0, -2).argmin(-1))" if s.ndim(a) > 1 else f"{a}.norm()",
        f"F.cosine_similarity({a}, {b} + 1, dim=-1)", f"F.huber_loss({a}, {b} * 2 + 0.1)", f"F.cross_entropy({a}.reshape(-1, {s.size(a, -1)}), torch.arange({s.values[a].numel() // s.size(a, -1)}) % {s.size(a, -1)}, label_smoothing=0.1, ignore_index=0)" if s.size(a, -1) > 1 and s.values[a].numel() > s.size(a, -1) else f"{a}.sum()",
    )  # fmt: skip


def complex(s: Scope) -> str:
    try:
        z = s.complex(1)
    except Unfit:
        z = ""
    a = s.f(least=1)
    even = s.size(a, -1) == 2
    made = s.pick(
        f"torch.complex({a}, {s.same(a)} * 0.5)",
        f"torch.view_as_complex({a}.contiguous())" if even else f"torch.fft.fft({a})",
        f"torch.fft.rfft({a}, dim={s.dim(a)})",
        f"torch.polar({a}.abs() + 0.1, {a})",
        f"torch.fft.fft2({a})" if s.ndim(a) > 1 else f"torch.fft.fft({a})",
        f"{a} * 1j",
    )
    if not z or s.rng.random() < 0.4:
        return made
    return s.pick(
        f"{z}.real", f"{z}.imag", f"({z} + 3).abs()", f"{z} * {z}", f"{z}.conj()", f"torch.view_as_real({z})", f"{z} @ {z}.mH" if s.ndim(z) > 1 else f"{z}.conj() * {z}",
        f"torch.fft.ifft({z}).real", f"torch.fft.irfft({z}, n={s.n(3, 6)})", f"{z}.sum({s.dim(z)})", f"({z} + 4).angle()", f"{z}.mean(0, keepdim=True) - {z}", f"torch.exp({z} * 0.1)",
        f"{z}.cumsum({s.dim(z)})", f"{z}.reshape(-1)", f"{z} / ({z}.abs() + 1)", f"torch.where({z}.real > 0, {z}, {z}.conj())",
    )  # fmt: skip


def rare(s: Scope) -> str:
    """Of layers and functions that few models have."""
    a = s.f(least=1)
    d, k = s.dim(a, 2), s.size(a, -1)
    two = s.f(least=2) if s.rng.random() < 0.5 else s.f(3)
    m, n = s.size(two, -2), s.size(two, -1)
    return s.pick(
        f"{s.part(f'nn.GRU({n}, 3, batch_first=True)')}({two})[0]",
        f"{s.part(f'nn.LSTM({n}, 3)')}({two})[0]",
        f"{s.part(f'nn.LSTMCell({n}, 3)')}({two}.flatten(0, -2))[0]",
        f"F.glu(torch.cat([{a}, {a} * 2], {d}), {d})",
        f"F.prelu({a}, {s.param(1)})",
        f"torch.searchsorted(torch.linspace(-1.7, 2.1, 7).double(), {a}.detach()) * {a}",
        f"torch.bucketize({a}.detach(), torch.linspace(-1.7, 2.1, 7).double())",
        f"torch.linalg.qr({two})[1].abs()",
        f"torch.linalg.svdvals({two} + torch.arange({n}))",
        f"torch.linalg.eigvalsh({two} @ {two}.mT + torch.diag(torch.arange({m}).double()))",
        f"torch.linalg.matrix_exp({two} @ {two}.mT * 0.1)",
        f"torch.baddbmm({s.param(m, n)}, {two}.flatten(0, -3), {s.param(n, n)}.expand({two}.flatten(0, -3).shape[0], -1, -1))",
        f"torch.addmm({s.param(n)}, {two}.flatten(0, -2), {s.param(n, n)}, beta=0.5)",
        f"torch.addmv({s.param(1)}, {two}.flatten(0, -2), {s.param(n)})",
        f"F.pdist({two}.flatten(0, -2) + torch.arange({n}))",
        f"F.local_response_norm({two}.unsqueeze(0), 2)",
        f"F.lp_pool1d({two}.abs() + 0.1, 2, 2)",
        f"F.fold({two}.flatten(0, -2).repeat(1, 4).T.unsqueeze(0)[:, :4, :1], (2, 2), 2)",
        f"F.grid_sample({two}.reshape(1, -1, {m}, {n}), torch.tanh({s.param(1, 3, 3, 2)}), align_corners=False)",
        f"F.pixel_shuffle({two}.reshape(1, -1, {m}, {n}).repeat(1, 4, 1, 1), 2)",
        f"torch.stft({a}.flatten(), 4, 2, window=torch.ones(4).double(), return_complex=True)",
        f"F.triplet_margin_loss({a}, {s.same(a)} + 1, {a} * 0.5)",
        f"F.gaussian_nll_loss({a}, {s.same(a)}.detach(), {a}.square() + 0.5)",
        f"F.multi_margin_loss({a}.reshape(-1, {k}), torch.arange({s.values[a].numel() // k}) % {k})",
        f"{s.part(f'nn.utils.parametrizations.weight_norm(nn.Linear({k}, 3))')}({a})",
        f"{s.part(f'nn.utils.parametrizations.spectral_norm(nn.Linear({k}, 3))')}({a})",
        f"{s.part(f'nn.TransformerEncoderLayer({n}, 1, 4, 0.0, batch_first=True)')}({two})",
        f"torch.cov({two}.flatten(0, -2).T)",
        f"torch.renorm({two}, 2, 0, 1.0)",
        f"torch.heaviside({a}, {s.param(1)}) * {a}",
        f"{a}.nanmean({d}) + {a}.aminmax()[0]",
        f"torch.meshgrid({a}.flatten()[:4], {s.param(3)}, indexing='ij')[0]",
        f"torch.block_diag({two}.flatten(0, -2), {s.param(2, 2)})",
        f"torch.cartesian_prod({a}.flatten()[:3], {s.param(2)})",
        f"{a}.cumsum({d}).var({d}, correction=0)",
        f"torch.cross({two}.flatten(0, -2).repeat(1, 3)[:, :3], {s.param(1, 3)}.expand({two}.flatten(0, -2).shape[0], -1), dim=-1)",
        f"torch.einsum('...i,...i,...i->...', {a}, {a}, {s.param(k)})",
        f"{a}.swapdims(0, -1).as_strided((2, 2), (1, 2))",
        f"{two}.view(torch.complex128).real" if n % 2 == 0 else f"{two}.logsumexp(0)",
        f"{a}.index_reduce(0, torch.zeros(1, dtype=torch.int64), {a}[:1].detach(), 'amax')",
        f"torch.vander({a}.flatten()[:4].tanh(), 3)",
        f"{a}.masked_scatter({a} > 0, {s.same(a)}.flatten() * 2)",
    )
