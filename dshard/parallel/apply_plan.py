"""Apply a plan to a module by hooks: its inputs on entry, schedules within, and the outputs of some of its modules.

The planned calls of each module that runs go on at its own.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from dshard.autograd.leaf_gradients import keep_gradient_layout
from dshard.caches import cached
from dshard.comm import compare_calls, comparing
from dshard.compile.graph_functions import skip_frame
from dshard.core.plain_tensors import count_as_replicated
from dshard.core.spec import Spec
from dshard.core.torch_placements import torch_placements
from dshard.core.transforms import unwrapped
from dshard.core.trees import GivenCopy, map_given
from dshard.core.wrapper import is_leaf
from dshard.dispatch.planned_calls import PLANNED, PlannedCall, PlannedCalls, is_checkpoint
from dshard.distribute import cut, distribute_tensor
from dshard.ops.matmul.options import MatmulOptions, current_options, enter_options, kept_options
from dshard.parallel.batch_rows import InputLayouts, argument_names
from dshard.parallel.expert_modules import ExpertsModule
from dshard.parallel.gather_groups import GatherGroup, gather_for, gather_groups
from dshard.parallel.given_containers import GivenCopies, begin_call
from dshard.parallel.in_graphs import InputsInGraph, by_loops, by_schedule, plain_replicated
from dshard.parallel.numbered_hooks import after, before, without_earlier_hooks
from dshard.parallel.plan_values import ModelPlan
from dshard.placements import Replicate, Shard
from dshard.rehearsal.module import Rehearsal, RehearsedParts
from dshard.rehearsal.region_recording import RegionRecording
from dshard.rehearsal.session import HERE, is_running, own_call
from dshard.routing import Routing
from dshard.rules.attention_loops import AttentionLoops
from dshard.rules.matmul_loops import Schedule
from dshard.tensor import DTensor
from dshard.torch_private import graph_task_id, no_torch_function, saved_tensor_hooks


def apply_plan(model: nn.Module, plan: ModelPlan, given: GivenCopies | None = None) -> list[Any]:
    """Register hooks that lay out inputs and outputs of `model` and its modules by `plan`, and return them.

    The copies of containers that a call is given are put into `given`.
    """
    groups = gather_groups(model, plan)
    hooks = take_inputs(model, plan, groups, given)
    rehearsal = Rehearsal(model)
    if not groups:
        hooks.append(before(model, rehearsal.enter, with_kwargs=True))
    hooks += [after(model.get_submodule(name), _output_hook(plan, name)) for name in plan.outputs]
    hooks += [before(each, _reduce_gradients_once) for each in model.modules() if isinstance(each, ExpertsModule)]
    pins = pin_schedules(model, plan)
    for name, schedule in plan.products.items():
        if not (name in pins and _sends_nothing(schedule, pins[name].weight)):
            hooks += _schedule_hooks(model.get_submodule(name), schedule, name in plan.shared)
    gathering, parts = gather_for(model, groups)
    hooks += [*pins.values(), *gathering]
    if not groups:
        hooks.append(after(model, rehearsal.leave, always=True))
    model.__dict__["rehearsed"] = RehearsedParts(model, parts) if groups else rehearsal
    return hooks


def take_inputs(
    model: nn.Module,
    plan: ModelPlan,
    groups: Mapping[str, GatherGroup] | None = None,
    given: GivenCopies | None = None,
) -> list[Any]:
    """Register hooks that lay out the inputs of `model`, and count plain tensors within as replicated; return them.

    Within the forward pass attention has the loops of the plan. `groups` are the weights that are gathered together.
    The copies of containers that a call is given are put into `given`.
    """
    blocks = [_around(_replicating, plain_replicated(plan.mesh))]
    if plan.attention is not None or plan.routing is not None:
        blocks.append(_around(partial(_by_loops, plan.attention, plan.routing), by_loops(plan.attention)))
    followed = FollowedModules(plan) if plan.calls else None
    if followed is not None:
        blocks.append(_around(followed.enter, None))  # graphs are laid out by cost
    layouts = InputLayouts(plan, plan.ndim, argument_names(model) if len(plan.inputs) > 1 else None)
    in_graph = InputsInGraph(plan.mesh, layouts)

    @skip_frame
    def enter(module: nn.Module, args: object, kwargs: object) -> Any:
        for enter_block, _ in blocks:
            enter_block()
        inputs: Any = args, kwargs
        copies: list[GivenCopy] = []
        inputs = in_graph(inputs, copies) if is_dynamo_compiling() else lay_out(inputs, plan, layouts, copies)
        if plan.precision is not None:
            inputs = plan.precision.inputs(inputs, copies)
        if given is not None:
            begin_call(given, None if is_dynamo_compiling() else sys._getframe(1), copies)
        return inputs

    @skip_frame
    def leave(module: nn.Module, args: object, out: object) -> Any:
        for _, leave_block in reversed(blocks):
            leave_block(module, args, out)
        return out if plan.precision is None else plan.precision.outputs(out)

    hooks = [before(model, enter, with_kwargs=True), after(model, leave, always=True)]
    return hooks + _recomputation_hooks(model, blocks, groups or {}, followed)


def _recomputation_hooks(
    model: nn.Module,
    blocks: Sequence[tuple[Any, Any]],
    groups: Mapping[str, GatherGroup],
    followed: FollowedModules | None,
) -> list[Any]:
    """Register hooks within which `model`, or modules of it, are recomputed in a backward pass.

    A recomputed module is within the same `blocks` as before, entered by the outermost module that is called. If that
    is within the module of a group of weights, whose own hooks did not run, it has the weights of the group.
    """
    entered: list[nn.Module] = []
    within = {child: group for path, group in groups.items() for child in model.get_submodule(path).children()}

    def enter(name: str, group: GatherGroup | None, module: nn.Module, args: object) -> None:
        if is_dynamo_compiling():
            return
        if graph_task_id() < 0 or entered:
            if followed is not None and PLANNED.of is followed.planned:
                followed.arrive(name)
            return
        entered.append(module)
        for enter_block, _ in blocks:
            enter_block()
        if followed is not None:
            followed.arrive(name, again=True)
        if group is not None and group.running:
            group = None
        if group is not None:
            group.enter(module, args, is_saved=True)

        def leave(module: nn.Module, args: object, out: object) -> None:
            entered.clear()
            once.remove()
            if group is not None:
                group.leave(module, args, out)
            for _, leave_block in reversed(blocks):
                leave_block(module, args, out)

        once = after(module, leave, always=True)

    hooked = [(name, each) for name, each in model.named_modules() if each in within or any(each.children())]
    return [before(module, partial(enter, name, within.get(module))) for name, module in hooked]  # which copies copy


def _schedule_hooks(module: nn.Module, schedule: Schedule, shared: bool) -> list[Any]:
    """Register hooks within which matmuls run by `schedule`; the gradient of their first operand is reduced once.

    In eager mode no block is entered for an `nn.Linear` whose weight has the schedule.
    """
    options = kept_options(MatmulOptions(schedule))
    enter_block, leave = _around(partial(enter_options, options), by_schedule(schedule))

    @skip_frame
    def enter(module: nn.Module, args: Any) -> Any:
        if is_dynamo_compiling():
            enter_block()
        else:
            weight: Any = module._parameters.get("weight")
            if type(weight) is not DTensor or weight._matmul is not options:
                enter_block()
            if len(args) == 1 and type(args[0]) is DTensor and _is_split(args[0]._spec, schedule.loops):
                return None
            for x in args:
                if isinstance(x, DTensor):
                    _reduce_gradient_once(x)
        return tuple(_redistribute_once(x, schedule) if isinstance(x, DTensor) else x for x in args) if shared else None

    return [before(module, enter), after(module, leave, always=True)]


def _sends_nothing(schedule: Schedule, weight: DTensor) -> bool:
    """Whether rows sharded as by the schedule meet the whole weight: without options, too, that is the cheapest."""
    return set(schedule.loops) == {"m"} and set(weight.placements) == {Replicate()}


@cached("operands split as their matmul", 4096)
def _is_split(spec: Spec, loops: tuple[str, ...]) -> bool:
    """Whether a first operand of this spec has rows sharded as by `loops`: then its gradient has its own layout."""
    return all(map(lambda loop, at: loop == "m" and isinstance(at, Shard), loops, spec.layout.placements))


@own_call
def _reduce_gradient_once(x: DTensor) -> None:
    """Sum the gradients of all uses of `x`, a tensor in the middle of the graph, and redistribute the sum."""
    if torch.compiler.is_compiling():  # a graph has no hooks on tensors in its middle
        return
    with no_torch_function():
        if x._gradient_leaf is None and x.requires_grad and not is_leaf(x):
            keep_gradient_layout(x)


@skip_frame
def _reduce_gradients_once(module: nn.Module, args: Any) -> None:
    """Reduce the gradients of the tokens and weights of a layer of experts at once: routers and norms use them, too."""
    if not is_dynamo_compiling():
        for x in args:
            if isinstance(x, DTensor):
                _reduce_gradient_once(x)


class _PinnedOptions:
    """The options pinned to the weight of an `nn.Linear`, until they are removed."""

    def __init__(self, weight: DTensor, options: MatmulOptions) -> None:
        self.weight, self.options = weight, options
        weight._matmul = options

    def remove(self) -> None:
        """Remove the options from the weight."""
        if self.weight._matmul is self.options:
            self.weight._matmul = None


def pin_schedules(model: nn.Module, plan: ModelPlan) -> dict[str, Any]:
    """Pin the schedule of each `nn.Linear` to its weight, unless another module uses the weight; the pins by name.

    Then no block needs to be entered and left around each of its calls.
    """
    modules = {name: model.get_submodule(name) for name in plan.products}
    users = Counter(id(weight) for module in modules.values() for weight in module._parameters.values())
    pins: dict[str, Any] = {}
    for name, module in modules.items():
        weight: object = module._parameters.get("weight") if type(module) is nn.Linear else None
        if type(weight) is DTensor and users[id(weight)] == 1:
            pins[name] = _PinnedOptions(weight, kept_options(MatmulOptions(plan.products[name])))
    return pins


def _around(block: Callable[[], Callable[[], None]], mode: TorchFunctionMode | None) -> tuple[Any, Any]:
    """A function that enters a block, and a hook that leaves it; `mode` is the same for graphs, or None.

    `block` enters it, and returns the function that leaves it.
    """
    stack: list[tuple[FrameType | None, Callable[[], None]]] = []

    def enter() -> None:
        if is_dynamo_compiling():
            if mode is not None:
                mode.__enter__()
            return
        while stack and (frame := stack[-1][0]) is not None and not is_running(frame):
            stack.pop()[1]()  # that of a call that has ended without a hook
        stack.append((sys._getframe(1).f_back, block()))

    @skip_frame
    def leave(module: nn.Module, args: object, out: object) -> None:
        if stack:
            stack.pop()[1]()
        elif mode is not None and is_dynamo_compiling():
            mode.__exit__(None, None, None)

    return enter, leave


def _replicating() -> Callable[[], None]:
    """Enter `implicit_replication` of a forward pass, and return the function that leaves it."""
    count_as_replicated(1, forward=True)
    return partial(count_as_replicated, -1, forward=True)


def _by_loops(loops: AttentionLoops | None, routing: Routing | None) -> Callable[[], None]:
    """Enter a block in which attention has these loops, if gradients are recorded; return the function that leaves it.

    In inference attention has the cheapest loops, so that a cache sharded over its sequence is not moved to heads.
    Experts are priced for a `routing`, unless a block around the model has another.
    """
    own, within = loops if torch.is_grad_enabled() else None, current_options()
    return enter_options(MatmulOptions(saved=within.saved, attention=own, routing=within.routing or routing))


@own_call
def _redistribute_once(x: DTensor, schedule: Schedule) -> DTensor:
    """`x` redistributed as the first operand of `schedule`, features last; cached for all modules that share `x`."""
    placements = tuple(
        Replicate() if loop == "n" else Shard(x.ndim - 1) if loop == "k" else placement
        for loop, placement in zip(schedule.loops, x.placements, strict=True)
    )
    if placements == x.placements:
        return x
    if torch.compiler.is_compiling():  # a graph has no marks on tensors
        return x.redistribute(placements=placements)
    redistributed: dict[object, DTensor] = x.__dict__.setdefault("_moved", {})
    if placements not in redistributed:
        redistributed[placements] = x.redistribute(placements=placements)
    return redistributed[placements]


@contextmanager
def applied(model: nn.Module, plan: ModelPlan) -> Iterator[None]:
    """Apply the hooks of `plan` to `model` within the block, in place of those of plans that parts of it have."""
    with without_earlier_hooks(model):
        hooks = apply_plan(model, plan)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _output_hook(plan: ModelPlan, name: str) -> Any:
    placements = plan.outputs[name]
    ndim = max((placement.dim + 1 for placement in placements if isinstance(placement, Shard)), default=0)

    @skip_frame
    def place(module: nn.Module, args: object, out: object) -> Any:
        if not isinstance(out, DTensor) or out.placements == placements or out.ndim < ndim:  # of one row, not a batch
            return out
        return out.redistribute(placements=placements)

    return place


def lay_out(inputs: object, plan: ModelPlan, layouts: InputLayouts, copies: list[GivenCopy]) -> Any:
    """The inputs of a model as distributed tensors: those with the batch as first dim by the plan, others replicated.

    Those that the plan names have their own layouts. Plain tensors must be equal on all ranks; nothing is sent.
    Distributed ones are unchanged, except that those on a mesh that the plan unfolds take the layout of plain ones.
    """
    keys, compares = iter(layouts.keys(inputs)), comparing()

    def distributed(leaf: Tensor) -> Tensor:
        layout = layouts.layouts[next(keys)]
        whole = unwrapped(leaf)
        if isinstance(whole, DTensor) and (whole is not leaf or not _on_other_mesh(leaf, plan)):
            return leaf  # a transform of torch.func that follows a distributed tensor goes on with it
        if isinstance(leaf, DTensor):
            return leaf.redistribute(plan.mesh, torch_placements(layout))
        if not compares:
            return cut(leaf, layout)
        compare_calls(f"a parallelized module with a plain input {tuple(leaf.shape)}", plan.mesh, contents=leaf)
        return distribute_tensor(leaf, plan.mesh, torch_placements(layout), src_data_rank=None)

    return map_given(inputs, distributed, copies)


def _on_other_mesh(x: DTensor, plan: ModelPlan) -> bool:
    """Whether `x` is on another mesh of the plan's ranks in the same order, such as the mesh that "auto" unfolds."""
    mesh = x._spec.layout.mesh
    return mesh != plan.mesh and mesh.ranks == plan.mesh.ranks


