"""Rows of published runs: what ran, where, and how fast; and why a row cannot be predicted, where it cannot."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoshard import Profile
from benchmarks.llama3 import LLAMAS
from benchmarks.mpt import SIZES
from cost_model.profile import paced

__all__ = [
    "AGAIN",
    "CUDNN",
    "ROWS",
    "Row",
    "attending",
    "gpu_profile",
    "missing",
    "profile_of",
    "read_rows",
    "run_name",
]

ROWS = (
    Path(__file__).parent / "published" / "mpt.csv",
    Path(__file__).parent / "published" / "torchtitan.csv",
)
PROFILES: Mapping[str, str] = {
    "h100_80gb": "h100",
    "h100_96gb": "h100",
    "a100_80gb": "a100",
    "a100_40gb": "a100",
}
SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")
AGAIN: Mapping[str, str] = {"none": "", "full": "blocks again", "selective": "ops again"}
"""What was computed again, in words."""
HBM2E, HBM3 = 2.4e12, 3.35e12
"""Bytes a second that the makers state: of torchtitan's H100 and of the profile's."""
AT_500_WATTS, AT_700_WATTS = 585e12, 755e12
"""Operations a second of products of 8192^3 in bfloat16, held, by the power that a GPU is given: torchtitan's H100 has
500 W, the profile's 700. [pytorch/FBGEMM pull request 2546, "H100 500W"; stas00/ml-engineering, compute/accelerator,
an H200, whose cores are the same]"""
TRITON_FORWARD, TRITON_BACKWARD = 1.4, 2.0
"""Times as long as FlashAttention-2, which the profiles have, took FlashAttention in Triton. [Dao 2023,
FlashAttention-2, section 4.1, on an A100: "around 1.3-1.5x faster than FlashAttention in Triton in the forward pass
and around 2x faster in the backward pass"]"""
CUDNN = 1 / 1.7
"""Times as long as FlashAttention-2 takes cuDNN's attention on Hopper, at most: "1.7-2.3x faster for training shapes".
[huggingface/transformers pull request 48163]"""


@dataclass(frozen=True)
class Row:
    """tokens_per_second: of one GPU. micro_batch: sequences of one GPU at once. checkpointing: one of `AGAIN`.
    memory_gib: the peak that was published, if one was. triton: whether attention was FlashAttention in Triton. float8:
    whether the blocks' linear layers multiplied in float8."""

    model: str
    sequence: int
    gpus: int
    gpu: str
    micro_batch: int
    accumulation: int
    sharding: str
    checkpointing: str
    tokens_per_second: float
    compiled: bool = False
    memory_gib: float | None = None
    triton: bool = False
    float8: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        return run_name(self.model, self.sequence, self.gpus, self.gpu)

    @property
    def ran(self) -> str:
        """How, in words."""
        again = AGAIN[self.checkpointing]
        pieces = (
            f"{self.accumulation} x {self.micro_batch}" if self.accumulation > 1 else f"{self.micro_batch}"
        )
        zero = "ZeRO-3" if self.sharding == "FULL_SHARD" else "ZeRO-2"
        said = pieces, zero, again, "compiled" if self.compiled else "", "float8" if self.float8 else ""
        return ", ".join(filter(None, said))

    @property
    def tokens(self) -> int:
        """Of one micro-batch of one GPU."""
        return self.micro_batch * self.sequence

    @property
    def memory_limit(self) -> str:
        """Of its GPU: "80GB"."""
        return self.gpu.split("_")[1].upper()

    def missing(self) -> str | None:
        """Why no plan of ours is this run; None where one is."""
        if self.model not in {**SIZES, **LLAMAS} or self.gpu not in PROFILES or self.sharding not in SHARDED:
            return f"no model, profile or pins for {self.model}, {self.gpu}, {self.sharding}"
        if self.checkpointing not in AGAIN or (self.checkpointing == "selective" and self.model in SIZES):
            return f"no policy {self.checkpointing} of what {self.model} computes again"
        return None


def run_name(model: str, sequence: int, gpus: int, gpu: str) -> str:
    return f"{model}, {sequence:,}, {gpus} x {gpu.split('_')[0].upper()}"


def missing(rows: Sequence[Row]) -> dict[str, int]:
    """Reason -> how many rows."""
    found: dict[str, int] = {}
    for row in rows:
        reason = row.missing()
        if reason is not None:
            found[reason] = found.get(reason, 0) + 1
    return found


def gpu_profile(gpu: str) -> Profile:
    """The shipped one of a GPU, whose memory is as fast as it is said, and products as its power allows."""
    profile = Profile.named(PROFILES[gpu])
    if gpu != "h100_96gb":
        return profile
    bandwidth = profile.device.memory_bytes_per_second * HBM2E / HBM3
    device = replace(profile.device, memory_bytes_per_second=bandwidth)
    return _paced(replace(profile, device=device), AT_700_WATTS / AT_500_WATTS, "matmul", "attention")


def profile_of(row: Row) -> Profile:
    """The shipped one of its GPU, with attention as slow as the row says."""
    return attending(gpu_profile(row.gpu), _triton_pace(row) if row.triton else 1.0)


def attending(profile: Profile, pace: float) -> Profile:
    """With attention that takes `pace` times as long."""
    return _paced(profile, pace, "attention")


def _paced(profile: Profile, pace: float, *kinds: str) -> Profile:
    """With kernels of these kinds that take `pace` times as long."""
    rates = {kind: tuple(paced(of, pace) for of in getattr(profile.device, kind)) for kind in kinds}
    return replace(profile, device=replace(profile.device, **rates))


def _triton_pace(row: Row) -> float:
    """Of forward and backward together, which the profiles price as one: two products forward, as many again in blocks
    that are computed again, and five backward."""
    forward = 4 if row.checkpointing == "full" else 2
    return (forward * TRITON_FORWARD + 5 * TRITON_BACKWARD) / (forward + 5)


def read_rows(path: Path) -> list[Row]:
    """Of a file like benchmarks/published/mpt.csv or torchtitan.csv."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [_torchtitan(line) if "local_batch" in line else _mpt(line) for line in lines]


def _mpt(line: Mapping[str, str]) -> Row:
    """Rows of up to 64 GPUs are in earlier versions of the source, with a `sweep.sh` that leaves attention as
    `submit_benchmarks.py` has it: `triton` at first, and `flash`, with FlashAttention-2 installed, in its last version.
    No row says what it ran: that the earlier ones ran the earlier kernel is assumed. [mosaicml/llm-foundry,
    scripts/train/benchmarking]"""
    offloaded = line.get("activation_cpu_offload", "False") == "True"
    return Row(
        model=line["model"],
        sequence=int(line["sequence"]),
        gpus=int(line["gpus"]),
        gpu=line["gpu"],
        micro_batch=int(line["micro_batch_per_gpu"]),
        accumulation=int(line["grad_accumulation"]),
        sharding=line["sharding"],
        checkpointing="offloaded" if offloaded else _full(line["activation_checkpointing"]),
        tokens_per_second=float(line["tokens_per_second_per_gpu"]),
        triton="Large Scale" not in line["hardware"],
        note=line.get("note") or "",
    )


def _full(said: str) -> str:
    return "full" if said == "True" else "none"


def _torchtitan(line: Mapping[str, str]) -> Row:
    """All of its rows are of one hardware, and of meshes of one axis; another mesh is a row without pins."""
    name, _, size = line["mesh"].partition("=")
    one_axis = name == "fsdp" and size == line["gpus"]
    selective = line["activation_checkpointing"].startswith("selective (per op)")
    return Row(
        model=line["model"],
        sequence=int(line["sequence"]),
        gpus=int(line["gpus"]),
        gpu="h100_96gb",
        micro_batch=int(line["local_batch"]),
        accumulation=1,
        sharding="FULL_SHARD" if one_axis else line["mesh"],
        checkpointing="selective" if selective else line["activation_checkpointing"],
        tokens_per_second=float(line["tokens_per_second_per_gpu"]),
        compiled=line["compile"] == "yes",
        memory_gib=float(line["memory_gib"]),
        float8=line["precision"].startswith("float8"),
    )
