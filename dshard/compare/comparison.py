"""The result of a comparison: how far modules are apart, how far rounding may have them be, which differs first."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import TypeAlias

from dshard.notebook import Tabled
from dshard.tables import text_table

INPUT, OUTPUT, VALUE = "input", "output", "value"
OF_INPUT, OF_OUTPUT, OF_PARAMETER = "gradient of input", "gradient of output", "gradient of parameter"
GRADIENTS = (OF_INPUT, OF_OUTPUT, OF_PARAMETER)
HEADINGS = ("", "module", "class", "calls", "output", "allowed", "gradient", "allowed")
Call: TypeAlias = tuple[str, int]
"""The path of a module, and how often it was called before."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a tensor's elements are off, and may be, relative to the largest.

    `what` is an output, a gradient or the like, `name` its place among the module's, `call` the number of the call.
    """

    module: str
    call: int
    what: str
    name: str
    error: float
    allowed: float

    @property
    def differs(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.error <= self.allowed

    @property
    def excess(self) -> float:
        """The error in units of the allowed one."""
        return self.error / self.allowed if 0 < self.allowed < inf else inf if self.differs else 0.0

    def __str__(self) -> str:
        where = f" {self.name}" * bool(self.name) + f" of call {self.call + 1}" * bool(self.call)
        return f"{self.what}{where}: off by {self.error:.1e} of its size, where rounding explains {self.allowed:.1e}"


@dataclass(frozen=True, slots=True)
class ModuleComparison:
    """A module by its path, "" for the model itself: its class, its calls, and what was compared of it."""

    module: str
    kind: str
    calls: int
    deviations: tuple[Deviation, ...]

    def row(self, first: str | None) -> list[str]:
        """The cells under `HEADINGS`; "*" marks the first that differs, "!" others."""
        mark = "*" if self.module == first else "!" * any(x.differs for x in self.deviations)
        cells = [mark, self.module or "(model)", self.kind, str(self.calls)]
        for gradients in False, True:
            of_kind = [x for x in self.deviations if x.what != INPUT and (x.what in GRADIENTS) == gradients]
            worst = max(of_kind, key=lambda x: x.excess, default=None)
            cells += ["", ""] if worst is None else [f"{worst.error:.1e}", f"{worst.allowed:.1e}"]
        return cells


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Tabled):
    """The result of `compare`: the `deviation` of the first module that differs, or None, and all modules as called."""

    model: str
    strategy: str
    modules: tuple[ModuleComparison, ...]
    deviation: Deviation | None

    @property
    def first(self) -> str | None:
        """The path of the first module that differs, "" for the model itself, "(loss)" for the loss; or None."""
        return None if self.deviation is None else self.deviation.module

    @property
    def direction(self) -> str | None:
        """Whether it is an "output" that differs first, or a "gradient": then all outputs are right; or None."""
        return None if self.deviation is None else "gradient" if self.deviation.what in GRADIENTS else "output"

    def head(self) -> str:
        """The result in a sentence."""
        laid_out = f"{self.model} laid out by {self.strategy}"
        if self.deviation is None:
            return f"{laid_out} is as alone: no module differs by more than rounding"
        kind = next(each.kind for each in self.modules if each.module == self.first)
        return f"{laid_out} differs first in {self.first or 'the model itself'} ({kind}), {self.deviation}"

    def rows(self) -> list[list[str]]:
        """A row for each module, under `HEADINGS`."""
        return [module.row(self.first) for module in self.modules]

    def to_json(self) -> str:
        """The result and all deviations as JSON; an infinite error, of a shape or a call that differs, is null."""
        data = json.dumps({"first": self.first, "direction": self.direction, **asdict(self)})
        return json.dumps(json.loads(data, parse_constant=lambda _: None))

    json = to_json

    def __str__(self) -> str:
        return f"{self.head()}\n\n{text_table(HEADINGS, self.rows())}"


def first_difference(calls: Sequence[Call], ended: Sequence[Call], found: Iterable[Deviation]) -> Deviation | None:
    """The deviation of the first module that was given what is right and did what is wrong.

    Forward that is the first to end whose inputs are right and outputs are not; backward the last that began whose
    outputs have right gradients while its inputs or parameters have wrong ones. So it is an innermost one.
    """
    wrong: defaultdict[Call, dict[str, Deviation]] = defaultdict(dict)
    for deviation in filter(lambda x: x.differs, found):
        path = deviation.module
        while path and (path, 0) not in calls:  # of a module never called, as for its weight alone, the next outer one
            path = path.rpartition(".")[0]
        wrong[path, deviation.call].setdefault(deviation.what, deviation)
    for done, given in (VALUE, INPUT), (OF_PARAMETER, OF_OUTPUT):  # what all calls of a module do together
        for module in {module for (module, _), kinds in wrong.items() if given in kinds}:
            wrong[module, 0].pop(done, None)
    order = [(wrong[call], INPUT, (VALUE, OUTPUT)) for call in ended]
    order += [(wrong[call], OF_OUTPUT, (OF_PARAMETER, OF_INPUT)) for call in reversed(calls)]
    firsts = [kinds[what] for kinds, given, done in order if given not in kinds for what in done if what in kinds]
    return next(iter(firsts + [deviation for kinds in wrong.values() for deviation in kinds.values()]), None)
