"""Calls within a model's forward pass that follow a plan: their operands, results and strategies have its layouts.

The planned calls are in the order of the forward pass, with a cursor at the next. A call that has its name, on as many
tensors of as many dims, follows it; any other is laid out by cost. What follows is a matter of the call alone: a
rehearsed module records it with the redistributions that the plan asks for, and answers it without looking here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from threading import local
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dshard.autograd.crossing import redistribute_with
from dshard.autograd.leaf_gradients import keep_gradient_layout
from dshard.comm import of_first_rank, same_memory, warn_user
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import for_shapes, meta_tensors
from dshard.core.trees import map_tensors, nested_tensors, replace_tensors, tensors_in
from dshard.core.wrapper import Wrapper, is_leaf
from dshard.layout import Layout, layout_of
from dshard.mesh import Mesh
from dshard.ops.matmul.options import MatmulOptions, current_options, enter_options
from dshard.placements import Placement
from dshard.rules.attention_loops import AttentionLoops
from dshard.rules.expand import Row
from dshard.rules.expert_loops import ExpertLoops
from dshard.rules.rule import PassThrough
from dshard.torch_private import no_torch_function, saved_tensor_hooks

ANY = -1
Placements: TypeAlias = tuple[Placement, ...]
Call: TypeAlias = Callable[[Function, Args, Kwargs], Any]


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """The placements to which a tensor is redistributed, and those to which its gradient is, before it is added."""

    placements: Placements
    gradient: Placements


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """The layouts that a plan has for a call of a function of torch in the forward pass of a model.

    It is call number `ordinal` of those by the same `name` in visit number `visit` of the module at the path `module`;
    `begun` are those modules that begin to run between it and the call before. `ndims` are the numbers of dims of its
    operands, `ANY` of a constant. `operands` and `results` are the moves of these, None for those that stay as they
    are; of those results that are `reduced` the gradient has the layout of the result, and is no partial sum. `rows`
    are those of the rule of a matmul, "sum 0" where operand 0 passes through as a partial sum; `attention` and
    `experts` have the loops of attention, and of a layer of experts.
    """

    name: str
    module: str
    visit: int
    ordinal: int
    begun: tuple[str, ...]
    ndims: tuple[int, ...]
    operands: tuple[PlannedMove | None, ...]
    results: tuple[PlannedMove | None, ...] = ()
    reduced: tuple[bool, ...] = ()
    rows: tuple[str | None, ...] | None = None
    attention: AttentionLoops | None = None
    experts: ExpertLoops | None = None

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the operands of a call have the dims of this one's."""
        dims = [len(x._spec.shape) if isinstance(x, Wrapper) else x.dim() for x in tensors]
        return len(dims) == len(self.ndims) and all(n in (own, ANY) for own, n in zip(dims, self.ndims, strict=True))

    @property
    def is_laid_out(self) -> bool:
        """Whether anything of the call is not left to its cost."""
        ways = self.rows or self.attention or self.experts
        return any(self.operands) or any(self.results) or any(self.reduced) or ways is not None

    def layouts(self) -> Hashable:
        """All of the call but its place in the model."""
        return self.name, self.ndims, self.operands, self.results, self.reduced, self.rows, self.attention, self.experts

    def by_cost(self) -> PlannedCall:
        """The call with everything left to its cost."""
        at = self.module, self.visit, self.ordinal, self.begun
        return PlannedCall(self.name, *at, self.ndims, (None,) * len(self.operands))

    def is_within(self, module: str) -> bool:
        """Whether the module at this path, or one in it, makes the call."""
        return not module or self.module == module or self.module.startswith(f"{module}.")

    def run(self, call: Call, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The result of a call that fits, with operands and results in these layouts."""
        tensors, operands = tensors_in((args, kwargs)), (args, kwargs)
        if any(map(_changes, tensors, self.operands)) and not _is_view(
            func, args, kwargs
        ):  # to which it may be written
            rest = iter(self.operands)
            operands = replace_tensors(operands, lambda x: redistributed(x, next(rest)))
        out = self._by_rows(call, func, *operands)
        results = nested_tensors(out)
        if len(results) != len(self.results):
            return out
        for x, is_reduced in zip(results, self.reduced, strict=True):
            if is_reduced and isinstance(x, Wrapper):
                _reduce_gradient(x)
        if not any(self.results) or _share_memory(results, tensors):
            return out
        rest = iter(self.results)
        return map_tensors(out, lambda x: redistributed(x, next(rest)))

    def _by_rows(self, call: Call, func: Function, args: Args, kwargs: Kwargs) -> Any:
        if self.rows is self.experts is None and (self.attention is None or not torch.is_grad_enabled()):
            return call(func, args, kwargs)
        among = None if self.rows is None else (tuple([frozenset({_row(row)}) for row in self.rows]),)
        own = MatmulOptions(saved=current_options().saved, attention=self.attention, experts=self.experts, among=among)
        leave = enter_options(own)
        try:
            return call(func, args, kwargs)
        finally:
            leave()


def _row(name: str | None) -> Row:
    """The row of a mesh axis by its name among the rows of a planned call."""
    if name is None or not name.startswith("sum "):
        return name
    return PassThrough(frozenset(map(int, name.split()[1:])), ("sum",))


def _changes(x: Tensor, move: PlannedMove | None) -> bool:
    return move is not None and isinstance(x, Wrapper) and _layout_on(x, move.placements) is not x._spec.layout


def _layout_on(x: Wrapper, placements: Placements) -> Layout:
    """The layout of a tensor in these placements; its own where they are for a mesh of other axes."""
    own = x._spec.layout
    return layout_of(own.mesh, placements, len(x._spec.shape)) if len(placements) == own.mesh.ndim else own


def redistributed(x: Tensor, move: PlannedMove | None) -> Tensor:
    if move is None or not isinstance(x, Wrapper):
        return x
    return redistribute_with(x, _layout_on(x, move.placements), _layout_on(x, move.gradient))


def _share_memory(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether a tensor among some has memory of one of the others."""
    locals_ = [
        [of_first_rank(x._local_tensor if isinstance(x, Wrapper) else x) for x in each] for each in (some, others)
    ]
    return any(same_memory(x, y) for x, y in product(*locals_))


def _is_view(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether a function gives a tensor with memory of its operands, on one device, or may, as `x.to(device)` does."""

    def without_data(x: Tensor) -> Tensor:
        return next(iter(meta_tensors([x._spec]))) if isinstance(x, Wrapper) else x.to("meta")

    args, kwargs = replace_tensors((args, kwargs), without_data)
    with torch.no_grad(), for_shapes():
        try:
            return _share_memory(tensors_in(func(*args, **kwargs)), tensors_in((args, kwargs)))
        except NotImplementedError:  # torch's word where data is copied, and there is none
            return True


def _reduce_gradient(x: Wrapper) -> None:
    with no_torch_function():
        if x._gradient_leaf is None and torch.is_grad_enabled() and x.requires_grad and not is_leaf(x):
            keep_gradient_layout(x)


class PlannedCalls:
    """The planned calls of a model, in order, and whether the user knows that the model made others."""

    def __init__(self, calls: Sequence[PlannedCall]) -> None:
        self.calls, self.has_warned = tuple(calls), False
        self.laid_out = [call.is_laid_out for call in calls]

    def warn(self, planned: PlannedCall, found: str, mesh: Mesh) -> None:
        """Warn once that a planned call was not made."""
        if self.has_warned:
            return
        self.has_warned = True
        warn_user(
            f"the model was planned to call {planned.name} in {planned.module or 'its own forward'}, and {found}: such "
            "calls are laid out by cost, one by one; plan it with a batch like those that it is given",
            mesh,
        )


class Position(NamedTuple):
    """A number among the planned calls of the forward pass that runs, None outside of one that has some."""

    of: PlannedCalls | None
    at: int


class Cursor(local):
    """The planned calls of the forward pass that runs in this thread, and the number of the next.

    `name` is that of the next, None if there is none: calls by other names need not look further. `visits` counts those
    of modules. Torch's checkpoint runs modules again, but not always what is around them: within a `checkpoint` only
    calls of the first `module` that it runs are planned, so that both times are alike.
    """

    of: PlannedCalls | None = None
    at = 0
    name: str | None = None
    checkpoint: Callable[[], object] | None = None
    module: str = ""

    def __init__(self) -> None:
        self.visits = Counter[str]()

    def put(self, of: PlannedCalls | None, at: int) -> None:
        """Go to this position."""
        self.of, self.at = of, at
        self.name = None if of is None or at >= len(of.calls) else of.calls[at].name

    def position(self) -> Position:
        """The position, to which `put` goes back."""
        return Position(self.of, self.at)

    def inside(self, hook: Any, module: str) -> None:
        """Note that the module at this path begins to run within the checkpoint of this hook."""
        if self.checkpoint is None or self.checkpoint() is not hook:
            self.checkpoint, self.module = ref(hook), module

    def run(self, call: Call, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The result of a call by the name of the next one."""
        of, at = self.of, self.at
        assert of is not None
        planned = of.calls[at] if of.laid_out[at] and self._fits(of, tensors_in((args, kwargs))) else None
        self.put(None, at)
        try:
            return call(func, args, kwargs) if planned is None else planned.run(call, func, args, kwargs)
        finally:
            self.put(of, at + 1)

    def _fits(self, of: PlannedCalls, tensors: Sequence[Tensor]) -> bool:
        """Whether a call on these tensors follows the next planned one."""
        planned, hooks = of.calls[self.at], saved_tensor_hooks(True)
        if not planned.fits(tensors):
            x = next(x for x in tensors if isinstance(x, Wrapper))
            of.warn(planned, f"calls it on {[len(x.shape) for x in tensors]} dims", x._spec.layout.mesh)
            return False
        if hooks is None or not is_checkpoint(hooks):
            return True
        return self.checkpoint is not None and self.checkpoint() is hooks[0] and planned.is_within(self.module)


def is_checkpoint(hooks: Sequence[object]) -> bool:
    """Whether hooks of saved tensors are those of `torch.utils.checkpoint`."""
    return getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_recomputed() -> bool:
    """Whether a call within a backward pass is one of a forward pass that `torch.utils.checkpoint` runs again."""
    hooks = saved_tensor_hooks(True)
    return hooks is not None and is_checkpoint(hooks)


def outermost_checkpoint() -> object:
    """The hook of the outermost checkpoint that a call is in, None outside of any.

    What runs in it runs again as a whole: the inputs of a checkpoint within one are made by the one around it.
    """
    hooks = saved_tensor_hooks(True)
    if hooks is None:
        return None
    innermost = saved_tensors_hooks(*hooks)
    innermost.__exit__()
    try:
        outer = outermost_checkpoint()
    finally:
        innermost.__enter__()
    return hooks[0] if outer is None and is_checkpoint(hooks) else outer


PLANNED = Cursor()
