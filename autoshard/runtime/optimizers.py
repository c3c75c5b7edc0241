"""Optimizers and DTensors: those made before the parameters became DTensors go on with the new ones, and updates of one
element at a time run on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from autoshard.runtime.sharding import like_parameter
from cost_model.errors import ShardingError
from passes.ir.process_state import live
from passes.ir.torch_dtensor import dtensor_from, local_of, sharding_of, wrap_attribute, wrap_in_torch


class RetiredParameter(nn.Parameter):
    """A parameter that was replaced: empty, and every use of it an error.

    Reading a stale `.grad` would silently give None, so that clipping a list of parameters made too
    early would clip nothing.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShardingError(
            "this parameter was replaced by a DTensor when autoshard distributed the model\n"
            "  try: ask the model for its parameters again, after autoshard (or after the first call, "
            "without example_inputs)"
        )


def retire(parameter: nn.Parameter) -> None:
    """Free the parameter's memory, whoever still holds it, and refuse its further use."""
    if not isinstance(parameter, DTensor):
        parameter.data = parameter.data.new_empty(0)
        parameter.__class__ = RetiredParameter


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Every optimizer there is: a parameter does not know who optimizes it."""
    return live(torch.optim.Optimizer)


def optimizers_of(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """Those that have some of the model's parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in live_optimizers():
        groups = getattr(optimizer, "param_groups", ())  # it may be half made
        if any(id(p) in own for group in groups for p in group["params"]):
            yield optimizer


def torch_optimizers_of(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """Those of torch's own."""
    return (one for one in optimizers_of(model) if type(one).__module__.startswith("torch.optim."))


def adopt(optimizers: Iterable[torch.optim.Optimizer], moved: Mapping[Tensor, nn.Parameter]) -> None:
    """Replace old parameters by new in every group, and shard the state kept for them.

    State of the old parameter's shape takes the new one's placements (each rank cuts its own values,
    without communication). Anything else stays as it is, on the parameter's device; a step count only where
    torch would have it there. Lists and dicts stay the same objects: L-BFGS has its own hold of them while it calls
    the model for the first time.
    """
    for optimizer in optimizers:
        groups = optimizer.param_groups
        # As torch's optimizers make it: a step count is on the CPU unless the kernel reads it.
        counted = {p for g in groups if g.get("fused") or g.get("capturable") for p in g["params"]}
        for group in groups:
            group["params"][:] = [moved.get(p, p) for p in group["params"]]
        for old in [p for p in optimizer.state if p in moved]:
            state = optimizer.state[moved[old]] = optimizer.state.pop(old)
            state.update(_sharded_state(state, moved[old], old in counted))


def shard_when_loaded() -> None:
    """From now on, in this process: `load_state_dict` of optimizers takes whole states, as one process saves them."""
    wrap_attribute(torch.optim.Optimizer, "load_state_dict", _loading_shards)


def _loading_shards(plain: Callable[..., None]) -> Callable[..., None]:
    def load(self: torch.optim.Optimizer, state_dict: Any) -> None:
        plain(self, state_dict)
        for parameter, state in self.state.items():
            if isinstance(parameter, DTensor):
                assert isinstance(parameter, nn.Parameter)
                self.state[parameter] = _sharded_state(state, parameter, counts=False)

    return load


def _sharded_state(state: Mapping[str, Any], parameter: nn.Parameter, counts: bool) -> dict[str, Any]:
    """counts: whether the step count moves to the parameter's device, too."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if _follows(name, value, parameter):
            value = like_parameter(value, parameter)
        elif isinstance(value, Tensor) and not parameter.is_meta and (name != "step" or counts):
            value = value.to(parameter.device)
        found[name] = value
    return found


def _follows(name: str, value: Any, parameter: nn.Parameter) -> bool:
    """Whether a state is cut as its parameter is. Of a 0-d parameter's 0-d state all but the step count is."""
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return plain and value.shape == parameter.shape and (value.ndim > 0 or name != "step")


ELEMENTWISE = (
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
)
"""Modules of torch.optim, each with a public function of its name that updates parameters, every element by itself.
Not among them: what needs a norm or a product of whole parameters (Adafactor, LBFGS, Muon)."""


def update_shards() -> None:
    """From now on, in this process: the updates of `ELEMENTWISE` run on the shards of DTensors.

    An optimizer, its state (DTensors where the parameter is one), hooks, closures and schedulers stay as they are:
    only what it calls to compute changes. torch takes every op of an update through DTensor's dispatch, which
    costs more than the update of a small model.
    """
    wrap_in_torch(tuple((f"torch.optim.{name}", name) for name in ELEMENTWISE), _on_shards)


def _on_shards(function: Callable[..., None]) -> Callable[..., None]:
    """function: (lists of tensors, parallel to the parameters, which come first; options by name)."""

    def update(*lists: Any, **options: Any) -> None:
        if torch.compiler.is_compiling() or not _divides(lists, options):
            return function(*lists, **options)
        shards = [[local_of(v) if isinstance(v, DTensor) else v for v in values] for values in lists]
        given = [list(values) for values in shards]
        function(*shards, **options)
        for values, before, after in zip(lists, given, shards, strict=True):
            if not all(map(is_, before, after)):
                _take_new(values, before, after, lists[0])
        # As an op on the DTensor would: what autograd saved of it is stale.
        increment_version([p for p in lists[0] if isinstance(p, DTensor)])
        return None

    return update


def _divides(lists: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether some parameter is a DTensor, and all that belongs to each is cut as it is."""
    if not lists or not all(isinstance(values, list) for values in lists):
        return False
    parameters = lists[0]
    if not any(isinstance(p, DTensor) for p in parameters):
        return False
    if options.get("differentiable") or any(isinstance(value, DTensor) for value in options.values()):
        return False
    shardings = [sharding_of(p) if isinstance(p, DTensor) else None for p in parameters]
    # An empty list is of a variant that is off.
    lengths = {len(values) for values in lists if values}
    return lengths == {len(parameters)} and all(all(map(_cut_alike, shardings, values)) for values in lists)


def _cut_alike(ours: Any, value: Tensor | None) -> bool:
    """Whether the shard of `value` belongs to that of a parameter with the sharding `ours`, None if it is plain.
    A step count is the same everywhere."""
    if not isinstance(value, DTensor):
        return ours is None or value is None or value.ndim == 0
    theirs = sharding_of(value)
    if ours is theirs:
        return True
    if ours is None or ours.mesh != theirs.mesh:
        return False
    if ours.shape == theirs.shape:
        return ours.placements == theirs.placements
    return theirs.ndim == 0 and all(p.is_replicate() for p in theirs.placements)


def _take_new(
    values: list[Tensor | None],
    before: Iterable[Tensor | None],
    after: Iterable[Tensor | None],
    parameters: Sequence[Tensor],
) -> None:
    """State that the update made (a first momentum) belongs in the caller's list, as a DTensor."""
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if new is not old:
            sharding = sharding_of(parameters[place])
            whole = new is None or sharding is None
            values[place] = new if whole else dtensor_from(new, sharding)  # type: ignore[arg-type]
