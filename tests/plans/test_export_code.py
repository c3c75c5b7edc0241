"""Code that plans export trains as the plans do."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoshard import MeshSpec, Plan, PlanError, autoshard, find_plan
from autoshard.plan.export_code import export_code
from autoshard.plan.families import Variant, family_named
from cost_model.memory import format_seconds
from tests.profiles import dear_start, slow_compute, waited_for
from tests.ranks import RankPool


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        q, k, v = (w(y).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def made() -> LM:
    torch.manual_seed(0)
    return LM().double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, 12, (2, 4, 6), generator=drawn)
    return tokens, targets


def family_plan(axes: dict[str, int], family: str, make: Callable[[], LM] = made) -> Plan:
    plan = find_plan(make(), MeshSpec(axes), batch(0), profile=slow_compute(), gap=0.5)
    assert plan.again is not None
    found = plan.again.search(Variant(family=family_named(family)))
    assert isinstance(found, Plan)
    return found


def trained(model: Any, rows: slice, backward: Any = None) -> list[float]:
    """Mean losses of three steps of plain gradient descent. backward: of the code, in pieces."""
    losses: list[float] = []
    for step in range(3):
        model.zero_grad()
        given = [one[rows] for one in batch(step)]
        if backward is None:
            loss = model(*given)
            loss.backward()
        else:
            loss = backward(model, *given)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
        losses.append(float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()))
    return losses


def both(
    rank: int, saved: str, code: str, data: Sequence[str], make: Callable[[], LM] = made
) -> tuple[list[float], list[float]]:
    plan = Plan.load(saved)
    mesh = init_device_mesh("cpu", plan.mesh.sizes, mesh_dim_names=plan.mesh.names)
    mine = trained(autoshard(make(), mesh, plan=plan, backend="eager"), slice(None))
    spec = importlib.util.spec_from_file_location("exported", code)
    assert spec is not None and spec.loader is not None
    exported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)
    parts, place = 1, 0
    for axis in data:
        parts, place = parts * plan.mesh.size(axis), plan.mesh.linear_index(rank, data)
    rows = slice(place * 4 // parts, (place + 1) * 4 // parts)
    model = exported.parallelize(make(), exported.make_mesh("cpu"))
    losses = trained(model, rows, getattr(exported, "backward_in_pieces", None))
    theirs = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(theirs)
    return mine, (theirs / plan.mesh.device_count).tolist()


# torch keeps what it derived of a mesh, by its names: those of another test are of groups that are gone.
CASES = [
    ({"a": 2}, "FSDP", ("a",), "fully_shard"),
    ({"b": 2}, "sequence parallel", (), "SequenceParallel"),
    ({"c": 2, "d": 2}, "FSDP x TP", ("c",), "parallelize_module"),
]
MORE = [
    ({"e": 2}, "DDP", ("e",), "DistributedDataParallel"),
    ({"f": 2}, "TP", (), "RowwiseParallel"),
    ({"g": 2, "h": 2}, "DDP x TP", ("g",), '"g_shard"'),
    ({"i": 2, "j": 2}, "FSDP x sequence parallel", ("i",), "SequenceParallel"),
    ({"k": 2, "l": 2}, "HSDP", ("k", "l"), 'mesh["k", "l"]'),
]


@pytest.mark.parametrize(
    ("axes", "family", "data", "call"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=[case[1] for case in (*CASES, *MORE)],
)
def test_exported_code_trains_as_the_plan(
    ranks: RankPool, tmp_path: Path, axes: dict[str, int], family: str, data: tuple[str, ...], call: str
) -> None:
    plan = family_plan(axes, family)
    plan.save(tmp_path / "plan.json")
    code = plan.export(tmp_path / "parallel.py")
    assert call in code.read_text()
    found = ranks.run(both, str(tmp_path / "plan.json"), str(code), data, world=plan.mesh.device_count)
    alone = trained(made(), slice(None))
    for mine, theirs in found:
        assert mine == pytest.approx(alone, abs=1e-12)
        assert theirs == pytest.approx(alone, abs=1e-12)


class Turned(Layer):
    """Queries and keys are turned by their places: the search splits their products by rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, angle = self.norm_1(x), torch.arange(6, dtype=x.dtype)[:, None]
        q, k, v = (w(y).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = (t * angle.cos() + torch.cat([-t[..., 1:], t[..., :1]], -1) * angle.sin() for t in (q, k))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def turned() -> LM:
    model = made()
    model.layers = nn.ModuleList(Turned() for _ in range(2)).double()
    return model


def test_parts_that_meet_a_whole_value_are_gathered(ranks: RankPool, tmp_path: Path) -> None:
    plan = family_plan({"q": 2}, "TP", turned)
    plan.save(tmp_path / "plan.json")
    code = plan.export(tmp_path / "parallel.py")
    text = code.read_text()
    assert '"layers.*.k": RowwiseParallel(input_layouts=Replicate())' in text
    assert '"layers.*.v": ColwiseParallel(output_layouts=Replicate())' in text
    assert '"layers.*.up": ColwiseParallel()' in text
    alone = trained(turned(), slice(None))
    for mine, theirs in ranks.run(both, str(tmp_path / "plan.json"), str(code), (), turned, world=2):
        assert mine == pytest.approx(alone, abs=1e-12) and theirs == pytest.approx(alone, abs=1e-12)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.normalize(self.up(x), dim=-1)).square().mean()


