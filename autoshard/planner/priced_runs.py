"""Seconds, memory and products of a step as a configuration runs it, and as the best plan does.

Its models are those of transformers from their configuration alone, on `meta`, with what they compute again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard.call_ends import output_layouts
from autoshard.plan.division import Division
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_stages import plan_stages
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.planner.configuration import (
    Configuration,
    Recompute,
    configured_narrowing,
    recomputing_options,
)
from autoshard.planning import canonical_capture
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError, ShardingError
from cost_model.memory import format_bytes, format_count, format_seconds, parse_bytes
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.canonicalize.mark_rows import with_routing
from passes.capture import Captured
from passes.ir.joint import JointGraph, node_value
from passes.ir.op_work import global_flops
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout
from passes.states.offers import users_choice

_PEAKS = {"h100": 989e12, "a100": 312e12}
"""Operations a second that the makers state, of products in bfloat16."""


@dataclass(frozen=True)
class Run:
    """Of one step: seconds, bytes of tensors on the fullest device, bytes reserved beside them, products' operations of
    all devices; bound: seconds under which no plan is, 0: not known."""

    seconds: float
    peak: float
    reserve: float
    flops: float
    bound: float = 0.0

    @property
    def nbytes(self) -> float:
        return self.peak + self.reserve

    def deeper(self, other: Run, times: float) -> Run:
        """With `times` as much more as `other`, of a deeper model, has; communicators do not grow with depth."""
        further = lambda here, there: here + times * (there - here)
        return Run(
            further(self.seconds, other.seconds),
            further(self.peak, other.peak),
            max(self.reserve, other.reserve),
            further(self.flops, other.flops),
        )


@dataclass(frozen=True)
class Machine:
    """Where it runs. seconds: for each search. optimizer: as of `find_plan`."""

    profile: Profile
    device: str
    memory_limit: str | None
    optimizer: str
    seconds: float

    def mesh(self, axes: Mapping[str, int]) -> MeshSpec:
        return MeshSpec(axes, device_type=self.device)

    @property
    def limit(self) -> int | None:
        """Bytes per device."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    def task(self, captured: Captured, mesh: MeshSpec, inputs: Mapping[int, Layout]) -> Task:
        """inputs: layouts of those that are parts of a batch."""
        call = CallLayouts(inputs, output_layouts(captured, mesh, None))
        given = {}, self.limit, "inductor", self.seconds
        return Task(captured, self.profile, mesh, call, *given, optimizer=self.optimizer)


def model_flops(joint: JointGraph) -> float:
    """Operations of the forward's products, three times: a backward has two for each. Causal attention counts by half,
    and what is computed again not at all. [the MFU of PaLM, appendix B, but for causal attention]"""
    return 3.0 * sum(global_flops(n) for n in joint.graph.nodes if n.meta.get("phase") == "forward")


def captured_on(call: Call, machine: Machine) -> Captured:
    model, args, kwargs = call
    return canonical_capture(model, args, kwargs, device=torch.device(machine.device))


@dataclass(frozen=True)
class Workload:
    """A step that is asked for. batch, sequence: of all devices; 0: not known. known: its captured calls, which are the
    same for every mesh, by what runs again and by layers; None: all."""

    model: MetaModel | GivenModel
    batch: int
    sequence: int
    machine: Machine
    gpus: int
    known: dict[tuple[Recompute, int | None], Captured] = field(default_factory=dict, repr=False)

    def captured(self, recompute: Recompute = "none", layers: int | None = None) -> Captured:
        again: Recompute = recompute if self.model.recomputes(recompute) else "none"
        if (again, layers) not in self.known:
            call = self.model.call(self.batch, self.sequence, again, layers)
            self.known[again, layers] = captured_on(call, self.machine)
        return self.known[again, layers]

    def lines(self) -> Iterator[tuple[str, str]]:
        tokens = f" of {self.sequence:,} tokens" if self.sequence else ""
        size = f"{format_count(self.model.parameters())} parameters"
        yield (
            "model",
            f"{self.model.name}, {size}; {self.batch:,} samples{tokens} a step, on {self.gpus} devices",
        )
        nominal = ", nominal: measured on no machine" if self.machine.profile.nominal else ""
        yield "prices", f"profile {self.machine.profile.name}{nominal}"

    def words(self, run: Run) -> str:
        """ "1.9 s, 8,575 tokens a second of each device, MFU 45%, 57.6GB of 80GB"."""
        unit = "tokens" if self.sequence else "samples"
        rate = self.batch * (self.sequence or 1) / run.seconds
        peak = _PEAKS.get(self.machine.profile.name)
        used = f", MFU {run.flops / run.seconds / self.gpus / peak:.1%}" if peak and run.flops else ""
        of = "" if self.machine.limit is None else f" of {format_bytes(self.machine.limit)}"
        fits = "" if self.fits(run) else ": does not fit"
        return (
            f"{format_seconds(run.seconds)}, {rate:,.0f} {unit} a second ({rate / self.gpus:,.0f} of each device)"
            f"{used}, {format_bytes(int(run.nbytes))}{of}{fits}"
        )

    def fits(self, run: Run) -> bool:
        return self.machine.limit is None or run.nbytes <= self.machine.limit


