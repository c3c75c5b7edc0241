"""Graphs of plans to draw, made by hand: a two-layer MLP and transformers of any depth."""

from __future__ import annotations

import networkx as nx

__all__ = ["UNMOVED", "mlp", "through", "transformer"]


UNMOVED: dict[str, str | float] = {"collective": "", "seconds": 0.0, "nbytes": 0}


def through(text: str, seconds: float, nbytes: int, bucket: str = "-") -> dict[str, str | float]:
    """An edge's attributes with one collective on it."""
    kind, _, rest = text.partition("[")
    each = {"kind": kind, "axes": rest.partition("]")[0], "seconds": repr(seconds), "nbytes": str(nbytes)}
    each["bucket"] = bucket
    return {
        "collective": text,
        "seconds": seconds,
        "nbytes": nbytes,
        **{f"each_{name}": value for name, value in each.items()},
    }


class _Builder:
    def __init__(self, mesh: str) -> None:
        self.graph = nx.DiGraph(mesh=mesh)

    def node(
        self, name: str, kind: str, label: str, layout: str, module: str, phase: str, seconds: float
    ) -> str:
        self.graph.add_node(
            name,
            label=label,
            kind=kind,
            layout=layout,
            seconds=seconds,
            phase=phase,
            module=module,
            source=f"model.py:{10 + len(self.graph)}" if kind == "op" else "",
        )
        return name

    def param(self, name: str, layout: str) -> str:
        return self.node(
            name.replace(".", "_"), "param", name, layout, name.rpartition(".")[0], "forward", 1e-6
        )

    def op(
        self,
        name: str,
        label: str,
        reads: list[str | tuple[str, str]],
        layout: str,
        module: str,
        phase: str = "forward",
        seconds: float = 20e-6,
    ) -> str:
        """reads: a name, or (name, collective in front of the read)."""
        self.node(name, "op", label, layout, module, phase, seconds)
        for read in reads:
            source, collective = (read, "") if isinstance(read, str) else read
            moved = through(collective, 35e-6, 8_388_608) if collective else UNMOVED
            self.graph.add_edge(source, name, layout="[@dp, -, -]", **moved)
        return name


def mlp() -> nx.DiGraph:
    """10 -> 32 -> 5 with ReLU on 3 ranks: column-wise, then row-wise."""
    b = _Builder("mesh (tp=3)")
    b.node("x", "input", "x", "f32[8@tp, 10]", "", "forward", 0.0)
    b.param("0.weight", "f32[32@tp, 10]")
    b.param("2.weight", "f32[5, 32@tp]")
    b.op("up", "contract", [("x", "all_gather[tp](dim=0)"), "0_weight"], "f32[8, 32@tp]", "0")
    b.op("relu", "aten.relu", ["up"], "f32[8, 32@tp]", "1")
    b.op("down", "contract", ["relu", "2_weight"], "f32[8, 5]+tp:sum", "2")
    b.node("tangent", "tangent", "tangent 0", "f32[8@tp, 5]", "", "backward", 0.0)
    b.op(
        "d_relu",
        "contract",
        [("tangent", "all_gather[tp](dim=0)"), "2_weight"],
        "f32[8, 32@tp]",
        "2",
        "backward",
    )
    b.op("d_w2", "contract", ["tangent", "relu"], "f32[5, 32@tp]", "2", "backward")
    b.op("d_up", "aten.threshold_backward", ["d_relu", "relu"], "f32[8, 32@tp]", "1", "backward")
    b.op("d_w0", "contract", ["d_up", "x"], "f32[32@tp, 10]", "0", "backward")
    b.node("output", "output", "output", "", "", "backward", 0.0)
    b.graph.add_edge("down", "output", layout="", **through("reduce_scatter[tp](dim=0)", 5e-6, 160))
    for gradient in ("d_w2", "d_w0"):
        b.graph.add_edge(gradient, "output", layout="", **UNMOVED)
    return b.graph


