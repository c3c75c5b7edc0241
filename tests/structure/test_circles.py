"""No module imports, by whatever way, a module that imports it: not in a function, not for the type checker alone."""

from __future__ import annotations

import pytest

from tests.structure.import_graph import circles, import_graph, sources
from tests.structure.source_tree import PACKAGES, ROOT


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_make_no_circle(package: str) -> None:
    found = circles(import_graph(sources(ROOT, package)))
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


@pytest.mark.parametrize(
    "back",
    [
        "import p.a",
        "from p.a import x",
        "from p import a",
        "def f():\n    from p.a import x",
        "if TYPE_CHECKING:\n    from p.a import x",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    texts = {"p.__init__": "", "p.a": "from p.b import y", "p.b": "from p import c", "p.c": back}
    assert circles(import_graph(texts)) == [("p.a", "p.b", "p.c")]


def test_imports_one_way_are_no_circle() -> None:
    texts = {
        "p.__init__": "from p.a import x",
        "p.a": "from p.b import y\nimport os",
        "p.b": "",
        "p.c": "import p",
    }
    assert circles(import_graph(texts)) == []
