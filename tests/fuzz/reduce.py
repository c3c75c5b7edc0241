"""A fault with the least of its case that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.fuzz.cases import FAULT, Case, Outcome, examined
from tests.fuzz.programs import Line, Program, is_sound, words

__all__ = ["reduced"]


def reduced(case: Case, outcome: Outcome) -> Case:
    """Smaller by a line or an option at a time, for as long as the fault stays of its kind."""
    kind = outcome.reason[:40]
    shows = lambda one: (found := examined(one)).state == FAULT and found.reason[:40] == kind
    found = True
    while found:
        found = False
        for smaller in _smaller(case):
            if (smaller.program == case.program or is_sound(smaller.program)) and shows(smaller):
                case, found = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    program = case.program
    for kept in program.outputs if len(program.outputs) > 1 else ():
        yield replace(case, program=_pruned(replace(program, outputs=(kept,))))
    for place in reversed(range(len(program.lines))):
        if (without := _without(program, place)) is not None:
            yield replace(case, program=without)
    for name in ("pins", "shards"):
        if getattr(case, name):
            yield replace(case, **{name: {}})
    for name, usual in (("share", None), ("kept", False), ("twice", False), ("prices", "slow")):
        if getattr(case, name) != usual:
            yield replace(case, **{name: usual})
    for name in case.options:
        yield replace(case, options={key: value for key, value in case.options.items() if key != name})
    for value in program.lines:  # all before it, and it is the result
        if value.makes and program.outputs != (value.makes,):
            yield replace(case, program=_pruned(replace(program, outputs=(value.makes,))))
    if len(case.mesh) > 1:
        yield replace(
            case, mesh={"a": case.mesh["a"]}, pins={name: pin[:1] for name, pin in case.pins.items()}
        )


def _without(program: Program, place: int) -> Program | None:
    """Without a line, and those that read what it makes; None if nothing would be left."""
    gone, lines = {program.lines[place].makes} - {""}, list[Line](program.lines[:place])
    for line in program.lines[place + 1 :]:
        if gone & words(line.text):
            gone |= {line.makes} - {""}
        else:
            lines.append(line)
    outputs = tuple(name for name in program.outputs if name not in gone)
    return _pruned(replace(program, lines=tuple(lines), outputs=outputs)) if outputs and lines else None


def _pruned(program: Program) -> Program:
    """Without what makes values that nothing reads, and without such parts and inputs."""
    lines = list(program.lines)
    for line in reversed(program.lines):
        read = words([text for other in lines if other is not line for text in other.text])
        alone = all(text.startswith(f"{line.makes} = ") for text in line.text)
        if line.makes and alone and line.makes not in read | words(program.outputs):
            lines.remove(line)
    used = words([text for line in lines for text in line.text]) | words(program.outputs)
    inputs = {name: made for name, made in program.inputs.items() if name in used} or dict(program.inputs)
    parts = {name: made for name, made in program.parts.items() if name in used}
    return Program(parts, inputs, tuple(lines), program.outputs)
