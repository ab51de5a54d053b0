"""Groups of parameters that are gathered, or cast, together for the module in which they are used."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from dshard.autograd.gathered_weights import GatheredUse, GatheredWeights, gathered_layout, stored_part, versions_of
from dshard.compile.graph_functions import skip_frame, skip_frames
from dshard.core.context import planning_context
from dshard.core.moves import LocalRedistribution, joined_redistribution
from dshard.core.spec import outside_checkpoint
from dshard.core.transforms import has_tangent
from dshard.core.trees import GivenCopy
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError
from dshard.parallel.given_containers import GivenCopies, begin_call, end_call
from dshard.parallel.numbered_hooks import after, before
from dshard.parallel.plan_values import ModelPlan
from dshard.parallel.precision import Precision
from dshard.placements import Shard
from dshard.rehearsal.module import Rehearsal
from dshard.rehearsal.session import is_running
from dshard.rehearsal.stretches import StretchRehearsal, begin_stretch, end_stretch
from dshard.tensor import DTensor
from dshard.torch_private import graph_task_id, is_alias_of, is_transforming

Place = tuple[nn.Module, str]
"""A module and its own name of a parameter."""
Member = tuple[list[Place], tuple[str, ...]]
"""The places of a parameter, and the mesh axes along which it is gathered."""


def blocks_of(model: nn.Module) -> Iterator[str]:
    """The paths of the modules whose weights are gathered together: the entries of the outermost lists of modules.

    Without lists, the entries of the outermost `nn.Sequential`s; of several of these, one of mere layers is a block
    itself. Other weights are gathered with the model itself.
    """
    kind = nn.ModuleList if any(isinstance(m, nn.ModuleList) for m in model.modules()) else nn.Sequential
    containers = [path for path, module in model.named_modules() if isinstance(module, kind)]
    outermost = [p for p in containers if not any(p != q and _is_within(p, q) for q in containers)]
    for path in outermost:
        entries = [*model.get_submodule(path).named_children()]
        if kind is nn.Sequential and len(outermost) > 1 and not any([*child.children()] for _, child in entries):
            yield path
            continue
        for name, child in entries:
            if next(child.parameters(), None) is not None:
                yield f"{path}.{name}".lstrip(".")


def block_within(blocks: Sequence[str], path: str) -> str:
    """The first of these paths of modules within which a module is; "" if it is in none."""
    return next((block for block in blocks if path == block or _is_within(path, block)), "")


def _is_within(path: str, outer: str) -> bool:
    return not outer or path.startswith(outer + ".")


def _parameter_of(owner: nn.Module, name: str) -> Tensor | None:
    return owner._parameters[name] if name in owner._parameters else None  # noqa: SIM401 (a script module has no `get`)


class Running(NamedTuple):
    """A call of the module of a group: its frame, None in a graph, its use, and hooks within.

    `given` has, for the places of each weight, what was put there in place of the stored one.
    """

    module: nn.Module
    frame: FrameType | None
    use: GatheredUse | None
    hooks: ExitStack | None
    given: list[tuple[list[Place], Wrapper, Wrapper]]


class GatherGroup:
    """The parameters of one block, or those in no block; `places` has for each the modules and names that use it.

    `axes` has for each the mesh axes along which it is gathered; `keeps` says that they stay gathered from the forward
    pass to the backward pass.
    """

    def __init__(self, members: list[Member], plan: ModelPlan, order: GatherOrder, keeps: bool) -> None:
        self.places, self.axes = [places for places, _ in members], [axes for _, axes in members]
        self.plan, self.order, self.keeps = plan, order, keeps
        self.ahead: GatheredWeights | None = None
        self.running: list[Running] = []
        self.given: list[tuple[Sequence[object], list[ReferenceType[Wrapper]]]] = []  # weights of forward passes

    def stored(self) -> list[Wrapper]:
        """The current stored parameters: without those that their modules no longer have, and untied ones apart."""
        for places in self.places:
            tied = _parameter_of(*places[0])
            for place in places:
                x = _parameter_of(*place)
                if x is None or x is not tied:  # such as one that was parametrized, is `None` now, or another one
                    self._regroup()
        return [places[0][0]._parameters[places[0][1]] for places in self.places]  # type: ignore[misc]

    def _regroup(self) -> None:
        """Leave out places that have no parameter, and let those that share one stand together."""
        members = dict[int, Member]()
        for places, axes in zip(self.places, self.axes, strict=True):
            for place in places:
                if (x := _parameter_of(*place)) is not None:
                    members.setdefault(id(x), ([], axes))[0].append(place)
        self.places, self.axes = [places for places, _ in members.values()], [axes for _, axes in members.values()]

    def moves(self, stored: list[Wrapper]) -> list[LocalRedistribution]:
        """The redistribution that gathers each parameter, in the dtype in which it is used."""
        axes, precision = self.axes, self.plan.precision

        def make() -> list[LocalRedistribution]:
            used = (x._spec if precision is None else x._spec.with_dtype(precision.used(x._spec.dtype)) for x in stored)
            return [joined_redistribution(s, gathered_layout(s.layout, own)) for s, own in zip(used, axes, strict=True)]

        key = (gathered_layout, *axes, precision, *[x._spec for x in stored])
        return planning_context().moves.of(key, make)  # type: ignore[no-any-return]

    def begin(self) -> None:
        """Begin to gather the parameters, ahead of their use."""
        if self.ahead is not None or not any(self.axes):
            return
        stored = self.stored()
        # those made in inference mode tell of no writes before their use
        if _can_gather(stored) and not any(x._local_tensor.is_inference() for x in stored):
            self.ahead = GatheredWeights(stored, self.moves(stored))

    def gathered(self, stored: list[Wrapper]) -> GatheredWeights:
        """The gathered parameters: the prefetched ones, unless the stored ones have been written to since."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead.versions == versions_of(stored):
            return ahead
        return GatheredWeights(stored, self.moves(stored))

    def enter(self, module: nn.Module, args: object, is_saved: bool = False) -> None:
        """Put gathered weights into the modules; before their forward pass.

        `is_saved`: around them is a checkpoint, which saves the weights as it saves other tensors.
        """
        if is_dynamo_compiling():
            if self.plan.precision is not None:
                stored = self.stored()
                self.running.append(Running(module, None, None, None, self._put(self._cast(stored), stored)))
            return
        self._leave_ended()
        frame = sys._getframe(1).f_back  # of torch, which lasts as long as the call
        stored, stack = self.stored(), ExitStack()
        if torch.compiler.is_compiling() or is_transforming() or not _can_gather(stored):
            self.running.append(Running(module, frame, None, stack, self._put(self._cast(stored), stored)))
        else:
            with outside_checkpoint():
                self._gather(module, frame, stored, stack, is_saved)

    def _cast(self, stored: list[Wrapper]) -> list[Wrapper]:
        """The stored weights in the dtype in which they are used."""
        precision = self.plan.precision
        return stored if precision is None else [x.to(precision.used(x.dtype)) for x in stored]

    def _leave_ended(self) -> None:
        """Leave calls that have ended without a hook: the modules have their gathered weights still."""
        while self.running and (frame := self.running[-1].frame) is not None and not is_running(frame):
            self.leave()

    def _gather(
        self, module: nn.Module, frame: FrameType | None, stored: list[Wrapper], stack: ExitStack, is_saved: bool
    ) -> None:
        is_recomputed = graph_task_id() >= 0  # within a backward pass, in which modules run in the other direction
        use, weights = self._use(stored, stack, is_saved, is_first=not is_recomputed)
        weights = self._as_given(weights, versions_of(stored)) if is_recomputed else weights
        self.running.append(Running(module, frame, use, stack, self._put(weights, stored)))
        if not is_recomputed:
            self.order.prefetch(self)
            self.order.follows(self)

    def _as_given(self, weights: list[Wrapper], versions: Sequence[object]) -> list[Wrapper]:
        """The weights, or those that the forward pass gave in place of them and that somebody still has.

        A backward pass of the program's own, as of a reversible network, differentiates by these.
        """
        out = [*weights]
        for then, given in self.given:  # the last are the first to be recomputed
            for i, one in enumerate(given):
                x = one() if then[i] == versions[i] else None
                out[i] = out[i] if x is None else x
        return out

    def _use(
        self, stored: list[Wrapper], stack: ExitStack, is_saved: bool, is_first: bool
    ) -> tuple[GatheredUse, list[Wrapper]]:
        """A use of the group, whose hooks are entered on the stack, and the gathered weights."""
        recorded = torch.is_grad_enabled() and not (self.keeps or is_saved)
        before = self.order.last() if recorded and is_first and self.order.last else None
        use = GatheredUse(stored, self.moves(stored), partial(self.gathered, stored), before)
        weights = use.tensors()
        for weight, own in zip(weights, stored, strict=True):
            weight._matmul = own._matmul
        if recorded:
            stack.enter_context(saved_tensors_hooks(use.pack, use.unpack))
            if is_first:
                self.order.last = ref(use)
        return use, weights

    def leave(self, *call: object) -> None:
        """Put the stored parameters back; after the forward pass, however it ended."""
        if not self.running:
            return
        module, _, use, stack, given = self.running.pop()
        if stack is not None:
            stack.close()
        moved = list[tuple[Wrapper, Wrapper]]()
        for places, x, own in given:
            for owner, name in places:
                is_there = _parameter_of(owner, name) is x
                if is_there:
                    owner._parameters[name] = own  # type: ignore[assignment]
                if not is_there or isinstance(owner, ParametrizationList):  # which may itself be removed
                    moved.append((x, own))
        if moved:
            _put_where_moved(module, moved)
        if use is None:
            return
        self.given = [each for each in self.given if any(one() is not None for one in each[1])]
        is_recomputed = graph_task_id() >= 0
        if use.gathered is not None and torch.is_grad_enabled() and not is_recomputed:
            self.given.append((use.gathered.versions, [ref(x) for _, x, _ in given]))
        use.write_back()
        if is_recomputed:
            self.ahead = use.gathered  # the backward pass wants them next
        if not torch.is_grad_enabled() or not (self.keeps or self.order.ends_with(self)):
            use.free()

    def weights(self) -> list[Tensor]:
        """The weights that the modules have now, without those that the program has taken away while they run."""
        now = (_parameter_of(*places[0]) for places in self.places)
        return [x for x in now if x is not None]

    def _put(self, weights: list[Wrapper], stored: list[Wrapper]) -> list[tuple[list[Place], Wrapper, Wrapper]]:
        """Put weights into the modules in place of the stored ones; the places, with both."""
        if weights is stored:
            return []
        for places, x in zip(self.places, weights, strict=True):
            for owner, name in places:
                owner._parameters[name] = x  # type: ignore[assignment]
        return [*zip(self.places, weights, stored, strict=True)]


