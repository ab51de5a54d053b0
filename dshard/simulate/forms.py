"""The forms of tensor parallelism of a transformer, as layouts: a new form is a new row of the table below.

A block is two pairs of linear layers. Between blocks lies the residual stream, between the layers of a pair the inner
features, in attention's own work the core. Layouts are those of tensors `[stage, tokens, features]` and of weights
`[stage, in, out]`, a placement for each mesh axis of the form; loops say what each axis splits of a product, as in
`dshard.ops.matmul.schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from dshard.errors import StrategyError
from dshard.placements import Placement, Replicate, Shard

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Where the tensors of a block lie on the mesh axes that have these roles.

    `first` and `second` are the weights of a pair, `first_loops` and `second_loops` what their products split.
    `sources` say where it is from.
    """

    name: str
    roles: tuple[str, ...]
    residual: Placements
    inner: Placements
    core: Placements
    first: Placements
    second: Placements
    first_loops: str
    second_loops: str
    source: str

    def __post_init__(self) -> None:
        places = (self.residual, self.inner, self.core, self.first, self.second)
        for part in (*places, self.first_loops, self.second_loops):
            assert len(part) == len(self.roles), self.name

    def shapes(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of its mesh for so many ranks: all factorisations, or those that the form is defined for.

        >>> FORMS["optimus"].shapes(4), FORMS["tesseract"].shapes(8), FORMS["megatron"].shapes(4)
        (((2, 2),), ((2, 2, 2),), ((4,),))
        """
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


def _places(text: str) -> Placements:
    return tuple(Replicate() if letter == "R" else Shard(int(letter) + 1) for letter in text.strip("-"))


def _form(name: str, roles: str, layouts: str, loops: str, source: str) -> Form:
    residual, inner, core, first, second = map(_places, layouts.split())
    first_loops, second_loops = (text.strip("-") for text in loops.split())
    return Form(name, tuple(roles.split()), residual, inner, core, first, second, first_loops, second_loops, source)


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        #                           residual inner core first second   loops of the first and of the second product
        _form("data", "", "- - - - -", "- -", "no tensor parallelism"),
        _form("megatron", "tp", "R 1 1 1 0", "n k", "Megatron-LM"),
        _form("megatron-sp", "tp", "0 1 1 1 0", "n k", "Megatron-LM with sequence parallelism"),
        _form("optimus", "r c", "01 01 01 01 01", "mn mn", "Optimus section 3"),
        _form("tesseract", "d r c", "001 001 001 R01 R01", "mmn mmn", "Tesseract section 3"),
        _form("atp", "d1 d2", "R1 1R 11 10 01", "nk kn", "ATP section 3.2"),
        _form("fsdp", "x", "0 0 0 0 0", "m m", "FSDP, ZeRO-3"),
    )
}


def form_of(name: str) -> Form:
    """The form of this name.

    Raises:
        StrategyError: there is none.
    """
    found = FORMS.get(name)
    if found is None:
        raise StrategyError(f"there is no form of tensor parallelism {name!r}: use {', '.join(FORMS)}")
    return found
