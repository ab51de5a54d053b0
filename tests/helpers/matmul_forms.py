"""The distributed matmuls of papers on tensor parallelism: layouts, collectives and volumes of each.

Y[m, n] = X[m, k] W[k, n]. A volume is the elements that each rank receives. Going back, "kept" is the volume where the
operands that were gathered are kept, "again" where each is gathered again; the gradient of Y is moved once for both
products. Optimus counts it twice, as each of its products moves its own operands: see `test_forms_differentiated`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dshard import Mesh, Schedule
from dshard.rules.matmul_loops import STRATEGIES

Volume = Callable[[tuple[int, ...], float, float, float], float]
"""Of the mesh shape and the elements of X, W and Y."""


def f(n: int) -> float:
    """Return the share of a tensor that a rank lacks if it holds one of n chunks."""
    return (n - 1) / n


@dataclass(frozen=True, slots=True)
class Form:
    """One row: where X, W and Y lie, what is sent and received going forward and, where all is kept, going back."""

    name: str
    axes: str
    strategy: str | Schedule
    x: str
    w: str
    y: str
    forward: Volume
    kept: Volume
    again: Volume
    sends: str
    returns: str

    def on(self, shape: tuple[int, ...]) -> Mesh:
        return Mesh(shape, tuple(self.axes.split()))

    @property
    def schedule(self) -> Schedule:
        return STRATEGIES[self.strategy].schedule if isinstance(self.strategy, str) else self.strategy


def nothing(s: tuple[int, ...], x: float, w: float, y: float) -> float:
    return 0.0


def summa(s: tuple[int, ...], x: float, w: float, y: float) -> float:
    r, c = s
    return f(c) * x / r + f(r) * w / c


def summa_abt(s: tuple[int, ...], x: float, w: float, y: float) -> float:
    r, c = s
    return f(r) * w / c + f(c) * y / r


def summa_atb(s: tuple[int, ...], x: float, w: float, y: float) -> float:
    r, c = s
    return f(c) * x / r + f(r) * y / c


def b_stationary(s: tuple[int, ...], x: float, w: float, y: float) -> float:
    r, c = s
    return f(r) * x / c + f(c) * y / r


def tesseract(s: tuple[int, ...], x: float, w: float, y: float) -> float:
    d, r, c = s
    return f(c) * x / (d * r) + f(r) * w / c


def over_depth(s: tuple[int, ...], x: float, w: float, y: float) -> float:
    """Return the volume of the all_reduce of W's gradient over the depth."""
    d, r, c = s
    return 2 * f(d) * w / (r * c)


def colossal(s: tuple[int, ...], x: float, w: float, y: float) -> float:
    out, inner, weight = s
    return f(inner) * x / (out * weight) + f(weight) * w / (out * inner) + f(out) * y / (inner * weight)


