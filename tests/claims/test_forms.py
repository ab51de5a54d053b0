"""Every form of the papers appears with exactly its layouts, collectives and volumes, forward and backward."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
from helpers.matmul_forms import FORMS, Form
from helpers.measured_matmuls import Sizes, collectives, measure, received

MAX_RANKS = 64


def cubes(form: Form) -> list[tuple[int, ...]]:
    """Meshes with axes of q = 2, 3, 4, 8 ranks, as many as 64 ranks allow, and some that are not square."""
    axes = len(form.axes.split())
    shapes = [(q,) * axes for q in (2, 3, 4, 8) if q**axes <= MAX_RANKS]
    if axes == 2:
        shapes += [(2, 3), (4, 2)]
    if form.name == "Tesseract":
        shapes += [(2, 3, 3), (2, 4, 4), (1, 8, 8)]
    if form.name == "3D":
        shapes += [(2, 3, 4)]
    return shapes


LARGEST = 20
"""Ranks of the largest meshes that the default tests take."""
CASES = [
    pytest.param(form, shape, id=f"{form.name} {shape}", marks=[pytest.mark.thorough] * (prod(shape) > LARGEST))
    for form in FORMS
    for shape in cubes(form)
]


def sizes_on(shape: tuple[int, ...]) -> Sizes:
    """Sizes that every axis divides, two of them together as well, and that tell the tensors apart."""
    unit = prod(set(shape)) * max(shape) if len(shape) > 1 else shape[0]
    return 2 * unit, unit, 3 * unit


@pytest.mark.parametrize(("form", "shape"), CASES)
def test_a_form_has_its_layouts_and_volumes(form: Form, shape: tuple[int, ...]) -> None:
    mesh, sizes = form.on(shape), sizes_on(shape)
    m, k, n = sizes
    elements = m * k, k * n, m * n

    for saved, back in (("moved", form.kept), ("stored", form.again)):
        found = measure(mesh, form.strategy, sizes, (form.x, form.w), saved)  # type: ignore[arg-type]

        assert found.error < 1e-10
        assert found.layouts == (form.x, form.w, form.y, form.x, form.w)
        assert received(found.forward) == pytest.approx(form.forward(shape, *elements), abs=1e-9)
        assert received(found.backward) == pytest.approx(back(shape, *elements), abs=1e-9)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_sends_by_its_collectives(form: Form) -> None:
    shape = (3, 2, 4)[: len(form.axes.split())]

    found = measure(form.on(shape), form.strategy, (24, 12, 36), (form.x, form.w), "moved")

    assert collectives(found.forward) == Counter(filter(None, form.sends.split(", ")))
    assert collectives(found.backward) == Counter(filter(None, form.returns.split(", ")))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("q", [2, 3, 4, 8])
def test_the_closed_form_says_the_same_for_any_mesh(form: Form, q: int) -> None:
    """Without ranks, so that 8 x 8 x 8 of them count, too."""
    mesh = form.on((q,) * len(form.axes.split()))
    m, k, n = 2 * q**3, 3 * q**3, 5 * q**3

    assert form.schedule.volume(mesh, m, k, n) == pytest.approx(form.forward(mesh.shape, m * k, k * n, m * n))
    assert [str(layout) for layout in form.schedule.layouts(mesh)] == [form.x, form.w, form.y]
