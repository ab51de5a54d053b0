"""Shortcuts of warm calls: functions that run what the log of a first call shows, straight on the local tensors.

Where nothing has to be sent and autograd records the call, it records it on the local tensors (`LocalGraph` in
`autograd/crossing.py`), so that torch differentiates what one device would. The executable has the layout of each
operand's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dshard.autograd.crossing import tracked_local, wrap_tracked
from dshard.comm import LocalTensor, own_coordinate
from dshard.core.call import views_first
from dshard.core.executable import Executable
from dshard.core.moves import tensors_in
from dshard.core.observe import CallRecord
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper
from dshard.dispatch.logged_call import (
    Shortcut,
    distributed_operands,
    has_operands,
    is_first,
    is_itself,
    is_local,
    is_local_composite,
    is_uneven,
    sends,
)
from dshard.dispatch.registry import known
from dshard.dispatch.view_shortcuts import view_shortcut
from dshard.layout import Layout, interned
from dshard.ops.mean_loss import mean_cross_entropy
from dshard.torch_private import make_wrapper_subclass as make

_ATEN = torch.ops.aten
_STRIDED = torch.strided
_DETACH = _ATEN.detach.default
BY_KIND: set[object] = set()
"""Functions that run one operator whatever the values of their numbers: only the types are part of the key."""


_BY_ROWS = frozenset({torch.rms_norm, torch.nn.functional.rms_norm})
"""Functions of several operators that, where nothing is sent, are the same function of the local tensors."""


OWN: dict[object, Any] = {torch.nn.functional.cross_entropy: mean_cross_entropy}
"""Functions that may send something and have a form of their own for warm calls, made of a call and its result."""


class Operand(NamedTuple):
    """A tensor operand of a step: its place among the step's arguments, and its place or name among those of the call.

    `grad` is the spec of its gradient, None where it gets none; `is_home` says whether that has the tensor's own
    layout. `result` is the number of the step whose result it is, where it is no argument of the call.
    """

    to: Any
    source: Any
    grad: Spec | None = None
    is_home: bool = True
    result: int | None = None


class Step(NamedTuple):
    """A function on local tensors, its arguments without the tensors, and its operands.

    The `template` is None where the arguments are those of the call itself. `first` says whether the result is the
    first of several.
    """

    run: Function
    template: list[object] | None
    kwargs: Kwargs
    operands: Sequence[Operand]
    first: bool

    def positional(self) -> list[tuple[int, int, Spec | None, bool]]:
        """The operands that the call has by position."""
        return [(x.to, x.source, x.grad, x.is_home) for x in self.operands if isinstance(x.source, int)]

    def others(self) -> list[Operand]:
        """The operands that the call has by name, or that are results of earlier steps."""
        return [x for x in self.operands if not isinstance(x.source, int)]


def shortcut_of(
    func: Function, args: Args, kwargs: Kwargs, out: Wrapper, records: Sequence[CallRecord], recorded: bool
) -> Shortcut | None:
    """The shortcut for `func` on operands of these specs, or None where the log of its first call allows none.

    `recorded` says whether autograd records an operand. Where the cache key lacks the values of numbers the shortcut
    can only call `func` itself.
    """
    if recorded and func in OWN and not any(getattr(each.executable, "compared", False) for each in records):
        own: Shortcut | None = OWN[func](func, args, kwargs, out)
        if own is not None:
            return own
    if not all(isinstance(each.executable, Executable) and each.executable.specs for each in records):
        return None  # some operators run as others, or have specs that only their results tell
    if type(out._local_tensor) is LocalTensor:
        return None
    if recorded:
        records = [each for each in records if each.op is not _DETACH]  # torch detaches saved tensors and views
    if not records or (recorded and not out.requires_grad):
        return None
    make_shortcut = _recorded_shortcut if recorded else _unrecorded_shortcut
    shortcut: Any = make_shortcut(func, args, kwargs, out, records)
    if shortcut is not None:
        shortcut.decisions = [each.executable.decision for each in reversed(records)]  # for observers, outermost last
    return shortcut  # type: ignore[no-any-return]


def is_one_operator(args: Args, kwargs: Kwargs, out: Wrapper, records: Sequence[CallRecord]) -> bool:
    """Whether the call is, to autograd, one operator on its own operands, whose result is no view."""
    records = [each for each in records if each.op is not _DETACH]
    if len(records) != 1 or records[0].op is None or out is not records[0].result or out._is_view():
        return False
    return has_operands(records[0], args, kwargs)


def _unrecorded_shortcut(
    func: Function, args: Args, kwargs: Kwargs, out: Wrapper, records: Sequence[CallRecord]
) -> Shortcut | None:
    record = records[0]
    executable = record.executable
    if len(records) > 1 or not (out is record.result or is_first(out, record)) or executable.compared:
        return None
    if record.op is not None and views_first(record.op):
        return None if func in BY_KIND else view_shortcut(func, args, kwargs, out, records)
    if executable.operator is None:
        return None if func in BY_KIND else _run_again(args, kwargs, record, out)
    is_whole = not executable.moves and executable.end is None
    steps = _itself(func, args, kwargs, record) if is_whole else None
    if steps is not None and not known(record.op).values:
        BY_KIND.add(func)
    if steps is None and func not in BY_KIND:
        steps = _steps(args, kwargs, records, out)
    return None if steps is None else _unrecorded(steps[0], out._spec, None if is_whole else executable.run)


def _recorded_shortcut(
    func: Function, args: Args, kwargs: Kwargs, out: Wrapper, records: Sequence[CallRecord]
) -> Shortcut | None:
    is_alone = len(records) == 1
    if func in _BY_ROWS and not is_uneven(records, out) and not any(map(sends, records)):
        operands = _operands_of(args, kwargs, records)
        return None if operands is None else _recorded([Step(func, None, {}, operands, first=False)], out._spec)
    if is_uneven(records, out) or not all(map(is_local, records)):
        if not is_alone or func in BY_KIND:
            return None
        return _composite(args, kwargs, records[0], out) or _run_again(args, kwargs, records[0], out)
    if out._is_view():
        return None if func in BY_KIND else view_shortcut(func, args, kwargs, out, records)
    steps = _itself(func, args, kwargs, records[0]) if is_alone else None
    if steps is None and func not in BY_KIND:
        steps = _steps(args, kwargs, records, out)
    return None if steps is None else _recorded(steps, out._spec)


# -- steps


def _operand(to: int | str, source: int | str, x: Wrapper, gradient: Layout) -> Operand:
    """Operand `x`, whose gradient has layout `gradient`."""
    grad = x._spec.with_layout(gradient) if x.requires_grad else None
    return Operand(to, source, grad, gradient == x._spec.layout.cotangent())


def _itself(func: Function, args: Args, kwargs: Kwargs, record: CallRecord) -> list[Step] | None:
    """The function itself as one step, if it runs just the logged operator on operands in the same order."""
    if not has_operands(record, args, kwargs) or not is_itself(func, args, kwargs, record):
        return None
    pairs = zip(distributed_operands(args, kwargs), record.executable.gradients, strict=True)
    return [Step(func, None, {}, [_operand(at, at, x, gradient) for (at, x), gradient in pairs], first=False)]


def _operands_of(args: Args, kwargs: Kwargs, records: Sequence[CallRecord]) -> list[Operand] | None:
    """The distributed arguments as operands, each with the one layout in which all logged operators give gradients.

    None where one of them, or a result in between, is given gradients in another layout than its own.
    """
    operands = list(distributed_operands(args, kwargs))
    gradients: dict[int, set[Layout]] = {id(x): set() for _, x in operands}
    for record in records:
        pairs: Any = zip(tensors_in(record.args), record.executable.gradients, strict=True)
        for x, gradient in pairs:
            gradients.setdefault(id(x), {x._spec.layout.cotangent()}).add(gradient)
    if any(len(layouts) != 1 for layouts in gradients.values()):
        return None
    return [_operand(at, at, x, *gradients[id(x)]) for at, x in operands]


def _steps(args: Args, kwargs: Kwargs, records: Sequence[CallRecord], out: Wrapper) -> list[Step] | None:
    """The logged operators as steps on arguments of the call and results of earlier ones, or None."""
    places = {id(x): place for place, x in distributed_operands(args, kwargs)}
    values: dict[int, int] = {}
    steps: list[Step] = []
    for i, record in enumerate(records):
        tensors: list[tuple[int, Any]] = [(k, x) for k, x in enumerate(record.args) if isinstance(x, Tensor)]
        if any(isinstance(x, Tensor) for x in record.kwargs.values()):
            return None
        operands: list[Operand] = []
        for (k, x), gradient in zip(tensors, record.executable.gradients, strict=True):
            if id(x) in places:
                operands.append(_operand(k, places[id(x)], x, gradient))
            elif id(x) in values and gradient == x._spec.layout.cotangent():
                operands.append(Operand(k, None, result=values[id(x)]))
            else:
                return None
        first = isinstance(record.result, tuple)
        values[id(record.result[0] if first else record.result)] = i
        template = [None if isinstance(x, Tensor) else x for x in record.args]
        steps.append(Step(record.executable.operator, template, record.kwargs, operands, first))
    return steps if values.get(id(out)) == len(records) - 1 else None


def _composite(args: Args, kwargs: Kwargs, record: CallRecord, out: Wrapper) -> Shortcut | None:
    """The local operator of a composite operator that sends nothing, as one step on arguments of the call, or None."""
    executable, places = record.executable, {id(x): place for place, x in distributed_operands(args, kwargs)}
    if not is_local_composite(record) or out is not record.result or is_uneven([record], out):
        return None
    if not all(id(x) in places for x in record.args):
        return None
    pairs: Any = zip(record.args, executable.gradients, strict=True)
    operands = [_operand(k, places[id(x)], x, gradient) for k, (x, gradient) in enumerate(pairs)]
    operator = executable.local_op(own_coordinate(executable.mesh))
    shortcut: Any = _recorded([Step(operator, [None] * len(operands), {}, operands, first=False)], out._spec)
    shortcut.repeats = True  # the first call was recorded on the local tensors, too
    return shortcut  # type: ignore[no-any-return]


# -- the functions that warm calls run


def _unrecorded(step: Step, spec: Spec, redistributing: Function | None) -> Shortcut:
    """Run a step on the local tensors; or, where something is redistributed, its executable."""
    cls, shape, stride, dtype, device = Wrapper.public, spec.shape, spec.stride, spec.dtype, spec.device
    operator, template, op_kwargs, _, first = step
    positional = [(k, i) for k, i, _, _ in step.positional()]
    named = [(x.to, x.source) for x in step.others()]

    def call(args: Args, kwargs: Kwargs) -> object:
        local: Any = list(args) if template is None else template.copy()
        for k, i in positional:
            local[k] = args[i]._local_tensor
        local_kwargs = kwargs if template is None else op_kwargs
        if named:
            local_kwargs = local_kwargs.copy()
            for k, name in named:
                (local_kwargs if template is None else local)[k] = kwargs[name]._local_tensor
        result = operator(*local, **local_kwargs) if redistributing is None else redistributing(local, local_kwargs)
        out = make(cls, shape, stride, None, None, dtype, _STRIDED, device)
        out._local_tensor = result[0] if first else result
        out._spec = spec
        return out

    return call


def _recorded(steps: Sequence[Step], spec: Spec) -> Shortcut:
    """Run steps in turn on the recorded local tensors."""
    cotangent = interned(spec.layout.cotangent())
    prepared = [(step, step.positional(), step.others()) for step in steps]
    if len(steps) == 1 and steps[0].template is None and not prepared[0][2] and not steps[0].first:
        function, operands = steps[0].run, prepared[0][1]

        def call_itself(args: Args, kwargs: Kwargs) -> object:
            local = list(args)
            for k, i, grad, is_home in operands:
                x = args[i]
                local[k] = x._local_tensor if grad is None else tracked_local(x, grad, is_home)
            return wrap_tracked(function(*local, **kwargs), spec, cotangent)

        return call_itself

    def call(args: Args, kwargs: Kwargs) -> object:
        results: list[Tensor] = []
        for (operator, template, options, _, first), positional, others in prepared:
            if template is None:
                local, options = list(args), kwargs
            else:
                local = template.copy()
            for k, i, grad, is_home in positional:
                x = args[i]
                local[k] = x._local_tensor if grad is None else tracked_local(x, grad, is_home)
            if others:
                options = options.copy()
                for k, name, grad, is_home, number in others:
                    if number is not None:
                        local[k] = results[number]
                    else:
                        x = kwargs[name]
                        x = x._local_tensor if grad is None else tracked_local(x, grad, is_home)
                        (local if isinstance(k, int) else options)[k] = x
            result = operator(*local, **options)
            results.append(result[0] if first else result)
        return wrap_tracked(results[-1], spec, cotangent)

    return call


def _run_again(args: Args, kwargs: Kwargs, record: CallRecord, out: Wrapper) -> Shortcut | None:
    """Run the matmul or composite operator again that the call is; None where it is none on the call's arguments."""
    run, places = record.call, {id(x): place for place, x in distributed_operands(args, kwargs)}
    sources = [places.get(id(x)) for x in record.args]
    if record.op is not None or run is None or out is not record.result or None in sources:
        return None
    if record.executable.compared:
        return None

    def call(args: Args, kwargs: Kwargs) -> object:
        return run(*[kwargs[at] if isinstance(at, str) else args[at] for at in sources])  # type: ignore[index]

    again: Any = call
    again.repeats = True
    return again  # type: ignore[no-any-return]
