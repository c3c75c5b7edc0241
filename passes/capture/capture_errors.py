"""CaptureErrors: what could not be traced, at which line of the user's code, and what to do."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn

from cost_model.errors import CaptureError
from passes.capture.provenance import NESTED, is_user_file, node_module, node_source, place_text, refused
from passes.capture.questions import Undecided, remedy_at
from passes.capture.rows import RowsUnknown
from passes.ir.torch_tracing import is_value_missing, shape_dependent_errors

_CHANGED_IN_PLACE = ("mutating a non-functional tensor", "expected to have an entirely functional graph")
"""What torch says where a tensor that it has not traced from the beginning is written to."""

_ELSEWHERE = (
    "after each optimizer.step(), under torch.no_grad(); or once, by a call before autoshard; or work on a "
    "clone; or requires_grad=False, or a buffer (register_buffer): both may change"
)
_FLAGS = "change requires_grad flags of leaf variables"
_FLAG_REMEDY = (
    "before the call; or, with values = {name: p.detach() for name, p in module.named_parameters()}, "
    "torch.func.functional_call(module, values, x) in place of module(x)"
)
_TO_LEAVES = "Cannot backprop through mirrored meta"
"""What torch says where gradients would go to the `.grad` of traced tensors."""
_BACKWARD = (
    "it calls .backward() itself, which leaves gradients in .grad of {}, out of sight of a compiled step"
)
_BACKWARD_REMEDY = (
    "gradients = torch.autograd.grad(loss, tensors), and return the loss, or what is made of them; the backward of a "
    "custom function returns the gradients of parameters that apply() is given"
)
_MAX_NORM = (
    "max_norm=None, and after each optimizer.step() for all rows, under torch.no_grad(): "
    "weight.mul_((max_norm / (weight.norm(dim=1, keepdim=True) + 1e-7)).clamp(max=1))"
)


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_COLLECTIVE_FILES = ("distributed_c10d.py", "_functional_collectives.py", os.path.join("nn", "functional.py"))
"""Of torch.distributed."""
_DRAW_REMEDY = (
    "leave `generator=` out, with torch.manual_seed(seed) before the call; or draw before it, and pass that"
)
_LONGEST = 1500
"""Characters of torch's own text: some list a whole graph."""
_REMEDY = (
    "call the model without autoshard, to see whether it is the model; else write this line with other ops, or compute "
    "it before the call and pass the result"
)


def capture_error(model: nn.Module, forward: Callable[..., Any], cause: Exception) -> CaptureError:
    """The error for `cause`, raised while `forward` was traced."""
    place = (
        (cause.place if isinstance(cause, (Undecided, RowsUnknown)) else None)
        or _place(cause)
        or _definition(forward)
    )
    reason, remedy = _explain(cause, place)
    return refused(reason, remedy, model=model, at=place)


def users_part(cause: BaseException) -> BaseException:
    """`cause` with the frames of the user's code alone in its tracebacks, where there are any."""
    for error in _chain(cause):
        kept: TracebackType | None = None
        for step in reversed(list(_steps(error.__traceback__))):
            if is_user_file(step.tb_frame.f_code.co_filename):
                kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
        if kept is not None:
            error.__traceback__ = kept
    return cause


def _steps(step: TracebackType | None) -> Iterator[TracebackType]:
    while step is not None:
        yield step
        step = step.tb_next


def mutation_error(model: nn.Module, what: str, source: str, by: Any) -> CaptureError:
    """For an in-place change of `what`, an argument or a parameter, by an op."""
    is_renorm = by is torch.ops.aten.embedding_renorm.default
    how, remedy = (" (max_norm)", _MAX_NORM) if is_renorm else ("", _ELSEWHERE)
    return refused(f"forward changes {what} in place{how}", remedy, model=model, at=source)


def own_backward_error(model: nn.Module, where: str) -> CaptureError:
    """where: the tensor whose `.grad` a call of `.backward()` within the forward, or its backward, changes."""
    return refused(_BACKWARD.format(where), _BACKWARD_REMEDY, model=model)


def held_object_error(model: nn.Module, node: fx.Node, value: object) -> CaptureError:
    """For an op that is called with an object of torch: a generator, a process group, a nested graph."""
    name = str(getattr(node.target, "_opname", node.name))
    if isinstance(value, torch.Generator):
        what, remedy = f"{name} draws from a generator of the user's own", _DRAW_REMEDY
    elif is_collective(node):
        what, remedy = _communicates(name)
    else:
        what, remedy = (
            f"{name} is called with {type(value).__name__}, which no graph of tensors holds",
            _REMEDY,
        )
    return refused(what, remedy, model=model, at=node_source(node))


