"""Which module and which line of the user's code every traced op comes from, and errors that name them.

The tracer copies `torch.fx.traceback.current_meta["custom"]` to each node it makes, and from a
forward node to the backward nodes that differentiate it. Here that entry is kept up to date: by
hooks around every module call, and by a mode that sees every call of a torch function. Refused there: tensors that
no graph holds, since they are not dense: sparse, nested, quantized, oneDNN's.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.fx import traceback as fx_traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from cost_model.errors import CaptureError, UnsupportedOpError
from passes.ir.torch_tracing import NESTED_MAKERS

_MODULE, _SOURCE, _AGAIN = "autoshard.module", "autoshard.source", "autoshard.again"
_CHECKPOINT = torch.utils.checkpoint.__file__
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_NOT_THE_USERS = tuple(
    path + os.sep
    for path in (
        os.path.dirname(os.path.abspath(torch.__file__)),
        *(os.path.join(_OURS, package) for package in ("autoshard", "passes", "cost_model")),
    )
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


@cache
def is_user_file(filename: str) -> bool:
    """Whether code of `filename` is the user's or a model library's: not torch's, ours or Python's."""
    if filename.startswith(("<", *_NOT_THE_USERS)):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or "site-packages" in filename


def place_text(code: CodeType, line: int) -> str:
    """ "/path/model.py:12, in forward: if x.sum() > 0:"."""
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}, in {code.co_name}" + (f": {text}" if text else "")


def frames(frame: FrameType | None, stop: frozenset[int] = frozenset()) -> Iterator[FrameType]:
    """`frame` and those that called it, the innermost first, to one whose code has an id of `stop`: to hash a code
    object takes as long as the rest of a look at it."""
    while frame is not None and id(frame.f_code) not in stop:
        yield frame
        frame = frame.f_back


def is_in_while(line: str) -> bool:
    """Whether "model.py:12" is in a `while` loop, the condition included."""
    return _is_in(line, (ast.While,))


def is_in_raise(line: str) -> bool:
    """Whether "model.py:12" is in a statement that may only raise."""
    return _is_in(line, (ast.Raise, ast.Assert))


def _is_in(line: str, kinds: tuple[type[ast.stmt], ...]) -> bool:
    filename, _, number = line.rpartition(":")
    return any(int(number) in lines for lines in _statements(filename, kinds))


@cache
def _statements(filename: str, kinds: tuple[type[ast.stmt], ...]) -> list[range]:
    """The lines of each."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # of a notebook, for one
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [range(one.lineno, (one.end_lineno or one.lineno) + 1) for one in found]


def user_frame(running: Iterable[FrameType]) -> FrameType | None:
    """The innermost frame of the user's code."""
    return next((frame for frame in running if is_user_file(frame.f_code.co_filename)), None)


def user_place() -> str:
    """The innermost line of the user's code that runs."""
    frame = user_frame(frames(sys._getframe(1)))
    return "" if frame is None else place_text(frame.f_code, frame.f_lineno)


class _SourceMode(TorchFunctionMode):
    """Notes the line that calls each torch function, then lets `replace` answer it or runs it."""

    def __init__(self, replace: dict[Any, Any], stop: frozenset[CodeType]) -> None:
        super().__init__()
        self.replace = replace
        self.stop = frozenset(map(id, stop))
        self._frames: list[FrameType] = []

    def _region(self, running: Sequence[FrameType]) -> int | None:
        """A number for each call of a checkpointed function: by the outermost frame of it among those that run."""
        inside = [frame for frame in running if frame.f_code.co_filename == _CHECKPOINT]
        if not inside:
            return None
        if inside[-1] not in self._frames[-1:]:
            self._frames.append(inside[-1])  # held, so that no other call gets its identity
        return len(self._frames)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        running = list(frames(sys._getframe(1), self.stop))
        entries: dict[str, Any] = {_AGAIN: self._region(running)}
        if (line := user_frame(running)) is not None:
            entries[_SOURCE] = f"{os.path.basename(line.f_code.co_filename)}:{line.f_lineno}"
        meta = fx_traceback.current_meta
        meta["custom"] = {**meta.get("custom", {}), **entries}
        check_dense_call(func, args)
        answer: Any = self.replace.get(func, func)
        result = answer(*args, **(kwargs or {}))
        check_dense_call(func, (), result)
        return result


