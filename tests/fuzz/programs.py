"""Random modules as text: lines of `op_table`, run on an example as they are drawn. The same for the same number."""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from passes.capture.operator_calls import GroupedAsCaptured
from tests.fuzz.op_table import KINDS
from tests.fuzz.scope import Scope, Unfit

__all__ = ["Line", "Program", "drawn_program", "is_sound", "words"]

NAMES: Mapping[str, Any] = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint}
LARGEST, MOST, DEEPEST = 1e3, 4096, 5
"""Of a value, of its numbers, and of its dims."""
STIRRED, MOVED, MOVED_NARROW = 1e-13, 1e-8, 1e-3
"""Change of all that is read, relative, and what of results it may change: more, and ranks may differ rightly."""


@dataclass(frozen=True)
class Line:
    """Statements; makes: the value that they name, if they do."""

    text: tuple[str, ...]
    makes: str = ""


@dataclass(frozen=True)
class Program:
    """parts, inputs: name -> the text that makes it. outputs: names of values."""

    parts: Mapping[str, str]
    inputs: Mapping[str, str]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]

    def source(self) -> str:
        made = [f"        {text}" for text in self.parts.values()]
        body = [f"        {text}" for line in self.lines for text in line.text]
        given = [
            f"torch.manual_seed({n}); {name} = {made}"
            for n, (name, made) in enumerate(self.inputs.items(), 1000)
        ]
        rows = [
            "class Model(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *made,
            f"    def forward(self, {', '.join(self.inputs)}):",
            *body,
            f"        return {', '.join(self.outputs)}",
            *given,
            f"model, inputs = Model().double(), ({', '.join(self.inputs)},)",
        ]
        return "\n".join(rows)

    def made(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        text = self.source()
        name = f"<fuzz {hash(text)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        names = dict(NAMES)
        exec(compile(text, name, "exec"), names)
        return names["model"], names["inputs"]


def words(text: str | Sequence[str]) -> set[str]:
    """The names in it."""
    return set(re.findall(r"\b[a-z]\d+\b", text if isinstance(text, str) else "\n".join(text)))


def drawn_program(number: int) -> Program:
    """One that torch runs, forward and backward."""
    rng = random.Random(number)
    for _ in range(100):
        program = _drawn(rng)
        if program is not None and is_sound(program):
            return program
    raise RuntimeError(f"no module for {number}")


def _drawn(rng: random.Random) -> Program | None:
    sizes = tuple(rng.sample((1, 2, 3, 4, 4, 5, 6, 7, 8, 12), 3))
    inputs = _inputs(rng, sizes)
    scope = Scope(rng, sizes, names=dict(NAMES))
    lines: list[Line] = []
    kinds, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    _replay(scope, inputs, lines)
    wanted, made = rng.randint(3, 11), 0
    for _ in range(6 * wanted):
        if len(lines) >= wanted:
            break
        made += 1
        line = _line(scope, rng.choices(kinds, weights)[0], f"v{made}")
        if line is None:
            continue
        if not _ran(scope, line):
            _replay(scope, inputs, lines)
            continue
        lines.append(line)
        scope.keep(words([text for one in lines for text in one.text]))
    outputs = _outputs(scope, lines, rng)
    return Program(dict(scope.parts), inputs, tuple(lines), outputs) if outputs and lines else None


def _inputs(rng: random.Random, sizes: Sequence[int]) -> dict[str, str]:
    """As they come, with a gradient, or with strides of their own."""
    forms = (
        *("{0}",) * 6,
        "{0}.requires_grad_()",
        "{0}.transpose(0, -1)",
        "{0}[::2]",
        "{0}[:1].expand_as({0})",
    )
    drawn = lambda *ndims: tuple(rng.choice(sizes) for _ in range(rng.choice(ndims)))
    real = lambda *ndims: rng.choice(forms).format(f"torch.randn({drawn(*ndims)}).double()")
    made = {"x0": real(2, 3, 3, 4)}
    if rng.random() < 0.4:
        made["x1"] = real(1, 2, 3)
    if rng.random() < 0.5:
        made["x2"] = f"torch.randint(0, 9, {drawn(1, 2)})"
    return made


def _line(scope: Scope, kind: str, name: str) -> Line | None:
    try:
        written = KINDS[kind][1](scope)
    except (Unfit, RuntimeError, IndexError):  # of shapes that do not fit
        return None
    text = (f"{{0}} = {written}",) if isinstance(written, str) else tuple(written)
    makes = name if any("{0}" in one for one in text) else ""
    return Line(tuple(one.replace("{0}", name) for one in text), makes)


def _ran(scope: Scope, line: Line) -> bool:
    """Runs it on the values; whether all are such as may go on."""
    held: dict[str, Any] = {"self": scope.module, **scope.values}
    try:
        with GroupedAsCaptured():
            exec("\n".join(line.text), scope.names, held)
    except Exception:
        return False
    if line.makes:
        scope.values[line.makes] = held[line.makes]
    return all(isinstance(value, Tensor) and _is_tame(value) for value in scope.values.values())


def _is_tame(value: Tensor) -> bool:
    if not 0 < value.numel() <= MOST or value.ndim > DEEPEST:
        return False
    value = value.detach()
    return value.dtype == torch.bool or bool((value.abs() <= LARGEST).all())


def _replay(scope: Scope, inputs: Mapping[str, str], lines: Sequence[Line]) -> None:
    """The values as they are behind the lines."""
    scope.values = {}
    for number, (name, made) in enumerate(inputs.items(), 1000):
        torch.manual_seed(number)
        scope.values[name] = eval(made, scope.names)
    for part in scope.parts.values():
        exec(part, scope.names, {"self": scope.module})
    scope.module.double()
    for line in lines:
        _ran(scope, line)


def _outputs(scope: Scope, lines: list[Line], rng: random.Random) -> tuple[str, ...]:
    """The last that has a gradient, and some of what no line reads; or a loss of all of those."""
    found = [name for name, value in scope.values.items() if value.requires_grad]
    if not found:
        return ()
    read = words([text for line in lines for text in line.text if not text.startswith(f"{line.makes} = ")])
    read |= {word for line in lines for word in words(line.text) if word != line.makes}
    rest = [
        name for name in scope.values if name not in (*read, *scope.names, found[-1]) and name.startswith("v")
    ]
    ends = (found[-1], *rng.sample(rest, min(len(rest), rng.choice((0, 1, 2, 4)))))
    real = [name for name in ends if scope.values[name].is_floating_point()]
    if found[-1] in real and rng.random() < 0.3:
        lines.append(Line((f"loss = {' + '.join(f'{name}.square().mean()' for name in real)}",)))
        return ("loss", *(name for name in ends if rng.random() < 0.3))
    others = [*("x0",) * 3, found[-1], *(f"self.{name}" for name, _ in scope.module.named_parameters())]
    return (*ends, rng.choice(others)) if rng.random() < 0.15 else ends


def is_sound(program: Program) -> bool:
    """Whether torch runs it, and a change of what it reads, as small as of rounding, changes results as little."""
    results = [_results(program, stirred) for stirred in (False, True)]
    if results[0] is None or results[1] is None:
        return False
    narrow = ".float()" in program.source()
    most = MOVED_NARROW if narrow else MOVED
    return all(_close(one, other, most) for one, other in zip(*results, strict=True))


def _close(one: Tensor | None, other: Tensor | None, most: float) -> bool:
    if one is None or other is None:
        return one is other
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    scale = float(one.abs().max()) if one.numel() else 1.0
    return scale < LARGEST**2 and bool(((one - other).abs() <= most * max(scale, 1e-6)).all())


def _results(program: Program, stirred: bool) -> list[Tensor | None] | None:
    """Outputs, buffers and gradients; None where torch refuses."""
    model, inputs = program.made()
    generator = torch.Generator().manual_seed(1)
    if stirred:
        change = lambda x: x.detach() * (1 + STIRRED * torch.randn(x.shape, generator=generator))
        for parameter in model.parameters():
            parameter.data.copy_(change(parameter))
        inputs = tuple(
            change(x).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
        )
    try:
        torch.manual_seed(0)
        with GroupedAsCaptured():
            given = model(*inputs)
            outputs = given if isinstance(given, tuple) else (given,)
            loss = sum(_number(value) for value in outputs if value.requires_grad)
            parameters = [p for p in (*model.parameters(), *inputs) if p.requires_grad]
            grads = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
    except Exception:
        return None
    return [*(o.detach() for o in outputs), *(b.detach() for b in model.buffers()), *grads]


def _number(value: Tensor) -> Tensor:
    """Of which every part counts, by another weight."""
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(7))
    return (weights * (torch.view_as_real(value).sum(-1) if value.is_complex() else value)).sum()
