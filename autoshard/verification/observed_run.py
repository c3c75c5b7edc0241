"""One forward and backward, observed module by module, and what ranks computed held against one process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.verification.part_errors import CANCELLED, Divergence, largest, relative_error
from autoshard.verification.verify_plan import TOLERANCE, VerifyReport
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.capture.trees import flatten

Tangent = Callable[[int, torch.Tensor, bool], torch.Tensor]
"""Place of an output, the output, and whether it is of the whole batch -> its gradient."""
Call = tuple[str, int]
"""A module's name, and which of its calls."""
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Parts of names that wrappers add."""


@dataclass
class ObservedRun:
    """outputs: floating point, of this rank; whole: whether each is of the whole batch. gradients: of parameters.
    forward, backward: what modules return, and the gradients of that, in the order in which they come. kinds: classes
    of modules by name."""

    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    whole: list[bool] = field(default_factory=list[bool])
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict[str, torch.Tensor | None])
    forward: dict[Call, torch.Tensor] = field(default_factory=dict[Call, torch.Tensor])
    backward: dict[Call, torch.Tensor] = field(default_factory=dict[Call, torch.Tensor])
    kinds: dict[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tangent: Tangent) -> ObservedRun:
        """Of one call, backward from all of its outputs."""
        run = ObservedRun()
        handles = list(run._observe(model))
        returned = [one for one in flatten(model(*args, **kwargs))[0] if one.is_floating_point()]
        terms: list[torch.Tensor] = []
        for place, output in enumerate(returned):
            value = whole_value(output)
            is_whole = isinstance(output, DTensor) and output.device_mesh.size() == dist.get_world_size()
            run.whole.append(is_whole)
            run.outputs.append(value.detach())
            if value.requires_grad:
                terms.append((value * tangent(place, value, is_whole)).sum())
        if terms:
            torch.stack(terms).sum().backward()
        for handle in handles:
            handle.remove()
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            run.gradients[_bare(name)] = None if grad is None else whole_value(grad).detach()
        return run

    def _observe(self, model: nn.Module) -> Iterator[Any]:
        calls = Counter[str]()

        def note(name: str, module: nn.Module, output: Any) -> None:
            value = next((one for one in flatten(output)[0] if one.is_floating_point()), None)
            if value is None:
                return
            call = name, calls[name]
            calls[name] += 1
            self.forward[call] = value.detach()
            if value.requires_grad:
                value.register_hook(lambda grad: note_gradient(call, grad))

        def note_gradient(call: Call, grad: torch.Tensor) -> None:
            self.backward.setdefault(call, grad.detach())

        for name, module in model.named_modules():
            bare = _bare(name)
            self.kinds[bare] = type(module).__name__
            yield module.register_forward_hook(
                lambda module, args, output, bare=bare: note(bare, module, output)
            )


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def whole_value(value: torch.Tensor) -> torch.Tensor:
    """A DTensor's, gathered by all of its ranks; any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@dataclass(frozen=True)
