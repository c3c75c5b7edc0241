"""Bytes of a device beside tensors: what an optimizer keeps and moves for each parameter, memory limits as users write
them, and what no tensor of a GPU can have, CUDA's context and NCCL's communicators.

The last are published figures, rounded to what was printed; no machine of this project has measured them.
`docs/cuda.md` says how to measure them where a plan runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from cost_model.errors import ShardingError, shown
from cost_model.groups import group_ranks, group_shape
from cost_model.mesh import MeshSpec


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer stores and moves, counted in arrays the size of the parameter.

    states: arrays that it keeps for each parameter, in the parameter's dtype.
    passes: arrays read plus arrays written in a step.
    element_nbytes: kept besides for each number of a parameter, whatever its dtype.
    """

    states: int
    passes: int
    element_nbytes: int = 0

    def state_nbytes(self, nbytes: int, element_size: int) -> int:
        """Bytes that it keeps for a parameter of `nbytes`, whose numbers take `element_size` bytes each."""
        return nbytes * self.states + nbytes // element_size * self.element_nbytes


ADAMW = Optimizer(states=2, passes=20)
"""`torch.optim.AdamW` as it runs by default (foreach): exp_avg and exp_avg_sq, made by `zeros_like`, so in
the parameter's dtype. Reads and writes of its eight kernels: mul_ 2 (decay), lerp_ 3, mul_ 2, addcmul_ 3,
sqrt 2 (into a temporary), div_ 2, add_ 2, addcdiv_ 4. [torch/optim/adam.py, _multi_tensor_adam] Its
`step` counter, four bytes a parameter, is not counted."""

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": ADAMW,
    "adam": Optimizer(states=2, passes=18),
    "adamw, amsgrad": Optimizer(states=3, passes=23),
    "adam, amsgrad": Optimizer(states=3, passes=21),
    "sgd": Optimizer(states=0, passes=3),
    "momentum": Optimizer(states=1, passes=8),
    "adamw, fp32 master": Optimizer(states=0, passes=20, element_nbytes=12),
    "adam, fp32 master": Optimizer(states=0, passes=18, element_nbytes=12),
    "sgd, fp32 master": Optimizer(states=0, passes=3, element_nbytes=4),
    "momentum, fp32 master": Optimizer(states=0, passes=8, element_nbytes=8),
}
"""By the names that users give them. Adam is AdamW without the decay's mul_ 2; SGD add_ 3; with momentum mul_ 2, add_ 3
and add_ 3. amsgrad keeps max_exp_avg_sq as well: maximum_ 3. [torch/optim/{adam,sgd}.py, foreach]
fp32 master: a float32 copy of each parameter, and states in float32, as mixed precision keeps them for parameters in
bfloat16 [Micikevicius et al. 2018]: 4 bytes a number each."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base ** (power + 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP")
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(value: str | int) -> int:
    """A memory limit: 70_000_000_000, "70GB" (decimal), "64GiB" (binary), "1.5 TB" -> bytes.

    Raises ShardingError for anything else, and for less than one byte.
    """
    nbytes = _parse_text(value) if isinstance(value, str) else value
    if isinstance(nbytes, int) and not isinstance(nbytes, bool) and 1 <= nbytes < 2**63:
        return nbytes
    raise ShardingError(
        f"memory_limit is {shown(value)}; it must be a number of bytes above zero\n"
        f"  the units are {', '.join(filter(None, _UNITS))}\n"
        '  try: "70GB" (70 * 1000**3), "64GiB" (64 * 1024**3) or an integer'
    )


def _parse_text(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        return None
    return round(Decimal(match[1]) * units[match[2].lower()])


Axes = tuple[str, ...]

CONTEXT_BYTES = 600_000_000
"""CUDA's context with the kernels that a training step loads, and cuBLAS's workspaces.

