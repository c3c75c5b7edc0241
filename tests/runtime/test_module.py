"""A dispatcher behind an unchanged module: one executable per kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.runtime.guards import Guards
from autoshard.runtime.module import MOST_KEPT, Built, Mode, dispatcher_of, install, original_forward


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> str:
        return "original"


class Returning:
    """An executable that returns its number, and depends on what is read of the model."""

    answers: tuple[Tensor, ...] = ()

    def __init__(self, number: Any, guards: Guards, is_remade: bool = False) -> None:
        self.number, self.guards, self.is_remade = number, guards, is_remade

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.number, len(args), sorted(kwargs)

    def end(self) -> None:
        self.number = None


class Builds:
    """Counts builds."""

    def __init__(self, model: nn.Module) -> None:
        self.count, self.model, self.is_remade = 0, model, False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Sequence[Tensor]) -> Built:
        self.count += 1
        guards = Guards(self.model, {self.model: frozenset({"temperature"})})
        return Returning(self.count, guards, self.is_remade)


def shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(a.shape for a in args), tuple(sorted(kwargs))


def installed() -> tuple[Net, Builds]:
    model = Net()
    builds = Builds(model)
    install(model, shapes, builds)
    return model, builds


def test_weights_that_are_one_no_more_are_another_program() -> None:
    """Each has the shape that both had."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = model[1].weight
    model[1].weight = model[0].weight
    tied = Guards(model, {})
    model[1].weight = weight
    assert not tied.hold() and "one tensor that had two" in tied.changed()
    apart = Guards(model, {})
    model[1].weight = nn.Parameter(torch.zeros(3, 3))
    assert apart.hold()
    model[1].weight = model[0].weight
    assert not apart.hold() and not apart.hold()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(3, 3), nn.ParameterDict({"a": torch.zeros(3)})

    def act(self, x: Tensor) -> Tensor:
        return x


EDITS: dict[str, Callable[[Any], Any]] = {
    "a name of a table": lambda m: m.table.update({"b": m.table.pop("a").detach().clone()}),
    "the class of a layer": lambda m: setattr(m.layer, "__class__", type("Other", (nn.Linear,), {})),
    "an attribute that was missing": lambda m: setattr(m, "scale", 2.0),
    "a method in its place": lambda m: setattr(m, "act", torch.relu),
    "a method of the class": lambda m: setattr(Named, "act", lambda self, x: x + 1),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_is_no_longer_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Named, "act", Named.act)  # it is put back
    model = Named()
    guards = Guards(model, {model: frozenset({"act", "scale"})})
    assert guards.hold() and not guards.changed()
    EDITS[name](model)
    assert not guards.hold() and guards.changed()


def test_class_names_and_state_stay() -> None:
    model, _ = installed()
    assert type(model) is Net
    assert list(model.state_dict()) == ["inner.weight", "inner.bias"]


@pytest.mark.parametrize("is_remade", [True, False])
def test_the_last_executables_are_kept(is_remade: bool) -> None:
    """First those that are not made again at once, as the first call's is not."""
    model, builds = installed()
    dispatcher = dispatcher_of(model)
    assert dispatcher is not None
    sizes = [torch.empty(0, size) for size in range(MOST_KEPT + 2)]
    model(sizes[0])
    first = next(iter(dispatcher.executables.values()))[0]
    builds.is_remade = is_remade
    for x in sizes[1:]:
        model(x)
    assert sum(map(len, dispatcher.executables.values())) == len(dispatcher.executables) == MOST_KEPT
    assert (first.number is None) == (not is_remade)  # type: ignore[attr-defined]
    made = builds.count
    for x in (*sizes[3:], *sizes[: int(is_remade)], sizes[3]):
        model(x)
    assert builds.count == made
    model(sizes[1])
    assert builds.count == made + 1
    model(sizes[3])  # which was called after the others
    assert builds.count == made + 1


def test_one_executable_per_kind_of_call() -> None:
    model, builds = installed()
    x, y = torch.ones(2, 2), torch.ones(3, 2)
    assert model(x) == (1, 1, [])
    assert model(x + 1) == (1, 1, [])
    assert model(y) == (2, 1, [])
    assert model(x, scale=2.0) == (3, 1, ["scale"])
    with torch.no_grad():
        assert model(x) == (4, 1, [])
    model.inner.eval()
    assert model(x) == (5, 1, [])
    model.inner.train()
    model.inner.bias.requires_grad_(False)
    assert model(x) == (6, 1, [])
    model.inner.bias.requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x) == (7, 1, [])
    assert model(x) == (1, 1, [])
    assert builds.count == 7


def test_an_executable_is_used_while_its_guards_hold(caplog: pytest.LogCaptureFixture) -> None:
    model, builds = installed()
    x = torch.ones(2, 2)
    assert model(x)[0] == 1
    model.temperature = 2.0  # type: ignore[assignment]
    with caplog.at_level("INFO", "autoshard"):
        assert model(x)[0] == 2
    assert "temperature is 2.0, and was missing" in caplog.text
    model.unread = 3  # type: ignore[assignment]
    assert model(x)[0] == 2
    del model.temperature
    assert model(x)[0] == 1  # as before
    for number in range(8):
        model.temperature = float(number)  # type: ignore[assignment]
        assert model(x)[0] == (2 if number == 2 else builds.count)
    assert "the model keeps changing: temperature is 7.0" in caplog.text


def test_prepare_builds_without_running() -> None:
    model, builds = installed()
    dispatcher = dispatcher_of(model)
    assert dispatcher is not None
    dispatcher.prepare((torch.ones(2, 2),), {})
    assert builds.count == 1
    assert model(torch.ones(2, 2)) == (1, 1, [])


def test_a_failed_build_is_not_remembered() -> None:
    model = Net()
    attempts: list[int] = []

    def build(args: tuple[Any, ...], kwargs: dict[str, Any], answers: Sequence[Tensor]) -> Built:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("no plan")
        return Returning("built", Guards(model, {}))

    install(model, shapes, build)
    with pytest.raises(ValueError, match="no plan"):
        model(torch.ones(2, 2))
    assert model(torch.ones(2, 2)) == ("built", 1, [])


def test_the_original_forward_is_there_for_capture() -> None:
    model, _ = installed()
    with original_forward(model):
        assert model(torch.ones(2, 2)) == "original"
    assert model(torch.ones(2, 2)) == (1, 1, [])


def test_installing_again_replaces() -> None:
    model, first = installed()
    second = Builds(model)
    install(model, shapes, second)
    model(torch.ones(2, 2))
    assert (first.count, second.count) == (0, 1)
    with original_forward(model):
        assert model(torch.ones(2, 2)) == "original"


def test_the_mode_is_all_that_a_graph_depends_on_but_arguments() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    keys = [Mode(model).key()]
    with torch.no_grad():
        keys.append(Mode(model).key())
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(Mode(model).key())
    model[1].eval()
    keys.append(Mode(model).key())
    model[0].bias.requires_grad_(False)
    keys.append(Mode(model).key())
    assert len(set(keys)) == 5