FORMS = [
    Form(
        "1D column",
        "tp",
        "column",
        "tp:R",
        "tp:S(1)",
        "tp:S(1)",
        nothing,
        lambda s, x, w, y: 2 * f(s[0]) * x,
        lambda s, x, w, y: 2 * f(s[0]) * x,
        "",
        "all_reduce tp",
    ),
    Form(
        "1D row",
        "tp",
        "row",
        "tp:S(1)",
        "tp:S(0)",
        "tp:R",
        lambda s, x, w, y: 2 * f(s[0]) * y,
        nothing,
        nothing,
        "all_reduce tp",
        "",
    ),
    Form(
        "1D row, the sequence split",
        "tp",
        "row-sequence",
        "tp:S(1)",
        "tp:S(0)",
        "tp:S(0)",
        lambda s, x, w, y: f(s[0]) * y,
        lambda s, x, w, y: f(s[0]) * y,
        lambda s, x, w, y: f(s[0]) * y,
        "reduce_scatter tp",
        "all_gather tp",
    ),
    Form(
        "SUMMA AB",
        "row col",
        Schedule(("m", "n"), ("k", "k")),
        "row:S(0) col:S(1)",
        "row:S(0) col:S(1)",
        "row:S(0) col:S(1)",
        summa,
        summa,
        lambda s, x, w, y: 2 * summa(s, x, w, y),
        "all_gather col, all_gather row",
        "reduce_scatter col, reduce_scatter row",
    ),
    Form(
        "SUMMA ABt",
        "row col",
        Schedule(("m", "k"), ("n", "n")),
        "row:S(0) col:S(1)",
        "row:S(1) col:S(0)",
        "row:S(0) col:S(1)",
        summa_abt,
        summa_abt,
        lambda s, x, w, y: summa_abt(s, x, w, y) + f(s[0]) * w / s[1],
        "all_gather row, reduce_scatter col",
        "all_gather col, reduce_scatter row",
    ),
    Form(
        "SUMMA AtB",
        "row col",
        Schedule(("k", "n"), ("m", "m")),
        "row:S(1) col:S(0)",
        "row:S(0) col:S(1)",
        "row:S(0) col:S(1)",
        summa_atb,
        summa_atb,
        lambda s, x, w, y: summa_atb(s, x, w, y) + f(s[1]) * x / s[0],
        "all_gather col, reduce_scatter row",
        "all_gather row, reduce_scatter col",
    ),
    Form(
        "B stationary",
        "row col",
        Schedule(("n", "k"), ("m", "m")),
        "row:S(0) col:S(1)",
        "row:S(1) col:S(0)",
        "row:S(1) col:S(0)",
        b_stationary,
        b_stationary,
        lambda s, x, w, y: b_stationary(s, x, w, y) + f(s[0]) * x / s[1],
        "all_gather row, reduce_scatter col",
        "all_gather col, reduce_scatter row",
    ),
    Form(
        "Tesseract",
        "dep row col",
        "tesseract",
        "dep:S(0) row:S(0) col:S(1)",
        "dep:R row:S(0) col:S(1)",
        "dep:S(0) row:S(0) col:S(1)",
        tesseract,
        lambda s, x, w, y: tesseract(s, x, w, y) + over_depth(s, x, w, y),
        lambda s, x, w, y: 2 * tesseract(s, x, w, y) + over_depth(s, x, w, y),
        "all_gather col, all_gather row",
        "reduce_scatter col, reduce_scatter row, all_reduce dep",
    ),
    Form(
        "3D",
        "out in w",
        Schedule(("k", "n", "m"), ("m", "m", "k")),
        "out:S(1) in:S(0) w:S(0); 0:w,in",
        "out:S(0) in:S(1) w:S(0)",
        "out:S(0) in:S(1) w:S(0); 0:w,out",
        colossal,
        colossal,
        lambda s, x, w, y: colossal(s, x, w, y) + f(s[1]) * x / (s[0] * s[2]) + f(s[2]) * w / (s[0] * s[1]),
        "all_gather in, all_gather w, reduce_scatter out",
        "all_gather out, reduce_scatter in, reduce_scatter w",
    ),
    Form(
        "ATP column-first",
        "d1 d2",
        "column-first",
        "d1:R d2:S(1)",
        "d1:S(1) d2:S(0)",
        "d1:S(1) d2:R",
        lambda s, x, w, y: 2 * f(s[1]) * y / s[0],
        lambda s, x, w, y: 2 * f(s[0]) * x / s[1],
        lambda s, x, w, y: 2 * f(s[0]) * x / s[1],
        "all_reduce d2",
        "all_reduce d1",
    ),
    Form(
        "ATP row-first",
        "d1 d2",
        "row-first",
        "d1:S(1) d2:R",
        "d1:S(0) d2:S(1)",
        "d1:R d2:S(1)",
        lambda s, x, w, y: 2 * f(s[0]) * y / s[1],
        lambda s, x, w, y: 2 * f(s[1]) * x / s[0],
        lambda s, x, w, y: 2 * f(s[1]) * x / s[0],
        "all_reduce d1",
        "all_reduce d2",
    ),
]
