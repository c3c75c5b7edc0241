"""Whatever is wrong is said on all ranks, before anything is communicated or changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard import (
    CaptureError,
    InfeasibleError,
    MeshSpec,
    Profile,
    ProfileError,
    ShardingError,
    autoshard,
    find_plan,
)
from autoshard.runtime.module import dispatcher_of
from cost_model.errors import AutoshardError
from tests.api.programs import Axes, assert_close, data, full, parallel, refusal, trained, two_linear
from tests.profiles import slow_compute
from tests.ranks import RankPool

PAIR: Axes = (("x", 2),)
LINE: Axes = (("x", 3),)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        while h.sum() > 0:
            h = h - 1
        return h


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu()


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown axis": (
        {"constraints": {"up.weight": {"y": Shard(0)}}},
        "axis 'y', which the mesh does not have",
    ),
    "no such dim": ({"constraints": {"up.bias": [Shard(1)]}}, "parameter up.bias"),
    "no such parameter": ({"constraints": {"up.wait": [Shard(0)]}}, "matches no parameter"),
    "partial pin": ({"constraints": {"up.bias": [Partial()]}}, "pinned Partial"),
    "too many placements": ({"constraints": {"up.bias": [Shard(0), Shard(0)]}}, "parameter up.bias"),
    "no such backend": ({"backend": "indcutor"}, "backend is 'indcutor', which is no compiler"),
    "input placements": (
        {"in_placements": [[Shard(0)], [Shard(0)]]},
        "in_placements has 2 entries for 1 tensors",
    ),
    "output placements": ({"out_placements": "kept"}, "out_placements is 'kept'"),
    "no such profile": ({"profile": "h1000"}, "no shipped profile is named 'h1000'"),
    "memory text": ({"memory_limit": "70 gigs"}, "70 gigs"),
    "memory": ({"memory_limit": 100}, "memory"),
    "refine": ({"refine": "always"}, "refine is 'always'"),
    "no set of sizes": ({"dynamic": "batch"}, "dynamic is 'batch'"),
    "a size without a name": ({"dynamic": {"rows"}}, "a name in dynamic is 'rows'"),
    "a size of images": ({"dynamic": {"height"}}, "dynamic names 'height', and no tensor of the call has it"),
    "no range": ({"sizes": {"batch": 8}}, "the range of 'batch' is 8"),
    "a range of images": (
        {"sizes": {"height": (1, 8)}},
        "sizes name 'height', and no tensor of the call has it",
    ),
    "schedules": ({"stages": "x", "schedule": ["gpipe"]}, "schedule is ['gpipe']"),
}


def wrong_arguments(rank: int) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, (options, _) in ARGUMENTS.items():
        model = two_linear()
        texts[name] = refusal(
            model, lambda model=model, options=options: parallel(model, PAIR, (data()[0],), **options)
        )
        assert dispatcher_of(model) is None
        assert torch.equal(model(data()[0]), two_linear()(data()[0]))
    return texts


def test_wrong_arguments(ranks: RankPool) -> None:
    kinds = {"no such profile": "ProfileError", "memory": "InfeasibleError"}
    for texts in ranks.run(wrong_arguments, world=2):
        for name, (_, message) in ARGUMENTS.items():
            assert texts[name].startswith(f"{kinds.get(name, 'ShardingError')}: "), texts[name]
            assert message in texts[name]


@pytest.mark.parametrize("name", [n for n, (o, _) in ARGUMENTS.items() if not {"dynamic", "backend"} & {*o}])
def test_the_search_alone_refuses_them_too(name: str) -> None:
    options, message = ARGUMENTS[name]
    with pytest.raises(AutoshardError) as caught:
        find_plan(two_linear(), MeshSpec({"x": 2}), (data()[0],), **{"profile": slow_compute(), **options})
    assert message in str(caught.value)


def too_big(rank: int) -> str:
    model = two_linear()
    mesh = DeviceMesh("cpu", torch.arange(8), mesh_dim_names=("x",), _init_backend=False)
    return refusal(model, lambda: autoshard(model, mesh, (data()[0],)))


def test_a_mesh_bigger_than_the_world(ranks: RankPool) -> None:
    for text in ranks.run(too_big, world=2):
        assert "mesh has 8 devices" in text and "only 2 processes run" in text


def left_out(rank: int) -> str:
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("x",))
    model = two_linear()
    return refusal(model, lambda: autoshard(model, mesh, profile=slow_compute(), backend="eager"))


def test_a_mesh_without_this_process(ranks: RankPool) -> None:
    inside, outside = ranks.run(left_out, world=2)
    assert inside == "no error"
    assert outside.startswith(
        "ShardingError: mesh (x=1) is without this process, rank 1 of 2\n  try: a mesh of all"
    )


def lazy(rank: int) -> list[str]:
    model = nn.Sequential(nn.LazyLinear(4))
    parallel(model, PAIR)
    with pytest.raises(CaptureError) as caught:
        model(data()[0])
    remedied = nn.Sequential(nn.LazyLinear(4))
    remedied(data()[0][:1])
    return [str(caught.value), str(parallel(remedied, PAIR)(data()[0]).shape)]


def test_a_lazy_model(ranks: RankPool) -> None:
    for text, shape in ranks.run(lazy, world=2):
        assert "0.weight is a lazy parameter" in text and "\n  try: call the model once" in text
        assert shape == "torch.Size([8, 4])"


def test_a_mesh_without_processes() -> None:
    model: Any = two_linear()
    with pytest.raises(ShardingError, match="MeshSpec, which has no processes"):
        autoshard(model, MeshSpec({"x": 2}), (data()[0],))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="mesh is a str"):
        find_plan(model, "x=2", (data()[0],))  # type: ignore[arg-type]


CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "dtype": (lambda m, x: m(x.double()), "float64"),
    "too many": (lambda m, x: m(x, x), "takes 2 positional arguments but 3 were given"),
    "keyword": (lambda m, x: m(y=x), "unexpected keyword argument 'y'"),
    "structure": (lambda m, x: m([x]), "must be Tensor, not list"),
    "width": (lambda m, x: m(x[:, :7]), ""),
}


def wrong_calls(rank: int) -> tuple[dict[str, str], Tensor]:
    """Every wrong call after a right one; then the right one again."""
    model, x = two_linear(), data()[0]
    parallel(model, PAIR, (x,))
    texts: dict[str, str] = {}
    for name, (call, _) in CALLS.items():
        try:
            call(model, x)
        except AutoshardError as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts, full(model(x))


def test_wrong_calls(ranks: RankPool) -> None:
    for texts, output in ranks.run(wrong_calls, world=2):
        for name, (_, message) in CALLS.items():
            assert message in texts[name]
        assert_close(output, two_linear()(data()[0]).detach())


MISMATCHES: dict[str, str] = {
    "model": "model and its code",
    "rows": "inputs",
    "memory": "memory_limit",
    "pins": "constraints",
    "backend": "backend",
    "refine": "refine",
    "profile": "profile",
}


def mismatch(rank: int, what: str) -> str:
    """Rank 1 differs in one thing."""
    odd = rank == 1
    model: nn.Module = Other() if odd and what == "model" else two_linear()
    x = data(6 if odd and what == "rows" else 8)[0]
    options: dict[str, dict[str, Any]] = {
        "memory": {"memory_limit": "1GB"},
        "pins": {"constraints": {"up.bias": [Replicate()]}},
        "backend": {"backend": "aot_eager"},
        "refine": {"refine": "off"},
        "profile": {"profile": slow_compute(10.0)},
    }
    return refusal(model, lambda: parallel(model, LINE, (x,), **(options.get(what, {}) if odd else {})))


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_differ(ranks: RankPool, what: str) -> None:
    for text in ranks.run(mismatch, what, world=3, timeout_seconds=60):
        assert text.startswith("PlanError: the ranks are about to run different programs"), text
        assert "on rank 1" in text and MISMATCHES[what] in text


def one_fails(rank: int, first_call: bool) -> str:
    model: nn.Module = Loop() if rank == 1 else two_linear()
    x = data()[0]
    if first_call:
        parallel(model, LINE)
        return refusal(model, lambda: model(x))
    return refusal(model, lambda: parallel(model, LINE, (x,)))


@pytest.mark.parametrize("first_call", [False, True])
def test_one_rank_that_cannot_capture(ranks: RankPool, first_call: bool) -> None:
    for text in ranks.run(one_fails, first_call, world=3, timeout_seconds=60):
        assert text.startswith("CaptureError: "), text
        assert "test_bad_input.py" in text and "h.sum() > 0" in text


def wrong_plan(rank: int, path: str, axes: Axes) -> str:
    model = Other()
    return refusal(model, lambda: parallel(model, axes, (data()[0],), plan=path))


def another_schedule(rank: int, path: str) -> list[str]:
    given: list[dict[str, Any]] = [{"schedule": "1f1b"}, {"schedule": "1f1b", "stages": "x"}]
    options = [{**one, "plan": path} for one in given]
    return [
        refusal(m := two_linear(), lambda m=m, o=o: parallel(m, PAIR, (data()[0],), **o)) for o in options
    ]


def test_another_schedule_than_the_plan_s(ranks: RankPool, tmp_path: Path) -> None:
    path, options = tmp_path / "plan.json", {"stages": "x", "micro_batches": 2, "schedule": "gpipe"}
    mesh, given = MeshSpec({"x": 2}), (data()[0],)
    find_plan(two_linear(), mesh, given, profile=slow_compute(), backend="eager", **options).save(path)
    for texts in ranks.run(another_schedule, str(path), world=2):
        for text in texts:
            assert text.startswith("ShardingError: schedule is '1f1b', and plan runs 'gpipe'"), text


def other_pins(rank: int, path: str) -> str:
    pins = {"up.weight": [Shard(1)]}
    text = refusal(
        model := two_linear(), lambda: parallel(model, PAIR, (data()[0],), plan=path, constraints=pins)
    )
    same = {"up.weight": [Shard(0)]}
    parallel(model, PAIR, (data()[0],), plan=path, constraints=same, recompute="user")
    return text


def test_pins_that_a_plan_does_not_meet(ranks: RankPool, tmp_path: Path) -> None:
    path, pins = tmp_path / "plan.json", {"up.weight": [Shard(0)]}
    given = (data()[0],)
    find_plan(two_linear(), MeshSpec({"x": 2}), given, profile=slow_compute(), constraints=pins).save(path)
    for text in ranks.run(other_pins, str(path), world=2):
        assert text.startswith("ShardingError: constraints pin up.weight to "), text
        assert "and plan has it as" in text


def test_a_plan_for_another_model_or_mesh(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = find_plan(two_linear(), MeshSpec({"x": 2}), (data()[0],), profile=slow_compute())
    plan.save(path)
    for text in ranks.run(wrong_plan, str(path), PAIR, world=2):
        assert text.startswith("PlanError: the plan was made for another model")
        assert "param down.weight: in the plan, not in the model" in text
    for text in ranks.run(wrong_plan, str(path), LINE, world=3):
        assert text.startswith("PlanError: the plan was made for mesh (x=2), and this is mesh (x=3)"), text
    broken = json.loads(path.read_text())
    broken["nodes"][0]["seconds"] = float("nan")
    path.write_text(json.dumps(broken))
    for text in ranks.run(wrong_plan, str(path), PAIR, world=2):
        assert text.startswith("PlanError: ") and "price of up_weight is nan" in text


@torch.library.custom_op("apitest::spread", mutates_args=())
def spread(x: Tensor) -> Tensor:
    """x minus half its mean: no dim may be split."""
    return x - x.mean() / 2


@spread.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


spread.register_autograd(lambda ctx, gradient: spread(gradient))


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 32)
        self.down = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(spread(torch.relu(self.up(x))))


def unknown_op(rank: int, axes: Axes | None) -> tuple[list[float], dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = Unknown()
    if axes is not None:
        parallel(model, axes, (data()[0],), constraints={"up.weight": [Shard(0)], "down.weight": [Shard(1)]})
    losses = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    reported = () if axes is None else model.autoshard_plan.fallbacks
    return losses, full(dict(model.named_parameters())), reported


def test_an_op_without_a_rule_runs_replicated(ranks: RankPool) -> None:
    wanted = unknown_op(0, None)
    for got in ranks.run(unknown_op, LINE, world=3):
        assert_close(got[:2], wanted[:2])
        assert got[2] == ("apitest.spread.default",)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0])
def test_impossible_prices_in_a_profile(tmp_path: Path, value: float) -> None:
    good = slow_compute()
    with pytest.raises(ProfileError, match="memory_bytes_per_second"):
        dataclasses.replace(good, device=dataclasses.replace(good.device, memory_bytes_per_second=value))
    content = json.loads(good.to_json())
    content["device"]["memory_bytes_per_second"] = value
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=r"bad\.json"):
        Profile.load(tmp_path / "bad.json")
    with pytest.raises(ProfileError, match="memory_bytes_per_second"):
        find_plan(two_linear(), MeshSpec({"x": 2}), (data()[0],), profile=tmp_path / "bad.json")


def test_a_memory_limit_nothing_meets_names_what_binds() -> None:
    with pytest.raises(InfeasibleError) as caught:
        find_plan(two_linear(), MeshSpec({"x": 2}), (data()[0],), profile=slow_compute(), memory_limit="1KB")
    text = str(caught.value)
    assert text.startswith("no plan fits memory_limit=1KB per device on mesh (x=2)\n")
    assert "try" in text and "memory" in text, text


def test_a_memory_limit_that_only_a_sharded_plan_meets() -> None:
    mesh, x = MeshSpec({"x": 4}), data()[0]
    # On the nominal CPU such a small model is fastest when it is not split at all.
    free = find_plan(two_linear(), mesh, (x,), profile="cpu")
    assert all(p == (Replicate(),) for p in free.parameters.values())
    limited = find_plan(two_linear(), mesh, (x,), profile="cpu", memory_limit=free.peak_memory * 6 // 10)
    assert limited.peak_memory <= free.peak_memory * 6 // 10
    assert any(p != (Replicate(),) for p in limited.parameters.values())
    assert limited.cost > free.cost


def test_pins_that_exclude_each_other() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(ShardingError, match="one tied parameter, pinned in two ways"):
        find_plan(
            tied,
            MeshSpec({"x": 2}),
            (torch.randn(4, 4),),
            profile=slow_compute(),
            constraints={"0.weight": [Shard(0)], "1.weight": [Shard(1)]},
        )


def limited(rank: int, axes: Axes, limit: int) -> str:
    """Of a plan that needs `limit` bytes more than it may have, given as an object."""
    plan = find_plan(two_linear(), MeshSpec(dict(axes)), (data()[0],), profile=slow_compute())
    model, allowed = two_linear(), plan.peak_memory - limit
    return refusal(model, lambda: parallel(model, axes, (data()[0],), plan=plan, memory_limit=allowed))


def test_a_plan_over_the_limit_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(limited, PAIR, 1, world=2):
        assert said.startswith("InfeasibleError: plan needs ") and "memory_limit is" in said
        assert "\n  try: memory_limit=" in said
    assert ranks.run(limited, PAIR, 0, world=2) == ["no error"] * 2
