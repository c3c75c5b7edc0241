"""Where another thread is, as far as its stack says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed

from autoshard.watching.telling import whereabouts

DISTRIBUTED = os.path.dirname(torch.distributed.__file__)
OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

Call = Callable[[Callable[[], Any]], Any]


def written(file: str, name: str) -> Call:
    """A function of that name in that file, which calls what it is given."""
    space: dict[str, Any] = {}
    exec(compile(f"def {name}(call): call()", file, "exec"), space)
    return space[name]


USER = written("/home/train.py", "step")
REDUCE = written(f"{DISTRIBUTED}/distributed_c10d.py", "all_reduce")
WITHIN = written(f"{DISTRIBUTED}/distributed_c10d.py", "_wait")
LOGGED = written(f"{DISTRIBUTED}/c10d_logger.py", "wrapper")
PACKAGE = written(f"{OURS}/autoshard/runtime/step.py", "run")


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ((USER,), ("train.py:1", "")),
        ((USER, LOGGED, REDUCE, WITHIN), ("train.py:1", "all_reduce")),
        ((USER, PACKAGE, REDUCE), ("train.py:1", "all_reduce")),
        ((written("/home/a.py", "a"), USER), ("train.py:1", "")),
        ((written("/home/träin.py", "step"),), ("tr\\xe4in.py:1", "")),
        ((PACKAGE,), ("", "")),
    ],
    ids=["user", "torch", "ours", "innermost", "not-ascii", "nowhere"],
)
def test_the_users_line_and_what_it_called_of_torch_distributed(
    path: tuple[Call, ...], wanted: tuple[str, str]
) -> None:
    """Each calls the next, and the last waits."""
    over = threading.Event()
    run: Callable[[], Any] = over.wait
    for call in reversed(path):
        run = partial(call, run)
    thread = threading.Thread(target=run)
    thread.start()
    assert thread.ident is not None
    deadline = time.monotonic() + 60.0
    try:
        while (found := whereabouts(thread.ident)) != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        over.set()
        thread.join()
    assert found == wanted


def test_of_no_thread_nothing_is_known() -> None:
    assert whereabouts(1) == ("", "")
