"""In which mode a call is captured, and what becomes of its outputs and of the state that it changes (a key/value
cache): gathered on every rank, as the plan has it, or in the layout asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.arguments import check_autocast
from autoshard.global_call import matched_placements
from autoshard.plan.other_sizes import Capture
from autoshard.plan.plan_ends import CallLayouts
from cost_model.mesh import MeshSpec
from passes.capture import Captured
from passes.capture.call import held_in, number_indices, tensor_paths
from passes.capture.device_view import autocast_on
from passes.capture.trees import in_objects
from passes.ir.process_state import random_state_kept
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout


@contextmanager
def as_inference(model: nn.Module) -> Generator[None]:
    """Inside, the model is in `eval()`, and nothing gets a gradient."""
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, flag in training:
            module.training = flag


def autocast_as(mesh: MeshSpec, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Autocast of the mesh's devices to `dtype`; nothing for None. ShardingError for a dtype it does not cast to."""
    check_autocast(dtype)
    if dtype is None:
        return nullcontext()
    return autocast_on(mesh.device_type, dtype)


def capture_as_now(
    capture: Capture, mesh: MeshSpec, autocast: torch.dtype | None = None, inference: bool = False
) -> Capture:
    """`capture`, with gradients and autocast as they are now."""
    grad, device = torch.is_grad_enabled(), mesh.device_type
    if autocast is None and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)

    def captured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        as_called = as_inference(model) if inference else torch.set_grad_enabled(grad)
        with as_called, autocast_as(mesh, autocast), random_state_kept():
            return capture(model, args, kwargs)

    return captured


@dataclass(frozen=True)
class CallEndsAsked:
    """out_placements, inference: as `autoshard` is given them. dtensors: which inputs of the call are some."""

    mesh: MeshSpec
    out_placements: Any
    inference: bool
    dtensors: frozenset[int]

    def __call__(self, captured: Captured, inputs: Mapping[int, Layout]) -> CallLayouts:
        """inputs: layouts of those that are shards.

        An input that is changed in place keeps its layout. In inference the search chooses that of a state: of what is
        changed in place where the call can put a DTensor in its stead, and of what is left in objects."""
        outputs, call = output_layouts(captured, self.mesh, self.out_placements), captured.call
        first, values = call.output_count - len(call.overwritten), _values(captured)
        is_state = lambda index: values[index].is_floating_point() and values[index].ndim > 1
        chosen, tied = set[int](), dict[int, int]()
        plans_state = self.inference and not captured.joint.trained
        for index, position in enumerate(call.overwritten, first):
            if position in inputs and position not in self.dtensors:
                outputs[index] = inputs[position]
            elif position in inputs or (
                plans_state and is_state(index) and position in held_in(call.key.tree)
            ):
                outputs[index], tied[index] = None, position
        if plans_state:
            chosen = {index for index in in_objects(call.outputs) if index < first and is_state(index)}
            outputs |= dict.fromkeys(chosen)
        return CallLayouts(inputs, outputs, frozenset(chosen), tied)


def output_layouts(captured: Captured, mesh: MeshSpec, out_placements: Any) -> dict[int, Layout | None]:
    """Layout per tensor output of a call that is not gathered; None where it stays as the plan likes, a DTensor.

    None for `out_placements` gathers all, but in training, where there is a loss (a scalar with a gradient), large
    outputs beside it: logits and caches that nobody asked for. What a forward leaves in attributes is gathered
    unless it is large; numbers (`loss.item()`) always are.
    """
    values = _values(captured)
    returned = [index for index in sorted(values) if index < captured.call.returned]
    left = {index: None for index in values if index not in returned and _is_large(values[index])}
    if isinstance(out_placements, str):  # "keep", as `check_call_placements` has seen
        return {**dict.fromkeys(returned), **left}
    if out_placements is None:
        return {**dict.fromkeys(_unasked(captured, returned, values)), **left}
    paths = tensor_paths(captured.call.returned_tree)
    names = [_output_name(paths[i], i) for i in returned]
    given = matched_placements(out_placements, names, mesh, argument="out_placements")
    asked: dict[int, Layout | None] = {
        i: placements_to_layout(placements, tuple(values[i].shape), mesh, what=f"output {i}")
        for i, placements in given.items()
        if placements is not None
    }
    return {**asked, **left}


def _values(captured: Captured) -> dict[int, torch.Tensor]:
    joint, numbers = captured.joint, number_indices(captured.call.outputs)
    return {
        spec.index: result.meta["val"]
        for spec, result in joint.returned
        if spec.kind == "output" and result is not None and spec.index not in numbers
    }


def _unasked(captured: Captured, returned: list[int], values: Mapping[int, torch.Tensor]) -> list[int]:
    trained = {spec.index for spec in captured.joint.inputs if spec.kind == "tangent"}
    has_loss = any(i in trained and values[i].numel() == 1 for i in returned)
    return [i for i in returned if has_loss and values[i].numel() > 1 and _is_large(values[i])]


def _output_name(path: str, position: int) -> str:
    """An output's name in the dict or object that holds it, "logits"; of others the position."""
    named = re.match(r"(?:\.|\[['\"])(\w+)(?:['\"]\])?", path)
    return named[1] + path[named.end() :] if named else f"output {position}"


def _is_large(value: torch.Tensor) -> bool:
    # 1 MiB is far below the logits of any language model, and above what a training loop logs.
    return math.prod(value.shape) * value.element_size() > 1 << 20
