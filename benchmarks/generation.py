"""`generate()` of a parallel model and of one process: how many tokens are equal, what was made, and what they take.

    python -m benchmarks.generation --ranks 2 4 --models Llama GPT-2 --ways greedy --tokens 64

Tiny models of transformers with random weights, in float64, on gloo ranks, weights split by pins: left alone, models so
small are replicated. Programs and captures are those of the first `generate()`; tokens are compared in it and in all
others. Seconds are CPU seconds of rank 0 a token in the quickest other `generate()`, over one process's.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autoshard
import autoshard.runtime.session as sessions
from autoshard.runtime.module import dispatcher_of

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
_OPTIONS: dict[str, Any] = {"profile": "cpu", "refine": "off", "tune": "first", "backend": "eager"}
_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_COLUMNS, _ROWS = [Shard(0)], [Shard(1)]
_LLAMA = {"*.[qkv]_proj.weight": _COLUMNS, "*.o_proj.weight": _ROWS}
_DENSE = _LLAMA | {
    "*.gate_proj.weight": _COLUMNS,
    "*.up_proj.weight": _COLUMNS,
    "*.down_proj.weight": _ROWS,
}


def _causal(name: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**_SIZES | _ENDS | options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(**sizes, **_ENDS))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    ends: dict[str, Any] = {"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, **ends))


@dataclass(frozen=True)
class Kind:
    """make: a model. pins: of its weights on one axis. dtype: torch's products of experts take no float64."""

    make: Callable[[], nn.Module]
    pins: dict[str, Any]
    dtype: torch.dtype = torch.float64


KINDS = {
    "Llama": Kind(lambda: _causal("Llama"), _DENSE),
    "Qwen2": Kind(lambda: _causal("Qwen2"), _DENSE),
    "GPT-2": Kind(_gpt2, {"*.c_fc.weight": [Shard(1)], "*.mlp.c_proj.weight": [Shard(0)]}),
    "Qwen3-MoE": Kind(
        lambda: _causal(
            "Qwen3Moe", head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        ),
        _LLAMA | {"*.experts.*": _COLUMNS},
        torch.float32,
    ),
    "T5": Kind(_t5, {"*.[qkv].weight": _COLUMNS, "*.o.weight": _ROWS}),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "assisted": {"do_sample": False},
}
CASES = [
    *(
        (name, cache, way)
        for name in KINDS
        for cache in ("static", "dynamic")
        for way in ("greedy", "sampling")
    ),
    ("Llama", "dynamic", "beams"),
    ("Llama", "static", "beams"),
    ("Qwen2", "dynamic", "assisted"),
]


@dataclass(frozen=True)
class Row:
    """equal: tokens, of `tokens`. seconds, alone: a token's."""

    name: str
    cache: str
    way: str
    ranks: int
    equal: int
    tokens: int
    programs: int
    captures: int
    seconds: float
    alone: float

    def __str__(self) -> str:
        cells = (
            self.name, self.cache, self.way, self.ranks, f"{self.equal} of {self.tokens}", self.programs, self.captures,
            f"{self.seconds * 1e3:.1f}", f"{self.seconds / self.alone:.1f}",
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| model | cache | way | ranks | tokens equal | programs | captures | CPU ms a token | over one process |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def generated(model: Any, cache: str, way: str, tokens: int, assistant: Any) -> Tensor:
    torch.manual_seed(11)
    # Assisted decoding takes one sequence.
    ids = torch.randint(1, 128, (1 if way == "assisted" else 2, 12))
    options = WAYS[way] | ({"assistant_model": assistant} if way == "assisted" else {})
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)[:, -tokens:]


def measured(name: str, cache: str, way: str, tokens: int, rounds: int, **options: Any) -> Row:
    """On every rank; seconds are this one's. options: of `autoshard`."""
    kind = KINDS[name]
    torch.manual_seed(7)
    plain = kind.make().to(kind.dtype).eval()
    assistant = kind.make().to(kind.dtype).eval() if way == "assisted" else None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    settings: dict[str, Any] = _OPTIONS | {"constraints": kind.pins} | options
    model = autoshard.autoshard(copy.deepcopy(plain), mesh, **settings)
    captures: list[None] = []
    capture = sessions.canonical_capture

    def counted(*args: Any, **given: Any) -> Any:
        captures.append(None)
        return capture(*args, **given)

    def timed(one: Any) -> tuple[Tensor, float]:
        begin = time.process_time()
        found = generated(one, cache, way, tokens, assistant)
        return found, (time.process_time() - begin) / tokens

    wanted, alone = timed(plain)
    sessions.canonical_capture = counted
    try:
        first, _ = timed(model)
    finally:
        sessions.canonical_capture = capture
    dispatcher: Any = dispatcher_of(model)
    # Calls of many sizes share a program in symbols.
    of: Any = lambda programs: id(getattr(programs, "_program", programs.running.program))
    running = {of(one._programs) for known in dispatcher.executables.values() for one in known}
    found, seconds = [first], float("inf")
    for _ in range(rounds):
        alone = min(alone, timed(plain)[1])
        again, took = timed(model)
        seconds = min(seconds, took)
        found.append(again)
    equal = min(int((one == wanted).sum()) for one in found)
    return Row(
        name,
        cache,
        way,
        dist.get_world_size(),
        equal,
        wanted.numel(),
        len(running),
        len(captures),
        seconds,
        alone,
    )


def _rank(rank: int, world: int, port: int, given: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for case in CASES:
        if case[0] not in given.models or case[2] not in given.ways or case[1] not in given.caches:
            continue
        try:
            row = str(measured(*case, given.tokens, given.rounds, inference=not given.trained))
        except Exception as error:
            row = f"| {' | '.join(case)} | {world} | {type(error).__name__}: {' '.join(str(error).split())[:300]} |"
            if given.trace and not rank:
                traceback.print_exc()
        if rank == 0:
            print(row, flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(KINDS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--caches", nargs="+", default=["static", "dynamic"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trained", action="store_true", help="without inference=True: caches are gathered")
    parser.add_argument("--trace", action="store_true", help="of errors")
    given = parser.parse_args(argv)
    print(HEADER)
    for world in given.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(_rank, (world, port, given), world)


if __name__ == "__main__":
    main()