The context took 426 MiB after the first call with torch 2.10 and CUDA 13 [unslothai/unsloth-zoo#1053], "around 400 MB"
since kernels load lazily [pytorch/pytorch#109888]. Kernels add to it as they are used. torch gives cuBLAS and cuBLASLt
32 MiB each on Hopper [torch docs, notes/cuda, cuBLAS workspaces]."""

COMMUNICATOR_BYTES = 688 << 20
"""One communicator of three ranks or more that has run an all-reduce: 688 MB on A100s with NVLink.
[NVIDIA/nccl#964] More channels take more [NVIDIA/nccl#864, #986], and from 2.22 on NCCL allocates what it connects."""

PAIR_BYTES = 544 << 20
"""The same for two ranks. [NVIDIA/nccl#964]"""

PEER_BYTES = 469_000_000
"""Added for every rank in reach of NVLink with which an all-to-all exchanges messages. The first all-to-all of eight
H100s took 4.34 - 1.06 GB, over seven peers. [NVIDIA/nccl#1685]"""


NETWORK_BYTES = 512 << 20
"""The buffer that all messages over a network share. [NVIDIA/nccl#2363]"""


def communicators(mesh: MeshSpec, used: Iterable[Axes] = ()) -> tuple[Axes, ...]:
    """The communicators of one rank, in the order in which they are made; none on CPUs or for one rank.

    The first is that of all ranks (the default process group). One for every mesh axis follows (DeviceMesh makes
    them), then those of several axes in `used`. Each is named by its axes of more than one device, in mesh order.
    Axes that span the same ranks share a communicator.
    """
    world = mesh.real_axes()
    if mesh.device_type != "cuda" or not world:
        return ()
    wanted = {tuple(sorted((a for a in axes if a in world), key=mesh.index)) for axes in used}
    several = sorted(
        (axes for axes in wanted if len(axes) > 1), key=lambda axes: [mesh.index(a) for a in axes]
    )
    return tuple(dict.fromkeys([world, *((axis,) for axis in world), *several]))


def reserve_bytes(mesh: MeshSpec, peers: Mapping[Axes, int] | None = None) -> int:
    """Bytes on every device of `mesh` for CUDA's context and the communicators; 0 on CPUs.

    peers: axes of the collectives that run -> with how many ranks one exchanges messages of its own
           (all-to-all), 0 if all its collectives go around a ring.
    """
    if mesh.device_type != "cuda":
        return 0
    found = CONTEXT_BYTES
    for axes in communicators(mesh, peers or ()):
        found += PAIR_BYTES if mesh.size(*axes) == 2 else COMMUNICATOR_BYTES
    for axes, count in (peers or {}).items():
        near = min(count, _in_reach(mesh, axes))
        found += near * PEER_BYTES + (NETWORK_BYTES if count > near else 0)
    return found


def _in_reach(mesh: MeshSpec, axes: Axes) -> int:
    """Other ranks of a group along `axes` in the same machine, where most are: ranks fill machines in their order."""
    ranks = group_ranks(group_shape(mesh, axes))
    # NVLink joins a rank to 7 others, in a machine of eight. Those beyond share one buffer. [NVIDIA/nccl#1450]
    return sum(rank <= 7 for rank in ranks) - 1


def format_count(number: float) -> str:
    """ "8.03 billion"."""
    for unit, size in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    """Three digits in a readable unit: "12.4 us"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def format_bytes(nbytes: int) -> str:
    """1536 -> "1.54KB": decimal units, as `memory_limit` reads them."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.4g}{unit}"


def enough_bytes(nbytes: int) -> str:
    """As `format_bytes`, rounded up: a `memory_limit` as it is written here is no less than `nbytes`."""
    last = _last_digit(nbytes)
    return format_bytes(-(-nbytes // last) * last)


def floor_bytes(nbytes: int) -> str:
    """As `format_bytes`, rounded down: what is written here is no more than `nbytes`."""
    last = _last_digit(nbytes)
    return format_bytes(nbytes // last * last)


def _last_digit(nbytes: int) -> int:
    """Bytes of the last of the four digits that are written."""
    scale = 1
    while nbytes >= 1000 * scale and scale < 1000**4:
        scale *= 1000
    return max(1, scale // 10 ** (4 - len(str(nbytes // scale))))
