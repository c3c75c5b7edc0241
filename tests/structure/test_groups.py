"""Tests that share a fixture of their module run in one process, which makes it once."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="module")
def shared() -> None:
    """Sharing it makes a group (tests/conftest.py)."""


@pytest.mark.usefixtures("shared")
def test_a_shared_fixture_makes_a_group(request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@structure/test_groups.py")