def best_run(asked: Workload, axes: Mapping[str, int], pieces: Sequence[int | str]) -> tuple[Run, Plan]:
    """By the plan that autoshard finds, in the first of these numbers of micro-batches in which there is one. Raises
    the last's InfeasibleError."""
    captured, machine = asked.captured(), asked.machine
    task = machine.task(captured, machine.mesh(axes), {})

    def planned(count: int | str) -> tuple[Run, Plan]:
        plan = Division(count).fastest(task, Deadline.after(machine.seconds))
        return replace(_run_of(plan, captured), bound=plan.lower_bound), plan

    for count in pieces[:-1]:
        with suppress(InfeasibleError):
            return planned(count)
    return planned(pieces[-1])


def _run_of(plan: Plan, captured: Captured) -> Run:
    return Run(plan.step_time, plan.peak_memory, plan.reserve, model_flops(captured.joint))


def configured_run(asked: Workload, configuration: Configuration) -> Run:
    """As it runs by the configuration. Of equal layers from two depths, as steps and their peaks are affine in it, from
    so many on that no more is on its way at once."""
    model = asked.model
    looped = configuration.stages_a_rank(model.depth)
    looped = looped if configuration.schedule == "interleaved" else 1
    configuration = replace(configuration, virtual=looped or 0, layers_a_stage=0)
    unit = max(2, configuration.stages * (looped or 2))
    few, more = 3 * unit, 5 * unit
    at = lambda layers: priced(
        asked.captured(configuration.recompute, layers), configuration, asked.batch, asked.machine
    )
    if model.depth <= more or not model.is_of_equal_layers():
        return at(None)
    one, other = at(few), at(more)
    # Two plans of different kinds tell nothing of a third.
    if other.peak < one.peak or other.seconds < one.seconds:
        return at(None)
    return one.deeper(other, (model.depth - few) / (more - few))


def priced(captured: Captured, configuration: Configuration, batch: int, machine: Machine) -> Run:
    """As `configured_plan` runs it."""
    return _run_of(configured_plan(captured, configuration, batch, machine), captured)


def configured_plan(
    captured: Captured, configuration: Configuration, batch: int, machine: Machine
) -> Plan | PipelinePlan:
    """The fastest plan with its weights so, in its micro-batches, with its `torch.utils.checkpoint`, within any memory.

    ShardingError where the batch is not divided so; InfeasibleError where the model cannot be."""
    mesh, pieces = machine.mesh(configuration.axes), configuration.pieces(batch)
    if configuration.recompute != "none" and not users_choice(captured.joint):
        raise ShardingError(
            f"{configuration.framework} computes blocks again, and the model has none under torch.utils.checkpoint\n"
            "  try: --hf, or checkpoint(block, x) in the model's forward"
        )
    if configuration.experts > 1:
        captured = replace(captured, joint=with_routing(captured.joint, configuration.routing))
    cut = cut_call(captured, pieces, sizes_only=True)
    if configuration.stages == 1:
        return search_plan(_task(cut, cut.joint, mesh, configuration, machine))
    task = _task(captured, cut.joint, mesh, configuration, machine)
    schedule, each = configuration.schedule, configuration.virtual or None
    return plan_stages(task, "pp", pieces, schedule=schedule, stages_per_rank=each)


