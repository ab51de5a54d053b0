"""Pictures of layouts: each element is drawn once for each rank that holds it, however it lies."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import dshard
from dshard import Layout, Mesh, Partial, Replicate, Shard, visualize
from dshard.errors import LayoutError, ShapeError
from dshard.testing import distribute, layouts, meshes, simulated

SIZES = st.integers(0, 7)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    shape = tuple(draw(st.lists(SIZES, max_size=4)))
    return draw(layouts(draw(meshes()), len(shape))), shape


def held(layout: Layout, shape: tuple[int, ...]) -> Counter[tuple[int, tuple[int, ...]]]:
    """How often each rank holds each element: once, where it does."""
    return Counter(
        (layout.mesh.rank(at), index)
        for at in layout.mesh.coordinates()
        for index in product(*layout.region(shape, at))
    )


def drawn(svg: str, ndim: int) -> Counter[tuple[int, tuple[int, ...]]]:
    """The same, read back from a drawing."""
    found: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for element in ElementTree.fromstring(svg).iter():
        if "data-rank" in element.attrib:
            parts = [range(*map(int, part.split(":"))) for part in element.attrib["data-part"].split()]
            parts = parts[len(parts) - ndim :]
            found.update((int(element.attrib["data-rank"]), index) for index in product(*parts))
    return found


@given(cases())
@settings(max_examples=60)
def test_every_element_is_drawn_once_for_each_rank_that_holds_it(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    picture = visualize(layout, shape)

    assert drawn(picture.svg(), len(shape)) == held(layout, shape)
    assert set(picture.idle) == set(layout.mesh.ranks) - {rank for rank, _ in held(layout, shape)}


def test_stripes_fill_their_part_and_no_more() -> None:
    picture = visualize(Layout(Mesh((2, 3)), (Shard(0), Replicate())), (5, 8))

    found = [e.attrib for e in ElementTree.fromstring(picture.svg()).iter() if "data-rank" in e.attrib]
    area = sum(float(e["width"]) * float(e["height"]) for e in found)
    frames = {e["data-part"]: float(e["width"]) * float(e["height"]) * 3 for e in found}
    assert len(found) == 6
    assert area == pytest.approx(sum(frames.values()), rel=1e-3)
    assert frames["0:3 0:8"] / frames["3:5 0:8"] == pytest.approx(3 / 2, rel=1e-3)


def test_a_terminal_gets_colours_and_a_pipe_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    picture = visualize(Layout(Mesh((2, 2)), (Shard(0), Shard(0))), (3,))

    console = Console(force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(picture)
    picture.show()

    assert "48;2;86;180;233" in capture.get()  # rank 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "nothing on rank 3" in printed


def test_distributed_tensors_are_drawn_by_their_layout(tmp_path: Path) -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    with simulated(mesh):
        x = distribute(torch.ones(4, 4), Layout(mesh, (Shard(1), Partial())))
        picture = visualize(x)

    assert picture == visualize(x.layout, (4, 4))
    assert picture._repr_svg_() == picture.svg(tmp_path / "x.svg") == (tmp_path / "x.svg").read_text()
    assert str(picture).splitlines()[-1].split() == ["0:4", "0,1", "2,3"]


def test_what_cannot_be_drawn_is_refused() -> None:
    layout = Layout(Mesh((2,)), (Shard(1),))
    with pytest.raises(ShapeError, match=r"give one, as in visualize\(layout, \(8, 8\)\)"):
        dshard.visualize(layout)
    with pytest.raises(LayoutError, match=r"S\(1\) is out of range"):
        visualize(layout, (4,))
    with simulated(layout.mesh), pytest.raises(ShapeError, match=r"the tensor has a shape, \(2, 2\)"):
        visualize(distribute(torch.ones(2, 2), layout), (2, 2))
