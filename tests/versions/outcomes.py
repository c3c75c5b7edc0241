"""What pytest's JUnit XML says of a run: how many passed, which did not and why, which were skipped and why.

Also the facts that tests noted with `record_property`. Standard library only: it also runs where nothing is installed.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Outcome", "count", "read_outcomes"]


@dataclass(frozen=True)
class Outcome:
    """One test. result: "passed", "failed", "error" (outside the test itself) or "skipped".

    why: the first line of what was raised, or the reason for the skip. noted: what the test recorded.
    """

    test: str
    result: str
    why: str = ""
    noted: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.test.split("::")[0]


def read_outcomes(path: Path) -> list[Outcome]:
    """The tests of a JUnit XML file, in order. A test with an error in its teardown is listed once, as that."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        outcome = _outcome(case)
        if outcome.test not in found or outcome.result in ("failed", "error"):
            found[outcome.test] = outcome
    return list(found.values())


def count(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Result -> number of tests."""
    numbers = Counter(outcome.result for outcome in outcomes)
    return {result: numbers[result] for result in ("passed", "failed", "error", "skipped")}


def _outcome(case: ElementTree.Element) -> Outcome:
    properties = case.find("properties")
    noted = {} if properties is None else {p.get("name", ""): p.get("value", "") for p in properties}
    for result, tag in (("error", "error"), ("failed", "failure"), ("skipped", "skipped")):
        child = case.find(tag)
        if child is not None:
            return Outcome(_name(case), result, _first_line(child), noted)
    return Outcome(_name(case), "passed", "", noted)


def _name(case: ElementTree.Element) -> str:
    """pytest writes classname "tests.api.test_cli" and name "test_x[case]"."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '')}"


def _first_line(child: ElementTree.Element) -> str:
    """What was raised; of a rank that failed, the last line of its traceback says more than the first."""
    message = child.get("message", "") or (child.text or "")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines and lines[0].endswith("--- rank 0 ---"):
        raised = [line for line in lines if line.split(":")[0].endswith(("Error", "Warning", "Exception"))]
        lines = raised[:1] or lines
    return lines[0] if lines else ""
