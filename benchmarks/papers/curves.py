"""Bytes received and efficiency against the number of ranks, for each form; writes docs/figures and docs/curves.md.

    python -m benchmarks.papers.curves

Weak scaling as in Optimus section 3: the hidden size grows with the root of the ranks, tokens stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log2
from pathlib import Path
from statistics import linear_regression

import torch

from benchmarks.papers.planned import planned
from benchmarks.papers.traced import Sizes, events_of, passes_of
from benchmarks.section import markdown_table, write_section
from dshard import Mesh
from dshard.rules.communication_bounds import matmul_lower_bound
from dshard.tools.demo.train import COLOURS
from dshard.topology import BYTES, Topology

DOCS = Path(__file__).parent.parent.parent / "docs"
RANKS = [4**i for i in range(1, 8)]
FORMS = ("megatron", "megatron-sp", "atp", "optimus", "tesseract", "fsdp")
SEQUENCES, TOKENS = 128, 512
BOUND = "lower bound"
PLANNED = {"planned": 1, "planned, two copies": 2, "planned, four copies": 4}
"""Lines of plans, and how many times they store each tensor at most."""
WIDTH, HEIGHT, MARGIN = 720, 420, 64


@dataclass(frozen=True, slots=True)
class Point:
    """What one rank receives of a block, forward, in bytes, and the part of the time that it computes, if known."""

    ranks: int
    nbytes: float
    efficiency: float = 1.0


def block_of(ranks: int) -> Sizes:
    """A block that has as many parameters for each rank whatever their number."""
    return Sizes(512 * round(ranks**0.5), max(ranks, 64), TOKENS, 64)


def mesh_of(form: str, ranks: int) -> Mesh | None:
    """The mesh of a form: a square, the deepest Tesseract, the ATP mesh (2 sqrt p, sqrt p / 2).

    None where there is none, as of FSDP on more ranks than sequences.
    """
    root = round(ranks**0.5)
    if form == "optimus":
        return Mesh((root, root), ("r", "c"))
    if form == "atp":
        return Mesh((2 * root, root // 2), ("d1", "d2"))
    if form == "tesseract":
        depths = [(d, q, q) for q in (2**i for i in range(1, 8)) if 1 < (d := ranks // q**2) <= q and d * q**2 == ranks]
        return Mesh(max(depths), ("d", "r", "c")) if depths else None
    return None if form == "fsdp" and ranks > SEQUENCES else Mesh((ranks,), ("tp",))


def point(form: str, ranks: int, topology: Topology) -> Point | None:
    """One form on so many ranks; None where it has no mesh of them."""
    mesh = mesh_of(form, ranks)
    if mesh is None:
        return None
    events, timed = (
        events_of(passes_of(block_of(ranks), SEQUENCES, mesh, form, prices, torch.bfloat16)[0], prices)
        for prices in (BYTES, topology)
    )
    busy, moved = (sum(e.seconds for e in timed if e.queue == queue) for queue in ("compute", "network"))
    return Point(ranks, sum(e.nbytes for e in events), busy / (busy + moved))


def bound(ranks: int, itemsize: int = 2) -> Point:
    """The least that the four products of the block can receive, each tensor stored once."""
    products = block_of(ranks).products
    return Point(ranks, itemsize * sum(matmul_lower_bound(SEQUENCES * TOKENS, k, n, ranks) for k, n in products))


def least(ranks: int, copies: int = 1, axes: int = 4) -> Point:
    """The plan of all layouts and foldings together that receives the least, each tensor stored so many times."""
    return Point(ranks, planned(block_of(ranks), SEQUENCES, ranks, copies=copies, axes=axes).nbytes)


def exponent(form: str, ranks: Sequence[int] = RANKS[2:]) -> float:
    """Of p, in the work that keeps communication over computation where it is: products alone, fitted to all `ranks`.

    Communication over computation is measured at a width that does not change, as p^a; it falls with the width h as 1/h
    and the work grows as h^3, so the work must grow as p^(3 a). The fit is that of least squares in the logarithms.
    """
    ratios, block = [], Sizes(64 * max(ranks), max(ranks), TOKENS, 64)
    for p in ranks:
        mesh = mesh_of(form, p)
        assert mesh is not None
        events = events_of(passes_of(block, SEQUENCES, mesh, form, BYTES, torch.bfloat16)[0], BYTES)
        ratios.append(sum(e.nbytes for e in events) / sum(e.flops for e in events if e.name == "mm"))
    return 3 * linear_regression([log2(p) for p in ranks], [log2(ratio) for ratio in ratios]).slope


def draw(title: str, series: dict[str, list[tuple[int, float]]], *, logarithmic: bool) -> str:
    """Curves over the ranks, their number on a logarithmic axis."""
    values = [value for points in series.values() for _, value in points]
    low, high = (log2(min(values)), log2(max(values))) if logarithmic else (0.0, 1.0)

    def at(ranks: int, value: float) -> str:
        across = (log2(ranks) - 2) / (log2(RANKS[-1]) - 2)
        up = ((log2(value) if logarithmic else value) - low) / (high - low)
        return f"{MARGIN + across * (WIDTH - 4 * MARGIN):.1f},{HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><text x="{MARGIN}" y="24">{escape(title)}</text>',
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - 3 * MARGIN}" fill="none" stroke="#888888"/>',
    ]
    for ranks in RANKS:
        x = at(ranks, min(values)).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{ranks}</text>')
    ends = [2**low / 2**20, 2**high / 2**20] if logarithmic else [0, 1]
    for end, y in zip(ends, (HEIGHT - MARGIN, MARGIN), strict=True):
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4}" text-anchor="end">{end:,.0f}</text>')
    for i, (name, points) in enumerate(series.items()):
        style = f'fill="none" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="2"'
        style += ' stroke-dasharray="6 4"' if name == BOUND else ""
        y = MARGIN + 20 * i
        parts += [
            f'<polyline points="{" ".join(at(*p) for p in points)}" {style}/>',
            f'<line x1="{WIDTH - 170}" x2="{WIDTH - 145}" y1="{y}" y2="{y}" {style}/>',
            f'<text x="{WIDTH - 138}" y="{y + 4}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw, and write the table."""
    topology = Topology.preset("dgx-h100", nodes=RANKS[-1] // 8)
    found = {form: [p for ranks in RANKS if (p := point(form, ranks, topology))] for form in FORMS}
    efficiency = {form: [(p.ranks, p.efficiency) for p in points] for form, points in found.items()}
    found |= {name: [least(ranks, copies) for ranks in RANKS] for name, copies in PLANNED.items()}
    found[BOUND] = [bound(ranks) for ranks in RANKS]
    nbytes = {form: [(p.ranks, p.nbytes) for p in points if p.nbytes] for form, points in found.items()}
    figures = DOCS / "figures"
    drawing = draw("MiB received in a block, forward, by ranks", nbytes, logarithmic=True)
    (figures / "bytes.svg").write_text(drawing)
    (figures / "efficiency.svg").write_text(draw("part of the time computing, by ranks", efficiency, logarithmic=False))
    cells = {form: {p.ranks: f"{p.nbytes / 2**20:,.0f}" for p in points} for form, points in found.items()}
    body = [[form, *(own.get(ranks, "") for ranks in RANKS)] for form, own in cells.items()]
    write_section("bytes", markdown_table(["MiB", *map(str, RANKS)], body), DOCS / "curves.md")
    rows = [[form, f"{exponent(form):.2f}"] for form in ("megatron", "optimus")]
    write_section("exponents", markdown_table(["form", "exponent of p"], rows), DOCS / "curves.md")


if __name__ == "__main__":
    main()
