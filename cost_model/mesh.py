"""A mesh of devices by names and sizes alone: no process group, no GPU. Names of groups that are only simulated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_model.errors import ShardingError, checked_count, reject

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MOST_DEVICES = 2**20
"""More devices are a slip: work that is done for every rank would not end."""


@dataclass(frozen=True, init=False)
class MeshSpec:
    """Named axes of a device mesh, major (slowest varying rank) first.

        MeshSpec({"dp": 32, "tp": 8}, device_type="cuda")

    Ranks are numbered row-major over the axes, as `torch.distributed.device_mesh.init_device_mesh`
    numbers them: with the mesh above rank = 8 * dp + tp, so "tp" groups are adjacent ranks.

    Raises ShardingError for an empty mesh, a size below 1 or a name that is not an identifier.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    device_type: str

    def __init__(self, axes: Mapping[str, int], device_type: str = "cpu") -> None:
        if not isinstance(axes, Mapping):
            raise reject("the axes of a mesh", axes, "MeshSpec({'dp': 8})")
        if not axes:
            raise ShardingError("mesh has no axes\n  try: MeshSpec({'dp': 8})")
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise reject("the name of a mesh axis", name, "an identifier, such as 'dp'")
            checked_count(size, f"the size of mesh axis {name!r}", least=1)
        if math.prod(axes.values()) > MOST_DEVICES:
            raise ShardingError(
                f"mesh has {math.prod(axes.values()):.3g} devices\n  try: at most {MOST_DEVICES}"
            )
        if not isinstance(device_type, str):
            raise reject("device_type", device_type, "'cpu' or 'cuda'")
        object.__setattr__(self, "names", tuple(axes))
        object.__setattr__(self, "sizes", tuple(axes.values()))
        object.__setattr__(self, "device_type", device_type)

    @staticmethod
    def of(mesh: DeviceMesh) -> MeshSpec:
        """A DeviceMesh by names and sizes. Unnamed dims are called "axis0", "axis1", ...

        Raises ShardingError where the mesh does not number its ranks 0, 1, 2, ... row-major: a rank's
        place in the mesh would not be its rank.
        """
        if not hasattr(mesh, "mesh_dim_names") or isinstance(mesh, type):
            raise reject("mesh", mesh, "init_device_mesh(device_type, shape, mesh_dim_names=names)")
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise ShardingError(
                f"mesh has ranks {ranks}\n  ranks must be 0, 1, 2, ... row by row\n"
                "  try: init_device_mesh(device_type, shape, mesh_dim_names=names)"
            )
        return MeshSpec(dict(zip(names, mesh.shape, strict=True)), mesh.device_type)

    @property
    def device_count(self) -> int:
        return math.prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Number of devices along `axes` together (1 for no axes)."""
        product = 1
        for axis in axes:  # a search calls this a million times, so no generator
            product *= self.sizes[self.index(axis)]
        return product

    def resized(self, axis: str, size: int) -> MeshSpec:
        """The same axes, of which `axis` has `size` devices."""
        self.index(axis)
        sizes = dict(zip(self.names, self.sizes, strict=True))
        return MeshSpec({**sizes, axis: size}, self.device_type)

    def index(self, axis: str) -> int:
        """Position of `axis`; ShardingError if the mesh has no such axis."""
        try:
            return self.names.index(axis)
        except ValueError:
            raise ShardingError(
                f"mesh has no axis {axis!r}\n  try: one of its axes, {', '.join(map(repr, self.names))}"
            ) from None

    def stride(self, axis: str) -> int:
        """Rank distance of neighbours along `axis`."""
        return math.prod(self.sizes[self.index(axis) + 1 :])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` sits: axis name -> index along that axis."""
        return {n: rank // self.stride(n) % s for n, s in zip(self.names, self.sizes, strict=True)}

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that share all of `rank`'s coordinates except along `axes`.

        Ordered with the first of `axes` varying slowest: position i in the group is the linear
        index (major to minor) along `axes`.
        """
        home = self.coordinate(rank)
        base = rank - sum(home[a] * self.stride(a) for a in axes)
        return tuple(
            base + sum(i * self.stride(a) for i, a in zip(index, axes, strict=True))
            for index in itertools.product(*(range(self.size(a)) for a in axes))
        )

    def linear_index(self, rank: int, axes: Sequence[str]) -> int:
        """Position of `rank` within `group(rank, axes)`."""
        position = 0
        for axis in axes:
            size = self.size(axis)
            position = position * size + rank // self.stride(axis) % size
        return position

    def real_axes(self) -> tuple[str, ...]:
        """Axes with more than one device. The others change nothing."""
        return tuple(n for n, s in zip(self.names, self.sizes, strict=True) if s > 1)

    def __str__(self) -> str:
        return "mesh (" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + ")"


_PREFIX = "axes:"


def simulated_group_name(axes: Sequence[str]) -> str:
    """The name by which the simulator knows the group over `axes`, in that order."""
    return _PREFIX + ",".join(axes)


def simulated_group_axes(name: str) -> tuple[str, ...]:
    """Inverse of `simulated_group_name`."""
    return tuple(name.removeprefix(_PREFIX).split(","))


@dataclass(frozen=True)
class _SimulatedGroups(Mapping[tuple[str, ...], str]):
    mesh: MeshSpec

    def __getitem__(self, axes: tuple[str, ...]) -> str:
        if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(self.mesh.names):
            raise KeyError(axes)
        return simulated_group_name(axes)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter((name,) for name in self.mesh.names)

    def __len__(self) -> int:
        return len(self.mesh.names)


def simulated_groups(mesh: MeshSpec) -> Mapping[tuple[str, ...], str]:
    """Any non-empty tuple of the mesh's axes -> its simulated name. Iterates over single axes only."""
    return _SimulatedGroups(mesh)
