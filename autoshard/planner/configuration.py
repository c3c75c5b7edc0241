"""What a configuration of torchtitan, Megatron-LM or accelerate runs: sizes of its mesh, how a step is divided, what
layouts it allows of weights, gradients and what is computed of a batch, and what of a model's blocks it computes again
in the backward, as policies of `torch.utils.checkpoint`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoshard.plan.families import Family, Role
from autoshard.plan.family_choices import family_narrowing, made_of_experts
from cost_model.errors import ShardingError, few
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value
from passes.ir.op_traits import is_cast, is_collect, is_piece, is_use, is_view
from passes.ir.routing import BALANCED, Routing
from passes.layout.layout import Layout
from passes.ops.routed_ops import READ_ROWS
from passes.search.search_terms import Choose, Narrowing, factors_along, in_turn, most
from passes.strategies.cuts import ops_of

Recompute = str
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""What runs again in the backward. selective: all of a block but attention and every second product. full: blocks.
Otherwise names of `MODULES`, separated by spaces."""
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Of Megatron-LM's `--recompute-modules`. core_attn: products of queries and keys, which flash attention never keeps;
moe_act: the activation between an expert's products."""
_PROJECTIONS = ("q_b_proj", "kv_b_proj")
_ACTIVATIONS = ("aten.silu.", "aten.gelu.", "aten.relu.", "aten.sigmoid.", "aten.mul.")
Words = Mapping[str, Callable[[Any], str]]
"""How a framework writes a value of a field of `Configuration`: "--option 4"."""