def is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") in _COLLECTIVES


def _communicates(what: str) -> tuple[str, str]:
    return (
        f"its forward communicates ({what}), but computes with the global batch, which every rank passes a share of",
        "leave the collective out: what it sums or gathers over the ranks is there already; of things that are not "
        "the model's, call it after the forward",
    )


def _explain(cause: Exception, place: str) -> tuple[str, str]:
    if name := _collective_called(cause):
        return _communicates(name)
    if isinstance(cause, Undecided) or is_value_missing(cause):
        if re.search(r"\.numpy\(|\bnp\.", getattr(cause, "place", "")):
            return (
                "NumPy reads the values of a tensor, which are not known before the call",
                "keep or return the tensor (`self.kept = x.detach()`), and .numpy() of it after the call",
            )
        return (
            "the value of a tensor decides what runs next (`if`, `.item()`, `.tolist()`, `int()`, ...)",
            remedy_at(
                place,
                getattr(cause, "remedy", "")
                or "torch.where, masks, an argument that is a Python number, or do it outside of forward",
            ),
        )
    reason, _, remedy = str(cause).partition("\n  try: ")
    if remedy:
        return reason, remedy
    if isinstance(cause, RowsUnknown):
        return f"the shape of a result depends on the values of a tensor: {cause.what}", cause.remedy
    if isinstance(cause, shape_dependent_errors()):
        return (
            "the shape of a result depends on the values of a tensor (nonzero, boolean index, unique, ...)",
            "torch.where or a mask of fixed shape",
        )
    if any(text in str(cause) for text in _CHANGED_IN_PLACE):
        return (
            "it changes a tensor in place that is neither a buffer nor made in forward",
            "self.register_buffer(name, tensor, persistent=False), which may change",
        )
    if _FLAGS in str(cause):
        return "it changes requires_grad of a parameter in forward, beside writes in place", _FLAG_REMEDY
    if _TO_LEAVES in str(cause):
        return _BACKWARD.format("parameters"), _BACKWARD_REMEDY
    if "nested_tensor" in str(cause) or "NestedTensor" in str(cause):
        return NESTED
    text = str(cause).strip() or "no message"
    reason = f"{type(cause).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ...'}"
    if isinstance(cause, TypeError) and _place(cause) is None:
        return reason, "call it with arguments that its forward accepts"
    return reason, _REMEDY


def _collective_called(cause: BaseException) -> str | None:
    """The function of torch.distributed that the user's code called where `cause` was raised."""
    folder = os.path.dirname(torch.distributed.__file__)
    files = {os.path.join(folder, name) for name in _COLLECTIVE_FILES}
    for error in _chain(cause):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            if code.co_filename in files and code.co_name != "wrapper":
                return code.co_name
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _place(cause: BaseException) -> str | None:
    """ "/path/model.py:12, in forward: if x.sum() > 0:" of the innermost frame of the user's code."""
    for error in _chain(cause):
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            code = frame.f_code
            if is_user_file(code.co_filename):
                return place_text(code, line)
    return None


def _definition(forward: Callable[..., Any]) -> str:
    target = forward.forward if isinstance(forward, nn.Module) else forward
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return repr(target)


aten = torch.ops.aten
_ALIKE = frozenset(
    {
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.addbmm.default,
        aten.mv.default, aten.addmv.default, aten.dot.default, aten.convolution.default, aten.linear.default,
    }
)  # fmt: skip


def check_dtypes(graph: fx.Graph) -> None:
    """CaptureError for the first product or convolution of a raw graph whose operands differ in dtype: eager torch
    refuses it."""
    for node in graph.nodes:
        if node.target in _ALIKE:
            values = [operand.meta["val"] for operand in node.all_input_nodes]
            dtypes = list(dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor)))
            if len(dtypes) > 1:
                raise _error(node, dtypes)


def _error(node: fx.Node, dtypes: list[torch.dtype]) -> CaptureError:
    where = " ".join(part for part in (node_module(node), node_source(node)) if part)
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return refused(
        f"{node.target} of {names}{' at ' + where if where else ''}, which torch does not compute",
        f"inputs of the parameters' dtype, x.to({dtypes[-1]})",
    )
