"""What a kind of call is called, so that ranks can tell one from another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.watching.watch import Watch
from passes.capture.call import flatten_call, tensor_names
from passes.ir.joint import JointGraph
from passes.plan.describe import graph_hash

__all__ = ["kind_of", "local_call", "tensor_shapes", "turns_of"]


def kind_of(model: nn.Module, joint: JointGraph) -> str:
    """The same on all ranks for the same program: global shapes for people, and the hash of all that it computes."""
    pairs = zip(joint.inputs, joint.placeholders, strict=True)
    shapes = [_shown(node.meta["val"]) for spec, node in pairs if spec.kind == "input"]
    mode = "training" if model.training else "eval"
    mode += ", gradients" if any(spec.kind == "tangent" for spec in joint.inputs) else ", no gradients"
    return f"{type(model).__name__}({', '.join(shapes)}), {mode}, program {graph_hash(joint)[:8]}"


def local_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """This rank's tensors, for people."""
    tensors, key = flatten_call(args, kwargs)
    names = tensor_names(key)
    return ", ".join(f"{name} {_shown(tensor)}" for name, tensor in zip(names, tensors, strict=True))


def tensor_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of this rank's tensors."""
    tensors, _ = flatten_call(args, kwargs)
    return [tuple(t.to_local().shape) if isinstance(t, DTensor) else tuple(t.shape) for t in tensors]


def turns_of(watch: Watch | None, kind: str) -> Callable[[str], AbstractContextManager[Any]]:
    """Of "forward" or "backward": the turn in which all ranks run it."""
    if watch is None:
        return lambda phase: nullcontext()
    keys = {phase: f"{phase} of {kind}" for phase in ("forward", "backward")}
    return lambda phase: watch.turn(keys[phase])


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
