"""`plan_model` and `parallelize`: one call lays out any module by a strategy of the papers, or by the cheapest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dshard import errors
from dshard.comm import DeviceMesh, as_mesh, text_of_first, warn_user
from dshard.core.context import planning_context
from dshard.core.signature import Args, Kwargs
from dshard.core.subclasses import refuse_own_rules
from dshard.core.trees import nested_tensors
from dshard.distribute import lay_out_assigned
from dshard.errors import ArgumentError, LayoutError, MeshError
from dshard.layout import layout_of
from dshard.mesh import Mesh
from dshard.ops.matmul.options import current_options, use_strategy
from dshard.parallel.apply_plan import apply_plan
from dshard.parallel.auto import Auto, cheapest
from dshard.parallel.boundary import Boundary, end_boundary, own_boundary, set_boundary
from dshard.parallel.distributed_parameters import distribute_parameters
from dshard.parallel.expert_modules import run_as_operators
from dshard.parallel.factors import trace_factors
from dshard.parallel.inputs import Mode, input_modes
from dshard.parallel.numbered_hooks import within_earlier_hooks
from dshard.parallel.plan_files import plan_from, plan_of
from dshard.parallel.plan_values import ModelPlan, PlanOptions, plan_options
from dshard.parallel.precision import Precision
from dshard.parallel.reachable_state import ReachableState
from dshard.parallel.roles import Roles, roles_of
from dshard.parallel.same_program import digests_of
from dshard.parallel.step_price import StepPrices
from dshard.parallel.strategies import StrategyName, axes_of, fitted_roles, idle_experts, lay_out, refined
from dshard.parallel.trace_step import RecordedStep, record_step, stand_in_for
from dshard.placements import Placement, Replicate
from dshard.planning.step_graph import Dtypes, StepGraph
from dshard.routing import Routing
from dshard.validate import check_type, shown

AUTO = "auto"
Checked: TypeAlias = StrategyName | str | Auto | Mapping[str, Sequence[Placement]] | ModelPlan
PlanArgument: TypeAlias = Checked | Path
ModuleT = TypeVar("ModuleT", bound=nn.Module)
AFTER_PARALLELIZE: list[Callable[[nn.Module, Boundary], None]] = []
"""What makes models of other libraries fit these once they are laid out; `dshard.parallel.integrations` has it."""


def plan_model(
    model: nn.Module,
    mesh: DeviceMesh | Mesh,
    plan: PlanArgument = AUTO,
    /,
    *args: object,
    precision: object = None,
    group: object = None,
    routing: Routing | None = None,
    **kwargs: object,
) -> ModelPlan:
    """The plan by which `parallelize` would lay out `model`, with the cost of a training step; `model` is unchanged.

    `args` and `kwargs` are an example batch, with data where the forward pass asks for values. Parameters may have no
    data. The mesh may be pure, so that no process is needed. `precision` and `group` are as of `parallelize`. Layers of
    experts are priced for tokens that spread as `routing` says, by their busiest rank.

    Raises:
        StrategyError: no such strategy, a mesh that it cannot use, or more ranks than there are heads.
        LayoutError: a forward pass that asks for values that have no data; a pattern that matches no parameter.
    """
    if routing is not None:
        with use_strategy(routing=routing):
            return plan_model(model, mesh, plan, *args, precision=precision, group=group, routing=None, **kwargs)
    pure = as_mesh(mesh)
    checked = _checked_argument(model, plan, pure, kwargs)
    args, kwargs = _example(model, args, kwargs)
    chosen = _plan_for(model, pure, checked, plan_options(model, precision, group), args, kwargs)
    routing = current_options().routing
    if isinstance(checked, ModelPlan):
        routing = routing or checked.routing
        if chosen.mesh.ranks != pure.ranks:
            raise _other_mesh(chosen.mesh, pure)
        chosen = replace(chosen, cost=None)  # type: ignore[arg-type]  # which was that of another batch
    with use_strategy(routing=routing):
        return chosen if chosen.cost is not None else replace(chosen, cost=StepPrices(model, args, kwargs)(chosen))


def parallelize(
    model: ModuleT,
    mesh: DeviceMesh | Mesh,
    plan: PlanArgument = AUTO,
    /,
    *args: object,
    inputs: Mode | Mapping[str, Mode] | Tensor = "global",
    outputs: Literal["distributed", "plain"] | Sequence[Placement] | Tensor | None = None,
    precision: object = None,
    group: object = None,
    seed_alike: bool = False,
    **kwargs: object,
) -> ModuleT:
    """Lay out `model` in place and return it: its parameters become DTensors, and it takes plain tensors as before.

    `plan` is the name of a strategy ("megatron", "megatron-sp", "optimus", "tesseract", "atp", "fsdp", "data",
    "expert", "context", "ulysses", joined by " x ", or "auto"), placements by a pattern of parameter names, a
    `ModelPlan`, or the `Path` of a file that `dshard plan model --out` wrote. `args` and `kwargs` are an example batch,
    by which the model is traced; a model with `dummy_inputs`, and placements by name, need none.

    Inputs are DTensors, or plain tensors: with `inputs="global"` whole batches, equal on all ranks, which compare them
    at the first call; with "per-data-rank" each data rank (`data_ranks`) gives its own rows, as many as it has. Inputs
    of other first sizes than the rows, there or in the example, are whole; names say which are where sizes do not:
    `inputs={"positions": "global", "batch.ids": "per-data-rank", "*": "per-data-rank"}`, of arguments, keys of dicts in
    them, and the rest.
    `outputs` are "distributed", of the placements given, or "plain": whole, or the rows of this data rank, whose
    gradients are those of the mean over all rows of the losses of the data ranks. By default they are distributed, but
    plain where a library gets a `ModelOutput` of Hugging Face. A model with a parameter called `inputs` or `outputs` is
    given a tensor for it by that name as before.

    Plain tensors that the model makes on its way count as replicated. Every rank must have the same parameters, or a
    warning says so; a digest of the program, and of their first values, is all that is sent. Ranks that take the same
    rows must draw the same numbers, too: a forward pass that draws from a generator whose state differs is refused.
    `seed_alike=True` seeds Python's and numpy's alike. Parameters without data get their local tensor alone.

    `precision`, a `dshard.parallel.Precision` or torch's `MixedPrecisionPolicy`, has weights used, and gradients
    reduced, in other dtypes than those in which parameters are stored. `group` are modules that each have
    theirs gathered together, as patterns of paths or themselves; by default the entries of the outermost module lists.

    Raises:
        ArgumentError: a `precision` or a `group` that is none.
        StrategyError: no such strategy, a mesh that it cannot use, or more ranks than there are heads.
        LayoutError: a forward pass that asks for values that have no data; a pattern that matches no parameter.
    """
    if isinstance(inputs, Tensor):
        inputs, kwargs = "global", {**kwargs, "inputs": inputs}
    if isinstance(outputs, Tensor):
        outputs, kwargs = None, {**kwargs, "outputs": outputs}
    chosen = chosen_plan(model, mesh, plan, plan_options(model, precision, group), args, kwargs)
    modes, digests = input_modes(inputs, model, args, kwargs), digests_of(model)
    _lay_out(model, Boundary(chosen, modes, outputs, seed_alike, digests))
    return model


def _lay_out(model: nn.Module, boundary: Boundary) -> None:
    """Lay out a model in place, by the plan of its boundary."""
    chosen = boundary.plan
    distribute_parameters(model, chosen)
    if chosen.precision is not None:
        chosen.precision.reduce(model.parameters())
    with within_earlier_hooks(model):
        set_boundary(model, boundary)
        run_as_operators(model)
        apply_plan(model, chosen, boundary.given)
        end_boundary(model, boundary)
    for adopt in AFTER_PARALLELIZE:
        adopt(model, boundary)


def chosen_plan(
    model: nn.Module, mesh: DeviceMesh | Mesh, plan: PlanArgument, options: PlanOptions, args: Args, kwargs: Kwargs
) -> ModelPlan:
    """The plan by which `parallelize` lays out `model`, on a mesh that has the processes of `mesh`."""
    pure = as_mesh(mesh)
    checked = _checked_argument(model, plan, pure, kwargs)
    if checked == AUTO or isinstance(checked, Auto):
        chosen = _found_by_first(partial(_plan_for, model, pure, checked, options, args, kwargs), pure)
    else:
        chosen = _plan_for(model, pure, checked, options, args, kwargs)
    if chosen.search is not None:  # the step of the model as it was
        chosen = replace(chosen, search=replace(chosen.search, space=None))
    return chosen if chosen.mesh == pure else replace(chosen, mesh=_on_ranks_of(mesh, chosen.mesh))


def _found_by_first(search: Callable[[], ModelPlan], mesh: Mesh) -> ModelPlan:
    """The plan that the first rank of a mesh finds and sends to the others; an error of its search is that of all."""
    found, failed = list[ModelPlan](), list[Exception]()

    def told() -> str:
        try:
            found.append(search())
        except Exception as error:  # raised here once the others know
            failed.append(error)
            return json.dumps({"error": type(error).__name__, "text": str(error)})
        return json.dumps(found[0].data())

    data = json.loads(text_of_first(told, mesh))
    if failed:
        raise failed[0]
    if "error" in data:
        raise getattr(errors, data["error"], LayoutError)(data["text"])
    return found[0] if found else plan_from(data, mesh)


def _plan_for(
    model: nn.Module, mesh: Mesh, checked: Checked, options: PlanOptions, args: Args, kwargs: Kwargs
) -> ModelPlan:
    """The plan of a checked `plan` argument; that of a named strategy is made by an example batch."""
    match checked:
        case ModelPlan():
            return options.of(checked)
        case str() | Auto():
            args, kwargs = _example(model, args, kwargs)
            dims = [x.dim() for x in nested_tensors((args, kwargs)) if x.dim()]
            with torch.autograd.set_detect_anomaly(False):  # gradients without data have no nan to look for
                found = planned(model, mesh, checked, options, args, kwargs)
            return replace(found, ndim=dims[0] if dims else 1)
        case _:
            return options.of(by_name(model, mesh, checked))


def _checked_argument(model: nn.Module, plan: PlanArgument, mesh: Mesh, kwargs: Mapping[str, object]) -> Checked:
    """Check the `plan` argument; a file is replaced by its plan, or by the strategy that it names."""
    check_type(model, nn.Module, "the model", "give an nn.Module")
    lazy = [name for name, module in model.named_modules() if _is_lazy(module)]
    if lazy:
        raise LayoutError(
            f"{type(model).__name__} has modules that never ran, so that their parameters have no shape: "
            f"{', '.join(lazy[:4])}; run it once before, as in `with torch.no_grad(): model(*batch)`"
        )
    names: dict[type, str] = {}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        names.setdefault(type(x), name)
    for kind, name in names.items():
        refuse_own_rules(f"laying out {name}", [kind], LayoutError)
    boundary = own_boundary(model)
    if boundary is not None:
        raise ArgumentError(
            f"{type(model).__name__} is laid out by parallelize already ({boundary.plan.strategy!r}): give the model "
            "as it was made; to go on in another layout, save its state and load that into the other"
        )
    if "plan" in kwargs and "plan" not in signature(model.forward).parameters:
        raise ArgumentError(
            f"plan={shown(kwargs['plan'])}: the plan is the third argument, by position; what is named is the model's"
        )
    if isinstance(plan, Path):
        plan = plan_of(plan, mesh)
    kinds = (str, Auto, Mapping, ModelPlan)
    check_type(
        plan, kinds, "the plan", "give the name of a strategy, placements by name, a ModelPlan, an Auto or a Path"
    )
    if isinstance(plan, ModelPlan):
        missing = set(plan.parameters) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if missing:
            raise LayoutError(
                f"a plan for another model: {type(model).__name__} has no parameter {', '.join(sorted(missing)[:3])}; "
                "make one of this model with plan_model"
            )
    return plan


def _is_lazy(module: nn.Module) -> bool:
    """Whether a parameter or buffer of `module` itself has no shape yet."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(is_lazy(x) for x in own if x is not None)


