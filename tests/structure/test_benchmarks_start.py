"""Every benchmark can be started: figures for a machine that is seldom at hand break unseen otherwise."""

from __future__ import annotations

import importlib
import pkgutil

import benchmarks


def test_every_module_can_be_imported() -> None:
    found = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
    assert "benchmarks.gpu_figures" in found
    for name in found:
        importlib.import_module(name)
