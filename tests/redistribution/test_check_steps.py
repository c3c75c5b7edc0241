"""Steps read from a file: what the search chose is accepted, and what is accepted is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout
from passes.redistribution.redistribute import Redistributor
from passes.redistribution.steps import STEPS, Redistribution, Step
from passes.redistribution.universe import step_problems
from tests.redistribution.layouts import creatable, link_prices, parts_of, random_layout, run_plan, totals
from tests.spatial.test_halo_steps import with_halos

MESHES = [{"a": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}]


def random_ends(seed: int, mesh: MeshSpec) -> tuple[Layout, Layout, list[int]]:
    rng = random.Random(seed)
    shape = [rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randint(1, 3))]
    src = random_layout(rng, shape, mesh, ["sum", "max"], 0.5)
    return src, creatable(src, random_layout(rng, shape, mesh, ["sum", "max"], 0.5)), shape


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_what_the_search_chooses_is_accepted(axes: dict[str, int]) -> None:
    mesh = MeshSpec(axes)
    for seed in range(60):
        src, dst, shape = random_ends(seed, mesh)
        if seed % 2 and not src.partial:
            dst = with_halos(random.Random(seed), Layout(src.dims), shape, mesh, summed=False)
        steps = Redistributor(mesh, link_prices(mesh)).plan(src, dst, shape, 8).steps
        assert list(step_problems(src, dst, steps, shape, mesh)) == [], (str(src), str(dst))


def changed(steps: Sequence[Step], rng: random.Random, mesh: MeshSpec, ndim: int) -> list[Step]:
    """One thing of them other than it was; layouts still chained, as a file's are."""
    found = list(steps)
    i = rng.randrange(len(found))
    step = found[i]
    match rng.randrange(5):
        case 0:
            del found[i]
        case 1:
            found.insert(i, step)
        case 2:
            found[i] = replace(step, axes=tuple(rng.sample(mesh.names, rng.randint(1, len(mesh.names)))))
        case 3:
            make = rng.choice(list(STEPS.values()))
            given = {
                name: rng.choice(["sum", "max"]) if name == "op" else rng.randrange(ndim)
                for name in make.argument_names()
            }
            found[i] = make(before=step.before, after=step.after, axes=step.axes, **given)
        case _:
            found[i] = replace(step, after=rng.choice([step.before, found[-1].after]))
    return chained(found, steps[0].before)


def chained(steps: Sequence[Step], first: Layout) -> list[Step]:
    found: list[Step] = []
    for step in steps:
        found.append(replace(step, before=found[-1].after if found else first))
    return found


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_what_is_accepted_is_right(axes: dict[str, int]) -> None:
    """Changed at random, steps are refused, or move every value to where it belongs."""
    mesh, refused, accepted = MeshSpec(axes), 0, 0
    for seed in range(150):
        src, dst, shape = random_ends(seed, mesh)
        rng = random.Random(seed)
        steps = Redistributor(mesh, link_prices(mesh)).plan(src, dst, shape, 8).steps
        if not steps:
            continue
        mine = changed(steps, rng, mesh, len(shape))
        if list(step_problems(src, dst, mine, shape, mesh)):
            refused += 1
            continue
        accepted += 1
        value = torch.randint(-99, 99, shape, generator=torch.manual_seed(seed))
        plan = Redistribution(tuple(mine), 0.0, (0.0,) * len(mine), (0,) * len(mine))
        results = run_plan(plan, parts_of(value, src, mesh, rng), shape, mesh)
        wanted = parts_of(value, Layout(dst.dims, (), dst.sizes), mesh, rng)
        for result, want in zip(totals(results, dst, mesh), wanted, strict=True):
            assert torch.equal(result, want), (seed, [step.text() for step in mine])
    assert refused > 20 and accepted > 0, (refused, accepted)
