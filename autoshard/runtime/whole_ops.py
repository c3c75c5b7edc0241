"""Ops that torch refuses on shards, done on whole tensors; and views of a DTensor that are no views of its shards.

torch gives `p[1]`, where rows are split, as a copy: what is written into it would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from autoshard.runtime.process_groups import pipeline_mesh_of, whole_group
from autoshard.runtime.sharding import as_laid_out
from cost_model.errors import ShardingError, log
from passes.ir.torch_compat import version_of
from passes.ir.torch_dtensor import (
    base_of,
    become_view,
    dtensor_from,
    is_partial,
    is_strided_shard,
    local_of,
    memory_of,
    sharding_of,
    take_place_of,
)
from passes.redistribution.emit_steps import WIDER

aten = torch.ops.aten


_OURS: set[DeviceMesh] = set()
"""Meshes of parallel models in this process, as torch's dispatcher, which asks here, is the process's."""


def whole_on(meshes: Iterable[DeviceMesh]) -> None:
    """Ops of DTensors on these are answered here."""
    _OURS.update(meshes)


def _is_ours(values: Any) -> bool:
    return any(value.device_mesh in _OURS for value in _dtensors(values))


class PartOfWhole(DTensor):
    """A view of the whole values of `root`, replicated. What is written into it is written into `root` too, on all
    ranks together; it follows what is written into `root` in other ways."""

    root: DTensor
    whole: Tensor
    version: int

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = _written(op, args, kwargs or {})
        for part in _parts((args, kwargs)):
            part._follow(any(part is one for one in written))
        if op is aten.as_strided.default:
            return _strided(op, args, kwargs or {})
        plain = lambda value: dtensor_from(local_of(value), sharding_of(value))
        given: Any = pytree.tree_map_only(PartOfWhole, plain, (args, kwargs or {}))
        found = op(*given[0], **given[1])
        for part in written:
            if isinstance(part, PartOfWhole):
                _put(part.root, part.whole)
        if written:
            return _results(op, args, kwargs or {}, found, lambda value: value)
        first = args[0] if args else None
        if isinstance(first, PartOfWhole) and _is_view(op):
            return pytree.tree_map_only(DTensor, lambda view: _part(view, first.root, first.whole), found)
        return found

    def _follow(self, surely: bool) -> None:
        if surely or self.version != _version(self.root):
            self.whole.copy_(self.root.full_tensor())
            self.version = _version(self.root)


def on_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], propagate: Callable[[], Any]) -> Any:
    """The op of whole tensors where torch refuses it on shards, or would write into a copy; else what torch finds."""
    given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, DTensor)]
    written = _written(op, args, kwargs)
    if not _is_ours(given) and not any(map(is_partial, written)):
        return NotImplemented
    if op._schema.is_mutable and not written:  # into a plain tensor: what it is given is whole
        return _whole(op, args, kwargs, written)
    if pending := list(filter(_is_pending, given)):
        for value in pending:
            take_place_of(value, _replicated(value.full_tensor(), _mesh(value)))
        return op(*args, **kwargs)
    if torch.Tag.inplace_view in op.tags and written:
        return _viewed_in_place(op, args, kwargs)
    if op in _NOTED:  # of the shard torch notes it where the whole is not asked, and sends no such shard
        return _NOTED[op](*args)
    if op is aten.select_backward.default and args[2] < 0:  # torch does not count it from the end
        return op(args[0], args[1], args[2] + len(args[1]), args[3])
    if op is aten._to_copy.default and kwargs.get("dtype") in WIDER:
        return _replicated(op(args[0].full_tensor(), **kwargs), _mesh(args[0]))
    if op is aten.sum.dim_IntList and args[1:] and not args[1]:  # of all dims
        return op(args[0], list(range(args[0].ndim)), *args[2:], **kwargs)
    errs = _errs(op, args) or _is_mixed(op, args)
    if errs and any(not p.is_replicate() for value in given for p in value.placements):
        return _whole(op, args, kwargs, written)
    draws = _draws(op, args, kwargs)
    on_cpu = _mesh(given[0]).device_type == "cpu" and not given[0].is_meta
    if draws and on_cpu:  # torch draws in step on others alone
        return _whole(op, args, kwargs, written)
    if written and not draws and not _dtensors(args):  # `torch.eye(5, 3, out=p)`: sizes are of the whole
        return _whole(op, args, kwargs, written)
    try:
        found = propagate()
    except (RuntimeError, NotImplementedError):
        if op.namespace in ("c10d", "_c10d_functional"):
            raise ShardingError(
                f"{op} of a parallel model's parameter or gradient, which is of the whole batch and the same on all "
                "ranks\n  try: leave the collective out; tensor.full_tensor() is the whole tensor"
            ) from None
        return _whole(op, args, kwargs, written)
    if written:
        return _whole(op, args, kwargs, written) if _moves(found, written[0]) else found
    if _is_view(op) and getattr(found, "needs_redistribute", False):
        return _view(op, args, kwargs)
    return found


_ERRING = frozenset({
    aten.mse_loss.default, aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default, aten.huber_loss_backward.default,
    aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.native_group_norm.default, aten.native_group_norm_backward.default,
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten.embedding.default, aten.gather.default, aten.view_copy.default, aten.linalg_ldl_solve.default,
})  # fmt: skip
"""Of these torch divides by the size of the shard, or takes it for that of the whole: means of uneven parts are others,
gradients are larger; or it leaves a sum, of rows in parts, that can be made once."""
_NOTED = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Views that only note what is to be computed, and what computes it."""
_INDEXED = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)


