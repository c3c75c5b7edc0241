"""A forward and a backward of a model, observed module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from passes.capture.trees import Instance, Nest, TensorLeaf, Tree, flatten
from passes.ir.torch_dtensor import as_loss_parallel, loss_parallel_noted, whole_value

Tangent = Callable[[int, torch.Tensor], torch.Tensor]
"""Place of an output, and the output -> its gradient."""
Call = tuple[str, int, int]
"""A module's name, which of its calls, and which of the tensors that it returns."""
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Parts of names that wrappers add."""


@dataclass
class ObservedRun:
    """outputs: of this rank. gradients, parameters: by name, gathered where they are DTensors.
    buffers: those that the model in one process writes. forward, backward: what modules return, and the gradients of
    that, in the order in which they come. calls: how often a module is called in the forward. kinds: classes of modules
    by name. draws: names of modules that draw random numbers, noted of the model in one process."""

    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict[str, torch.Tensor | None])
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    buffers: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    forward: dict[Call, torch.Tensor] = field(default_factory=dict[Call, torch.Tensor])
    backward: dict[Call, torch.Tensor] = field(default_factory=dict[Call, torch.Tensor])
    calls: Counter[str] = field(default_factory=Counter[str])
    kinds: dict[str, str] = field(default_factory=dict[str, str])
    draws: set[str] = field(default_factory=set[str])
    _hooked: set[Call] = field(default_factory=set[Call])

    @staticmethod
    def of(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tangent: Tangent,
        like: ObservedRun | None = None,
    ) -> ObservedRun:
        """Of one call, backward from all of its outputs. like: of the model in one process, whose names count."""
        run = ObservedRun()
        parameters = {_bare(name): one for name, one in model.named_parameters(remove_duplicate=like is None)}
        start = _start(parameters, like.parameters if like else parameters)
        before = {name: one.detach().clone() for name, one in model.named_buffers()} if like is None else {}
        handles = list(run._observe(model, start, like is None))
        with loss_parallel_noted() as noted:
            returned = _tensors(model(*args, **kwargs))
        for handle in handles:  # a backward that computes blocks again calls modules too
            handle.remove()
        terms: list[torch.Tensor] = []
        for place, output in enumerate(returned):
            value = whole_value(output)
            run.outputs.append(value.detach())
            if value.requires_grad:
                product = (value * tangent(place, value)).sum()
                terms.append(product.real if product.is_complex() else product)
        if terms:
            with as_loss_parallel(noted):
                torch.stack(terms).sum().backward()
            unused = run._hooked - run.backward.keys()  # nothing of the outputs is made of it
            run.forward = {call: value for call, value in run.forward.items() if call not in unused}
        for name, parameter in parameters.items():
            name, grad = name.removeprefix(start), parameter.grad
            run.gradients[name] = None if grad is None else whole_value(grad).detach()
            run.parameters[name] = whole_value(parameter).detach()
        for given, buffer in model.named_buffers():
            name = _bare(given).removeprefix(start)
            if (
                name in like.buffers
                if like
                else given not in before or not torch.equal(before[given], buffer)
            ):
                run.buffers[name] = whole_value(buffer).detach()
        return run

    def _observe(self, model: nn.Module, start: str, notes_draws: bool) -> Iterator[Any]:
        states: dict[str, torch.Tensor] = {}

        def note(name: str, output: Any) -> None:
            number = self.calls[name]
            self.calls[name] += 1
            if notes_draws and not torch.equal(states[name], _generators()):
                self.draws.add(name)
            for place, value in enumerate(filter(_is_computed_with, _tensors(output))):
                call = name, number, place
                self.forward[call] = value.detach().clone()  # some write into what a module returns
                if value.requires_grad:
                    self._hooked.add(call)
                    value.register_hook(lambda grad, call=call: note_gradient(call, grad))

        def note_gradient(call: Call, grad: torch.Tensor) -> None:
            self.backward.setdefault(call, grad.detach())

        for name, module in model.named_modules():
            bare = _bare(name)
            bare = "" if f"{bare}." == start else bare.removeprefix(start)
            if bare in self.kinds:  # what a wrapper wraps
                continue
            self.kinds[bare] = type(module).__name__
            if notes_draws:
                yield module.register_forward_pre_hook(
                    lambda module, args, bare=bare: states.update({bare: _generators()})
                )
            yield module.register_forward_hook(lambda module, args, output, bare=bare: note(bare, output))


def _tensors(value: Any) -> list[torch.Tensor]:
    """One that is there twice, twice, as wrappers make two of it."""
    tensors, tree = flatten(value)
    return [tensors[index] for index in _places(tree)]


def _places(tree: Tree) -> Iterator[int]:
    if isinstance(tree, TensorLeaf):
        yield tree.index
    elif isinstance(tree, (Nest, Instance)):
        for child in tree.children:
            yield from _places(child)


def _is_computed_with(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _start(names: Iterable[str], wanted: Iterable[str]) -> str:
    """What a wrapper puts before all names of the model: "module." of DistributedDataParallel."""
    there, longest = set(names), max(wanted, key=len, default="")
    starts = {name[: -len(longest)] for name in there if f".{name}".endswith(f".{longest}")}
    return min(
        starts, key=lambda one: (sum(one + name not in there for name in wanted), len(one)), default=""
    )


def _generators() -> torch.Tensor:
    """States of torch's random generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)