def transformer(layers: int) -> nx.DiGraph:
    """Blocks of attention and SwiGLU, FSDP over dp and sequence parallel over tp, with their backward."""
    b = _Builder("mesh (dp=32, tp=8)")
    stream = "bf16[256@dp, 2048@tp, 4096]"
    b.node("ids", "input", "input_ids", "i64[256@dp, 2048]", "", "forward", 0.0)
    b.param("embed.weight", "bf16[128256@tp, 4096]")
    x = b.op("embed", "aten.embedding", ["embed_weight", "ids"], stream, "embed")
    for i in range(layers):
        x = _block_forward(b, f"layers.{i}", x, stream)
    b.param("head.weight", "bf16[128256@tp, 4096]")
    logits = b.op(
        "head",
        "contract",
        [(x, "all_gather[tp](dim=1)"), "head_weight"],
        "bf16[256@dp, 2048, 128256@tp]",
        "head",
    )
    loss = b.op("loss", "aten.sum", [logits], "f32[]+dp:sum", "", seconds=3e-6)
    b.node("tangent", "tangent", "tangent 0", "f32[]", "", "backward", 0.0)
    g = b.op(
        "d_logits", "aten.mul", ["tangent", logits], "bf16[256@dp, 2048, 128256@tp]", "", "backward", 3e-6
    )
    d_head = b.op("d_head", "contract", [g, x], "bf16[128256@tp, 4096]+dp:sum", "head", "backward")
    g = b.op("d_x", "contract", [g, "head_weight"], stream, "head", "backward")
    gradients = [d_head]
    for i in reversed(range(layers)):
        g, more = _block_backward(b, f"layers.{i}", g, stream)
        gradients += more
    gradients.append(
        b.op(
            "d_embed",
            "aten.embedding_dense_backward",
            [g, "ids"],
            "bf16[128256@tp, 4096]+dp:sum",
            "embed",
            "backward",
        )
    )
    b.node("output", "output", "output", "", "", "backward", 0.0)
    b.graph.add_edge(loss, "output", layout="[]", **through("all_reduce[dp]()", 9e-6, 4))
    for gradient in gradients:
        b.graph.add_edge(
            gradient,
            "output",
            layout="[@tp, @dp]",
            **through("reduce_scatter[dp](dim=1)", 2e-4, 33_554_432),
        )
    return b.graph


def _block_forward(b: _Builder, m: str, x: str, stream: str) -> str:
    n = m.replace(".", "_")
    for name in ("wq", "wk", "wv", "wo"):
        b.param(f"{m}.attn.{name}.weight", "bf16[4096@tp, 4096@dp]")
    for name in ("w1", "w2", "w3"):
        b.param(f"{m}.mlp.{name}.weight", "bf16[14336@tp, 4096@dp]")
    b.param(f"{m}.norm1.weight", "bf16[4096]")
    gather = "all_gather[dp](dim=1)"
    h = b.op(f"{n}_norm1", "aten.mul", [x, f"{n}_norm1_weight"], stream, f"{m}.norm1", seconds=4e-6)
    heads = [
        b.op(
            f"{n}_{w}",
            "contract",
            [(h, "all_gather[tp](dim=1)"), (f"{n}_attn_w{w}_weight", gather)],
            "bf16[256@dp, 2048, 4096@tp]",
            f"{m}.attn.w{w}",
        )
        for w in "qkv"
    ]
    a = b.op(
        f"{n}_sdpa", "attention", list(heads), "bf16[256@dp, 32@tp, 2048, 128]", f"{m}.attn", seconds=9e-5
    )
    o = b.op(
        f"{n}_o",
        "contract",
        [a, (f"{n}_attn_wo_weight", gather)],
        "bf16[256@dp, 2048, 4096]+tp:sum",
        f"{m}.attn.wo",
    )
    x = b.op(f"{n}_add1", "aten.add", [x, (o, "reduce_scatter[tp](dim=1)")], stream, m, seconds=3e-6)
    u = b.op(
        f"{n}_w1",
        "contract",
        [(x, "all_gather[tp](dim=1)"), (f"{n}_mlp_w1_weight", gather)],
        "bf16[256@dp, 2048, 14336@tp]",
        f"{m}.mlp.w1",
        seconds=6e-5,
    )
    v = b.op(
        f"{n}_w3",
        "contract",
        [(x, "all_gather[tp](dim=1)"), (f"{n}_mlp_w3_weight", gather)],
        "bf16[256@dp, 2048, 14336@tp]",
        f"{m}.mlp.w3",
        seconds=6e-5,
    )
    s = b.op(f"{n}_silu", "aten.silu", [u], "bf16[256@dp, 2048, 14336@tp]", f"{m}.mlp", seconds=4e-6)
    t = b.op(f"{n}_gate", "aten.mul", [s, v], "bf16[256@dp, 2048, 14336@tp]", f"{m}.mlp", seconds=4e-6)
    w = b.op(
        f"{n}_w2",
        "contract",
        [t, (f"{n}_mlp_w2_weight", gather)],
        "bf16[256@dp, 2048, 4096]+tp:sum",
        f"{m}.mlp.w2",
        seconds=6e-5,
    )
    return b.op(f"{n}_add2", "aten.add", [x, (w, "reduce_scatter[tp](dim=1)")], stream, m, seconds=3e-6)


