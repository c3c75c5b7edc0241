"""Where recomputation may begin: places of the forward at which little is alive.

What is alive there is kept whatever else is computed again. So copies are made for one part of the graph at a time, and
live no longer than the backward of that part: a transformer is cut at its residual stream, a U-Net at its skips.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from torch import fx

from passes.ir.joint import JointGraph, dependents, result_index, results_nbytes
from passes.ir.op_traits import draws, is_collect, is_product, is_use, is_view, storage_root
from passes.ir.phase_ops import ops_by_phase

Place = frozenset[fx.Node]
"""The values alive at one place of the forward."""


def places(joint: JointGraph) -> tuple[Place, ...]:
    """In the order of the forward: between two products the place with the fewest bytes alive, where that is no
    more than at the places before and behind it.

    Values count that depend on a parameter and that the forward still reads; views as what they view.
    """
    forward, _ = ops_by_phase(joint)
    main = _trained_values(joint, forward)
    alive = _alive(forward, main)
    ends = [step for step, node in enumerate(forward) if is_product(node) and node in main]
    lowest: list[tuple[int, Place]] = []
    for first, last in pairwise([0, *ends]):
        inside = [alive[step] for step in range(first, last) if alive[step][1]]
        lowest.extend(sorted(inside, key=lambda found: found[0])[:1])
    found: list[Place] = []
    for i, (nbytes, place) in enumerate(lowest):
        around = [other for other, _ in lowest[max(0, i - 1) : i + 2]]
        if nbytes <= min(around) and place not in found[-1:]:
            found.append(place)
    return tuple(found)


def candidates(joint: JointGraph, kept: Sequence[Place]) -> list[fx.Node]:
    """The ops of the forward that may be computed again, if what is alive at `kept` is kept."""
    forward, _ = ops_by_phase(joint)
    main = _trained_values(joint, forward)
    stay = frozenset[fx.Node]().union(*kept)
    return [n for n in forward if n in main and n not in stay and _may_run_again(n)]


def _may_run_again(node: fx.Node) -> bool:
    """What runs before or after the pieces of a batch runs once, and what a piece leaves behind is counted once."""
    runs_late = node.meta.get("runs", "piece") == "piece" and not is_collect(node)
    return runs_late and not is_use(node) and not is_view(node) and not draws(node)


def known_ops(joint: JointGraph, names: Collection[str]) -> list[str]:
    """Those of `names` that are ops of the forward and may be computed again."""
    wanted = set(names)
    return [node.name for node in candidates(joint, ()) if node.name in wanted]


def users_choice(joint: JointGraph) -> list[str]:
    """The ops that run under `torch.utils.checkpoint`, but for those whose results are read outside of that call, or
    saved by its policy (`create_selective_checkpoint_contexts`)."""
    forward, _ = ops_by_phase(joint)
    inside = set(forward)

    def read_outside(node: fx.Node, region: int | None) -> bool:
        readers = [user for user in node.users if user.op == "output" or user in inside]
        return any(
            read_outside(user, region) if is_use(user) or is_view(user) else _region(user) != region
            for user in readers
        )

    allowed = candidates(joint, ())
    return [
        node.name
        for node in allowed
        if _region(node) is not None and "saved" not in node.meta and not read_outside(node, _region(node))
    ]


def _region(node: fx.Node) -> int | None:
    return node.meta.get("checkpoint")


def _trained_values(joint: JointGraph, forward: Sequence[fx.Node]) -> set[fx.Node]:
    """Ops of the forward that depend on a trained parameter."""
    return dependents(forward, joint.trained) - joint.trained


def _alive(forward: Sequence[fx.Node], main: set[fx.Node]) -> list[tuple[int, Place]]:
    """After each op: the bytes of what is alive, and what that is."""
    last: dict[fx.Node, int] = {}
    for step, node in enumerate(forward):
        for operand in node.all_input_nodes:
            last[_owner(operand)] = step
    ending: dict[int, list[fx.Node]] = {}
    for node, step in last.items():
        ending.setdefault(step, []).append(node)
    now: dict[fx.Node, int] = {}
    found: list[tuple[int, Place]] = []
    nbytes = 0
    for step, node in enumerate(forward):
        if node in main and _owner(node) is node and last.get(node, -1) > step:
            now[node] = results_nbytes(node)
            nbytes += now[node]
        for gone in ending.get(step, ()):
            nbytes -= now.pop(gone, 0)
        found.append((nbytes, frozenset(now)))
    return found


def _owner(node: fx.Node) -> fx.Node:
    return result_index(storage_root(node))[0]
