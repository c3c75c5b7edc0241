"""A plan as code of stock PyTorch: `plan.export("parallel.py")`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_summary import axis_words
from autoshard.plan.stock_calls import StockCalls, dotted
from autoshard.version import __version__
from cost_model.errors import PlanError
from cost_model.memory import format_bytes, format_seconds


def export_code(plan: PlanContent) -> str:
    """The text of a module with `make_mesh` and `parallelize`. PlanError where no axis of the mesh can be written so,
    and for stages."""
    if plan.axis:
        raise PlanError(
            f"export(...): a pipeline along {plan.axis} cannot be written as code of stock PyTorch\n"
            "  try: find_plan(..., stages=None), or autoshard(model, mesh, plan=...)"
        )
    odd = next((name for name in plan.parameter_layouts if not re.fullmatch(r"[\w.]+", name)), None)
    if odd is not None:
        raise PlanError(
            f"export(...): the name {odd!r} cannot stand in code\n"
            "  try: names of letters, digits and _ for modules and parameters"
        )
    return _Written(StockCalls(plan)).text()


@dataclass(frozen=True)
class _Written:
    calls: StockCalls

    @property
    def plan(self) -> PlanContent:
        return self.calls.plan

    def text(self) -> str:
        if not self.calls.tensor and not self.calls.data:
            *missing, _ = self.calls.missing()
            raise PlanError(
                "export(...): nothing of this plan can be written as code of stock PyTorch\n"
                + "".join(f"    {line}\n" for line in missing or ["every rank computes the same"])
                + "  try: autoshard(model, mesh, plan=...), or a plan of a family, plan.why_not('FSDP')"
            )
        problems = [*self.calls.styles.problems, *self.calls.unstyled()]
        if problems:
            raise PlanError(
                f"export(...): {problems[0]}: parallelize_module has no style that adds its gradient up\n"
                "  try: autoshard(model, mesh, plan=...), or constraints that keep those layers whole"
            )
        body = "\n".join(self._body())
        imports = "\n".join(_imports(body))
        return f"{self._head()}\n{imports}\n\n\n{body}\n"

    def _head(self) -> str:
        plan = self.plan
        limit = "" if plan.memory_limit is None else f" of {format_bytes(plan.memory_limit)}"
        predicted = f"{format_seconds(plan.step_time)} a step, {format_bytes(plan.peak_memory)}{limit}"
        axes = [f"{axis}: {axis_words([plan.records], axis)}" for axis in plan.mesh.real_axes()]
        return "\n".join(
            [
                f'"""Written by autoshard {__version__} from a plan for {plan.mesh}: code of stock PyTorch.',
                "",
                f"The plan: {predicted}; predicted.",
                *axes,
                "",
                "Not done here:",
                *(f"  - {line}" for line in self.calls.missing()),
                "",
                *_usage(self.calls),
                '"""',
                "",
            ]
        )

    def _body(self) -> Iterator[str]:
        axes = self._mesh_axes()
        names = "".join(f'"{name}", ' for name in axes)
        yield 'def make_mesh(device="cuda"):'
        yield f"    return init_device_mesh(device, {tuple(axes.values())}, mesh_dim_names=({names.strip()}))\n\n"
        yield "def parallelize(model, mesh):"
        if self.calls.tensor is not None:
            yield f'    tensor = mesh["{self.calls.tensor}"]'
            yield "    styles = {"
            yield from (f'        "{name}": {style},' for name, style in self._styles())
            yield "    }"
            yield "    parallelize_module(model, tensor, styles)"
            if self.calls.sequence:
                for name, numbers in self.calls.layers.items():
                    yield f"    first, last = {_child(name, numbers[0])}, {_child(name, numbers[-1])}"
                    yield "    first.register_forward_pre_hook(partial(split_sequence, tensor))"
                    yield "    last.register_forward_hook(partial(gather_sequence, tensor))"
        for name in self.calls.again:
            yield f"    for layer in {_module(name)}.children():"
            yield "        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)"
        yield from self._data_calls()
        if self.calls.sequence:
            yield _SEQUENCE
        if self.plan.micro_batches > 1:
            yield _PIECES.format(count=self.plan.micro_batches)

    def _mesh_axes(self) -> dict[str, int]:
        """An axis of one is what fully_shard replicates over all others of."""
        axes = {axis: self.plan.mesh.size(axis) for axis in self.plan.mesh.names}
        if not self._replicated_by_fsdp:
            return axes
        (name,) = self.calls.data
        return {
            k: v
            for axis, n in axes.items()
            for k, v in ((axis, n), *([(f"{name}_shard", 1)] * (axis == name)))
        }

    @property
    def _replicated_by_fsdp(self) -> bool:
        """Whether weights are whole over the only data axis, beside tensor parallelism, which DDP does not know."""
        return list(self.calls.data.values()) == [False] and self.calls.tensor is not None

    def _data_calls(self) -> Iterator[str]:
        if not self.calls.data:
            yield "    return model"
        elif list(self.calls.data.values()) == [False] and self.calls.tensor is None:
            (axis,) = self.calls.data
            yield f'    return DistributedDataParallel(model, process_group=mesh.get_group("{axis}"))'
        else:
            names = sorted(self.calls.data, key=lambda axis: self.calls.data[axis])
            names += [f"{names[0]}_shard"] * self._replicated_by_fsdp
            yield f"    data = mesh[{', '.join(map(_quoted, names))}]"
            for name in self.calls.layers:
                yield f"    for layer in {_module(name)}.children():"
                yield "        fully_shard(layer, mesh=data)"
            yield "    return fully_shard(model, mesh=data)"

    def _styles(self) -> Iterator[tuple[str, str]]:
        """Of modules, equal layers by one pattern."""
        found = dict(self._each_style())
        patterns: dict[str, str] = {}
        for name, style in found.items():
            place = re.search(r"(?:^|\.)(\d+)\.", name)
            if place is None:
                patterns[name] = style
                continue
            before, after = name[: place.start(1)], name[place.end(1) :]
            alike = [f"{before}{number}{after}" for number in self.calls.layers[name[: place.start()]]]
            same = all(found.get(one) == style for one in alike)
            patterns[f"{before}*{after}" if same else name] = style
        return iter(patterns.items())

    def _each_style(self) -> Iterator[tuple[str, str]]:
        styles = self.calls.styles
        for module, gathered in styles.columns.items():
            given = ["output_layouts=Replicate()"] * gathered + [
                "input_layouts=Shard(1)"
            ] * self.calls.is_inside(module)
            yield module, f"ColwiseParallel({', '.join(given)})"
        for module, in_parts in styles.rows.items():
            given = ["input_layouts=Replicate()"] * (not in_parts) + [
                "output_layouts=Shard(1)"
            ] * self.calls.is_inside(module)
            yield module, f"RowwiseParallel({', '.join(given)})"
        for module, dim in styles.embeddings.items():
            words = (
                "RowwiseParallel(input_layouts=Replicate())",
                "ColwiseParallel(output_layouts=Replicate())",
            )
            yield module, words[dim]
        for module in styles.others:
            if self.calls.is_inside(module):
                yield module, "SequenceParallel(use_local_output=True)"