def _put_where_moved(module: nn.Module, moved: list[tuple[Wrapper, Wrapper]]) -> None:
    """Put stored parameters where a forward pass put gathered weights that it took out of their places.

    A parametrization that is registered or removed within it takes the weight for a buffer, as it is no leaf.
    """
    stored = {id(x): (x, own) for x, own in moved}
    for owner in module.modules():
        tensors: dict[str, Any]
        for tensors in (owner._parameters, owner._buffers):
            for name in [name for name, x in tensors.items() if id(x) in stored]:
                x, own = stored[id(tensors.pop(name))]
                owner._parameters[name] = own  # type: ignore[assignment]
                if stored_part(x) is None and not is_alias_of(x._local_tensor, own._local_tensor):
                    raise LayoutError(
                        f"{name} of a {type(owner).__name__}, a gathered copy of a weight, got other content in a "
                        "forward pass, as remove_parametrizations(..., leave_parametrized=True) gives: call it outside "
                        "of forward"
                    )


def _can_gather(stored: Sequence[Tensor]) -> bool:
    """Whether a collective for all can gather these: distributed tensors, without tangents that it would not bring."""
    return all(type(x) is DTensor for x in stored) and not any(map(has_tangent, stored))


class GatherOrder:
    """The order in which the groups of a model ran, by which the next is prefetched; and the last use."""

    def __init__(self) -> None:
        self.following: dict[int, GatherGroup] = {}
        self.ended: GatherGroup | None = None
        self.previous: GatherGroup | None = None
        self.last: ReferenceType[GatheredUse] | None = None  # the graph holds it, if anything does

    def follows(self, group: GatherGroup) -> None:
        """A group runs, or until the model has run is registered: record that it followed the previous one."""
        if self.previous is not None and self.previous is not group:
            self.following[id(self.previous)] = group
        self.previous = group

    def prefetch(self, group: GatherGroup) -> None:
        """Begin to gather the group that followed this one the last time."""
        following = self.following.get(id(group))
        if following is not None:
            following.begin()

    def ends_with(self, group: GatherGroup) -> bool:
        """Whether the model ended with this group the last time: backward begins with it, and needs it gathered."""
        return self.ended is group

    def restart(self, module: nn.Module, args: object) -> None:
        """The model begins: forget the previous use."""
        if is_dynamo_compiling():  # a graph gathers operator by operator
            return
        self.ended, self.previous, self.last = self.previous, None, None


