"""Warm calls that autograd records on the local tensors, where nothing has to be sent for them.

A function that runs only operators on local tensors is called on the recorded local tensors (`LocalGraph` in
`autograd/crossing.py`), so that torch records and differentiates what one device would. The strategy has the layout of
each operand's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from dshard.autograd.crossing import LocalGraph, local_graph_of, tracked_local, wrap_tracked
from dshard.comm import LocalTensor
from dshard.comm.rank_checks import enabled as comparing
from dshard.core.call import views_first, writes_first
from dshard.core.executable import Executable
from dshard.core.moves import coordinate_of, sharing_version
from dshard.core.observe import CallRecord, Decision, OperatorMode
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper
from dshard.dispatch.registry import known
from dshard.layout import Layout, interned
from dshard.ops.matmul.matmul_executable import MatmulExecutable
from dshard.placements import Partial

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Shortcut: TypeAlias = Callable[[Args, Kwargs], Any]
Place: TypeAlias = tuple[Any, Spec | None, bool]
"""The position or name of an operand, the spec of its gradient (None: no gradient), whether that has its own layout."""
_ATEN = torch.ops.aten
_is_replaying, _set_replay = torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled
_is_recording = torch.is_grad_enabled
_without_dispatch = torch._C._DisableTorchDispatch
_DETACH = _ATEN.detach.default


def tracked_shortcut(
    func: Any, args: Args, kwargs: Kwargs, out: Any, records: Sequence[CallRecord], *, by_kind: bool
) -> Shortcut | None:
    """The shortcut for a differentiable `func` on operands of these specs, or None where the log allows none.

    With `by_kind` the cache key lacks the values of numbers: then the shortcut can only call `func` itself.
    """
    if (
        not all(isinstance(run, Executable | MatmulExecutable) for run, *_ in records)
        or not out.requires_grad
        or is_simulated(out)
    ):
        return None
    records = [each for each in records if each[1] is not _DETACH]  # torch detaches saved tensors and views
    if not records or _is_uneven(records, out):
        return None
    op_operands = [id(x) for x in (*records[0][2], *records[0][3].values()) if isinstance(x, Tensor)]
    in_order = op_operands == [id(x) for _, x in _distributed_operands(args, kwargs)]
    shortcut: Any = None
    if isinstance(records[0][0], MatmulExecutable):
        shortcut = None if len(records) > 1 or kwargs or not in_order else _matmul_shortcut(records[0][0], args, out)
    elif any(isinstance(run, MatmulExecutable) or not _is_local(run, op) for run, op, *_ in records):
        return None
    elif out._is_view():
        return None if by_kind else view_shortcut(func, args, kwargs, out, records)
    elif (
        len(records) == 1
        and in_order
        and records[0].executable.operator is records[0].op
        and is_itself(func, args, kwargs, records[0])
    ):
        shortcut = _same_function_shortcut(func, args, kwargs, out, records[0][0])
    elif not by_kind:
        shortcut = _program_shortcut(args, kwargs, out, records)
    if shortcut is not None:
        shortcut.decisions = [_decision(each.executable) for each in reversed(records)]  # for observers, outermost last
    return shortcut  # type: ignore[no-any-return]


def is_simulated(x: Wrapper) -> bool:
    """Whether `x` is a tensor of simulated ranks."""
    return type(x._local) is LocalTensor


def _is_uneven(records: Sequence[CallRecord], out: Wrapper) -> bool:
    """Whether some rank has an empty local tensor of a tensor with elements.

    Some of torch's formulas for gradients differ where there are no elements, and need other operands: ranks that ran
    them on their local tensors would not meet in a backward pass through a gradient.
    """
    tensors = [x for _, _, args, kwargs, _ in records for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    specs = {x._spec for x in (*tensors, out) if isinstance(x, Wrapper)}
    return any(spec.layout.leaves_empty(spec.shape) for spec in specs)


def _decision(executable: Executable | MatmulExecutable) -> Decision:
    return executable.decision if isinstance(executable, Executable) else executable.decision()


def _is_local(run: Executable, op: OpOverload) -> bool:
    """Whether an operator and its gradient run on the local tensors alone: of partial reductions only sums do."""
    if run.operator is None or run.moves or run.compared or not run.differentiable or writes_first(op):
        return False
    layouts = [layout for plan in run.plans for layout in (plan.src, plan.dst)]
    layouts += [spec.layout for spec in run.specs]
    return not any(isinstance(p, Partial) and p.reduce_op != "sum" for layout in layouts for p in layout.placements)


def _place(at: int | str, x: Wrapper, gradient: Layout) -> Place:
    """The place of operand `x` of a shortcut, whose gradient has layout `gradient`."""
    return at, x._spec.with_layout(gradient) if x.requires_grad else None, gradient == x._spec.layout.cotangent()


def _distributed_operands(args: Args, kwargs: Kwargs) -> list[tuple[int | str, Any]]:
    """The distributed arguments, each with its position or name."""
    cls = Wrapper.public
    everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [(at, x) for at, x in everything if type(x) is cls]


def _same_function_shortcut(func: Any, args: Args, kwargs: Kwargs, out: Any, run: Executable) -> Shortcut:
    """The shortcut that calls the function itself on the recorded local tensors."""
    spec, cotangent = out._spec, interned(out._spec.layout.cotangent())
    operands = zip(_distributed_operands(args, kwargs), run.gradients, strict=True)
    operand_places = [_place(at, x, gradient) for (at, x), gradient in operands]
    places = [place for place in operand_places if isinstance(place[0], int)]
    named = [place for place in operand_places if isinstance(place[0], str)]

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


def _matmul_shortcut(executable: MatmulExecutable, args: Args, out: Wrapper) -> Shortcut | None:
    """The shortcut of a matmul, or None where it redistributes or runs in panels."""
    plans = (*executable.plans, executable.end, *([] if executable.bias_plan is None else [executable.bias_plan]))
    layout = out._spec.layout
    if comparing() or executable.cut is not None or executable.streamed is not None or any(p.steps for p in plans):
        return None
    if executable.bias is not None and layout.partial_axes():
        return None  # one rank alone adds the bias
    if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in _placements(executable)):
        return None
    operands = _distributed_operands(args, {})
    if len(operands) != (2 if executable.bias is None else 3):
        return None
    gradients = (*executable.strategy.gradients[:2], *([] if executable.bias is None else [executable.bias_gradient()]))
    places = [_place(at, x, gradient) for (at, x), gradient in zip(operands, gradients, strict=True)]
    spec, cotangent, run = out._spec, interned(layout.cotangent()), executable.local(coordinate_of(executable.mesh))

    def call(args: Args, kwargs: Kwargs) -> Any:
        local = [
            args[i]._local if grad is None else tracked_local(args[i], grad, is_home) for i, grad, is_home in places
        ]
        return wrap_tracked(run(*local), spec, cotangent)

    return call


def _placements(executable: MatmulExecutable) -> list[object]:
    layouts = (*executable.strategy.inputs, *executable.strategy.outputs)
    return [placement for layout in layouts for placement in layout.placements]


def view_shortcut(func: Any, args: Args, kwargs: Kwargs, out: Any, records: Sequence[CallRecord]) -> Shortcut | None:
    """The shortcut of a view of one tensor, or None where the log allows none.

    torch itself makes the view of the distributed tensor, without dispatch, so that autograd knows its base. The local
    view is made when it is first used.
    """
    cls = Wrapper.public
    run, op, op_args, op_kwargs, _ = records[0]
    if len(records) > 1 or not views_first(op) or run.operator is None or run.moves or out._spec is not run.specs[0]:
        return None
    if not out._is_view() or out._view_sync is not None:  # detached, or a view of a copy
        return None
    operands = _distributed_operands(args, kwargs)
    if len(operands) != 1 or operands[0][0] != 0 or op_args[0] is not args[0]:
        return None
    take_view: Any = run.operator
    rest, options = op_args[1:], op_kwargs
    if is_itself(func, args, kwargs, records[0]):
        # torch finds its own functions faster than operators
        take_view, rest, options = func, args[1:], kwargs
    spec, recorded = out._spec, torch.is_grad_enabled() and out.requires_grad
    take_view_below_autograd = sharing_version(take_view)

    def call(args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        if x._view_sync is not None:
            return func(*args, **kwargs)
        if recorded or _is_recording():  # it may be written to; see `dshard.dispatch.fast_path`
            before = _is_replaying()
            _set_replay(True)
            try:
                with _without_dispatch():
                    out = func(*args, **kwargs).as_subclass(cls)
            finally:
                _set_replay(before)
        else:
            with _without_dispatch():
                out = func(*args, **kwargs).as_subclass(cls)
        out._spec = spec
        source = local_graph_of(x) if recorded else None
        if source is None:
            out._local = take_view(x._local, *rest, **options)
        else:  # later operators continue from the local graph
            out._pending_local = lambda: take_view_below_autograd(x._local, *rest, **options)
            out._local_graph = LocalGraph(out._version, make=lambda: take_view(source.at_home(), *rest, **options))
        return out

    return call


def _program_shortcut(args: Args, kwargs: Kwargs, out: Wrapper, records: Sequence[CallRecord]) -> Shortcut | None:
    """The shortcut of several operators in turn, on arguments and results of earlier ones, or None."""
    operands_of_call = _distributed_operands(args, kwargs)
    names = {id(x): where for where, x in operands_of_call}
    values: dict[int, int] = {}
    steps: list[tuple[Any, list[Any], list[tuple[int, Place | int]], Kwargs, bool]] = []
    for i, (run, _, op_args, op_kwargs, result) in enumerate(records):
        operands: list[tuple[int, Any]] = [(k, x) for k, x in enumerate(op_args) if isinstance(x, Tensor)]
        if any(isinstance(x, Tensor) for x in op_kwargs.values()):
            return None
        slots: list[tuple[int, Place | int]] = []
        for (k, x), gradient in zip(operands, run.gradients, strict=True):
            if id(x) in names:
                slots.append((k, _place(names[id(x)], x, gradient)))
            elif id(x) in values and gradient == x._spec.layout.cotangent():
                slots.append((k, values[id(x)]))
            else:
                return None
        several = isinstance(result, tuple)
        values[id(result[0] if several else result)] = i
        template = [None if isinstance(x, Tensor) else x for x in op_args]
        steps.append((run.operator, template, slots, op_kwargs, several))
    if values.get(id(out)) != len(records) - 1:
        return None
    spec, cotangent = out._spec, interned(out._spec.layout.cotangent())

    def call(args: Args, kwargs: Kwargs) -> Any:
        results: list[Any] = []
        for operator, template, slots, op_kwargs, several in steps:
            local = template.copy()
            for k, source in slots:
                if isinstance(source, int):
                    local[k] = results[source]
                else:
                    where, grad, is_home = source
                    x = kwargs[where] if isinstance(where, str) else args[where]
                    local[k] = x._local if grad is None else tracked_local(x, grad, is_home)
            result = operator(*local, **op_kwargs)
            results.append(result[0] if several else result)
        return wrap_tracked(results[-1], spec, cotangent)

    return call


def is_itself(func: Any, args: Args, kwargs: Kwargs, records: CallRecord) -> bool:
    """Whether `func` on the local tensors runs just the logged operator, not a kernel, with equal further arguments."""
    cls = Wrapper.public
    _, op, op_args, op_kwargs, _ = records
    rule = known(op).op
    if rule is None or rule.kernel is not None:
        return False
    local = [arg._local if type(arg) is cls else arg for arg in args]
    local_kwargs = {name: arg._local if type(arg) is cls else arg for name, arg in kwargs.items()}
    calls: list[tuple[OpOverload, Args, Kwargs]] = []

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    try:
        with torch.no_grad(), OperatorMode(run):
            func(*local, **local_kwargs)
    except (RuntimeError, IndexError):  # arguments that fit the global tensor, not this rank's local one
        return False
    if len(calls) != 1:
        return False
    local_op, local_op_args, local_op_kwargs = calls[0]
    expected = [arg._local if isinstance(arg, Wrapper) else arg for arg in op_args]
    return local_op is op and _are_equal([*local_op_args, local_op_kwargs], [*expected, op_kwargs])


def _are_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y if isinstance(x, Tensor) else type(x) is type(y) and x == y for x, y in zip(a, b, strict=True)
    )
