"""Passes of a model, and how far their modules are apart, how far rounding may have them be, which differs first.

A pass is one forward and backward pass, with copies of what each module was given, returned, and holds at its end.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dshard.core.transforms import is_wrapped
from dshard.core.trees import map_tensors, named_tensors
from dshard.core.wrapper import DISTRIBUTED
from dshard.notebook import Tabled
from dshard.tables import text_table
from dshard.torch_private import graph_task_id

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


SLACK = ((1e-4, 4.0), (1e-10, 100.0), (0.0, 1e4))
"""For an epsilon of at least the first number: how many times the effect of random roundings may be exceeded.

A fault changes values by more than a thousandth, so the finer the dtype, the more room is left to other algorithms.
"""
EPSILONS = 4
"""So many epsilons of its size may a tensor be off that no rounding elsewhere changes."""
Place: TypeAlias = tuple[str, int, str, str]
"""Where a tensor stands in a pass: a call of a module, what the tensor is to it, and its name there."""


class ObservedPass:
    """A pass of a model, module by module: their `calls` as they began, those that `ended`, and all `values`.

    With a `generator` what modules return, and its gradients, are rounded by it at random. Each call has its inputs for
    itself, so that their gradients are those of this call alone.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.calls: list[Call] = []
        self.ended: list[Call] = []
        self.values: dict[Place, Tensor] = {}
        self.local: set[Place] = set()
        self.kinds: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._running: list[Call] = []
        self._generator = generator

    def watch(self, path: str, module: nn.Module) -> None:
        """Observe a module, after the hooks that it has."""
        self.kinds[path] = type(module).__name__
        module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
        module.register_forward_hook(self._leave)

    def keep_state(self, model: nn.Module) -> None:
        """Keep the values of all parameters and buffers, and the gradients of parameters."""
        for path, x in (*model.named_parameters(), *model.named_buffers()):
            module, _, name = path.rpartition(".")
            self.values[module, 0, VALUE, name] = x.detach()
            if isinstance(x, nn.Parameter) and x.grad is not None:
                self.values[module, 0, OF_PARAMETER, name] = x.grad

    def gather(self) -> None:
        """Make the values whole on all ranks; `local` are those that are not distributed."""
        self.local = {at for at, x in self.values.items() if not isinstance(x, DISTRIBUTED)}
        with torch.no_grad():
            self.values = {at: x.full_tensor() if isinstance(x, DISTRIBUTED) else x for at, x in self.values.items()}

    def rounded(self, x: Tensor) -> Tensor:
        """A tensor whose elements each differ from those of `x` by at most half the dtype's epsilon, at random."""
        if self._generator is None or not x.is_floating_point():
            return x
        chance = torch.rand(x.shape, generator=self._generator, device=x.device, dtype=x.dtype)
        return x + x.detach() * (torch.finfo(x.dtype).eps * (chance - 0.5))

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if graph_task_id() != -1:  # a checkpoint computes it once more
            return None
        self._running.append((path, self._counts[path]))
        self._counts[path] += 1
        self.calls.append(self._running[-1])
        own: dict[int, Tensor] = {}
        args, kwargs = (
            {name: own.setdefault(id(x), _alias(x)) if isinstance(x, Tensor) else x for name, x in items}
            for items in (enumerate(args), kwargs.items())
        )
        self._keep_all(self._running[-1], INPUT, OF_INPUT, {**args, **kwargs})
        return tuple(args.values()), kwargs

    def _leave(self, module: nn.Module, args: object, out: Any) -> Any:
        if graph_task_id() != -1:
            return None
        self.ended.append(self._running.pop())
        if self._generator is not None:
            out = map_tensors(out, self.rounded)
        self._keep_all(self.ended[-1], OUTPUT, OF_OUTPUT, out)
        return out

    def _keep_all(self, call: Call, what: str, gradient: str, tree: object) -> None:
        for path, x in named_tensors(tree):
            if is_wrapped(x) or not (isinstance(x, DISTRIBUTED) or x.layout is torch.strided):
                continue
            at, of_gradient = ((*call, kind, ".".join(path)) for kind in (what, gradient))
            self.values[at] = x.detach().clone()
            if x.requires_grad and torch.is_grad_enabled():
                x.register_hook(partial(self._keep_gradient, of_gradient))

    def _keep_gradient(self, at: Place, gradient: Tensor) -> Tensor:
        self.values[at] = gradient.detach().clone()
        return self.rounded(gradient)


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad and torch.is_grad_enabled() else x


def errors(expected: ObservedPass, actual: ObservedPass) -> dict[Place, float]:
    """The largest difference in each value of two passes: infinite for one that a pass has not, or in another shape."""
    places = {**expected.values, **actual.values}
    return {at: _error(expected.values.get(at), actual.values.get(at), at[2] in GRADIENTS) for at in places}


def _error(x: Tensor | None, y: Tensor | None, missing_is_zero: bool) -> float:
    if missing_is_zero:
        x, y = (torch.zeros_like(y) if x is None else x), (torch.zeros_like(x) if y is None else y)  # type: ignore[arg-type]
    if x is None or y is None or x.shape != y.shape:
        return inf
    x, y = _wide(x), _wide(y.to(x.device))
    return _largest(torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y).nan_to_num(inf, inf))


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _wide(x: Tensor) -> Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).double()


def _epsilon(x: Tensor | None) -> float:
    return torch.finfo(x.dtype).eps if x is not None and (x.is_floating_point() or x.is_complex()) else 0.0


def deviations(
    alone: ObservedPass, laid_out: ObservedPass, changed: Sequence[Mapping[Place, float]], coarsest: float
) -> dict[Place, Deviation]:
    """The deviations of a laid-out pass from one alone, whose values random roundings have `changed` by so much.

    Local tensors, of another shape than the global one, are left out. `coarsest` is the epsilon of the dtype in which
    gradients of parameters were reduced.
    """
    out = {}
    slack = next(times for least, times in SLACK if max(coarsest, *map(_epsilon, alone.values.values())) >= least)
    for at, error in errors(alone, laid_out).items():
        x, y = alone.values.get(at), laid_out.values.get(at)
        if at in laid_out.local and x is not None and y is not None and x.shape != y.shape:
            continue
        eps = max(_epsilon(x), _epsilon(y), coarsest if at[2] == OF_PARAMETER else 0.0)
        size = 0.0 if x is None else _largest(_wide(x).nan_to_num(0.0, 0.0, 0.0))
        allowed = slack * max((each.get(at, 0.0) for each in changed), default=0.0) + EPSILONS * eps * size
        out[at] = Deviation(*at, error / (size or 1.0), allowed / (size or 1.0))
    return out