def _task(
    captured: Captured, cut: JointGraph, mesh: MeshSpec, configuration: Configuration, machine: Machine
) -> Task:
    """cut: the graph in its micro-batches, of which stages are cut later."""
    joint, inputs = captured.joint, {}
    if joint.pieces == 1:
        split = dict.fromkeys(configuration.batch_axes, Shard(0)) | {"cp": Shard(1)}
        rows = [split.get(axis, Replicate()) for axis in mesh.names]
        laid_out = lambda node: placements_to_layout(
            rows, tuple(node_value(node).shape), mesh, what="a batch"
        )
        inputs = {i: laid_out(node) for i, node in enumerate(joint.given_as("input"))}
    return replace(
        machine.task(captured, mesh, inputs),
        memory_limit=None,
        backend="inductor" if configuration.compiled else "uncompiled",
        narrowing=configured_narrowing(cut, mesh, configuration),
        recompute="user",
    )


Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model, and one call of it: positional arguments, and by name."""


@dataclass(frozen=True)
class GivenModel:
    """A user's model, and one call of it: what it computes again is its own to say."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    depth: int = 0

    @property
    def batch(self) -> int:
        tensors = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Tensor)]
        return tensors[0].shape[0] if tensors and tensors[0].ndim else 1

    def call(self, batch: int, sequence: int, recompute: Recompute, layers: int | None = None) -> Call:
        return self.model, self.args, self.kwargs

    def is_of_equal_layers(self) -> bool:
        return False

    def recomputes(self, recompute: Recompute) -> bool:
        """Whether it can be told to."""
        return recompute == "none"

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def name(self) -> str:
        return type(self.model).__name__


@dataclass(frozen=True)
class MetaModel:
    """config: of transformers. dtype: of parameters, and of what is computed."""

    config: Any
    dtype: torch.dtype

    @staticmethod
    def of(source: Path | Mapping[str, Any], dtype: torch.dtype) -> MetaModel:
        """A folder with a config.json, such a file, or what it holds. ShardingError for what is none of a causal
        language model, and without transformers."""
        try:
            from transformers import CONFIG_MAPPING
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        except ImportError:
            raise ShardingError(
                "--hf builds models of transformers, which is not installed\n  try: pip install 'autoshard[planner]'"
            ) from None
        values = dict(source) if isinstance(source, Mapping) else _read(source)
        kind = values.pop("model_type", None)
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ShardingError(
                f"--hf: model_type is {kind!r}, which this transformers trains no causal language model of\n"
                "  try: autoshard plan module:function, which returns your model and its inputs"
            )
        try:
            config = CONFIG_MAPPING[kind].from_dict(values | {"use_cache": False})
            model = MetaModel(config.get_text_config(), dtype)
            model.parameters()
        except Exception as error:  # whatever transformers finds wrong
            raise ShardingError(
                f"--hf: of these sizes transformers builds no {kind}: {error}\n  try: a config.json as it was published"
            ) from error
        return model

    @property
    def depth(self) -> int:
        return self.config.num_hidden_layers

    @property
    def name(self) -> str:
        return self.config.model_type

    @property
    def longest(self) -> int:
        """Tokens of a sequence, at most."""
        return getattr(self.config, "max_position_embeddings", 2048)

    def call(self, batch: int, sequence: int, recompute: Recompute, layers: int | None = None) -> Call:
        """One step of training: batch sequences, with labels, in float32 at the loss, which is all that it returns:
        frameworks keep no logits."""
        model = self._model(layers)
        model.forward = partial(_loss, model.forward)
        if recompute != "none":
            options = recomputing_options(model, recompute)
            enable = getattr(model, "activation_checkpointing_enable", None)
            if enable is None:  # transformers 5.0
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            else:
                enable(activation_checkpointing_kwargs=options)
        tokens, labels = (torch.zeros(batch, sequence, dtype=torch.int64, device="meta") for _ in range(2))
        return model.train(), (), {"input_ids": tokens, "labels": labels}

    def _model(self, layers: int | None) -> Any:
        from transformers import AutoModelForCausalLM

        config = type(self.config).from_dict(self.config.to_dict())
        if layers is not None:
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
            config.num_hidden_layers = layers
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=self.dtype)

    def recomputes(self, recompute: Recompute) -> bool:
        """Whether it can be told to."""
        return True

    def is_of_equal_layers(self) -> bool:
        """Whether a step is affine in their number."""
        if len(set(getattr(self.config, "layer_types", None) or ())) > 1:
            return False
        sizes: dict[str, Counter[tuple[str, torch.Size]]] = {}
        for name, parameter in self._whole.named_parameters():
            place = re.search(r"\.(\d+)\.", name)
            if place is not None:
                sizes.setdefault(place[1], Counter())[name.replace(place[0], ".", 1), parameter.shape] += 1
        return len(sizes) == self.depth and all(one == sizes["0"] for one in sizes.values())

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._whole.parameters())

    @cached_property
    def _whole(self) -> Any:
        """To be counted."""
        return self._model(None)


def _loss(forward: Callable[..., Any], **inputs: Any) -> Any:
    return forward(**inputs).loss


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardingError(
            f"--hf {file} is no JSON: {error}\n  try: a config.json of transformers"
        ) from None
    if not isinstance(values, dict):
        raise ShardingError(f"--hf {file} holds no options\n  try: a config.json of transformers")
    return values
