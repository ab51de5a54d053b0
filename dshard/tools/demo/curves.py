"""An SVG drawing of every strategy's losses."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from dshard.tools.demo.train import Row

WIDTH, HEIGHT, MARGIN, LINE = 720, 400, 48, 18
COLOURS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def draw(rows: Sequence[Row]) -> str:
    """Draw a curve for each row, later ones thinner and dashed, so that coinciding curves all remain visible.

    >>> draw([Row("single", "1 device", 0.5, 0.0, 1.0, 0, 0, 1.0, (2.0, 1.0, 0.5))]).count("<polyline")
    1
    """
    steps = max((len(row.losses) for row in rows), default=0)
    top = max((loss for row in rows for loss in row.losses), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(steps, top),
    ]
    for i, row in enumerate(rows):
        colour = COLOURS[i % len(COLOURS)]
        thin = 6 - 5 * i / max(1, len(rows) - 1)
        style = f'fill="none" stroke="{colour}" stroke-width="{thin:.1f}"' + (' stroke-dasharray="8 6"' if i else "")
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in _points(row.losses, steps, top))
        y = MARGIN + i * LINE
        legend = f"{row.strategy} ({row.mesh}), {row.test_accuracy:.1%} right"
        parts += [
            f'<polyline points="{points}" {style}/>',
            f'<line x1="{WIDTH - 330}" x2="{WIDTH - 300}" y1="{y}" y2="{y}" {style}/>',
            f'<text x="{WIDTH - 292}" y="{y + 4}">{escape(legend)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _points(losses: Sequence[float], steps: int, top: float) -> list[tuple[float, float]]:
    across, up = (WIDTH - 2 * MARGIN) / max(1, steps - 1), (HEIGHT - 2 * MARGIN) / top
    return [(MARGIN + i * across, HEIGHT - MARGIN - loss * up) for i, loss in enumerate(losses)]


def _axes(steps: int, top: float) -> list[str]:
    left, right, low, high = MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN, MARGIN
    return [
        f'<path d="M{left} {high}V{low}H{right}" fill="none" stroke="#888888"/>',
        f'<text x="{left - 8}" y="{high + 4}" text-anchor="end">{top:.2f}</text>',
        f'<text x="{left - 8}" y="{low + 4}" text-anchor="end">0</text>',
        f'<text x="{left}" y="{high - 14}">loss</text>',
        f'<text x="{right}" y="{low + 18}" text-anchor="end">step {steps}</text>',
    ]
