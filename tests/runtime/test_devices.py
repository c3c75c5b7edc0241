"""What is where, and how it comes to the mesh's device: on fakes of GPUs that this machine has not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard.runtime.executable as executable_module
from autoshard.runtime.leaves import InputSide
from autoshard.runtime.sharding import arrived, check_bound, check_devices, move_buffers
from cost_model.errors import ShardingError
from passes.capture import flatten_call
from passes.ir.joint import GraphInput
from passes.layout.layout import Layout

MINE = torch.device("cuda", 3)


def weights(device: torch.device | str) -> nn.Module:
    """A layer on a device that may not be there: nothing is drawn, and nothing has a gradient."""
    layer = nn.Module()
    for name in ("weight", "bias"):
        layer.register_parameter(name, nn.Parameter(torch.empty(4, device=device), requires_grad=False))
    return layer


class Counting(nn.Module):
    """A layer, a counter that two modules share, and a mask."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.layer = weights(device)
        self.inner = nn.Module()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_buffer("nothing", None)
        self.inner.register_buffer("steps", self.get_buffer("steps"))


def refusal(model: nn.Module, device: torch.device = MINE) -> str:
    with pytest.raises(ShardingError) as caught:
        check_devices(model, device)
    return str(caught.value)


def test_on_the_cpu_on_the_device_on_meta_and_mixtures_of_them() -> None:
    with FakeTensorMode():
        check_devices(Counting(), MINE)
        check_devices(Counting(MINE), MINE)
    with torch.device("meta"):
        check_devices(Counting("meta"), MINE)
    check_devices(Counting(), torch.device("cpu"))


def test_a_third_device_is_refused_and_what_is_where_named() -> None:
    with FakeTensorMode():
        assert refusal(Counting("cuda:0")) == (
            "the model has tensors on cuda:0, and this rank's part of the mesh is cuda:3\n"
            "  cuda:0: layer.weight, layer.bias\n"
            "  cpu: steps, mask\n"
            "  try: torch.cuda.set_device(local rank) before the model is made, or model.to('cuda:3')"
        )
        several = nn.Sequential(*(weights("cuda:0") for _ in range(3)))
        assert "cuda:0: 0.weight, 0.bias, 1.weight, 1.bias and 2 more" in refusal(several)


def test_a_model_on_gpus_is_not_for_a_mesh_of_cpus() -> None:
    with FakeTensorMode():
        text = refusal(weights(MINE), torch.device("cpu"))
    assert "this rank's part of the mesh is cpu" in text
    assert "try: model.cpu(), or a mesh of the model's device type" in text


def test_buffers_move_together_and_a_shared_one_stays_one() -> None:
    with FakeTensorMode():
        model = Counting()
        move_buffers(model, MINE)
        assert {b.device for b in model.buffers()} == {MINE}
        assert model.steps is model.inner.steps
        assert model.nothing is None and "mask" not in model.state_dict()
        kept = model.mask
        move_buffers(model, MINE)
        assert model.mask is kept
    with torch.device("meta"):
        unmade = Counting()
    move_buffers(unmade, torch.device("cpu"))
    assert unmade.mask.is_meta


def test_a_call_is_the_same_wherever_its_tensors_are() -> None:
    """Else CPU example inputs would refuse GPU inputs, or have them planned again."""
    with FakeTensorMode():
        calls = [flatten_call((torch.ones(2, 3, device=d),), {})[1] for d in ("cpu", "cuda:0", MINE)]
    assert calls[0] == calls[1] == calls[2] and len({hash(call) for call in calls}) == 1


def test_cpu_tensors_of_a_call_are_moved_with_their_gradient() -> None:
    with FakeTensorMode():
        x = torch.ones(2)
        assert arrived(x, "x", MINE).device == MINE
        here = torch.ones(2, device=MINE)
        assert arrived(here, "x", MINE) is here
        with pytest.raises(
            ShardingError, match=r"^x is on cuda:0, and this rank's part of the mesh is cuda:3"
        ):
            arrived(torch.ones(2, device="cuda:0"), "x", MINE)
    with pytest.raises(ShardingError, match=r"^x is on meta"):
        arrived(torch.ones(2, device="meta"), "x", torch.device("cpu"))
    x = torch.ones(2)
    assert arrived(x, "x", torch.device("cpu")) is x


class Copies(TorchDispatchMode):
    """Copies between devices that the host waits for, and reads of a device's values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source = args[0].device if args and isinstance(args[0], Tensor) else None
        target = result.device if isinstance(result, Tensor) else torch.device("cpu")
        crosses = source is not None and source.type != target.type
        if crosses and not (kwargs or {}).get("non_blocking"):
            self.waited_for.append(str(func))
        return result


def leaf(monkeypatch: pytest.MonkeyPatch, kind: Any, session: Any) -> Callable[[list[Tensor]], Tensor]:
    """How a session gets the tensor of a placeholder of that kind on a rank of device MINE."""
    monkeypatch.setattr(executable_module, "local_device", lambda mesh: MINE)
    joint: Any = SimpleNamespace(constants={"x": torch.tensor(2.5)})
    side = InputSide((2,), Layout.replicated(1))
    return executable_module._leaf(
        session, joint, GraphInput(kind, "x", 0), side, fx.Graph().placeholder("x")
    )


@pytest.mark.parametrize("kind", ["seed", "constant", "input"])
def test_no_leaf_of_a_step_makes_the_host_wait(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with FakeTensorMode():
        seed = torch.tensor(2**61 + 1)
        session: Any = SimpleNamespace(mesh=None, spec=None, seeds=SimpleNamespace(next=lambda: seed))
        get = leaf(monkeypatch, kind, session)
        with Copies() as copies:
            value = get([torch.ones(2)])
    assert value.device == MINE and copies.waited_for == []
    assert (value.dtype, tuple(value.shape)) == {
        "seed": (torch.int64, ()),
        "constant": (torch.float32, ()),
        "input": (torch.float32, (2,)),
    }[kind]


def test_a_process_group_of_another_device() -> None:
    check_bound(MINE, None)
    check_bound(MINE, MINE)
    check_bound(torch.device("cpu"), MINE)
    with pytest.raises(ShardingError, match=r"bound to cuda:0, and the process's current device is cuda:3"):
        check_bound(MINE, torch.device("cuda", 0))