@dataclass(frozen=True)
class Configuration:
    """stages: of a pipeline. replicate: ranks with whole weights; shard: with parts of them, gathered to use. tensor:
    with parts of the products. each_piece: gathered and reduced in each micro-batch (ZeRO-3); else once in a step.
    context: with parts of the sequences, and of weights that are stored split. experts: among how many neighbours of
    tensor, context and data the experts are divided; expert_tensor: over `tensor` their products are split instead.
    virtual: stages a rank, one after the other round the ranks; layers_a_stage: in its place; 0: not said. routing: to
    which experts tokens are sent, and how.

    sequence_parallel: norms and the residual stream split in the sequence over `tensor`. micro_batch: sequences of one
    data-parallel rank at once; accumulation: in its place, micro-batches of a step. batch: sequences of all ranks in a
    step; sequence: tokens; 0: not said. model: a configuration of transformers, where the framework's says that too;
    named: how it does, where it does. recomputes: what it offers. words: by field. taken: options that are not given,
    with what is taken for them. unread: options that change no step, or are not known. equal_stages: whether stages
    have equal numbers of layers.
    """

    framework: str
    stages: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    each_piece: bool = True
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    micro_batch: int = 1
    accumulation: int = 0
    batch: int = 0
    sequence: int = 0
    schedule: str | None = None
    compiled: bool = True
    model: Mapping[str, Any] | None = None
    named: str = ""
    recomputes: tuple[Recompute, ...] = RECOMPUTE
    words: Words = field(default_factory=dict)
    taken: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    equal_stages: bool = False
    context: int = 1
    experts: int = 1
    expert_tensor: bool = False
    virtual: int = 0
    layers_a_stage: int = 0
    routing: Routing = BALANCED

    @property
    def gpus(self) -> int:
        return self.stages * self.replicate * self.shard * self.context * self.tensor

    @property
    def axes(self) -> dict[str, int]:
        """Of its mesh, neighbours last. ShardingError where the experts cannot be divided so."""
        data = self.shard if self.shard > 1 else self.replicate
        within = self._data_of_experts(data)
        sizes = {"pp": self.stages, "replicate": self.replicate, "shard": self.shard}
        sizes[self._data_axis] = data // within
        sizes |= {"ep": within, "cp": self.context, "tp": self.tensor}
        return {name: size for name, size in sizes.items() if size > 1} or {"shard": 1}

    @property
    def _data_axis(self) -> str:
        return "shard" if self.shard > 1 else "replicate"

    def _data_of_experts(self, data: int) -> int:
        """Of so many data-parallel ranks, those that one layer's experts are divided among."""
        if self.experts == 1:
            return 1
        others = self.context * (1 if self.expert_tensor else self.tensor)
        if self.experts % others or data % (self.experts // others):
            raise ShardingError(
                f"{self.experts} expert-parallel ranks are not {others} of context and tensor parallelism times a "
                f"part of {data} data-parallel ones\n  try: {others} of them, or {others * data}"
            )
        return self.experts // others

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Over which experts' weights are split by expert."""
        names = ("ep", "cp") if self.expert_tensor else ("ep", "cp", "tp")
        return tuple(name for name in names if self.experts > 1 and name in self.axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Over which sequences are divided."""
        return tuple(name for name in ("replicate", "shard", "ep") if name in self.axes)

    @property
    def stored_axes(self) -> tuple[str, ...]:
        """Over which weights are stored split and gathered: of the batch and of sequences, where not whole on all."""
        if self.shard == 1 and self.replicate > 1:
            return ()
        return tuple(name for name in ("shard", "ep", "cp") if name in self.axes)

    def pieces(self, batch: int) -> int:
        """Micro-batches of a step. ShardingError where they do not divide the batch."""
        together = self.replicate * self.shard * (self.accumulation or self.micro_batch)
        if batch % together:
            how = f"{self.accumulation} micro-batches" if self.accumulation else f"{self.micro_batch} at once"
            raise ShardingError(
                f"a batch of {batch} is no multiple of {self.replicate * self.shard} data-parallel ranks times {how}\n"
                f"  try: --batch {-(-batch // together) * together}"
            )
        return self.accumulation or batch // together

    def stages_a_rank(self, layers: int) -> int | None:
        """Of a model of so many layers; None: not said. ShardingError where its layers are not divided so."""
        among = self.stages * max(1, self.virtual)
        if self.equal_stages and not self.layers_a_stage and layers % among:
            fitting = [
                count for count in range(1, layers + 1) if layers % (count * max(1, self.virtual)) == 0
            ]
            said = f"{among} stages" if self.virtual else f"{self.stages} pipeline ranks"
            raise ShardingError(
                f"{layers} layers are no multiple of {said}, as {self.framework} has them\n"
                f"  try: {few([f'{count}' for count in fitting], 6, ', ...')} pipeline ranks"
            )
        if self.stages == 1 or not self.layers_a_stage:
            return self.virtual or None
        stages = -(-layers // self.layers_a_stage)
        if stages % self.stages:
            raise ShardingError(
                f"{layers} layers, {self.layers_a_stage} a stage, are {stages} stages, no multiple of {self.stages} "
                f"pipeline ranks\n  try: {-(-layers // self.stages)} layers a stage, or a divisor of that"
            )
        return stages // self.stages

    @property
    def family(self) -> Family | None:
        """What it says of weights and of the residual stream; None on one rank, or on stages alone."""
        roles: dict[str, Role] = {"replicate": "whole", "ep": "whole", "cp": "whole", "tp": "used"}
        for axis in self.stored_axes:
            roles[axis] = "stored"
        found: list[tuple[str, Role]] = [(axis, roles[axis]) for axis in self.axes if axis in roles]
        if self.context > 1:
            found.append(("cp", "sequence"))
        for axis in self.expert_axes:
            found.append((axis, "experts"))
        if self.gpus == self.stages:
            return None
        return Family(
            self.framework, (), "", None, "whole", residual=self.sequence_parallel, by_axis=tuple(found)
        )

    def __str__(self) -> str:
        """ "shard=32, tp=8, sequence parallel; blocks computed again"."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        sizes += f", experts over {' x '.join(self.expert_axes)}" if self.expert_axes else ""
        sequence = ", sequence parallel" if self.sequence_parallel and self.tensor > 1 else ""
        again = f"; {again_words(self.recompute)} computed again" if self.recompute != "none" else ""
        schedule = f"; {self.schedule}" if self.schedule and self.stages > 1 else ""
        compiled = "" if self.compiled else "; not compiled"
        return f"{sizes}{sequence}{again}{schedule}{compiled}"

    def others(self) -> Iterator[Configuration]:
        """As many GPUs and stages, compiled, otherwise divided: tensor parallelism within a host of 8; of each division
        first what computes least again. As many sequences at once, or fewer where the batch leaves a rank no more."""
        data = self.gpus // self.stages // self.context
        for tensor in (1, 2, 4, 8):
            whole = self.replicate if self.shard > 1 else data // tensor
            if whole and data % (tensor * whole) == 0:
                ranks = data // tensor
                at_once = math.gcd(self.micro_batch, self.batch // ranks)
                sizes = {
                    "tensor": tensor,
                    "replicate": whole,
                    "shard": ranks // whole,
                    "micro_batch": at_once,
                }
                for again in self.recomputes:
                    yield replace(self, **sizes, recompute=again, compiled=True)

    def changes(self, other: Configuration) -> str:
        """The options of `other` that are not as here, as the framework writes them."""
        names = [name for name in self.words if getattr(self, name) != getattr(other, name)]
        return ", ".join(self.words[name](getattr(other, name)) for name in names) or "as it is"


def again_words(recompute: Recompute) -> str:
    """What runs again: "blocks", "layernorm, moe_act"."""
    return {"selective": "ops", "full": "blocks"}.get(recompute, ", ".join(recompute.split()))


def configured_narrowing(joint: JointGraph, mesh: MeshSpec, configuration: Configuration) -> Narrowing:
    """joint: in its micro-batches; of stages too, which are cut of it. Raises as `family_narrowing`."""
    family = configuration.family
    narrowing = Narrowing() if family is None else family_narrowing(family, joint, mesh)
    allowed = {**narrowing.allowed, **_as_frameworks_do(joint, configuration)}
    return replace(narrowing, allowed=allowed, further=AlongTheCall.of(joint, configuration))


def _as_frameworks_do(joint: JointGraph, configuration: Configuration) -> Mapping[str, Choose]:
    """Every rank makes gradients of its own part of the batch, to be summed over the data-parallel ranks. Of what
    micro-batches share: weights are gathered in each, and gradients reduced; or once, before and after."""
    found: dict[str, Choose] = {}
    summed = {*configuration.batch_axes, *configuration.stored_axes}
    summed |= {"cp"} if configuration.context > 1 else set()
    stored, by_expert = frozenset(configuration.stored_axes), frozenset(configuration.expert_axes)
    experts = made_of_experts(joint) if by_expert else frozenset()
    named = {spec.name for node, spec in joint.given if node in experts}
    split = _most(lambda one: len(stored & _splits(one)))
    for spec, node in joint.returned:
        if spec.kind == "grad" and node is not None:
            pending = _pending(summed - by_expert if spec.name in named else summed)
            *after, made = _until_made(node)
            for one in filter(is_collect, after):
                found[one.name] = split if configuration.each_piece else pending
            found[made.name] = pending
    for node in joint.graph.nodes if stored else ():
        if is_use(node) and node.meta.get("runs") == "before":
            axes, sign = (
                stored - by_expert if node in experts else stored,
                1 if configuration.each_piece else -1,
            )
            found[node.name] = _most(lambda one, axes=axes, sign=sign: sign * len(axes & _splits(one)))
    return found


def _pending(axes: Set[str]) -> Choose:
    """Those that are sums to come over most of these axes."""
    return _most(lambda one: len(axes & {axis for axis, _ in one.partial}))


@dataclass(frozen=True)
class AlongTheCall:
    """What is computed of a call's tensors is split along their first dim over the axes of the batch, and along the
    second over those of its sequences, but within attention, which gathers keys, exchanges them for heads, or passes
    them round. Rows of experts are split by expert over the axes of these, and their ids known to all of them.

    dims: each such dim of the call that axes split, with these, and with those dims of the whole graph's values, by
    name, that are split with it: a stage knows what it receives by its name."""

    dims: tuple[tuple[int, frozenset[str], frozenset[tuple[str, int]]], ...]
    by_expert: frozenset[str]

    @staticmethod
    def of(joint: JointGraph, configuration: Configuration) -> AlongTheCall:
        ops = list(ops_of(joint))
        heads = [*joint.given_as("input"), *filter(is_piece, joint.graph.nodes)]
        sequence = ("cp",) if configuration.context > 1 else ()
        given = enumerate(map(frozenset, (configuration.batch_axes, sequence)))
        dims: list[tuple[int, frozenset[str], frozenset[tuple[str, int]]]] = []
        for dim, axes in ((dim, axes) for dim, axes in given if axes):
            along = factors_along(ops, [(node, dim) for node in heads if node_value(node).ndim > dim])
            split = {
                (node.name, d)
                for node, rule in ops
                for d, factors in enumerate(rule.results[0])
                if along[node].intersection(factors[:1])
            }
            dims.append((dim, axes, frozenset(split | {(node.name, dim) for node in heads})))
        return AlongTheCall(tuple(dims), frozenset(configuration.expert_axes))

    def __call__(self, joint: JointGraph) -> Mapping[str, Choose]:
        ops, found = list(ops_of(joint)), dict[str, Choose]()
        named = {node.name: node for node in joint.graph.nodes}
        for dim, axes, places in self.dims:
            along = factors_along(ops, [(named[name], d) for name, d in places if name in named])
            for node, rule in ops:
                exchanges = any(way.exchange is not None for way in rule.ways)
                routed = node.meta.get("rows") or any(user.target in READ_ROWS for user in node.users)
                own = axes - self.by_expert if routed else axes
                if along[node] and own and not (dim and exchanges):
                    choose = _split_along(along[node], own)
                    found[node.name] = in_turn(found[node.name], choose) if node.name in found else choose
        return found


def _split_along(factors: frozenset[str], axes: frozenset[str]) -> Choose:
    """Those that split most of one of these factors over these axes."""
    return most(lambda one: sum(len(axes.intersection(of.axes)) for of in one.splits if of.factor in factors))


def _splits(layout: Layout) -> frozenset[str]:
    """Axes that split a dim: not those over which it is a sum to come."""
    return frozenset(itertools.chain(*layout.dims))


def _until_made(gradient: fx.Node) -> list[fx.Node]:
    """From where it is returned to where it is made, before it is cast, viewed or added to those of other pieces."""
    found = [gradient]
    while is_collect(found[-1]) or is_view(found[-1]) or is_cast(found[-1]):
        found.append(found[-1].all_input_nodes[0])
    return found


def _most(good: Callable[[Layout], int]) -> Choose:
    return most(lambda strategy: good(strategy.results[0]))


def modules_again(names: str) -> str:
    """Of names separated by spaces those that change what is kept, in order; "none" where none does."""
    return " ".join(sorted(set(names.split()) - {"core_attn"})) or "none"


def recomputing_options(model: nn.Module, recompute: str) -> dict[str, Any]:
    """For transformers to enable checkpoints of its blocks with."""
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = _every_second
    elif recompute != "full":
        inside = _watched(model, frozenset(recompute.split()))
        policy = lambda context, op, *args, **kwargs: _of_modules(inside, str(op))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return options


def _every_second() -> Any:
    """torchtitan's: attention and every second product stay. [torchtitan, `_get_custom_policy`]"""
    return create_selective_checkpoint_contexts(partial(_products, {False: 0, True: 0}))


def _products(seen: dict[bool, int], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(op)
    if any(word in name for word in ("aten.mm.", "aten.addmm.", "aten.linear.")):
        seen[context.is_recompute] += 1
        saved = seen[context.is_recompute] % 2 == 1
    else:
        saved = "attention" in name
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _of_modules(inside: list[str], op: str) -> CheckpointPolicy:
    """Of an op within what runs again, by the names of that."""
    activation = any(op.startswith(name) for name in _ACTIVATIONS)
    again = any(name != "moe_act" or activation for name in inside)
    return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE


def _watched(model: nn.Module, wanted: frozenset[str]) -> list[str]:
    """Names of `MODULES` that are wanted, while a forward of one runs."""
    inside: list[str] = []
    for path, module in model.named_modules():
        owner = model.get_submodule(path.rpartition(".")[0])
        if path.rpartition(".")[2].isdigit():  # a forward before may have been given up
            module.register_forward_pre_hook(lambda *_: inside.clear())
        for name in wanted.intersection(_names(path, module, owner)):
            enter: Callable[..., None] = lambda *_, name=name: inside.append(name)
            leave: Callable[..., None] = lambda *_, name=name: inside.remove(name)
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    return inside


def _names(path: str, module: nn.Module, owner: nn.Module) -> set[str]:
    """As Megatron-LM calls a module of transformers. owner: that it is in. Of the norm before experts a rank keeps what
    it was sent, and no more is kept with it than without."""
    *_, block, last = ("", *path.split("."))
    found = {"shared_experts"} if last.startswith("shared_expert") and "gate" not in last else set[str]()
    mixture = any(hasattr(one, "experts") for one in owner.children())
    if block.isdigit() and last.endswith("norm") and not (mixture and last != "input_layernorm"):
        found.add("layernorm")
    if block.isdigit() and not last.endswith(("norm", "attn", "attention")):
        found.add("moe" if hasattr(module, "experts") else "mlp")
    if last == "experts":
        found.add("moe_act")
    if last in _PROJECTIONS:
        found.add("mla_up_proj")
    return found
