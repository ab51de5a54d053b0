"""A plan for a whole model, as a value: layouts of parameters, inputs and outputs, and the cost of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from dshard.errors import ArgumentError, LayoutError, MeshError, StrategyError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.notebook import Tabled
from dshard.parallel.precision import Precision, as_precision
from dshard.placements import Placement
from dshard.rules.attention_loops import AttentionLoops
from dshard.rules.matmul_loops import Schedule
from dshard.tables import human_bytes, text_table
from dshard.validate import article, as_tuple, shown, suggestion

Placements = tuple[Placement, ...]


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
    def total(self) -> int:
        """The most bytes held at once; gradients are made anew in each step."""
        return self.parameters + self.optimizer + self.peak


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a training step, traced on tensors without data: forward and backward of one batch.

    `work` are the seconds of local work, equal under all plans on a mesh up to repeated work and copies; `hidden` are
    the seconds of joined collectives that overlap with it. `flops` are the floating-point operations of the first rank.
    `experts` has the modules that are layers of experts, each with its loops as docs/experts.md names them.
    """

    moves: tuple[Moves, ...]
    memory: Memory
    work: float = 0.0
    hidden: float = 0.0
    flops: float = 0.0
    experts: tuple[tuple[str, str], ...] = ()

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


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Tabled):
    """The placements of a model's parameters and inputs on a mesh, and of the outputs of some modules.

    Made by `plan_model`, applied by `parallelize`. `parameters` has the placements of each by name, `batch` those of
    inputs whose first dim is the batch (other inputs are replicated), `outputs` those of module outputs, and `products`
    the loops of the matmul within a module. `shared` are modules that redistribute their input once, for all of them.
    `gathers` has under "" the mesh axes whose shards of parameters are gathered a block at a time, and under its name
    those of a parameter that is not gathered along all of them, such as experts. `precision` are the dtypes
    in which weights are used and gradients reduced, `groups` the modules whose weights are gathered or cast together,
    None for the model's blocks. `attention` is the loop of attention on each mesh axis, None for the cheapest. `ndim`
    is the number of dims of the example batch: an input of fewer is one row, and replicated. Where the layouts of all
    tensors were chosen together, `certificate` is how many times the least possible seconds, by the prices of the
    planner, these are at most. Unnamed tensors are replicated, or laid out by cost.
    """

    strategy: str
    mesh: Mesh
    parameters: Mapping[str, Placements]
    batch: Placements
    outputs: Mapping[str, Placements] = field(default_factory=dict)
    products: Mapping[str, Schedule] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    cost: Cost = None  # type: ignore[assignment]  # None before it is priced, as all that `plan_model` returns are
    precision: Precision | None = None
    groups: tuple[str, ...] | None = None
    attention: AttentionLoops | None = None
    ndim: int = 1
    gathers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    certificate: float | None = None

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
        """One row for each module, of its parameters and collectives: cells under `HEADINGS`."""
        modules: dict[str, list[str]] = {}
        for name, placements in self.parameters.items():
            module, _, own = name.rpartition(".")
            modules.setdefault(module, []).append(f"{own} {Layout(self.mesh, placements)}")
        sent: dict[str, dict[str, list[Moves]]] = {}
        for move in () if self.cost is None else self.cost.moves:
            sent.setdefault(move.module, {}).setdefault(move.direction, []).append(move)
        rows = []
        for module in [*modules, *(m for m in sent if m not in modules)]:
            moves = sent.get(module, {})
            every = [move for part in moves.values() for move in part]
            rows.append(
                [
                    module or "(outside)",
                    "; ".join(modules.get(module, [])),
                    _listed(moves.get("forward", [])),
                    _listed(moves.get("backward", [])),
                    human_bytes(sum(move.nbytes for move in every)) if every else "",
                    f"{sum(move.seconds for move in every) * 1e3:.3f}" if every else "",
                ]
            )
        return rows

    def __str__(self) -> str:
        lines = [f"{self.strategy} on ({self.mesh}); batch [{Layout(self.mesh, self.batch)}]"]
        lines.append(text_table(HEADINGS, self.rows()))
        return "\n".join(lines + self.notes())

    def notes(self) -> list[str]:
        """What a step receives and holds, and the loops of layers of experts, in sentences."""
        if self.cost is None:
            return []
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
        if self.certificate is not None:
            notes.append(f"all layouts chosen together, within {self.certificate:.3f} of any choice by these prices")
        return notes


HEADINGS = ("module", "parameters", "forward", "backward", "received", "ms")


def _listed(moves: Sequence[Moves]) -> str:
    return ", ".join(f"{move.count or 'in one'} {move.collective} {move.axis}" for move in moves)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options given to `parallelize` or `plan_model`; None keeps a plan's own."""

    precision: Precision | None
    groups: tuple[str, ...] | None

    def of(self, plan: Plan) -> Plan:
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
        paths = [path for path in modules if _is_like(path.split("."), selector.split("."))]
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


def _is_like(names: list[str], patterns: list[str]) -> bool:
    """Whether each name of a path matches its pattern: "layers.*" are the layers, not their submodules."""
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def read_plan(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The contents of a file that `dshard plan model` wrote."""
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StrategyError(f"the plan {path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise StrategyError(f"the plan {path} is no JSON: {error}") from None
    if not isinstance(contents, Mapping):
        raise StrategyError(f"the plan {path} is no JSON object: write one with dshard plan model --out")
    return contents


def mesh_of(path: Path) -> Mesh:
    """A mesh of the shape and names in the file, of the first ranks."""
    mesh = read_plan(path).get("mesh", {})
    if not isinstance(mesh, Mapping) or not mesh.get("shape") or not mesh.get("names"):
        raise StrategyError(f"the plan {path} names no mesh: write one with dshard plan model --out")
    return Mesh(tuple(mesh["shape"]), tuple(mesh["names"]))


def strategy_of(path: Path, mesh: Mesh) -> str:
    """The strategy named in the file, for a mesh of the shape named there."""
    contents = read_plan(path)
    strategy = contents.get("strategy")
    if not isinstance(strategy, str):
        raise StrategyError(f"the plan {path} names no strategy: write one with dshard plan model --out")
    shape = contents.get("mesh", {}).get("shape")
    if shape != list(mesh.shape):
        raise MeshError(f"the plan {path} is for a mesh of {shape}, but the mesh is ({mesh}): make one of that shape")
    return strategy
