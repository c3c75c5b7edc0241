"""`report(model)`: run real steps, and see each part beside what was predicted, as a page of text.

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
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoshard.api import autoshard
from autoshard.arguments import checked_model
from autoshard.global_call import as_call
from autoshard.plan.plan import Plan
from autoshard.planning import started_mesh
from autoshard.reporting.measured import (
    MeasuredCollective,
    PeakMemory,
    PipelineReport,
    RankFigures,
    Report,
    StepFigures,
    put_together,
)
from autoshard.reporting.recorder import Recorder, SeenInPieces, SeenWhole
from autoshard.reporting.tracks import Tracks, held_nbytes, peak_counter, probe, run_peaks
from autoshard.runtime.process_groups import Axes, kept_on, whole_group
from autoshard.runtime.session import Session
from autoshard.runtime.trial_run import filled
from autoshard.watching.agreement import everyones
from cost_model.errors import PlanError, ShardingError, checked_count
from cost_model.measure.clock import marks_of
from cost_model.memory import format_bytes, format_seconds
from cost_model.mesh import MeshSpec
from cost_model.profile import CollectiveTime, Profile, corrected_profile
from passes.ir.torch_dtensor import local_of
from passes.lower.phases import Phases
from passes.predict.prediction import Prediction

_SHOWN = 40
_ROW = "{:46} {:>10} {:>10} {:>7}"


def report_text(figures: StepFigures, profile: str, refined: float | None = None) -> str:
    """Whole step, phases, collectives: predicted, measured, and predicted / measured.

    profile: what the prediction was made with, as printed. refined: seconds of the step by what was timed of the plan;
    None: nothing was.
    """
    steps = f"{figures.steps} step{'s' if figures.steps > 1 else ''}"
    ranks = f"{figures.ranks} rank{'s' if figures.ranks > 1 else ''}"
    lines = [
        f"{steps} after {figures.warmup} of warm-up, {ranks}; prices of {profile}",
        "",
        _ROW.format("", "predicted", "measured", "ratio"),
        _row("step", figures.predicted, figures.seconds),
        *([] if refined is None else [_row("  refined, as planned", refined, figures.seconds)]),
    ]
    for phase in figures.phases:
        lines.append(_row(f"  {phase.name}", phase.predicted, phase.seconds))
        alone = [c for c in figures.collectives if c.predicted.phase == phase.name]
        if alone and phase.compute is not None:
            lines.append(_row("    compute", phase.predicted_compute, phase.compute))
            predicted = sum(c.predicted.times * c.predicted.seconds for c in alone)
            lines.append(_row("    communication, alone", predicted, _seconds(alone)))
    if figures.exposed is not None:
        lines.append(_row("exposed communication", figures.exposed.predicted, figures.exposed.measured))
    lines += [*_memory(figures), "", *_collectives(figures), *_tracks(figures)]
    return "\n".join(lines) + "\n"


def _memory(figures: StepFigures) -> Iterator[str]:
    peak = figures.peak_memory
    if peak is not None:
        for name, one in (("peak memory", peak), *((f"  {one.phase}", one) for one in figures.memory)):
            predicted = "-" if one.predicted is None else format_bytes(one.predicted)
            ratio = "-" if one.predicted is None else f"{one.predicted / max(1, one.measured):.2f}"
            yield _ROW.format(name, predicted, format_bytes(one.measured), ratio)


def _collectives(figures: StepFigures) -> Iterator[str]:
    """One line for all that move the same bytes in the same way, the costliest first; each alone."""
    if not figures.collectives:
        yield "collectives: none"
        return
    yield _ROW.format("collectives, each alone", "predicted", "measured", "ratio")
    rows: dict[tuple[str, str, str, int], list[MeasuredCollective]] = {}
    for c in figures.collectives:
        p = c.predicted
        rows.setdefault((p.phase, p.kind, ",".join(p.axes), p.nbytes), []).append(c)
    for key, members in sorted(rows.items(), key=lambda item: -_seconds(item[1])):
        phase, kind, axes, nbytes = key
        times = sum(c.predicted.times for c in members)
        name = f"  {phase} {kind}[{axes}] {format_bytes(nbytes)} x{times}"
        yield _row(name, members[0].predicted.seconds, statistics.median(c.seconds for c in members))


def _seconds(collectives: Sequence[MeasuredCollective]) -> float:
    """Seconds of all of them in a step."""
    return sum(c.predicted.times * c.seconds for c in collectives)


def _tracks(figures: StepFigures) -> Iterator[str]:
    """Starts and ends, of the first so many."""
    if not figures.tracks:
        return
    yield ""
    yield _ROW.format("collectives in a step, start to end", "predicted", "measured", "")
    for number, track in enumerate(figures.tracks[:_SHOWN], 1):
        p = track.predicted
        name = f"  {number} {p.phase} {p.kind}[{','.join(p.axes)}] {p.serves}"
        yield f"{name[:46]:46} {_span(p.start, p.end):>19} {_span(track.start, track.end):>19}"
    if len(figures.tracks) > _SHOWN:
        yield f"  and {len(figures.tracks) - _SHOWN} more: report.figures.tracks, report.draw(path)"


def _span(start: float, end: float) -> str:
    return f"{format_seconds(start)} - {format_seconds(end)}"


def _row(name: str, predicted: float | None, measured: float) -> str:
    first = "-" if predicted is None else format_seconds(predicted)
    ratio = "-" if not predicted or not measured else f"{predicted / measured:.2f}"
    return _ROW.format(name, first, format_seconds(measured), ratio)


def track_svg(figures: StepFigures) -> str:
    """Both on one axis of seconds since the forward began; a collective has the same number in both. What is in
    flight at once stands in lanes."""
    from autoshard.drawing.draw import rows_svg
    from autoshard.drawing.timeline_svg import Bar
    from autoshard.plan.plan_graph import colour

    tracks, rows = figures.tracks, list[tuple[str, list[Bar]]]()
    kinds = [t.predicted.kind for t in tracks]
    predicted = [(t.predicted.start, t.predicted.end) for t in tracks]
    measured = [(t.start, t.end) for t in tracks]
    for name, spans in (("predicted", predicted), ("measured", measured)):
        lanes: list[list[Bar]] = []
        for number, (kind, span) in enumerate(zip(kinds, spans, strict=True), 1):
            lane = next((lane for lane in lanes if lane[-1].end <= span[0]), None)
            if lane is None:
                lanes.append(lane := [])
            lane.append(Bar(*span, colour(kind), f"{number} {kind}", str(number)))
        rows += [("" if place else name, lane) for place, lane in enumerate(lanes)]
    legend = {kind: colour(kind) for kind in kinds}
    if (exposed := figures.exposed) is not None:
        before, after = format_seconds(exposed.predicted), format_seconds(exposed.measured)
        legend[f"exposed: predicted {before}, measured {after}"] = "none"
    return rows_svg(rows, max(end for _, end in (*predicted, *measured)), legend)


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
    """The report of a model that every rank runs whole."""

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
        longer forward and backward computed than predicted. See `cost_model.profile`. The optimizer's
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


@dataclass(frozen=True)
class ReportOptions:
    """mesh: of the plan that is searched where `plan` is None. write_profile: where the corrected
    profile goes. Others as for `autoshard` and `report`."""

    plan: Plan | None
    mesh: Mapping[str, int] | None
    device: str
    profile: str | None
    backend: str
    steps: int
    warmup: int
    write_profile: Path | None


def run_report(model: nn.Module, example_inputs: Any, options: ReportOptions) -> int:
    """Every rank calls this; rank 0 prints. Parameters and inputs on `meta` get random values.

    The loss is the output's `loss`, else its first scalar, else the mean square of its first tensor; the
    optimizer is AdamW. Raises ShardingError unless as many ranks were started as the mesh has.
    """
    spec = _mesh_spec(options)
    with started_mesh(dict(zip(spec.names, spec.sizes, strict=True)), spec.device_type) as mesh:
        train_and_report(model, example_inputs, options, mesh)
    return 0


def _mesh_spec(options: ReportOptions) -> MeshSpec:
    if options.plan is not None:
        return options.plan.mesh
    if options.mesh is None:
        raise ShardingError("report: neither a plan nor a mesh\n  try: --plan plan.json, or --mesh dp=2,tp=4")
    return MeshSpec(options.mesh, device_type=options.device)


def train_and_report(model: nn.Module, example_inputs: Any, options: ReportOptions, mesh: DeviceMesh) -> None:
    """`run_report` on ranks that have a process group already."""
    device = torch.device(mesh.device_type)
    args, kwargs = pytree.tree_map(lambda leaf: _real(leaf, device), as_call(example_inputs))
    if not any(p.is_meta for p in model.parameters()):
        model.to(device)
    autoshard(
        model, mesh, (args, kwargs), plan=options.plan, profile=options.profile, backend=options.backend
    )
    _fill(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with report(model, warmup=options.warmup) as measured:
        for _ in range(options.steps):
            loss_of(model(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(measured.text(), end="")
        if options.write_profile is not None:
            assert isinstance(measured, StepReport), "plans with stages are not among the options"
            measured.corrected().save(options.write_profile)
            print(f"\nsaved {options.write_profile}")
    dist.barrier()


def _real(leaf: Any, device: torch.device) -> Any:
    """An argument on `device`; on `meta` it has no values, so zeros, which any integer input allows."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if leaf.is_meta else leaf.to(device)


def _fill(model: nn.Module, device: torch.device) -> None:
    """Small random values for what is on `meta`."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return
    model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            filled(local_of(tensor))


def loss_of(outputs: Any) -> Tensor:
    """The loss among a model's outputs; ShardingError if none can be differentiated."""
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if isinstance(loss, Tensor):
        return loss
    tensors = [
        leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not tensors:
        raise ShardingError("report: the model's outputs need no gradient\n  try: a model with a loss")
    scalars = [t for t in tensors if t.ndim == 0]
    return scalars[0] if scalars else tensors[0].float().square().mean()


def axes_by_group(mesh: DeviceMesh) -> Mapping[str, Axes]:
    """The inverse of what `groups_for` gave so far: name of a process group -> its axes."""
    return {group.group_name: axes for axes, group in kept_on(mesh, "groups").items()}