def _usage(calls: StockCalls) -> Sequence[str]:
    """How a script takes it."""
    rows = f"its own rows of the batch along {', '.join(calls.data)}" if calls.data else "the whole batch"
    lines = [
        "mesh = make_mesh(); model = parallelize(model, mesh), before the optimizer is made. A rank passes",
        f"{rows}.",
    ]
    if calls.data:
        lines.append(
            f"The loss must be a mean over its rows: gradients are averaged along {', '.join(calls.data)}, which of"
        )
        lines.append("a sum, or where rows count unequally, gives other gradients than one process has.")
    if calls.plan.micro_batches > 1:
        lines.append("A step is backward_in_pieces(model, *inputs), where the model returns a loss.")
    if calls.tensor:
        count = calls.plan.mesh.size(calls.tensor)
        lines.append(f"Between layers split by columns and by rows a rank has 1/{count} of the features:")
        lines.append("code that says a number of heads says -1 instead.")
    axes = ", ".join(map(_quoted, calls.data))
    batch = f", batch_axes=[{axes}]" if axes else ""
    return [*lines, f"Check: autoshard.verify_parallel(make_model, parallelize, inputs, mesh=...{batch})"]


def _quoted(name: str) -> str:
    return f'"{name}"'


def _module(name: str) -> str:
    return f'model.get_submodule("{name}")' if name else "model"


def _child(name: str, number: int) -> str:
    return f'model.get_submodule("{dotted(name)}{number}")'


_SEQUENCE = '''

def split_sequence(mesh, layer, inputs):
    """The first layer takes a rank's part of the sequence, dim 1."""
    whole = DTensor.from_local(inputs[0], mesh, [Replicate()])
    return whole.redistribute(placements=[Shard(1)]).to_local(), *inputs[1:]


def gather_sequence(mesh, layer, inputs, output):
    """What the last layer returns, whole on every rank."""
    return DTensor.from_local(output, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()'''

_PIECES = '''

def backward_in_pieces(model, *inputs):
    """Forward and backward of a rank's rows in {count} pieces, in place of both; the mean of their losses."""
    pieces = list(zip(*(one.chunk({count}) for one in inputs)))
    losses = []
    for piece in pieces:
        loss = model(*piece) / len(pieces)
        loss.backward()
        losses.append(loss.detach())
    return sum(losses)'''

_HOMES = {
    "functools": ("partial",),
    "torch.distributed.device_mesh": ("init_device_mesh",),
    "torch.distributed.fsdp": ("fully_shard",),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard"),
    "torch.distributed.tensor.parallel": (
        "ColwiseParallel",
        "RowwiseParallel",
        "SequenceParallel",
        "parallelize_module",
    ),
    "torch.nn.parallel": ("DistributedDataParallel",),
    "torch.utils.checkpoint": ("checkpoint",),
}


def _imports(body: str) -> Iterator[str]:
    for module, names in _HOMES.items():
        used = [name for name in names if re.search(rf"\b{name}[.(,]", body)]
        if used:
            yield f"from {module} import {', '.join(used)}" + "\n" * (module == "functools")
