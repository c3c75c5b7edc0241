"""What of a model's blocks a configuration computes again in the backward, as policies of `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Of Megatron-LM's `--recompute-modules`. core_attn: products of queries and keys, which flash attention never keeps;
moe_act: the activation between an expert's products."""
_PROJECTIONS = ("q_b_proj", "kv_b_proj")
_ACTIVATIONS = ("aten.silu.", "aten.gelu.", "aten.relu.", "aten.sigmoid.", "aten.mul.")


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
