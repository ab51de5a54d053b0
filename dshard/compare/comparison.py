"""How far two passes are apart, by how much rounding may have them differ, and which module differs first."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite

import torch
from torch import Tensor

from dshard.compare.observed_pass import (
    AFTER,
    BEFORE,
    GRADIENTS,
    INPUT,
    OF_INPUT,
    OF_OUTPUT,
    OF_PARAMETER,
    OUTPUT,
    Call,
    ObservedPass,
    Place,
)
from dshard.notebook import Tabled
from dshard.tables import text_table

HEADINGS = ("", "module", "class", "calls", "output", "allowed", "gradient", "allowed")
SLACK = ((1e-4, 4.0), (1e-10, 100.0), (0.0, 1e4))
"""For an epsilon of at least the first number: how many times the effect of random roundings may be exceeded.

A fault changes values by more than a thousandth, so the finer the dtype, the more room is left to other algorithms.
"""
EPSILONS = 4
"""So many epsilons of its size may a tensor be off that no rounding elsewhere changes."""
Norms = tuple[float, float]
"""The Euclidean norm, and the largest element: errors spread over all elements, or at a few."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a tensor is off, and may be, relative to its size: in the norm that is worse.

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

    def data(self) -> dict[str, object]:
        """The fields as JSON values; an infinite error, of a shape or a call that differs, is None."""
        fields = asdict(self) | {"differs": self.differs}
        return {name: None if isinstance(x, float) and not isfinite(x) else x for name, x in fields.items()}


@dataclass(frozen=True, slots=True)
class ModuleComparison:
    """A module by its path, "" for the model itself: its class, its calls, and what was compared of it."""

    module: str
    kind: str
    calls: int
    deviations: tuple[Deviation, ...]

    def worst(self, *, gradients: bool) -> Deviation | None:
        """The deviation that exceeds most what is allowed, of its gradients or of its values."""
        of_kind = [x for x in self.deviations if x.what != INPUT and (x.what in GRADIENTS) == gradients]
        return max(of_kind, key=lambda x: (x.differs, x.allowed < 1, x.excess), default=None)

    def row(self, first: str | None) -> list[str]:
        """The cells under `HEADINGS`; "*" marks the first that differs, "!" others."""
        cells = [self.module or "(model)", self.kind, str(self.calls)]
        for worst in self.worst(gradients=False), self.worst(gradients=True):
            cells += ["", ""] if worst is None else [f"{worst.error:.1e}", f"{worst.allowed:.1e}"]
        return ["*" if self.module == first else "!" * any(x.differs for x in self.deviations), *cells]


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
        if self.deviation is None:
            return f"{self.model} laid out by {self.strategy} is as alone: no module differs by more than rounding"
        kind = next(each.kind for each in self.modules if each.module == self.first)
        where = f"{self.first or 'the model itself'} ({kind})"
        return f"{self.model} laid out by {self.strategy} differs first in {where}, {self.deviation}"

    def rows(self) -> list[list[str]]:
        """A row for each module, under `HEADINGS`."""
        return [module.row(self.first) for module in self.modules]

    def to_json(self) -> str:
        """The result and all deviations as JSON."""
        modules = [
            {"module": each.module, "class": each.kind, "calls": each.calls}
            | {"deviations": [deviation.data() for deviation in each.deviations]}
            for each in self.modules
        ]
        first = None if self.deviation is None else self.deviation.data()
        data = {"model": self.model, "strategy": self.strategy, "first": first, "direction": self.direction}
        return json.dumps({**data, "modules": modules})

    json = to_json

    def __str__(self) -> str:
        return f"{self.head()}\n\n{text_table(HEADINGS, self.rows())}"


def comparison_of(alone: ObservedPass, strategy: str, found: Sequence[Deviation]) -> Comparison:
    """The comparison of a pass alone with another, by the deviations of all ranks."""
    calls, of_module = Counter(call.module for call in alone.calls), defaultdict(list)
    for deviation in found:
        of_module[deviation.module].append(deviation)
    rows = [ModuleComparison(at, alone.kinds[at], calls[at], tuple(of_module[at])) for at in {**calls, **of_module}]
    return Comparison(alone.kinds[""], strategy, tuple(rows), first_difference(alone, found))