def _other_mesh(planned_for: Mesh, mesh: Mesh) -> MeshError:
    return MeshError(
        f"a plan for the mesh ({planned_for}) was given the mesh ({mesh}): give one of the same ranks, or plan again"
    )


def planned(
    model: nn.Module,
    mesh: Mesh,
    plan: str | Auto,
    options: PlanOptions,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> ModelPlan:
    """The plan of the strategy of this name, or the cheapest plan for `Auto`."""
    if isinstance(plan, Auto) and plan.routing is not None:
        with use_strategy(routing=plan.routing):
            return planned(model, mesh, replace(plan, routing=None), options, args, kwargs)
    reached = ReachableState(model, args, kwargs)
    model_trace = trace_factors(model, args, kwargs, reached)
    roles = roles_of(model_trace)
    if plan == AUTO or isinstance(plan, Auto):
        auto = plan if isinstance(plan, Auto) else Auto()
        prices = StepPrices(model, args, kwargs, reached, model_trace)
        first = {id(x): name for name, x in model.named_parameters()}
        names = {name: first[id(x)] for name, x in model.named_parameters(remove_duplicate=False)}
        graph = step_graph(model_trace.step, model, tuple(args), kwargs, reached, options.precision)
        return cheapest(mesh, roles, auto, options, prices, graph, names)
    named, idle = plan_by_name(roles, plan, mesh)
    if idle:
        warn_user(idle, mesh)
    return options.of(named)


def plan_by_name(roles: Roles, strategy: str, mesh: Mesh) -> tuple[ModelPlan, str]:
    """The plan by a named strategy, and what to warn of: experts fewer than their ranks.

    Raises:
        StrategyError: no such strategy, a mesh that it cannot use, or more ranks than there are heads.
    """
    axes = axes_of(strategy, mesh)
    if any(axis.experts for axis in axes):
        strategy, mesh = refined(roles, strategy, mesh, planning_context().topology_of(mesh).hosts)
        axes = axes_of(strategy, mesh)
    roles = fitted_roles(roles, axes, mesh)
    return lay_out(roles, strategy, axes, mesh), idle_experts(roles, axes, mesh)


def step_graph(
    step: RecordedStep,
    model: nn.Module,
    args: Args,
    kwargs: Mapping[str, object],
    reached: ReachableState,
    precision: Precision | None = None,
) -> StepGraph | None:
    """The graph of a recorded step of `model`, or of one with weights in the dtype in which they are used.

    None of a model that does not run without data, for which there are strategies by name.
    """
    if step.answers is None:
        return None
    stored = next((x.dtype for x in model.parameters() if x.dtype.is_floating_point), None)
    if precision is None or precision.param_dtype is None or stored is None:
        return step.graph().copies()
    used = {id(x): stand_in_for(x, precision.without_data) for x in model.parameters()}
    with reached.replaced(used):
        args, kwargs = precision.inputs((tuple(args), kwargs), [])
        graph = record_step(model, args, kwargs).graph().copies()
    return replace(graph, dtypes=Dtypes(stored, precision.reduced))


def _on_ranks_of(mesh: DeviceMesh | Mesh, planned_for: Mesh) -> Mesh:
    """The mesh of a plan, on the ranks of `mesh`; a device mesh is built where `mesh` is one."""
    pure = as_mesh(mesh)
    if pure.ranks != planned_for.ranks:
        raise _other_mesh(planned_for, pure)
    if isinstance(mesh, Mesh):
        return planned_for
    ranks = torch.tensor(planned_for.ranks, device="cpu").view(planned_for.shape)
    return as_mesh(DeviceMesh(planned_for.device_type, ranks, mesh_dim_names=planned_for.names))


def by_name(model: nn.Module, mesh: Mesh, patterns: Mapping[str, Sequence[Placement]]) -> ModelPlan:
    """The plan that places parameters by the first pattern, as in `fnmatch`, that matches their name."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        check_type(pattern, str, "a pattern", "give names of parameters, as fnmatch reads them", LayoutError)
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayoutError(
                f"the pattern {pattern!r} matches no parameter of {type(model).__name__}: patterns are those of "
                f"fnmatch, names such as {', '.join(names[:3])}"
            )
    replicated = (Replicate(),) * mesh.ndim
    parameters = {}
    for name, parameter in model.named_parameters():
        placements = next((p for pattern, p in patterns.items() if fnmatchcase(name, pattern)), replicated)
        layout = layout_of(mesh, placements, parameter.dim())
        if layout.partial_axes():
            raise LayoutError(f"{name} cannot lie [{layout}]: a parameter is never partial; use Shard or Replicate")
        parameters[name] = layout.placements
    return ModelPlan("by name", mesh, parameters, {"": replicated})


def _example(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    if args or kwargs:
        return args, kwargs
    dummy = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, Mapping):
        raise LayoutError(
            f"{type(model).__name__} must be traced to be laid out: give an example batch after the plan, "
            "parallelize(model, mesh, plan, inputs)"
        )
    return (), dict(dummy)


lay_out_assigned()
