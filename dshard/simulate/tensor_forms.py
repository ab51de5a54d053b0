"""The forms of tensor parallelism of a transformer, as layouts: those of the strategies that `parallelize` knows.

A block is two pairs of linear layers. Between blocks lies the residual stream, between the layers of a pair, and so in
attention's own work, the inner features. Layouts are those of tensors `[stage, tokens, features]` and of weights
`[stage, in, out]`, a placement for each mesh axis of the form; loops say what each axis splits of a matmul, as in
`dshard.rules.matmul_loops`. All of it follows from what each axis of a strategy splits
(`dshard.parallel.strategies`), so a new form is a new row there, and the names of its axes in the table below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from dshard.errors import StrategyError
from dshard.parallel.strategies import STRATEGIES, Axis
from dshard.placements import Placement, Replicate, Shard
from dshard.validate import as_int, suggestion

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A form of tensor parallelism: the placements of a block's tensors on mesh axes with these roles.

    `first` and `second` are the weights of a pair, `first_loops` and `second_loops` what their matmuls split.
    `gathered` says which axes share out all parameters, to be gathered for use, `sequence` which split the tokens
    within a sequence, and `by_heads` whether attention then has loop h there; `source` is where the form is from.
    """

    name: str
    roles: tuple[str, ...]
    residual: Placements
    inner: Placements
    first: Placements
    second: Placements
    first_loops: str
    second_loops: str
    gathered: tuple[bool, ...]
    sequence: tuple[bool, ...]
    by_heads: bool
    source: str

    def __post_init__(self) -> None:
        places = (self.residual, self.inner, self.first, self.second)
        for part in (*places, self.first_loops, self.second_loops, self.gathered, self.sequence):
            if len(part) != len(self.roles):
                raise StrategyError(f"the form {self.name!r} has {len(self.roles)} mesh axes: {part!r} says other")

    def shapes(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """The mesh shapes of this form for `ranks` ranks: all factorisations, or those that the form is defined for.

        >>> FORMS["optimus"].shapes(4), FORMS["tesseract"].shapes(8), FORMS["megatron"].shapes(4)
        (((2, 2),), ((2, 2, 2),), ((4,),))
        """
        as_int(ranks, "ranks", StrategyError, least=1)
        if not self.roles:
            return ((),) if ranks == 1 else ()
        if len(self.roles) == 1:
            return ((ranks,),) if ranks > 1 else ()
        if self.name == "optimus":
            q = isqrt(ranks)
            return ((q, q),) if q * q == ranks and q > 1 else ()
        if self.name == "tesseract":
            depths = range(2, ranks + 1)
            return tuple((d, q, q) for d in depths if ranks % d == 0 and (q := isqrt(ranks // d)) ** 2 * d == ranks > d)
        return tuple((ranks // d, d) for d in range(2, ranks) if ranks % d == 0)


def _placed(axis: Axis) -> tuple[Placement, ...]:
    """The placements that one axis of a strategy gives the residual stream, inner features, both weights of a pair."""
    rows, columns = Shard(1), Shard(2)
    kept: dict[str | None, Placement] = {None: Replicate(), "features": columns, "sequence": rows}
    weights: dict[str | None, tuple[Placement, Placement]] = {
        None: (Replicate(), Replicate()),
        "inner": (columns, rows),
        "residual": (rows, columns),
        "summed": (rows, rows),
        "made": (columns, columns),
        "first": (rows, rows),
    }
    if axis.batch or axis.sequence:
        return rows, rows, *weights[axis.weights]
    inner = columns if axis.weights in ("inner", "made") else Replicate()
    return kept[axis.residual], inner, *weights[axis.weights]


def _loops(axes: Sequence[Axis], weights: Placements) -> str:
    loops: dict[Placement, str] = {Shard(1): "k", Shard(2): "n"}
    pairs = zip(axes, weights, strict=True)
    return "".join("m" if axis.batch or axis.sequence else loops[weight] for axis, weight in pairs)


def _form(name: str, roles: str, source: str) -> Form:
    """The form of a strategy; data parallelism is outside all forms, so its own has no axes."""
    axes = tuple(axis for part in name.split(" x ") for axis in STRATEGIES[part]) if roles else ()
    residual, inner, first, second = zip(*map(_placed, axes), strict=True) if axes else ((),) * 4
    loops = _loops(axes, first), _loops(axes, second)
    gathered = tuple(axis.weights == "first" for axis in axes)
    sequence, by_heads = tuple(axis.sequence for axis in axes), any(axis.attention == "h" for axis in axes)
    places = residual, inner, first, second
    return Form(name, tuple(roles.split()), *places, *loops, gathered, sequence, by_heads, source)


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        _form("data", "", "no tensor parallelism"),
        _form("megatron", "tp", "Megatron-LM"),
        _form("megatron-sp", "tp", "Megatron-LM with sequence parallelism"),
        _form("optimus", "r c", "Optimus section 3"),
        _form("tesseract", "d r c", "Tesseract section 3"),
        _form("atp", "d1 d2", "ATP section 3.2"),
        _form("fsdp", "x", "FSDP, ZeRO-3"),
        _form("context", "cp", "context parallelism, by the cheaper of two loops"),
        _form("ulysses", "cp", "DeepSpeed-Ulysses"),
        _form("context x megatron-sp", "cp tp", "Megatron-LM with context parallelism"),
        _form("ulysses x megatron-sp", "cp tp", "DeepSpeed-Ulysses with Megatron-LM"),
    )
}


def form_of(name: str) -> Form:
    """The form of this name."""
    known_form = FORMS.get(name) if isinstance(name, str) else None
    if known_form is None:
        known = f"use {', '.join(FORMS)}{suggestion(name, FORMS)}"
        raise StrategyError(f"there is no form of tensor parallelism {name!r}: {known}")
    return known_form