def distances(expected: ObservedPass, actual: ObservedPass) -> dict[Place, Norms]:
    """The norms of the differences of two passes: infinite for a value that one has not, or in another shape."""
    places = {**expected.values, **actual.values}
    return {at: _distance(expected.values.get(at), actual.values.get(at), at.what in GRADIENTS) for at in places}


def _distance(x: Tensor | None, y: Tensor | None, missing_is_zero: bool) -> Norms:
    if missing_is_zero:  # a gradient
        x, y = (torch.zeros_like(y) if x is None else x), (torch.zeros_like(x) if y is None else y)  # type: ignore[arg-type]
    if x is None or y is None or x.shape != y.shape:
        return inf, inf
    x, y = _wide(x), _wide(y.to(x.device))
    return _norms(torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y).nan_to_num(inf, inf))


def _norms(x: Tensor) -> Norms:
    return x.norm().item(), x.abs().max().item() if x.numel() else 0.0


def _wide(x: Tensor) -> Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).double()


def _epsilon(x: Tensor | None) -> float:
    return torch.finfo(x.dtype).eps if x is not None and (x.is_floating_point() or x.is_complex()) else 0.0


def deviations(
    alone: ObservedPass, laid_out: ObservedPass, changed: Sequence[Mapping[Place, Norms]], coarsest: float
) -> dict[Place, Deviation]:
    """The deviations of a laid-out pass from one alone, whose values random roundings have `changed` by so much.

    Local tensors, of another shape than the global one, are left out. `coarsest` is the epsilon of the dtype in which
    gradients of parameters were reduced.
    """
    out, zero = {}, (0.0, 0.0)
    slack = next(times for least, times in SLACK if max(coarsest, *map(_epsilon, alone.values.values())) >= least)
    for at, gap in distances(alone, laid_out).items():
        x, y = alone.values.get(at), laid_out.values.get(at)
        is_local = at in laid_out.local and x is not None and y is not None and x.shape != y.shape
        if is_local or at in alone.overwritten:
            continue
        eps = max(_epsilon(x), _epsilon(y), coarsest if at.what == OF_PARAMETER else 0.0)
        size = zero if x is None else _norms(_wide(x).nan_to_num(0.0, 0.0, 0.0))
        effect = map(max, zip(*(each.get(at, zero) for each in changed), strict=True))
        relative = []
        for error, unit, most in zip(gap, size, effect, strict=True):
            allowed = slack * most + EPSILONS * eps * unit
            relative.append(Deviation(*at.call, at.what, at.name, error / (unit or 1.0), allowed / (unit or 1.0)))
        out[at] = max(relative, key=lambda deviation: deviation.excess)
    return out


def first_difference(alone: ObservedPass, found: Iterable[Deviation]) -> Deviation | None:
    """The deviation of the first module that was given what is right and did what is wrong.

    Forward that is the first to end whose inputs are right and outputs are not; backward the last that began whose
    outputs have right gradients while its inputs or parameters have wrong ones. So it is an innermost one.
    """
    wrong: defaultdict[Call, dict[str, Deviation]] = defaultdict(dict)
    called = {call.module for call in alone.calls}
    for deviation in found:
        if deviation.differs:
            wrong[Call(_caller(deviation.module, called), deviation.call)].setdefault(deviation.what, deviation)
    for done, given in (AFTER, INPUT), (OF_PARAMETER, OF_OUTPUT):  # what all calls of a module do together
        for module in {call.module for call, kinds in wrong.items() if given in kinds}:
            wrong[Call(module, 0)].pop(done, None)
    forward = [_found(wrong[call], INPUT, (BEFORE, OUTPUT, AFTER)) for call in alone.ended]
    backward = [_found(wrong[call], OF_OUTPUT, (OF_PARAMETER, OF_INPUT)) for call in reversed(alone.calls)]
    anywhere = [deviation for kinds in wrong.values() for deviation in kinds.values()]
    return next((deviation for deviation in (*forward, *backward, *anywhere) if deviation is not None), None)


def _found(wrong: Mapping[str, Deviation], given: str, done: Sequence[str]) -> Deviation | None:
    return None if given in wrong else next((wrong[what] for what in done if what in wrong), None)


def _caller(path: str, called: set[str]) -> str:
    """The module, or where it was never called, as for its weight alone, the next outer one that was."""
    while path not in called and path:
        path = path.rpartition(".")[0]
    return path