def gather_groups(model: nn.Module, plan: ModelPlan) -> dict[str, GatherGroup]:
    """The groups of parameters that are gathered, or cast, as the plan asks, by the paths of their modules."""
    listed = blocks_of(model) if plan.groups is None else plan.groups
    hooked = [b for b in listed if not isinstance(model.get_submodule(b), torch.jit.ScriptModule)]
    blocks = sorted(hooked, key=len, reverse=True)  # innermost first
    places: defaultdict[int, list[Place]] = defaultdict(list)
    axes: dict[int, tuple[str, ...]] = {}
    groups_of: defaultdict[int, set[str]] = defaultdict(set)
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is None or (id(parameter) not in places and not _changes(f"{path}.{own}", parameter, plan)):
                continue
            places[id(parameter)].append((module, own))
            axes.setdefault(id(parameter), plan.gathered_axes(f"{path}.{own}".lstrip(".")))
            groups_of[id(parameter)].add(block_within(blocks, path))
    members: defaultdict[str, list[Member]] = defaultdict(list)
    for number, where in places.items():
        groups = groups_of[number]
        members[next(iter(groups)) if len(groups) == 1 else ""].append((where, axes[number]))
    order, paths = GatherOrder(), [path for path, _ in model.named_modules() if path in members]
    by_path = {path: GatherGroup(members[path], plan, order, keeps=path == "") for path in paths}
    for group in by_path.values():  # the model's own first, then blocks as they are listed
        order.follows(group)
    return by_path


