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

from benchmarks.section import markdown_table, write_section
from dshard.rules.communication_bounds import matmul_lower_bound
from dshard.simulate import Model, Setup, form_of
from dshard.simulate.block import BlockCosts, block_events
from dshard.tools.demo.curves import COLOURS
from dshard.topology import Topology

DOCS = Path(__file__).parent.parent.parent / "docs"
RANKS = [4**i for i in range(1, 8)]
FORMS = ("megatron", "megatron-sp", "atp", "optimus", "tesseract", "fsdp")
SEQUENCES, TOKENS = 128, 512
BOUND = "lower bound"
WIDTH, HEIGHT, MARGIN = 720, 420, 64


@dataclass(frozen=True, slots=True)
class Point:
    """What one rank receives of a block, forward, in bytes, and the part of the time that it computes."""

    ranks: int
    nbytes: float
    efficiency: float


def model_of(ranks: int) -> Model:
    """As many parameters for each rank whatever their number."""
    width = 512 * round(ranks**0.5)
    return Model(1, width, max(ranks, 64), TOKENS, head_size=64, ffn=4 * width)


def shape_of(form: str, ranks: int) -> tuple[int, ...] | None:
    """The mesh of a form: the deepest Tesseract, the ATP mesh nearest to the best, (2 sqrt p, sqrt p / 2)."""
    shapes = form_of(form).shapes(ranks)
    if form == "tesseract":
        shapes = tuple(s for s in shapes if s[0] <= s[1])
        return max(shapes, default=None)
    if form == "atp":
        return min(shapes, key=lambda s: abs(log2(s[0] / s[1]) - 2), default=None)
    return shapes[0] if shapes else None


def point(form: str, ranks: int, topology: Topology) -> Point | None:
    """One form on so many ranks; None where it has no mesh of them."""
    shape = shape_of(form, ranks)
    if shape is None:
        return None
    events = block_events(BlockCosts(model_of(ranks), Setup(form_of(form), shape), topology, exact=False), SEQUENCES)[0]
    busy = sum(e.seconds for e in events if not e.axes)
    moved = sum(e.seconds for e in events if e.axes)
    return Point(ranks, sum(e.nbytes for e in events), busy / (busy + moved))


def bound(ranks: int, itemsize: int = 2) -> Point:
    """The least that the four products of the block can receive, each tensor stored once."""
    model = model_of(ranks)
    tokens = SEQUENCES * TOKENS
    sizes = [(linear.features_in, linear.features_out) for linear in model.linears]
    return Point(ranks, itemsize * sum(matmul_lower_bound(tokens, k, n, ranks) for k, n in sizes), 1.0)


def exponent(form: str, ranks: Sequence[int] = RANKS[2:]) -> float:
    """Of p, in the work that keeps communication over computation where it is: products alone, fitted to all `ranks`.

    Communication over computation is measured at a width that does not change, as p^a; it falls with the width h as 1/h
    and the work grows as h^3, so the work must grow as p^(3 a). The fit is that of least squares in the logarithms.
    """
    topology = Topology.flat(25e9, ranks=max(ranks)).bytes_only()
    ratios = []
    for p in ranks:
        model = Model(1, 64 * max(ranks), max(ranks), 64 * max(ranks))
        shape = shape_of(form, p)
        assert shape is not None
        found = block_events(BlockCosts(model, Setup(form_of(form), shape), topology, exact=False), 256)[0]
        moved = sum(e.nbytes for e in found if e.axes and e.name != "norm")
        ratios.append(moved / sum(e.flops for e in found if e.name != "attention"))
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
    found[BOUND] = [bound(ranks) for ranks in RANKS]
    nbytes = {form: [(p.ranks, p.nbytes) for p in points] for form, points in found.items()}
    efficiency = {form: [(p.ranks, p.efficiency) for p in points] for form, points in found.items() if form != BOUND}
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