class FollowedModules:
    """The planned calls of a model, and for each module with modules in it the numbers at which its visits begin.

    Visits of a module with unlike layouts are laid out by cost: a visit that is recomputed is not known by its number.
    """

    def __init__(self, plan: ModelPlan) -> None:
        self.mesh = plan.mesh
        self.begins, ends = _visits(plan.calls)
        self.planned = PlannedCalls(_alike(plan.calls, self.begins, ends))

    def enter(self) -> Callable[[], None]:
        """Begin a forward pass of the model, and return the function that ends it."""
        before = PLANNED.position()
        PLANNED.put(self.planned, 0)
        PLANNED.visits = Counter()
        return partial(PLANNED.put, *before)

    def arrive(self, name: str, again: bool = False) -> None:
        """The module of this name begins to run: its calls are the next ones, unless there were later ones.

        If it runs `again`, in a backward pass, those before it need not be made.
        """
        begins, visit = self.begins.get(name), PLANNED.visits[name]
        if begins is None:
            return
        PLANNED.visits[name] += 1
        hooks = saved_tensor_hooks(True)
        if hooks is not None and is_checkpoint(hooks):
            PLANNED.inside(hooks[0], name)
        at = begins[min(visit, len(begins) - 1)]
        if at <= PLANNED.at:
            return
        by_python = HERE.answer is None or isinstance(HERE.answer, RegionRecording) or HERE.awaits_a_call
        if by_python and not again:
            left_out = [each for each in self.planned.calls[PLANNED.at : at] if each.is_laid_out]
            if left_out:
                self.planned.warn(left_out[0], f"went on to {name} without", self.mesh)
        PLANNED.put(self.planned, at)


def _visits(calls: Sequence[PlannedCall]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """For each module the numbers of the first call of each visit to it, and of the last."""
    begins, ends = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for n, call in enumerate(calls):
        for module in call.begun:
            if module:
                begins[module].append(n)
                ends[module].append(n)
        names = call.module.split(".")
        for module in [".".join(names[: i + 1]) for i in range(len(names))]:
            ends[module][-1:] = [n] if ends[module] else []
    return begins, ends


def _alike(calls: Sequence[PlannedCall], begins: dict[str, list[int]], ends: dict[str, list[int]]) -> list[PlannedCall]:
    """The calls, with those by cost of modules whose visits are not alike."""
    out = [*calls]
    for module, firsts in begins.items():
        visits = [calls[first : last + 1] for first, last in zip(firsts, ends[module], strict=True)]
        if len({tuple([call.layouts() for call in visit]) for visit in visits}) > 1:
            for first, last in zip(firsts, ends[module], strict=True):
                out[first : last + 1] = [call.by_cost() for call in out[first : last + 1]]
    return out