def _errs(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether torch's answer, of shards, is not that of the whole."""
    if op in (aten.fill_.Scalar, aten.fill_.Tensor):  # torch fills a pending sum on every rank, which adds up
        return is_partial(args[0])
    if op in _INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return op in _ERRING


_SCALED = frozenset({aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor})


def _is_mixed(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether a number meets a pending sum, `p.sum() + 1`: torch remembers one of Python for a tensor without dims and
    the other way round, but adds the first on all ranks and the second on one."""
    operands = [v for v, a in zip(args, op._schema.arguments, strict=False) if str(a.type) == "Tensor"]
    partial = [isinstance(value, DTensor) and is_partial(value) for value in operands]
    lone = (not p and not (isinstance(v, Tensor) and v.ndim) for v, p in zip(operands, partial, strict=True))
    return op not in _SCALED and any(partial) and any(lone)


def multiplied(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`mul.Scalar`, which torch refuses of a complex number: it cannot remember it."""
    return aten.mul.Tensor(*args, **kwargs)


def convolved(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Convolutions, of whole operands: torch's are of ranks that have all channels, and refuse plain operands."""
    return lambda op, args, kwargs: (
        _whole(op, args, kwargs, []) if _is_ours((args, kwargs)) else plain(op, args, kwargs)
    )


def _is_pending(value: DTensor) -> bool:
    """Whether it waits for a maximum or a norm over ranks: torch adds such up as if they were done."""
    pending = (p for p in value.placements if isinstance(p, Partial))
    return any(p.reduce_op in ("max", "min") or hasattr(p, "norm_type") for p in pending)


def as_strided(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Of the whole memory that the tensor is a view of, as in one process; torch has it not of shards."""

    def strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return plain(op, args, kwargs)
        except RuntimeError:
            if not _is_ours((args, kwargs)):
                raise
            return _strided(op, args, kwargs)

    return strided


def _strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _named(op, args, kwargs)
    view, offset = given["self"], given.get("storage_offset")
    memory = base_of(view)
    is_known = not view.storage_offset() or (isinstance(view, PartOfWhole) and view.root is memory)
    if not is_known or not memory.is_contiguous():
        raise ShardingError(
            "as_strided of a part of a tensor that is in parts on ranks: where in memory it begins is not known\n"
            "  try: as_strided of the parameter, storage_offset counted from its first element; or of .clone()"
        )
    offset = view.storage_offset() if offset is None else offset
    return _view(op, (memory, given["size"], given["stride"], offset), {})


def least_or_greatest(plain: Callable[..., Any]) -> Callable[..., Any]:
    """argmin and argmax, whose dim torch does not count from the end, and of which an empty shard has none."""

    def place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _named(op, args, kwargs)
        x, dim = given["self"], given.get("dim")
        if not _is_ours(x):
            return plain(op, args, kwargs)
        args = (x, dim if dim is None or dim >= 0 else dim + x.ndim, given.get("keepdim", False))
        if any(is_strided_shard(p) for p in x.placements) or _has_empty_shards(x):
            return _whole(op, args, {}, [])
        return plain(op, args, {})

    return place


def _has_empty_shards(x: DTensor) -> bool:
    """Whether a rank of the mesh may have none: the same on all ranks."""
    parts = [1] * x.ndim
    for placement, ranks in zip(x.placements, x.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= ranks
    return any(size <= -(-size // n) * (n - 1) for size, n in zip(x.shape, parts, strict=True))


_RESIZED = """resize_ of a tensor of a parallel model, which may be in parts on ranks
  try: p.data = a tensor of the new size; p.grad = None, to free it"""


@torch.no_grad()
def _viewed_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """`p.unsqueeze_(0)`: the tensor becomes its view."""
    name = op._schema.name.split("::")[1].removesuffix("_").replace("resize", "reshape")
    if name == "reshape" and prod(args[1]) != args[0].numel():
        raise ShardingError(_RESIZED)
    return become_view(op, args, kwargs, getattr(args[0], name)(*args[1:], **kwargs))


def _moves(found: Any, target: DTensor) -> bool:
    """Whether torch would write into a tensor that lies otherwise than the target."""
    sharding = getattr(found, "output_spec", None)
    placements = getattr(sharding, "placements", target.placements)
    return tuple(placements) != tuple(target.placements)


@torch.no_grad()
def _whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[DTensor]) -> Any:
    if _is_view(op):
        return _view(op, args, kwargs)
    log.debug("%s is computed on whole tensors: torch has no rule by which shards are enough", op)
    wholes = {id(value): _values(value) for value in _dtensors((args, kwargs))}
    whole = lambda value: wholes[id(value)]
    found = op(*pytree.tree_map_only(DTensor, whole, args), **pytree.tree_map_only(DTensor, whole, kwargs))
    if _draws(op, args, kwargs):
        _send_first(
            [*pytree.tree_leaves(found), *(wholes[id(target)] for target in written)],
            _mesh(_dtensors((args, kwargs))[0]),
        )
    for target in written:
        _put(target, wholes[id(target)])
    if op._schema.is_mutable and not written:
        return found
    operands = _dtensors((args, kwargs))
    return _results(op, args, kwargs, found, lambda value: _like_one(value, operands))


def _send_first(values: Iterable[Any], mesh: DeviceMesh) -> None:
    """Into `values` those of the first rank: each has drawn its own."""
    for value in {id(value): value for value in values if isinstance(value, Tensor)}.values():
        sent = value.contiguous()
        dist.broadcast(sent, group=whole_group(mesh), group_src=0)
        if sent is not value:
            value.copy_(sent)


def _like_one(value: Tensor, operands: list[DTensor]) -> Tensor:
    """Laid out as the first operand of its shape, as a gradient should be; else replicated; whole if it is sparse."""
    if value.layout is not torch.strided:
        return value
    for one in operands:
        if one.shape == value.shape and value.ndim and not is_partial(one):
            return as_laid_out(value, one)
    return _replicated(value, _mesh(operands[0]))


@torch.no_grad()
def _view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    root, *rest = args
    whole = _values(root)
    views = op(whole, *rest, **kwargs)
    mesh = _mesh(root)
    return pytree.tree_map_only(Tensor, lambda view: _part(_replicated(view, mesh), root, whole), views)


def _part(view: DTensor, root: DTensor, whole: Tensor) -> PartOfWhole:
    part = dtensor_from(local_of(view), sharding_of(view), PartOfWhole)
    assert isinstance(part, PartOfWhole)
    part.root, part.whole, part.version = root, whole, _version(root)
    return part


def _version(root: DTensor) -> int:
    return 0 if root.is_inference() else version_of(root)


def _values(value: DTensor) -> Tensor:
    """All of it, in memory of its own."""
    found = value.full_tensor()
    return found.clone() if memory_of(found) == memory_of(value) else found


def _put(target: DTensor, whole: Tensor) -> None:
    local_of(target).copy_(local_of(as_laid_out(whole, target)))


def _replicated(value: Tensor, mesh: Any) -> DTensor:
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _mesh(value: DTensor) -> Any:
    """All ranks that run the script, where stages have their own."""
    return pipeline_mesh_of(value.device_mesh) or value.device_mesh


def _dtensors(values: Any) -> list[DTensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, DTensor)]


def _parts(values: Any) -> list[PartOfWhole]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, PartOfWhole)]


def _named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What is given, by the names of the op's schema."""
    return {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it draws random numbers: dropout and attention do where they drop."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = _named(op, args, kwargs)
    return given.get("dropout_p", given.get("p")) != 0.0 and given.get("train") is not False


def _results(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any, made: Callable[[Tensor], Tensor]
) -> Any:
    """What the op returns: operands that it has written into, where its schema says so, others as `made` of them."""
    given = _named(op, args, kwargs)
    names = {
        frozenset(a.alias_info.before_set): a.name for a in op._schema.arguments if a.alias_info is not None
    }

    def one(result: Any, value: Any) -> Any:
        if result.alias_info is not None and result.alias_info.is_write:
            return given[names[frozenset(result.alias_info.before_set)]]
        return pytree.tree_map_only(Tensor, made, value)

    results = op._schema.returns
    if len(results) == 1:
        return one(results[0], found)
    return tuple(one(result, value) for result, value in zip(results, found or (), strict=True)) or None


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """Operands that the op changes."""
    given = _named(op, args, kwargs)
    changed = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _dtensors([given.get(name) for name in changed])


def _is_view(op: Any) -> bool:
    """Whether its result lies in the memory of its first operand."""
    first = next(iter(op._schema.arguments), None)
    return first is not None and first.alias_info is not None and not first.alias_info.is_write
