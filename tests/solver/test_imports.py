"""The solver is usable by itself: it knows arrays, and loads neither torch nor what belongs to tensors."""

from __future__ import annotations

import subprocess
import sys

from tests.structure.source_tree import ROOT

ALONE = """
import itertools, sys
sys.modules["torch"] = None  # importing it is an ImportError

import numpy as np
from passes.solver.problem import Problem
from passes.solver.solve import solve

edge = np.array([[0.0, 4.0], [3.0, 1.0]])
problem = Problem(
    (np.array([1.0, 2.0]), np.array([0.0, 3.0]), np.array([5.0, 1.0])), ((0, 1), (1, 2), (0, 2)), (edge,) * 3,
    ((0, 2), (1, 3), (0, 3)), (np.array([4, 1]), np.array([2, 1]), np.array([0, 3])), 5.0,
)
fitting = [c for c in itertools.product(range(2), repeat=3) if problem.fits(c)]
assert 1 < len(fitting) < 8
assert solve(problem).cost == min(map(problem.cost, fitting))
foreign = {name.split(".")[0] for name in sys.modules} & {"autoshard", "cost_model", "networkx", "sympy"}
inside = {name for name in sys.modules if name.startswith("passes.") and not name.startswith("passes.solver")}
assert not foreign | inside, foreign | inside
"""


def test_it_solves_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