def test_parts_that_are_summed_over_are_gathered() -> None:
    pins = {"up.*": [Shard(0)], "down.weight": [Shard(1)]}
    given = (torch.empty(65536, 8, device="meta"),)
    plan = find_plan(Normed().to("meta"), MeshSpec({"r": 2}, "cuda"), given, profile="h100", constraints=pins)
    assert any("r:sum" in str(one.results[0].layout) for one in plan.records if one.op.startswith("aten.sum"))
    text = export_code(plan)
    assert '"up": ColwiseParallel(output_layouts=Replicate())' in text
    assert '"down": RowwiseParallel(input_layouts=Replicate())' in text


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["o", "p"])
def test_pieces_of_a_batch(ranks: RankPool, tmp_path: Path, axis: str) -> None:
    options: dict[str, Any] = {"micro_batches": 2, "gap": 0.5}
    if axis == "p":
        options["constraints"] = {"*": [Replicate()]}
    plan = find_plan(made(), MeshSpec({axis: 2}), batch(0), profile=slow_compute(), **options)
    plan.save(tmp_path / "plan.json")
    code = plan.export(tmp_path / "parallel.py")
    data = (axis,) if "fully_shard" in code.read_text() or "DistributedData" in code.read_text() else ()
    alone = trained(made(), slice(None))
    for mine, theirs in ranks.run(both, str(tmp_path / "plan.json"), str(code), data, world=2):
        assert mine == pytest.approx(alone, abs=1e-12) and theirs == pytest.approx(alone, abs=1e-12)


def test_layers_that_are_computed_again() -> None:
    class Again(LM):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    plan = find_plan(Again().double(), MeshSpec({"m": 2}), batch(0), profile=slow_compute(), recompute="user")
    text = export_code(plan)
    assert "layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)" in text
    assert "from torch.utils.checkpoint import checkpoint" in text and "from functools import partial" in text


def test_the_head_says_what_is_not_done() -> None:
    plan = family_plan({"n": 2}, "FSDP")
    cut = replace(plan, micro_batches=4)
    assert "A step is backward_in_pieces(model, *inputs)" in export_code(cut) and "chunk(4)" in export_code(
        cut
    )
    assert f"The plan: {format_seconds(plan.step_time)} a step" in export_code(plan)
    assert 'batch_axes=["n"]' in export_code(plan)
    assert "The loss must be a mean over its rows: gradients are averaged along n, which" in export_code(plan)


class Scaled(LM):
    """A weight of a layer itself, which reads the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda layer, args, output: output * layer.scale)
            layer.scale = nn.Parameter(torch.ones(8))


class HeadNorm(nn.Module):
    """Parts of heads read a weight whole: its gradient would have to be added up over them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(8, 16), nn.Parameter(torch.ones(4)), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x).unflatten(-1, (-1, 4)) * self.scale).flatten(-2)).square().mean()


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def test_what_cannot_be_written(tmp_path: Path) -> None:
    pins = {"up.*": [Shard(0)], "down.weight": [Shard(1)], "scale": [Replicate()]}
    mesh = MeshSpec({"tp": 2}, "cuda")
    tensor = find_plan(HeadNorm(), mesh, (torch.ones(64, 8),), profile=waited_for("h100"), constraints=pins)
    scaled = find_plan(Scaled().double(), MeshSpec({"n": 2}), batch(0), profile=slow_compute(), gap=0.5)
    assert scaled.again is not None
    sequence = scaled.again.search(Variant(family=family_named("sequence parallel")))
    alone = find_plan(Alone(), MeshSpec({"x": 2}), (torch.ones(3),), profile=dear_start(1.0))
    named = nn.Sequential()
    named.add_module('y"', nn.Linear(8, 8))
    odd = find_plan(named, MeshSpec({"x": 2}), (torch.ones(4, 8),), profile=slow_compute())
    for plan, words in [
        (tensor, "scale, read whole by what a rank has"),
        (sequence, "layers.0.scale, read by a rank's part of the sequence"),
        (
            alone,
            "nothing of this plan can be written as code of stock PyTorch\n    every rank computes the same\n",
        ),
        (odd, 'y"'),
    ]:
        with pytest.raises(PlanError) as caught:
            export_code(plan)
        assert words in str(caught.value) and "\n  try: " in str(caught.value)
    with pytest.raises(PlanError, match="export"):
        export_code(replace(alone, axis="x"))  # type: ignore[call-arg]
    with pytest.raises(PlanError):
        family_plan({"n": 2}, "FSDP").export(tmp_path / "no" / "parallel.py")
