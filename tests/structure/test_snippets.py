"""Code in the pages is Python, its calls of autoshard take their arguments, and what says so runs."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator

import pytest

import autoshard
from tests.structure.pages import PAGES
from tests.structure.source_tree import ROOT, relative

_BLOCK = re.compile(r"^(<!-- run -->\n)?```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_METHODS = {
    name: getattr(autoshard.Plan, name)
    for name in ("why_not", "explain", "draw", "save", "diff", "step_time_at", "memory_at", "size_crossovers")
}


_SUFFIXES = ("json", "html", "svg", "py", "pt")
"""Of files that are called plan."""


def blocks() -> Iterator[tuple[str, bool, str]]:
    """Page, whether its code runs, code; of a diff what it leads to."""
    for page in [ROOT / "README.md", *PAGES]:
        for run, kind, code in _BLOCK.findall(page.read_text()):
            if kind == "diff":
                code = "".join(f"{line[1:]}\n" for line in code.splitlines() if line[:1] != "-")
            yield relative(page), bool(run), textwrap.dedent(code)


BLOCKS = list(blocks())


def called(call: ast.Call) -> object:
    """A function of autoshard, or a method of plans."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", None) != "autoshard":
        return _METHODS.get(name) if getattr(call.func.value, "id", None) == "plan" else None
    return getattr(autoshard, name or "", None) if name in autoshard.__all__ else None


def wrong_calls(code: str) -> list[str]:
    wrong = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not inspect.isroutine(function := called(node)):
            continue
        parameters = inspect.signature(function).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue
        wrong += [f"{ast.unparse(node)}: {word.arg}" for word in node.keywords if word.arg not in parameters]
    return wrong


def test_what_is_wrong_is_found() -> None:
    assert wrong_calls("autoshard(model, mesh, stage='pp')") == ["autoshard(model, mesh, stage='pp'): stage"]
    assert wrong_calls("plan.draw('a.svg', b=2)") == ["plan.draw('a.svg', b=2): b"]


def test_there_are_diffs_and_code_that_runs() -> None:
    assert sum(run for _, run, _ in BLOCKS) >= 2 and len(BLOCKS) > 15


@pytest.mark.parametrize(
    ("page", "code"), [(page, code) for page, _, code in BLOCKS], ids=[page for page, *_ in BLOCKS]
)
def test_calls_take_their_arguments(page: str, code: str) -> None:
    assert not wrong_calls(code)


@pytest.mark.parametrize(
    "code", [code for _, run, code in BLOCKS if run], ids=[page for page, run, _ in BLOCKS if run]
)
def test_it_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "page", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out


def test_what_is_said_of_plans_exists() -> None:
    there = {
        name for kind in (autoshard.Plan, autoshard.PipelinePlan) for name in (*dir(kind), *_fields(kind))
    }
    texts = {relative(page): page.read_text() for page in [ROOT / "README.md", *PAGES]}
    named = {
        (page, name)
        for page, text in texts.items()
        for name in re.findall(r"(?<![\w.])plan\.([a-z]\w*)", text)
    }
    assert len(named) > 40
    assert not {(page, name) for page, name in named if name not in there | {*_SUFFIXES}}


def _fields(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        yield from inspect.get_annotations(base)
