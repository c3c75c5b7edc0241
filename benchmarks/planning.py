"""Plan Llama-3-8B's real configuration for 256 H100s, offline, and time each stage.

    python benchmarks/planning.py --layers 4 --dp 32 --tp 8

The model lives on `meta`, the prices are those of a profile; no GPU, no process group.
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import MeshSpec, Profile
from autoshard.planning import prices_of
from cost_model.memory import parse_bytes
from passes.canonicalize import canonicalize
from passes.capture import capture
from passes.search.boundary import boundary_of
from passes.search.solve import solve
from passes.search.space import build_space


def llama_3_8b(layers: int, dtype: torch.dtype) -> nn.Module:
    """The published configuration of Llama-3-8B with `layers` of its 32 layers, on `meta`."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(dtype)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print the seconds that the block took, and the process's peak memory so far."""
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"  {name:14} {seconds:8.1f} s   peak RSS {peak / 1e9:.2f} GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dp", type=int, default=32)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--memory-limit", help='per device, such as "70GB"')
    parser.add_argument("--time-limit", type=float, default=600.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    mesh = MeshSpec({"dp": arguments.dp, "tp": arguments.tp}, device_type="cuda")
    model = llama_3_8b(arguments.layers, getattr(torch, arguments.dtype))
    tokens = torch.zeros(arguments.batch, arguments.sequence, dtype=torch.int64, device="meta")
    prices = prices_of(Profile.load(arguments.profile), mesh)
    limit = None if arguments.memory_limit is None else parse_bytes(arguments.memory_limit)
    print(
        f"Llama-3-8B, {arguments.layers} layers, {arguments.dtype}, tokens {tuple(tokens.shape)}, {mesh}, "
        f"memory limit {arguments.memory_limit}"
    )

    start = time.perf_counter()
    with stage("capture"):
        captured = capture(model, (), {"input_ids": tokens, "labels": tokens})
    with stage("canonicalize"):
        joint = canonicalize(captured.joint)
    with stage("space"):
        # Output 0, the loss, is global; the logits stay as the plan leaves them.
        outputs = {spec.index: None for spec in joint.outputs if spec.kind == "output" and spec.index > 0}
        boundary = boundary_of(joint, parameters={}, inputs={}, outputs=outputs)
        space = build_space(joint, prices, boundary, memory_limit=limit)
    with stage("search"):
        solution = solve(space.problem, time_limit=arguments.time_limit)
    peak, _ = space.problem.peak(solution.choice)
    print(f"  {'total':14} {time.perf_counter() - start:8.1f} s")
    problem = space.problem
    print(
        f"{len(captured.joint.graph.nodes)} nodes captured, {len(joint.graph.nodes)} canonical; "
        f"{len(problem.node_costs)} search nodes, {len(problem.edges)} edges, "
        f"{sum(len(c) for c in problem.node_costs)} strategies"
    )
    print(
        f"predicted step {solution.cost * 1e3:.1f} ms, bound {solution.lower_bound * 1e3:.1f} ms, "
        f"gap {solution.gap:.2%} ({solution.status}); predicted peak {peak / 1e9:.1f} GB"
    )


if __name__ == "__main__":
    main()
