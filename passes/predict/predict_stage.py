"""What one stage of a pipeline takes for a piece, once a step and in bytes: figures for the timeline of all stages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from msgspec import Struct, structs

from cost_model.checked_arguments import Count, Seconds
from passes.ir.joint import CPU, JointGraph
from passes.ir.process_state import collector_paused
from passes.lower.phases import Backward, Phases
from passes.lower.piecewise import RankPieces, split_pieces
from passes.lower.rank_program import RankProgram, rank_program
from passes.plan.planned_graph import PlannedGraph
from passes.predict.predict_program import alone, predict_phases, predict_pieces, trained_by, update_seconds
from passes.predict.predict_step import slowest_ranks
from passes.predict.prediction import MemoryWalk, Prediction
from passes.simulate.lockstep import simulated_group_axes, simulated_groups
from passes.stages.stage_graph import split_backward
from passes.strategies.prices import Prices
from passes.strategies.traffic import eager_traffic


class StageFigures(Struct, frozen=True, forbid_unknown_fields=True):
    """Of one stage, on its slowest and on its fullest rank.

    forward, backward: seconds of one piece. input, weight: of the halves of its backward as two programs. before,
    after: once in a step, before the first piece and after the last. update: of the optimizer.
    held: bytes from the first piece to the end of the step, whatever runs; kept: those that a piece leaves in its
    forward for its backward, and what it received; peak: the most while one piece runs, all of these included.
    """

    forward: Seconds
    backward: Seconds
    input: Seconds
    weight: Seconds
    before: Seconds
    after: Seconds
    update: Seconds
    held: Count
    kept: Count
    peak: Count

    @property
    def running(self) -> int:
        """Bytes that are there only while a piece runs."""
        return self.peak - self.held - self.kept

    def of_piece(self, pieces: int) -> float:
        """Seconds of a piece, with its share of what runs once."""
        return self.forward + self.backward + (self.before + self.after + self.update) / pieces


@collector_paused()
def predict_stage(
    joint: JointGraph,
    planned: PlannedGraph,
    prices: Prices,
    received: Collection[str],
) -> StageFigures:
    """joint: of the stage. received: names of the values that come from the stage before."""
    joint = replace(joint, device=CPU)  # it is never run
    mesh = prices.mesh
    groups = simulated_groups(mesh)
    found = [
        _of_rank(joint, rank_program(joint, planned, mesh, rank, groups), prices, frozenset(received))
        for rank in slowest_ranks(planned.layouts, mesh)
    ]
    slowest = max(found, key=lambda one: one.forward + one.backward)
    fullest = max(found, key=lambda one: one.peak)
    return structs.replace(slowest, held=fullest.held, kept=fullest.kept, peak=fullest.peak)


def kept_by_a_piece(walk: MemoryWalk, received: Collection[str]) -> int:
    """Bytes that a piece leaves in its forward for its backward; what it received is taken to be among them."""
    turn = next((i for i, (phase, _) in enumerate(walk.steps) if phase == "backward"), len(walk.steps))
    at_turn = [v for v in walk.values if v.kind == "kept" and v.first <= turn <= v.last]
    inputs = [v for v in walk.values if v.kind == "inputs" and v.name in received]
    return sum(value.nbytes for value in (*at_turn, *inputs))


def _of_rank(
    joint: JointGraph, program: RankProgram, prices: Prices, received: frozenset[str]
) -> StageFigures:
    eager = prices.traffic is eager_traffic
    predict = lambda phases: predict_phases(phases, prices, simulated_group_axes)
    if joint.pieces == 1:
        phases = (program.joined() if eager else program).complete()
        step = predict(phases)
        before = after = 0.0
        given_back = received
    else:
        parts = split_pieces(program)
        parts = parts.joined() if eager else parts
        step = predict_pieces(program, parts, joint.pieces, prices, simulated_group_axes)
        before, after = (predict(alone(module)).seconds for module in (parts.before, parts.after))
        phases = parts.piece.complete()
        given_back = _given_back(phases, parts)
    piece = predict(phases).phase_seconds
    halves = _halves(phases.backward, given_back, predict)
    walk = step.memory
    assert walk is not None
    return StageFigures(
        forward=piece[0],
        backward=piece[1],
        input=halves[0],
        weight=halves[1],
        before=before,
        after=after,
        update=update_seconds(trained_by(program), prices),
        held=_held(walk),
        kept=kept_by_a_piece(walk, received),
        peak=walk.peak.nbytes,
    )


def _given_back(phases: Phases, parts: RankPieces) -> set[str]:
    """Names of the gradients of what is received: of a piece's, those that it leaves for another stage."""
    if phases.backward is None:
        return set()
    left = zip(phases.backward.gradients, parts.left[len(phases.outputs) :], strict=True)
    return {end.name for end, one in left if one.how == "own"}


def _halves(
    backward: Backward | None, received: Collection[str], predict: Callable[[Phases], Prediction]
) -> tuple[float, float]:
    """Seconds of what the stage before waits for, and of the gradients of parameters."""
    if backward is None:
        return 0.0, 0.0
    halves = split_backward(backward, received)
    return predict(alone(halves.input)).seconds, predict(alone(halves.weight)).seconds


def _held(walk: MemoryWalk) -> int:
    """Of what is there to the end: what was there before the pieces, and gradients."""
    end = len(walk.steps) - 1
    forward = [i for i, (phase, _) in enumerate(walk.steps) if phase == "forward"]
    early = max(forward, default=0)
    return sum(
        value.nbytes
        for value in walk.values
        if value.last == end and (value.kind == "gradients" or value.first <= early)
    )
