"""`report(model)`: run real steps, and see each part beside what was predicted.

with autoshard.report(model) as report:
    for batch in batches:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
print(report.text())
report.corrected().save("mine.json")
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autoshard.arguments import checked_model
from autoshard.reporting.measured import PeakMemory, RankFigures, StepFigures, put_together
from autoshard.reporting.pipeline_report import PipelineReport, Report
from autoshard.reporting.probe import probe
from autoshard.reporting.recorder import Recorder, SeenInPieces, SeenWhole
from autoshard.reporting.text import report_text, track_svg
from autoshard.reporting.tracks import Tracks, held_nbytes, peak_counter, run_peaks
from autoshard.runtime.observe import marks_of
from autoshard.runtime.process_groups import axes_by_group, whole_group
from autoshard.runtime.session import Session
from autoshard.watching.agreement import everyones
from cost_model.checked_arguments import checked_count
from cost_model.correction import CollectiveTime, corrected_profile
from cost_model.errors import PlanError
from cost_model.profile import Profile
from passes.lower.phases import Phases
from passes.predict.prediction import Prediction


def report(model: nn.Module, *, warmup: int = 2, repeats: int = 5) -> StepReport | PipelineReport:
    """Measure the training steps run in a `with` block, on all ranks, against their prediction.

    model:   made parallel by `autoshard`; every rank enters the block and runs the same steps.
    warmup:  steps of the block that are not counted (at least one always is).
    repeats: after the block, the last step's forward and backward run so often once more, op by op, to
             time each collective alone. They change nothing.

    A step begins with a forward that follows an optimizer's update; its phases are forward, backward,
    optimizer and other. Compiled programs are measured as they are. Several programs in one block (other
    shapes): the prediction is of the one that was trained last. Of a batch in pieces the forward and the backward are
    those of all pieces.

    Of a model in stages it is a `PipelineReport`: the timeline of all stages and pieces, measured beside predicted.

    Raises PlanError if `model` is not parallel, or was not called in the block.
    """
    session = Session.of(checked_model(model))
    checked_count(warmup, "warmup")
    checked_count(repeats, "repeats", least=1)
    if session is None:
        raise PlanError(
            "report: the model is not parallel\n  try: model = autoshard(model, mesh, ...) before"
        )
    plan = session.plan
    if (plan is not None and plan.axis) or (plan is None and session.settings.stages not in (None, "auto")):
        return PipelineReport(session, warmup)
    if plan is None and session.settings.stages == "auto":
        raise PlanError(
            "report: whether the model has stages is not known yet\n  try: report after its first call"
        )
    return StepReport(session, warmup, repeats)


class StepReport(Report[StepFigures]):
    """Of a model that every rank runs whole."""

    def __init__(self, session: Session, warmup: int, repeats: int) -> None:
        self._repeats, self._marks = repeats, marks_of(session.spec.device_type)
        self._recorder = Recorder(session.model, self._marks, peak_counter(session.spec.device_type))
        super().__init__(session, warmup, session.observers, self._recorder)

    def text(self) -> str:
        """Whole step, phases and collectives: predicted, measured, predicted / measured."""
        plan = self._session.plan
        refined = plan.step_time if plan is not None and plan.origin.timed else None
        return report_text(self.figures, str(self._session.profile), refined)

    def _drawn(self, target: Path) -> str:
        if not self.figures.tracks:
            raise PlanError(
                "report: nothing to draw: no collectives ran, or not on CPUs with gloo, where they can be followed, or "
                "the batch is in pieces\n"
                "  try: report.text()"
            )
        return track_svg(self.figures)

    def corrected(self, profile: Profile | None = None) -> Profile:
        """`profile`, or the one the prediction was made with, with what was measured written into it.

        Collectives: their times become samples of their group. Kernels: all rates are scaled by how much
        longer forward and backward computed than predicted. See `cost_model.correction`. The optimizer's
        phase corrects nothing: the prediction is AdamW's, whichever it was.
        """
        figures, session = self.figures, self._session
        times = [
            CollectiveTime(c.predicted.kind, c.predicted.axes, c.predicted.nbytes, c.seconds)
            for c in figures.collectives
        ]
        factor = _compute_factor(figures)
        note = (
            f"Corrected on {datetime.date.today()} by {figures.steps} steps on {figures.ranks} ranks of "
            f"{session.spec}, torch {torch.__version__}, backend {session.settings.backend}: "
            f"{len(times)} collectives, kernels x {factor:.3g}"
        )
        return corrected_profile(profile or session.profile, session.spec, times, factor, note)

    def _measure(self) -> StepFigures:
        session = self._session
        steps = self._recorder.steps()
        program = self._recorder.program()
        if program is None or not steps:
            raise PlanError(
                "report: the model was not called in the block\n  try: run training steps inside `with`"
            )
        phases, forward = program
        given = forward.inputs, session.settings.backend
        step = SeenWhole(phases, *given) if isinstance(phases, Phases) else SeenInPieces(phases, *given)
        prediction = step.predicted(session.prices(), axes_by_group(session.mesh).__getitem__)
        probed = probe(step.probed(self._marks), self._repeats)
        mine = RankFigures(
            replace(prediction, memory=None),  # of every value: not for the other ranks
            tuple(steps),
            probed.collectives,
            probed.compute,
            *self._seen_again(step, prediction),
        )
        ranks = everyones(session.mesh, mine)
        return put_together(ranks, self._warmup, fused=session.settings.backend != "eager")

    def _seen_again(
        self, step: SeenWhole | SeenInPieces, prediction: Prediction
    ) -> tuple[Tracks | None, tuple[PeakMemory, ...]]:
        """When collectives ran, and how many bytes were alive: on CPUs in the step run again, under a profiler."""
        session, peaks = self._session, self._recorder.peaks
        if session.spec.device_type != "cpu":
            return None, _beside(prediction, peaks)
        tracks = None
        if prediction.collectives:
            group = whole_group(session.mesh)
            tracks = step.tracks(self._repeats, lambda: dist.barrier(group))
        held = held_nbytes(step.inputs, session.model.parameters(), self._recorder.optimizers())
        return tracks, _beside(prediction, run_peaks(step.run_again, held))


def _beside(prediction: Prediction, measured: Mapping[str, int]) -> tuple[PeakMemory, ...]:
    walk = prediction.memory
    predicted = {phase: None if walk is None else walk.peak_of(phase) or None for phase in measured}
    return tuple(PeakMemory(phase, predicted[phase], nbytes) for phase, nbytes in measured.items())


def _compute_factor(figures: StepFigures) -> float:
    """Measured over predicted seconds of the kernels of forward and backward; 1 where nothing is known."""
    pairs = [
        (phase.compute, phase.predicted_compute)
        for phase in figures.phases
        if phase.name != "optimizer" and phase.compute is not None and phase.predicted_compute is not None
    ]
    measured = sum(compute for compute, _ in pairs)
    predicted = sum(compute for _, compute in pairs)
    return measured / predicted if measured > 0.0 and predicted > 0.0 else 1.0