def _block_backward(b: _Builder, m: str, g: str, stream: str) -> tuple[str, list[str]]:
    n, wide = m.replace(".", "_"), "bf16[256@dp, 2048, 14336@tp]"
    gathered = (g, "all_gather[tp](dim=1)")
    t = b.op(
        f"{n}_d_gate", "contract", [gathered, f"{n}_mlp_w2_weight"], wide, f"{m}.mlp.w2", "backward", 6e-5
    )
    w2 = b.op(
        f"{n}_d_w2",
        "contract",
        [g, f"{n}_gate"],
        "bf16[4096, 14336@tp]+dp:sum",
        f"{m}.mlp.w2",
        "backward",
        6e-5,
    )
    s = b.op(f"{n}_d_silu", "aten.silu_backward", [t, f"{n}_w1"], wide, f"{m}.mlp", "backward", 4e-6)
    x1 = b.op(f"{n}_d_x1", "contract", [s, f"{n}_mlp_w1_weight"], stream, f"{m}.mlp.w1", "backward", 6e-5)
    w1 = b.op(
        f"{n}_d_w1",
        "contract",
        [s, f"{n}_add1"],
        "bf16[14336@tp, 4096]+dp:sum",
        f"{m}.mlp.w1",
        "backward",
        6e-5,
    )
    x = b.op(f"{n}_d_add1", "aten.add", [g, (x1, "reduce_scatter[tp](dim=1)")], stream, m, "backward", 3e-6)
    a = b.op(
        f"{n}_d_o",
        "contract",
        [(x, "all_gather[tp](dim=1)"), f"{n}_attn_wo_weight"],
        "bf16[256@dp, 2048, 4096@tp]",
        f"{m}.attn.wo",
        "backward",
    )
    q = b.op(
        f"{n}_d_sdpa",
        "attention_backward",
        [a, f"{n}_q", f"{n}_k", f"{n}_v"],
        "bf16[256@dp, 32@tp, 2048, 128]",
        f"{m}.attn",
        "backward",
        2e-4,
    )
    h = b.op(
        f"{n}_d_q",
        "contract",
        [q, f"{n}_attn_wq_weight"],
        "bf16[256@dp, 2048, 4096]+tp:sum",
        f"{m}.attn.wq",
        "backward",
    )
    wq = b.op(
        f"{n}_d_wq", "contract", [q, f"{n}_norm1"], "bf16[4096@tp, 4096]+dp:sum", f"{m}.attn.wq", "backward"
    )
    out = b.op(
        f"{n}_d_norm1",
        "aten.mul",
        [(h, "reduce_scatter[tp](dim=1)"), x],
        stream,
        f"{m}.norm1",
        "backward",
        4e-6,
    )
    return out, [w2, w1, wq]
