"""The largest published run beside the plan that autoshard finds: Llama 3.1 405B in stages on 512 H100.

    python -m benchmarks.published_pipeline                                # both schedules; 10 minutes each
    python -m benchmarks.published_pipeline --schedule interleaved --seconds 1500

pytorch/torchtitan, 8 x 8 x 8 (FSDP, pipeline, tensor parallel), float8, sequences of 8,192 tokens, reached 100 tokens a
second on each GPU with 1F1B and 128 with interleaved 1F1B. [torchtitan's table of 405B runs] autoshard has no
float8: bfloat16 is computed, parameters are float32, blocks under `torch.utils.checkpoint`. Prices are the profile's;
the model is on `meta`, and no GPU is used.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Mapping

import torch

from autoshard import InfeasibleError, MeshSpec, find_plan
from benchmarks.llama3 import Llama3

MODEL, LENGTH, SEQUENCES, PIECES = "Llama 3.1 405B", 8_192, 256, 32
MESH = {"dp": 8, "pp": 8, "tp": 8}
TOKENS_PER_SECOND: Mapping[str, int] = {"1f1b": 100, "interleaved": 128}
"""That were published, of each GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedule", nargs="+", choices=list(TOKENS_PER_SECOND), default=list(TOKENS_PER_SECOND)
    )
    parser.add_argument(
        "--seconds", type=float, default=580.0, help="time_limit of each; it takes a few more"
    )
    parser.add_argument("--layers", type=int, default=None, help="of a model that is less deep")
    args = parser.parse_args()
    tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64, device="meta")
    for schedule in args.schedule:
        planned(schedule, args.seconds, args.layers, tokens)


def planned(schedule: str, seconds: float, layers: int | None, tokens: torch.Tensor) -> None:
    mesh = MeshSpec(MESH)
    began, cpu = time.monotonic(), time.process_time()
    try:
        plan = find_plan(
            Llama3(MODEL, LENGTH, layers),
            mesh,
            (tokens, tokens),
            profile="h100",
            stages="pp",
            schedule=schedule,
            micro_batches=PIECES,
            memory_limit="80GB",
            time_limit=seconds,
        )
    except InfeasibleError as error:
        print(f"{schedule}: {error}")
        return
    spent = f"{time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} of CPU"
    rate = SEQUENCES * LENGTH / plan.step_time / mesh.device_count
    print(
        f"{schedule}: {plan.step_time:.1f} s a step, {rate:.0f} tokens a second of each GPU "
        f"(published: {TOKENS_PER_SECOND[schedule]}, float8), {plan.stages_per_rank} stages a rank, "
        f"bubble {plan.bubble:.2f}, at least {plan.lower_bound:.1f} s, {plan.peak_memory / 1e9:.1f} GB; "
        f"planned in {spent}, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB",
        flush=True,
    )


if __name__ == "__main__":
    main()
