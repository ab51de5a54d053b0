"""Warm calls that autograd records: on the local parts, where nothing has to be sent for them.

A function that is known to come down to operators on the local parts is called on those as autograd knows them
(`dshard.autograd.Live`), so that torch records, and runs back, what one device would. The strategy says where the
gradient of each operand then lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from dshard.autograd.crossing import LocalGraph, local_graph_of, tracked_local, wrap_tracked
from dshard.comm import LocalTensor
from dshard.comm.rank_checks import enabled as comparing
from dshard.core.call_log import CallRecord
from dshard.core.moves import coordinate_of, sharing_version
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper
from dshard.dispatch.operator import OperatorExecutable
from dshard.layout import Layout, interned
from dshard.ops.matmul.matmul_executable import MatmulExecutable
from dshard.placements import Partial

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Shortcut: TypeAlias = Callable[[Args, Kwargs], Any]
Place: TypeAlias = tuple[Any, Spec | None, bool]
"""Which argument, what its gradient is (None: it needs none), and whether that lies as it wants it."""
_ATEN = torch.ops.aten
_replays, _replay = torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled
_recording = torch.is_grad_enabled
_without_dispatch = torch._C._DisableTorchDispatch
_DETACH, _RESHAPES = _ATEN.detach.default, frozenset({_ATEN._unsafe_view.default, _ATEN.reshape.default})


def tracked_shortcut(
    func: Any, args: Args, kwargs: Kwargs, out: Any, seen: Sequence[CallRecord], *, by_kind: bool
) -> Shortcut | None:
    """How to call `func` on operands like these from now on, some of which want gradients, if what was seen allows.

    With `by_kind` calls are not told apart by their numbers: then only `func` itself will do.
    """
    if (
        not all(isinstance(run, OperatorExecutable | MatmulExecutable) for run, *_ in seen)
        or not out.requires_grad
        or is_simulated(out)
    ):
        return None
    seen = [each for each in seen if each[1] is not _DETACH]  # torch detaches what it saves, and what a view gives
    if not seen or _is_uneven(seen, out):
        return None
    taken = [id(x) for x in (*seen[0][2], *seen[0][3].values()) if isinstance(x, Tensor)]
    in_order = taken == [id(x) for _, x in _given(args, kwargs)]
    found: Any = None
    if isinstance(seen[0][0], MatmulExecutable):
        found = None if len(seen) > 1 or kwargs or not in_order else _product(seen[0][0], args, out)
    elif any(isinstance(run, MatmulExecutable) or not _is_local(run) for run, *_ in seen):
        return None
    elif out._is_view():
        return None if by_kind else view_shortcut(func, args, kwargs, out, seen)
    elif len(seen) == 1 and in_order and seen[0][0].op.kernel is None and is_itself(func, args, kwargs, seen[0]):
        found = _same_function(func, args, kwargs, out, seen[0][0])
    elif not by_kind:
        found = _program(args, kwargs, out, seen)
    if found is not None:
        found.decisions = [run.decision for run, *_ in reversed(seen)]  # for whoever wants to see them, outermost last
    return found  # type: ignore[no-any-return]


def is_simulated(x: Any) -> bool:
    """Whether the ranks are simulated."""
    return type(x._local) is LocalTensor


def _is_uneven(seen: Sequence[CallRecord], out: Any) -> bool:
    """Whether a rank holds nothing of a tensor of which others hold something.

    Some of torch's formulas for gradients are others where there are no elements, and need other operands: ranks that
    ran them on their local tensors would not meet in a backward pass through a gradient.
    """
    tensors = [x for _, _, args, kwargs, _ in seen for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    specs = {x._spec for x in (*tensors, out) if isinstance(x, Wrapper)}
    return any(spec.layout.leaves_empty(spec.shape) for spec in specs)


def _is_local(run: OperatorExecutable) -> bool:
    """Whether an operator runs on the local parts as they are, and so back: of what is pending, only sums go back."""
    if run.warm is None or run.warm.operator is None or run.inplace or any(p.steps for p in run.plans):
        return False
    if run.op.kernel is not None and not run.views and run.call.func not in _RESHAPES:
        return False
    layouts = (*run.strategy.inputs, *run.strategy.outputs)
    return not any(isinstance(p, Partial) and p.reduce_op != "sum" for layout in layouts for p in layout.placements)


def _place(at: int | str, x: Any, gradient: Layout) -> Place:
    return at, x._spec.with_layout(gradient) if x.requires_grad else None, gradient == x._spec.layout.cotangent()


def _given(args: Args, kwargs: Kwargs) -> list[tuple[int | str, Any]]:
    cls = Wrapper.public
    everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [(at, x) for at, x in everything if type(x) is cls]


def _same_function(func: Any, args: Args, kwargs: Kwargs, out: Any, run: OperatorExecutable) -> Shortcut:
    """The function itself, on the local parts."""
    spec, cotangent = out._spec, interned(out._spec.layout.cotangent())
    operands = zip(_given(args, kwargs), run.strategy.gradients, strict=True)
    found = [_place(at, x, gradient) for (at, x), gradient in operands]
    places = [place for place in found if isinstance(place[0], int)]
    named = [place for place in found if isinstance(place[0], str)]

    def call(args: Args, kwargs: Kwargs) -> Any:
        local: list[Any] = list(args)
        for i, grad, is_home in places:
            x = args[i]
            local[i] = x._local if grad is None else tracked_local(x, grad, is_home)
        if named:
            kwargs = kwargs.copy()
            for name, grad, is_home in named:
                x = kwargs[name]
                kwargs[name] = x._local if grad is None else tracked_local(x, grad, is_home)
        return wrap_tracked(func(*local, **kwargs), spec, cotangent)

    return call


def _product(product: MatmulExecutable, args: Args, out: Any) -> Shortcut | None:
    """A product of which nothing moves."""
    plans = (*product.plans, product.end, *([] if product.bias_plan is None else [product.bias_plan]))
    layout = out._spec.layout
    if comparing() or product.cut is not None or product.streamed is not None or any(p.steps for p in plans):
        return None
    if product.bias is not None and layout.partial_axes():
        return None  # one rank alone adds the bias
    if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in _placements(product)):
        return None
    given = _given(args, {})
    if len(given) != (2 if product.bias is None else 3):
        return None
    gradients = (*product.strategy.gradients[:2], *([] if product.bias is None else [product.bias_gradient()]))
    places = [_place(at, x, gradient) for (at, x), gradient in zip(given, gradients, strict=True)]
    spec, cotangent, run = out._spec, interned(layout.cotangent()), product.local(coordinate_of(product.mesh))

    def call(args: Args, kwargs: Kwargs) -> Any:
        local = [
            args[i]._local if grad is None else tracked_local(args[i], grad, is_home) for i, grad, is_home in places
        ]
        return wrap_tracked(run(*local), spec, cotangent)

    return call


def _placements(product: MatmulExecutable) -> list[object]:
    layouts = (*product.strategy.inputs, *product.strategy.outputs)
    return [placement for layout in layouts for placement in layout.placements]


def view_shortcut(func: Any, args: Args, kwargs: Kwargs, out: Any, seen: Sequence[CallRecord]) -> Shortcut | None:
    """A view of one tensor: autograd must know of whom, and the local one is taken when it is asked for.

    Of a tensor without memory a view is no more than other sizes: torch makes it, and notes whose it is, without asking
    back for each.
    """
    cls = Wrapper.public
    run, _, op_args, op_kwargs, _ = seen[0]
    if len(seen) > 1 or not run.views or run.warm is None or out._spec is not run.out_specs[0]:
        return None
    if not out._is_view() or out._view_sync is not None:  # detached, or a copy that is shown
        return None
    given = _given(args, kwargs)
    if len(given) != 1 or given[0][0] != 0 or op_args[0] is not args[0]:
        return None
    take: Any = run.warm.operator
    rest, options = op_args[1:], op_kwargs
    if run.op.kernel is None and is_itself(
        func, args, kwargs, seen[0]
    ):  # torch finds its own functions faster than operators
        take, rest, options = func, args[1:], kwargs
    spec, recorded = out._spec, torch.is_grad_enabled() and out.requires_grad
    taken_later = sharing_version(take)

    def call(args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        if x._view_sync is not None:
            return func(*args, **kwargs)
        if recorded or _recording():  # it may be written to; see `dshard.dispatch.fast_path`
            before = _replays()
            _replay(True)
            try:
                with _without_dispatch():
                    out = func(*args, **kwargs).as_subclass(cls)
            finally:
                _replay(before)
        else:
            with _without_dispatch():
                out = func(*args, **kwargs).as_subclass(cls)
        out._spec = spec
        source = local_graph_of(x) if recorded else None
        if source is None:
            out._local = take(x._local, *rest, **options)
        else:  # which is what others go on from
            out._pending_local = lambda: taken_later(x._local, *rest, **options)
            out._local_graph = LocalGraph(out._version, make=lambda: take(source.at_home(), *rest, **options))
        return out

    return call


def _program(args: Args, kwargs: Kwargs, out: Any, seen: Sequence[CallRecord]) -> Shortcut | None:
    """Some operators, one after the other, of arguments and of what came out before."""
    given = _given(args, kwargs)
    names = {id(x): at for at, x in given}
    values: dict[int, int] = {}
    steps: list[tuple[Any, list[Any], list[tuple[int, Place | int]], Kwargs, bool]] = []
    for i, (run, _, op_args, op_kwargs, result) in enumerate(seen):
        operands: list[tuple[int, Any]] = [(k, x) for k, x in enumerate(op_args) if isinstance(x, Tensor)]
        if any(isinstance(x, Tensor) for x in op_kwargs.values()):
            return None
        slots: list[tuple[int, Place | int]] = []
        for (k, x), gradient in zip(operands, run.strategy.gradients, strict=True):
            if id(x) in names:
                slots.append((k, _place(names[id(x)], x, gradient)))
            elif id(x) in values and gradient == x._spec.layout.cotangent():
                slots.append((k, values[id(x)]))
            else:
                return None
        several = isinstance(result, tuple)
        values[id(result[0] if several else result)] = i
        template = [None if isinstance(x, Tensor) else x for x in op_args]
        steps.append((run.warm.operator, template, slots, op_kwargs, several))
    if values.get(id(out)) != len(seen) - 1:
        return None
    spec, cotangent = out._spec, interned(out._spec.layout.cotangent())

    def call(args: Args, kwargs: Kwargs) -> Any:
        found: list[Any] = []
        for operator, template, slots, op_kwargs, several in steps:
            local = template.copy()
            for k, source in slots:
                if isinstance(source, int):
                    local[k] = found[source]
                else:
                    at, grad, is_home = source
                    x = kwargs[at] if isinstance(at, str) else args[at]
                    local[k] = x._local if grad is None else tracked_local(x, grad, is_home)
            result = operator(*local, **op_kwargs)
            found.append(result[0] if several else result)
        return wrap_tracked(found[-1], spec, cotangent)

    return call


def is_itself(func: Any, args: Args, kwargs: Kwargs, seen: CallRecord) -> bool:
    """Whether `func` on the local parts is the operator that was seen, with just the same further arguments."""
    cls = Wrapper.public
    _, op, op_args, op_kwargs, _ = seen
    local = [arg._local if type(arg) is cls else arg for arg in args]
    local_kwargs = {name: arg._local if type(arg) is cls else arg for name, arg in kwargs.items()}
    try:
        with torch.no_grad(), _Watch() as watch:
            func(*local, **local_kwargs)
    except (RuntimeError, IndexError):  # arguments that fit the whole tensor, not this rank's part of it
        return False
    if len(watch.calls) != 1:
        return False
    found, found_args, found_kwargs = watch.calls[0]
    wanted = [arg._local if isinstance(arg, Wrapper) else arg for arg in op_args]
    return found is op and _same([*found_args, found_kwargs], [*wanted, op_kwargs])


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y if isinstance(x, Tensor) else type(x) is type(y) and x == y for x, y in zip(a, b, strict=True)
    )


class _Watch(TorchDispatchMode):
    """The operators that run within the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[OpOverload, Args, Kwargs]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
