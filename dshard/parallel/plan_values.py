"""A plan for a whole model, as a value: layouts of parameters, inputs and outputs, and the cost of a step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from math import inf
from os import PathLike
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import nn

from dshard.dispatch.planned_calls import PlannedCall
from dshard.errors import ArgumentError, LayoutError, StrategyError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.notebook import Tabled
from dshard.parallel.plan_blocks import folded
from dshard.parallel.plan_json import Placements as Placements
from dshard.parallel.plan_json import encoded
from dshard.parallel.precision import Precision, as_precision
from dshard.placements import Placement
from dshard.routing import Routing
from dshard.rules.attention_loops import AttentionLoops
from dshard.rules.matmul_loops import Schedule
from dshard.tables import human_bytes, human_seconds, text_table
from dshard.validate import article, as_tuple, shown, suggestion

Pins: TypeAlias = Mapping[str, "str | Layout | Sequence[Placement]"]
"""Layouts by the names, or patterns as in `fnmatch`, of parameters and of modules, whose outputs are meant."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The collectives of one kind that a module runs in one direction of a step: how many, bytes received, seconds.

    A collective for parameters or gradients of several modules counts once, with the last, but each has its share of
    the bytes and seconds.
    """

    module: str
    direction: str
    collective: str
    axis: str
    count: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that the first rank holds: of parameters, gradients, and two moments of an optimiser.

    `activations` are the saved tensors and outputs after the forward pass; `peak` is the peak allocation of a step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int

    @property
    def transient(self) -> int:
        """Bytes of temporaries: the peak less the larger of activations and gradients."""
        return self.peak - max(self.activations, self.gradients)

    @property
    def saved_share(self) -> float:
        """The part of activations in these and gradients, of which one takes the place of the other."""
        return self.activations / max(1, self.activations + self.gradients)

    @property
    def total(self) -> int:
        """The most bytes held at once; gradients are made anew in each step."""
        return self.parameters + self.optimizer + self.peak


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a training step, traced on tensors without data: forward and backward of one batch.

    `work` are the seconds of local work, equal under all plans on a mesh up to repeated work and copies; `hidden` are
    the seconds of joined collectives that overlap with it. `flops` are the floating-point operations of the first rank.
    `experts` has the modules that are layers of experts, each with its loops as docs/experts.md names them; `routing`
    says how tokens were expected to spread over these.
    """

    moves: tuple[Moves, ...]
    memory: Memory
    work: float = 0.0
    hidden: float = 0.0
    flops: float = 0.0
    experts: tuple[tuple[str, str], ...] = ()
    routing: Routing | None = None

    def loops(self) -> dict[str, str]:
        """The loops of layers of experts, each with its modules: the first, and the last of several."""
        modules: dict[str, list[str]] = {}
        for module, loops in self.experts:
            modules.setdefault(loops, []).append(module)
        return {
            loops: own[0] if len(own) == 1 else f"{own[0]} to {own[-1]} ({len(own)} layers)"
            for loops, own in modules.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes received in all collectives."""
        return sum(move.nbytes for move in self.moves)

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return sum(move.seconds for move in self.moves)

    @property
    def seconds(self) -> float:
        """Seconds of collectives and of local work, less those that overlap."""
        return self.communication + self.work - self.hidden


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan of a search: its strategy, its mesh, and the seconds of its traced step, or a bound of them."""

    strategy: str
    mesh: str
    seconds: float
    is_bound: bool = False

    def __str__(self) -> str:
        return f"{self.strategy} on ({self.mesh}) {'at least ' * self.is_bound}{human_seconds(self.seconds)}"


@dataclass(frozen=True, slots=True)
class PlanPart:
    """Blocks of a model that are laid out alike, and the strategies by name whose layouts their modules have."""

    blocks: tuple[str, ...]
    names: str


class RunnerUp(NamedTuple):
    """The cheapest plan in which something lies otherwise, not priced by a trace, and how many seconds more it takes.

    `seconds` are by the prices of the planner, by which the plan that it is compared with was chosen.
    """

    plan: ModelPlan
    seconds: float


class StepSpace(Protocol):
    """All plans of a traced step, from which others can be chosen; `plan.search.space` of a plan that was not saved."""

    def edited(self, plan: ModelPlan, pins: Pins) -> ModelPlan:
        """The cheapest plan of the step that `plan` is of with these layouts."""

    def runner_up(self, plan: ModelPlan, pattern: str) -> RunnerUp:
        """The cheapest plan in which the parameters that match lie otherwise than in `plan`."""

    def as_named(self, plan: ModelPlan, parameters: Sequence[str]) -> tuple[str, float] | None:
        """The cheapest strategy by name for these parameters that is not theirs, and how many seconds more it takes.

        None where the plan was not searched to the end, so that another one is cheaper.
        """


@dataclass(frozen=True, slots=True)
class Search:
    """How a plan was found, by the prices of the planner; a plan that was loaded has no `space`.

    `seconds` are those of the plan, less what of it is assumed to run beside work, and no plan on any of the `meshes`
    that were tried takes less than `bound`, or with a limit of memory none that holds no more. `assignments` is the
    decimal logarithm of the number of plans, `spent` the seconds of the processor. `tried` are the plan and others, the
    fastest first, `parts` the blocks of the model. Where there was no time for all plans, these `are_alike` on all
    axes of some groups of mesh axes: all of them, or of two groups.
    """

    seconds: float
    bound: float
    assignments: float = 0.0
    spent: float = 0.0
    meshes: int = 1
    tried: tuple[Tried, ...] = ()
    parts: tuple[PlanPart, ...] = ()
    are_alike: bool = False
    space: StepSpace | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as a file has it: without the tables of a step, which hold functions of torch."""
        return Search, tuple([getattr(self, each.name) for each in fields(self) if each.name != "space"])

    @property
    def certificate(self) -> float:
        """How many times the least possible seconds the plan takes at most: 1 if no other plan takes less."""
        return max(1.0, self.seconds / self.bound) if self.bound > 0 else 1.0 if self.seconds <= 0 else inf

    def notes(self, plan: ModelPlan) -> list[str]:
        """How good the plan is, what else was tried, and what its blocks are and would cost otherwise, in sentences."""
        foldings = f"{self.meshes} folding{'s' * (self.meshes != 1)}{', axes used alike' * self.are_alike}"
        power = int(self.assignments)
        number = f"{10 ** (self.assignments - power):.0f} x 10^{power}" if power > 3 else f"{10**self.assignments:.0f}"
        took = "" if plan.cost is None else f"{human_seconds(plan.cost.seconds)}, "
        space = f"{foldings}, {number} assignments, {self.spent:.1f} s"
        notes = [f"{took}within {self.certificate:.3f} of any plan of this space ({space})"]
        if len(self.tried) > 1:
            notes.append(f"others: {'; '.join(map(str, self.tried[1:SHOWN]))}")
        until = process_time() + PATIENCE
        return notes + [self._note(part, plan, until) for part in self.parts]

    def _note(self, part: PlanPart, plan: ModelPlan, until: float) -> str:
        """What the blocks of a part are, what they send, and the cheapest other strategy by name for them, in time."""
        label = next(iter(folded(dict.fromkeys(part.blocks, 0))))
        own = tuple(f"{block}." for block in part.blocks)
        moves = [] if plan.cost is None else [m for m in plan.cost.moves if f"{m.module}.".startswith(own)]
        sent = ""
        if moves:
            sent = f", {human_bytes(sum(m.nbytes for m in moves))} in {sum(m.seconds for m in moves) * 1e3:.3f} ms"
        parameters = [name for name in plan.parameters if name.startswith(own)]
        is_late = self.space is None or process_time() > until
        other = None if is_late or self.space is None else self.space.as_named(plan, parameters)
        return f"{label or 'the model'}: {part.names}{sent}" + (
            "" if other is None else f"; as {other[0]}: {other[1] * 1e3:+.3f} ms"
        )


@dataclass(frozen=True, slots=True, repr=False)
class ModelPlan(Tabled):
    """The placements of a model's parameters and inputs on a mesh, and of the outputs of some modules, or of all calls.

    Made by `plan_model`, applied by `parallelize`. `parameters` has the placements of each by name, `inputs` under ""
    those of inputs whose first dim is the batch (other inputs are replicated), and under its name, as `parallelize` has
    it, those of an input that lies otherwise. `outputs` are those of module outputs, and `products` the loops of the
    matmul within a module. `shared` are modules that redistribute their input once, for all of them.
    `gathers` has under "" the mesh axes whose shards of parameters are gathered a block at a time, and under its name
    those of a parameter that is not gathered along all of them, such as experts. `calls` are the functions of torch
    that a forward pass calls, in order, with the layouts of operands and results. `precision` are the dtypes in which
    weights are used and gradients reduced, `groups` the modules whose weights are gathered or cast together, None for
    the model's blocks. `attention` is the loop of attention on each mesh axis, None for the cheapest. `ndim` is the
    number of dims of the example batch: an input of fewer is one row, and replicated. `search` says how "auto" found
    the plan. Unnamed tensors are replicated, or laid out by cost.
    """

    strategy: str
    mesh: Mesh
    parameters: Mapping[str, Placements]
    inputs: Mapping[str, Placements]
    outputs: Mapping[str, Placements] = field(default_factory=dict)
    products: Mapping[str, Schedule] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    cost: Cost = None  # type: ignore[assignment]  # None before it is priced, as all that `plan_model` returns are
    precision: Precision | None = None
    groups: tuple[str, ...] | None = None
    attention: AttentionLoops | None = None
    ndim: int = 1
    gathers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    calls: tuple[PlannedCall, ...] = ()
    search: Search | None = None

    @property
    def routing(self) -> Routing | None:
        """How tokens are expected to spread over experts, by which loops of these are chosen; None for evenly."""
        return None if self.cost is None else self.cost.routing

    @property
    def certificate(self) -> float | None:
        """How many times the least possible seconds, by the planner's prices, this plan takes at most; of "auto" alone.

        1 says that no plan of the step is cheaper.
        """
        return None if self.search is None else self.search.certificate

    @property
    def bound(self) -> float | None:
        """Seconds that each plan of the step takes at least, by the prices of the planner; of "auto" alone."""
        return None if self.search is None else self.search.bound

    def data(self) -> dict[str, Any]:
        """The plan as JSON values; the step of which it is a plan is left out."""
        mesh = {"shape": list(self.mesh.shape), "names": list(self.mesh.names)}
        return {"strategy": self.strategy, "mesh": mesh, **encoded(self, self.mesh)}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a JSON file, whose `Path` `parallelize` and `plan_model` take in its place."""
        Path(path).write_text(json.dumps(self.data(), indent=1) + "\n", encoding="utf-8")

    def edit(self, pins: Pins) -> ModelPlan:
        """The cheapest plan of the same step in which these parameters, and outputs of modules, have these layouts.

        Pins are as those of `Auto`, on this plan's mesh; those that led to this plan stay. The new plan has no cost
        before `plan_model(model, mesh, plan, *batch)` prices it.

        >>> plan.edit({"head.weight": "x:S(0) y:R"})  # doctest: +SKIP

        Raises:
            StrategyError: a plan whose step is not known, such as one that was loaded; a pin that cannot be met.
            LayoutError: a name of nothing in the step, or a layout that its tensor cannot have.
        """
        return self._space("edited").edited(self, pins)

    def runner_up(self, pattern: str) -> RunnerUp:
        """The cheapest plan in which the parameters of this name, or in these modules, all lie otherwise.

        >>> plan.runner_up("blocks.*.attn.q").seconds  # seconds more  # doctest: +SKIP

        Raises:
            StrategyError: a plan whose step is not known, such as one that was loaded; there is no other layout.
            LayoutError: a name of nothing in the step.
        """
        return self._space("compared with others").runner_up(self, pattern)

    def _space(self, done: str) -> StepSpace:
        space = None if self.search is None else self.search.space
        if space is None:
            raise StrategyError(
                f"the plan {self.strategy!r} has no step from which it is {done}: take one that plan_model made by "
                '"auto"; a file, a strategy by name and a parallelized model have none'
            )
        return space

    @property
    def batch(self) -> Placements:
        """The placements of inputs whose first dim is the batch."""
        return self.inputs[""]

    def placements(self, parameter: str) -> Placements:
        """The placements of the parameter of this name."""
        if parameter not in self.parameters:
            hint = suggestion(parameter, self.parameters)
            raise LayoutError(f"the plan has no parameter {parameter!r}: look into plan.parameters{hint}")
        return self.parameters[parameter]

    def gathered_axes(self, parameter: str) -> tuple[str, ...]:
        """The mesh axes along which shards of the parameter of this name are gathered for use."""
        return self.gathers.get(parameter, self.gathered)

    @property
    def gathered(self) -> tuple[str, ...]:
        """The mesh axes along which shards of most parameters are gathered for use."""
        return self.gathers.get("", ())

    def rows(self) -> list[list[str]]:
        """One row for each module, of its parameters and collectives: cells under `HEADINGS`.

        Modules of consecutive blocks that are laid out alike have one row, with the sums of their collectives.
        """
        modules: dict[str, list[str]] = {}
        for name, placements in self.parameters.items():
            module, _, own = name.rpartition(".")
            modules.setdefault(module, []).append(f"{own} {Layout(self.mesh, placements)}")
        sent: dict[str, list[Moves]] = {}
        for move in () if self.cost is None else self.cost.moves:
            sent.setdefault(move.module, []).append(move)
        every = [*modules, *[module for module in sent if module not in modules]]
        rows = []
        for label, alike in folded({module: "; ".join(modules.get(module, [])) for module in every}).items():
            moves = [move for module in alike for move in sent.get(module, [])]
            rows.append(
                [
                    label or "(outside)",
                    "; ".join(modules.get(alike[0], [])),
                    *[_listed([move for move in moves if move.direction == way]) for way in ("forward", "backward")],
                    human_bytes(sum(move.nbytes for move in moves)) if moves else "",
                    f"{sum(move.seconds for move in moves) * 1e3:.3f}" if moves else "",
                ]
            )
        return rows

    def __str__(self) -> str:
        return "\n".join([self.head(), text_table(HEADINGS, self.rows()), *self.notes()])

    def head(self) -> str:
        """The strategy, the mesh and the layouts of the batch and of inputs that lie otherwise, in a line."""
        inputs = [f"{name or 'batch'} [{Layout(self.mesh, own)}]" for name, own in self.inputs.items()]
        return f"{self.strategy} on ({self.mesh}); {', '.join(inputs)}"

    def notes(self) -> list[str]:
        """What a step receives and holds, the loops of layers of experts, and how it was found, in sentences."""
        if self.cost is None:
            return [] if self.search is None else self.search.notes(self)
        memory, hidden = self.cost.memory, f"{self.cost.hidden * 1e3:.3f}"
        overlap = "" if hidden == "0.000" else f", {hidden} of them beside local work"
        held = ", ".join(
            f"{name} {human_bytes(getattr(memory, name))}"
            for name in ("parameters", "gradients", "optimizer", "activations", "transient")
        )
        said = (
            f"a step receives {human_bytes(self.cost.nbytes)} in {self.cost.communication * 1e3:.3f} ms{overlap}; "
            f"a rank holds at most {human_bytes(memory.total)}: {held}"
        )
        notes = [said, *(f"experts by {loops}: {modules}" for loops, modules in self.cost.loops().items())]
        return notes if self.search is None else notes + self.search.notes(self)


SHOWN, PATIENCE = 5, 1.0
"""Plans of a search that are shown, and seconds of the processor in which alternatives of blocks are looked for."""
HEADINGS = ("module", "parameters", "forward", "backward", "received", "ms")


def _listed(moves: Sequence[Moves]) -> str:
    counts = Counter[str]()
    for move in moves:
        counts[f"{move.collective} {move.axis}"] += move.count
    return ", ".join(f"{number or 'in one'} {each}" for each, number in counts.items())


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options given to `parallelize` or `plan_model`; None keeps a plan's own."""

    precision: Precision | None
    groups: tuple[str, ...] | None

    def of(self, plan: ModelPlan) -> ModelPlan:
        """`plan` with these options."""
        precision = plan.precision if self.precision is None else self.precision
        return replace(plan, precision=precision, groups=plan.groups if self.groups is None else self.groups)


def plan_options(model: nn.Module, precision: object, group: object) -> PlanOptions:
    """The options of the arguments `precision` and `group`."""
    if group is None:
        return PlanOptions(as_precision(precision), None)
    modules = {path: m for path, m in model.named_modules() if path and next(m.parameters(), None) is not None}
    way_out = 'give patterns of their paths, such as ["layers.*"], or the modules themselves'
    selectors = as_tuple(group, "group", way_out)
    paths = dict.fromkeys(path for each in selectors for path in _matches(each, modules, type(model).__name__, way_out))
    return PlanOptions(as_precision(precision), tuple(path for path in modules if path in paths))


def _matches(selector: object, modules: dict[str, nn.Module], model: str, way_out: str) -> list[str]:
    if isinstance(selector, str):
        paths = [path for path in modules if is_like(path, selector)]
    elif isinstance(selector, nn.Module):
        paths = [path for path, module in modules.items() if module is selector]
    else:
        raise ArgumentError(f"group: {shown(selector)} is {article(selector)}: {way_out}")
    if not paths:
        name = repr(selector) if isinstance(selector, str) else article(selector)
        raise LayoutError(
            f"group: {name} is no module of {model} with parameters: {way_out}; there are {', '.join([*modules][:3])}"
        )
    return paths


def is_like(path: str, pattern: str) -> bool:
    """Whether each name of a path matches that of a pattern: "layers.*" are the layers, not their submodules."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
