"""torch.distributed as a forward sees it while it is traced: a world of one rank, whose batch is the global one.

    world_size = dist.get_world_size()                      # 1
    if dist.is_initialized(): dist.all_reduce(counts)       # counts are of the global batch as they are
    dist.all_gather(parts, x)                               # parts = [x]

So a model that synchronizes between the ranks of data parallelism, as codebooks, mixtures and contrastive losses do,
computes what those ranks compute together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from passes.ir.torch_dispatch import replaced_attribute


class _Done:
    """Of an `async_op`."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _into(out: Tensor, given: Tensor) -> None:
    out.copy_(given.reshape(out.shape))


def _as_it_is(given: Any, *args: Any) -> None:
    """Summed or broadcast over one rank."""


def _gathered(parts: list[Any], given: Any) -> None:
    if isinstance(given, Tensor):
        _into(parts[0], given)
    else:
        parts[0] = given


_ALONE: dict[str, Callable[..., None]] = {
    "all_reduce": _as_it_is, "reduce": _as_it_is, "broadcast": _as_it_is, "barrier": lambda *args: None,
    "all_gather": _gathered, "all_gather_object": _gathered, "all_gather_into_tensor": _into,
    "reduce_scatter_tensor": _into,
}  # fmt: skip
"""What collectives do alone, given their tensors."""
_NUMBERS = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}


@contextmanager
def world_of_one() -> Generator[None]:
    """For this thread, and for code that asks by the names of `torch.distributed`; of groups of its own as ever."""
    if not dist.is_available():
        yield
        return
    thread = threading.get_ident()
    with ExitStack() as stack:
        for module in (dist, distributed_c10d):
            for name, number in _NUMBERS.items():
                stack.enter_context(_answered(module, name, thread, lambda *args, n=number, **kwargs: n))
            for name, alone in _ALONE.items():
                stack.enter_context(_answered(module, name, thread, _collective(alone)))
        yield


def _answered(module: Any, name: str, thread: int, answer: Callable[..., Any]) -> Any:
    own = getattr(module, name)

    @wraps(own)
    def asked(*args: Any, **kwargs: Any) -> Any:
        is_whole = _is_whole(args, kwargs) and threading.get_ident() == thread
        return (answer if is_whole else own)(*args, **kwargs)

    return replaced_attribute(module, name, asked)


def _is_whole(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it is of all ranks, and the model was made for one: a list for the parts of more was not."""
    groups = [kwargs.get("group"), *(arg for arg in args if isinstance(arg, dist.ProcessGroup))]
    parts = [part for part in (*args, *kwargs.values()) if isinstance(part, list)]
    return all(group in (None, dist.group.WORLD) for group in groups) and all(
        len(part) == 1 for part in parts
    )


def _collective(alone: Callable[..., None]) -> Callable[..., Any]:
    def run(*args: Any, async_op: bool = False, group: Any = None, op: Any = None, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, (Tensor, list))]
        alone(*given)
        return _Done() if async_op else None

    return run