@contextmanager
def provenance(
    model: nn.Module, replace: dict[Any, Callable[..., Any]], stop: frozenset[CodeType]
) -> Generator[None]:
    """Note module and source of every op that runs inside, and answer calls of the torch functions in
    `replace` by the functions given there. `stop`: code of the frames that the user's code lies below."""
    names = {module: name for name, module in model.named_modules()}
    entered: list[dict[str, str]] = []

    def enter(module: nn.Module, _args: Any) -> None:
        custom = fx_traceback.current_meta.get("custom", {})
        entered.append(custom)
        if module in names:
            fx_traceback.current_meta["custom"] = {**custom, _MODULE: names[module]}

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        fx_traceback.current_meta["custom"] = entered.pop()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    with hooks[0], hooks[1], fx_traceback.preserve_node_meta(), _SourceMode(replace, stop):
        yield


def node_module(node: fx.Node) -> str:
    """Dotted path of the module whose forward made `node` or what it differentiates; "" for the root."""
    return node.meta.get("custom", {}).get(_MODULE, "")


def node_source(node: fx.Node) -> str:
    """ "model.py:31", or "" if unknown."""
    return node.meta.get("custom", {}).get(_SOURCE, "")


def node_is_saved(node: fx.Node) -> bool:
    """Whether the policy of the user's selective checkpoint saves what `node` makes; torch notes it as "recompute"."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def node_checkpoint(node: fx.Node) -> int | None:
    """Which call of `torch.utils.checkpoint` runs `node`, or what it differentiates; None: none does."""
    return node.meta.get("custom", {}).get(_AGAIN)


_COMPRESSED = """to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc sparse_compressed_tensor sparse_csr_tensor
sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor"""
_MAKERS = {**dict.fromkeys(_COMPRESSED.split(), "sparse"), **dict.fromkeys(NESTED_MAKERS, "nested")}
"""Functions that may not run on traced tensors, not even to see what they make: some end the process."""


NESTED = (
    "it makes or takes a nested tensor, and graphs hold dense ones",
    "a padded tensor and a mask, made before the call",
)
"""What is wrong, and what to do."""


def refused(what: str, remedy: str, *, model: nn.Module | None = None, at: str | None = "") -> CaptureError:
    """at: the user's line."""
    subject = "cannot capture" if model is None else f"cannot capture {type(model).__name__}"
    line = f"\n  at {at}" if at else ""
    return CaptureError(f"{subject}: {what}{line}\n  try: {remedy}")


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def check_dense(tensor: Tensor, name: str) -> None:
    """CaptureError for a parameter, buffer or argument that is not dense, or that stands for other tensors."""
    if not is_dense(tensor):
        kind = _kind(tensor)
        dense = {
            "nested": f"torch.nested.to_padded_tensor({name}, 0.0), and a mask",
            "quantized": f"{name}.dequantize()",
        }.get(kind, f"{name}.to_dense()")
        raise refused(f"{name} is {kind}, not a dense tensor", dense)
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and not isinstance(tensor, DTensor):
        inner, _ = flatten()
        unwrapped = "from torchao.utils import unwrap_tensor_subclass; unwrap_tensor_subclass(model)"
        plain = "a plain one: plans gather in float8 without Float8LinearConfig(enable_fsdp_float8_all_gather=True)"
        what = (
            f"{name} is of type {type(tensor).__name__}, which stands for other tensors: {', '.join(inner)}"
        )
        raise refused(what, plain if tensor.requires_grad else unwrapped)


def check_dense_call(func: Any, args: Sequence[Any], result: Any = None) -> None:
    """UnsupportedOpError for a call of a torch function that takes, makes or would make such a tensor."""
    name = getattr(func, "__name__", "")
    made = _MAKERS.get(name)
    for value in (*args, result):
        if isinstance(value, Tensor) and not is_dense(value) and name != "__get__":
            made = _kind(value)
    if made == "nested":
        raise UnsupportedOpError("\n  try: ".join(NESTED))
    if made is not None:
        raise UnsupportedOpError(
            f"{name}() takes or makes a {made} tensor, and graphs hold dense ones\n  try: a dense tensor: .to_dense() "
            "before the model gets it, a mask, or torch.zeros(size).index_put(indices, values, accumulate=True)"
        )


def _kind(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else str(tensor.layout)
