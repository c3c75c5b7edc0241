"""Do steps lead where they should? What a plan file says is held against what a redistribution may do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cost_model.mesh import MeshSpec
from passes.layout.joined_axes import JoinedAxes
from passes.layout.layout import Layout
from passes.redistribution.dim_splits import DimSplits
from passes.redistribution.moves import Moves, as_state, as_step
from passes.redistribution.redistribute import universe_key
from passes.redistribution.steps import Step

__all__ = ["step_problems"]


def step_problems(
    held: Layout,
    wanted: Layout,
    steps: Sequence[Step],
    shape: Sequence[int],
    mesh: MeshSpec,
    joined: JoinedAxes = (),
) -> Iterator[str]:
    """What is wrong with `steps` as a way from `held` to `wanted`, in sentences; nothing if each is a move that the
    search has and they end in `wanted`.

    shape: the tensor's global one. The layouts, those between the steps too, fit it and the mesh.
    joined: axes that the search moved together.
    """
    if not steps and held == wanted:
        return
    dims, key = universe_key((held, wanted), shape)
    # Axes that neither the tensor nor a step has only add moves that are none of these.
    used = {*held.axes, *wanted.axes, *(axis for step in steps for axis in step.axes)}
    part = MeshSpec(
        {name: mesh.size(name) for name in mesh.names if name in used or not used}, mesh.device_type
    )
    runs = tuple(run for run in joined if used.issuperset(run))
    moves = Moves(part, tuple(DimSplits(part, spec, runs) for spec in key.dims), runs)
    now = held
    for step in steps:
        state = as_state(now, dims)
        made = (as_step(state, move, dims, len(shape)) for move in moves(state) if move.make is type(step))
        if all(step != other for other in made):
            yield f"no step {step.text()} leads from {now} to {step.after}"
            return
        now = step.after
    if now != wanted:
        yield f"its steps lead to {now}, and it reads {wanted}"