class RankComparison:
    """What this rank and the others `got`, beside what one process `wanted`. All ranks ask the same, in one order."""

    mesh: MeshSpec
    batch_axes: tuple[str, ...]
    rank: int
    wanted: ObservedRun
    got: ObservedRun

    def report(self) -> VerifyReport:
        """The same on every rank. ShardingError where the parallel model has other outputs or parameters."""
        gradients = self._gradients()
        floats = [one for one in (*self.wanted.outputs, *self.wanted.gradients.values()) if one is not None]
        limit = max((TOLERANCE.get(one.dtype, 0.0) for one in floats), default=1e-4)
        own = dict(self._output_errors())
        floor = CANCELLED * largest(self.wanted.gradients.values())
        for name, expected in self.wanted.gradients.items():
            if expected is not None:
                own[f"grad {name}"] = _error(gradients.get(name), expected, floor)
        errors = {name: max(one[name] for one in self._of_all(own)) for name in own}
        worst = max(errors.values(), default=0.0)
        if worst <= limit:
            return VerifyReport(True, worst, errors, None)
        return VerifyReport(False, worst, errors, self._first(errors, limit))

    def _gradients(self) -> Mapping[str, torch.Tensor | None]:
        """Of the parallel model, by the model's names."""
        got = self.got.gradients
        if not got.keys() & self.wanted.gradients.keys():  # DistributedDataParallel
            got = {name.removeprefix("module."): value for name, value in got.items()}
        missing = sorted(self.wanted.gradients.keys() - got.keys())
        if missing:
            raise ShardingError(
                f"the parallel model has no parameter {missing[0]}, and {len(missing) - 1} others of the model's\n"
                "  try: code that keeps parameters under their names, as fully_shard and parallelize_module do"
            )
        return got

    def _output_errors(self) -> Iterator[tuple[str, float]]:
        if len(self.got.outputs) != len(self.wanted.outputs):
            raise ShardingError(
                f"the parallel model returns {len(self.got.outputs)} tensors, and the model "
                f"{len(self.wanted.outputs)}\n  try: make_parallel that returns the same"
            )
        group = self.mesh.group(self.rank, self.batch_axes)
        for place, (value, expected) in enumerate(zip(self.got.outputs, self.wanted.outputs, strict=True)):
            if len(group) > 1 and not self.got.whole[place]:
                if value.shape == expected.shape:  # one for the batch: a mean
                    all_ranks = self._of_all(value)
                    value = torch.stack([all_ranks[rank] for rank in group]).mean(0)
                else:
                    expected = expected.chunk(len(group))[self.mesh.linear_index(self.rank, self.batch_axes)]
            yield f"output {place}", _error(value, expected, 0.0)

    def _of_all(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.mesh.device_count
        dist.all_gather_object(found, own)
        return found

    def _first(self, errors: Mapping[str, float], limit: float) -> Divergence | None:
        """A module that returns something else, else one whose output has another gradient, else a parameter. What
        modules return may cancel where results do not: it differs from ten times the tolerance on."""
        parts = len(self.mesh.group(self.rank, self.batch_axes))
        sides = (("its output", "forward", 1.0), ("the gradient of its output", "backward", float(parts)))
        for said, side, factor in sides:
            wanted, got = getattr(self.wanted, side), getattr(self.got, side)
            for call, value in wanted.items():
                own = _called(got, call)
                if all(self._of_all(own is not None)):
                    assert own is not None
                    pieces = self._of_all(whole_value(own))
                    error = min(joined_errors(pieces, value * factor, self.mesh), default=float("inf"))
                    if error > 10.0 * limit:
                        name, kind = call[0] or "the model", self.wanted.kinds[call[0]]
                        return Divergence(name, said, error, kind, "")
        found = next(
            (name for name, error in errors.items() if error > limit and name.startswith("grad ")), None
        )
        if found is None:
            return None
        return Divergence(found.removeprefix("grad "), "its gradient", errors[found], "a parameter", "")


def _called(got: Mapping[Call, torch.Tensor], call: Call) -> torch.Tensor | None:
    name, number = call
    under = f"module.{name}" if name else "module"
    return got.get(call, got.get((under, number)))


def _error(value: torch.Tensor | None, expected: torch.Tensor, floor: float) -> float:
    if value is None or value.shape != expected.shape:
        return float("inf")
    return relative_error(value, expected, max(largest([expected]), floor))


def joined_errors(pieces: Sequence[torch.Tensor], expected: torch.Tensor, mesh: MeshSpec) -> Iterator[float]:
    """Errors of every way in which the ranks' pieces may be one value: along each axis copies, parts of a dim or
    summands."""
    scale = largest([expected])
    ways: list[int | str] = ["copies", "sum", *range(expected.ndim)]
    for chosen in itertools.product(ways, repeat=len(mesh.names)):
        joined = _joined(list(pieces), chosen, mesh, expected.shape)
        if joined is not None and all(one.shape == expected.shape for one in joined):
            yield max(relative_error(one, expected, scale) for one in joined)


def _joined(
    pieces: list[torch.Tensor], ways: Sequence[int | str], mesh: MeshSpec, shape: torch.Size
) -> list[torch.Tensor] | None:
    """All copies; None for parts that do not fit. From the last axis on, as it splits the parts of those before."""
    copies = [pieces]
    for size, way in zip(reversed(mesh.sizes), reversed(ways), strict=True):
        merged: list[list[torch.Tensor]] = []
        for row in copies:
            groups = [row[i : i + size] for i in range(0, len(row), size)]
            if way == "copies":
                merged += [list(one) for one in zip(*groups, strict=True)]
                continue
            if isinstance(way, int) and sum(one.shape[way] for one in groups[0]) > shape[way]:
                return None
            try:
                merged.append([torch.cat(one, way) if isinstance(way, int) else sum(one) for one in groups])  # type: ignore[misc]
            except (RuntimeError, IndexError):  # of other shapes
                return None
        copies = merged
    return [row[0] for row in copies]