def gather_for(model: nn.Module, groups: dict[str, GatherGroup]) -> tuple[list[RemovableHandle], list[Rehearsal]]:
    """Register hooks that gather the weights of groups for their modules; the hooks, and how modules are rehearsed.

    Modules are rehearsed on weights that are gathered by then, as inputs: what ranks send to gather them, and to reduce
    their gradients, is the same however each of them runs the module. One around others is rehearsed between these.
    """
    hooks, rehearsals = list[RemovableHandle](), list[Rehearsal]()
    for path, group in groups.items():
        module, precision = model.get_submodule(path), group.plan.precision
        if not hooks:
            hooks.append(before(model, group.order.restart))
        is_within = any(_is_within(path, other) for other in groups if other != path)
        is_around = any(_is_within(other, path) for other in groups if other != path)
        if is_within:
            hooks.append(before(module, end_stretch))
        hooks.append(before(module, group.enter))
        if precision is not None and path:
            enter, leave = _casting(precision)
            hooks += [before(module, enter, with_kwargs=True), after(module, leave)]
        rehearsals.append((StretchRehearsal if is_around else Rehearsal)(module, group.weights))
        hooks.append(before(module, rehearsals[-1].enter, with_kwargs=True))
        hooks.append(after(module, rehearsals[-1].leave, always=True))
        hooks.append(after(module, group.leave, always=True))
        if is_within:
            hooks.append(after(module, begin_stretch, always=True))
    return hooks, rehearsals


def _changes(name: str, parameter: Tensor, plan: ModelPlan) -> bool:
    """Whether this parameter is used in another layout or dtype than it is stored in."""
    placements = plan.parameters.get(name.lstrip("."))
    if placements is None or not (plan.gathers or plan.precision):
        return False
    is_gathered = any(
        isinstance(placements[plan.mesh.axis(axis)], Shard) for axis in plan.gathered_axes(name.lstrip("."))
    )
    return is_gathered or (plan.precision is not None and plan.precision.used(parameter.dtype) is not parameter.dtype)


def _casting(precision: Precision) -> tuple[Any, Any]:
    """Hooks around a module whose inputs are cast."""
    given: GivenCopies = []

    @skip_frame
    def enter(module: nn.Module, args: object, kwargs: object) -> Any:
        copies: list[GivenCopy] = []
        inputs = precision.inputs((args, kwargs), copies)
        begin_call(given, None if is_dynamo_compiling() else sys._getframe(1), copies)
        return inputs

    @skip_frame
    def leave(module: nn.Module, args: object, out: object) -> None:
        end_call(given, None if is_dynamo_compiling() else sys._getframe(1), lambda x: x)

    return enter, leave


skip_frames(GatherGroup)
skip_frames(GatherOrder)
