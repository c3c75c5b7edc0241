"""Models of transformers from their configuration alone, on `meta`; with what they compute again."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoshard.planner.configuration import Recompute
from cost_model.errors import ShardingError

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
        return MetaModel(CONFIG_MAPPING[kind].from_dict(values | {"use_cache": False}), dtype)

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
            options: dict[str, Any] = {"use_reentrant": False}
            if recompute == "selective":
                options["context_fn"] = _selective_contexts
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
        for name, parameter in self._model(None).named_parameters():
            place = re.search(r"\.(\d+)\.", name)
            if place is not None:
                sizes.setdefault(place[1], Counter())[name.replace(place[0], ".", 1), parameter.shape] += 1
        return len(sizes) == self.depth and all(one == sizes["0"] for one in sizes.values())

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model(None).parameters())


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


def _selective_contexts() -> Any:
    """torchtitan's: attention and every second product stay. [torchtitan, `_get_custom_policy`]"""
    return create_selective_checkpoint_contexts(partial(_policy, {False: 0, True: 0}))


def _policy(seen: dict[bool, int], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(op)
    if any(word in name for word in ("aten.mm.", "aten.addmm.", "aten.linear.")):
        seen[context.is_recompute] += 1
        saved = seen[context.is_recompute] % 2 == 1
    else:
        saved = "attention" in name
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
