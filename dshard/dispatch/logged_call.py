"""Predicates on the log of a first call, which decide what later calls may run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.core.call import writes_first
from dshard.core.executable import Executable
from dshard.core.observe import CallRecord, OperatorMode
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.wrapper import Wrapper
from dshard.dispatch.registry import known
from dshard.ops.composite import run_recorded
from dshard.placements import Partial
from dshard.torch_private import OpOverload

Shortcut: TypeAlias = Callable[[Args, Kwargs], Any]
"""The function that a warm call runs on its arguments."""


def distributed_operands(args: Args, kwargs: Kwargs) -> list[tuple[int | str, Any]]:
    """The distributed arguments, each with its position or name."""
    cls = Wrapper.public
    everything: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
    return [(at, x) for at, x in everything if type(x) is cls]


def has_operands(record: CallRecord, args: Args, kwargs: Kwargs) -> bool:
    """Whether the distributed arguments of the call are the operands of the logged operator, in the same order."""
    op_operands = [x for x in record.args if isinstance(x, Tensor)]
    return [*map(id, op_operands)] == [id(x) for _, x in distributed_operands(args, kwargs)]


def is_itself(func: Function, args: Args, kwargs: Kwargs, record: CallRecord) -> bool:
    """Whether `func` on the local tensors runs only the logged operator, without a kernel and with equal arguments."""
    cls = Wrapper.public
    _, op, op_args, op_kwargs, *_ = record
    rule = None if op is None else known(op).op
    if rule is None or rule.kernel is not None:
        return False
    local = [arg._local_tensor if type(arg) is cls else arg for arg in args]
    local_kwargs = {name: arg._local_tensor if type(arg) is cls else arg for name, arg in kwargs.items()}
    calls: list[tuple[OpOverload, Args, Kwargs]] = []

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        calls.append((func, args, kwargs))
        return record.computed.result_of(func, args, kwargs)

    try:
        with torch.no_grad(), OperatorMode(run):
            func(*local, **local_kwargs)
    except (RuntimeError, IndexError):  # arguments that fit the global tensor, not this rank's local one
        return False
    if len(calls) != 1:
        return False
    local_op, local_op_args, local_op_kwargs = calls[0]
    expected = [arg._local_tensor if isinstance(arg, Wrapper) else arg for arg in op_args]
    return local_op is op and _are_equal([*local_op_args, local_op_kwargs], [*expected, op_kwargs])


def _are_equal(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(
        x is y if isinstance(x, Tensor) else type(x) is type(y) and x == y for x, y in zip(a, b, strict=True)
    )


def is_first(out: object, record: CallRecord) -> bool:
    """Whether `out` is the first of several results of the logged operator."""
    return isinstance(record.result, tuple) and out is record.result[0]


def is_uneven(records: Sequence[CallRecord], out: Wrapper) -> bool:
    """Whether some rank has an empty local tensor of a tensor with elements.

    Some of torch's formulas for gradients differ for tensors without elements, and need other operands: ranks that ran
    them on local tensors would run different collectives in a backward pass through a gradient.
    """
    tensors = [x for each in records for x in (*each.args, *each.kwargs.values()) if isinstance(x, Tensor)]
    specs = {x._spec for x in (*tensors, out) if isinstance(x, Wrapper)}
    return any(spec.layout.leaves_empty(spec.shape) for spec in specs)


def sends(record: CallRecord) -> bool:
    """Whether a call communicates, or is no operator on the local tensors."""
    executable: Executable = record.executable
    return executable.operator is None or bool(executable.moves) or executable.end is not None or executable.compared


def _is_differentiable(record: CallRecord) -> bool:
    """Whether torch's gradient of the local operator is the gradient of the call, which it is not with a kernel."""
    executable: Executable = record.executable
    if executable.differentiable or record.op is None:
        return executable.differentiable
    return all(executable.local_op(at) is record.op for at in executable.mesh.coordinates())


def is_local(record: CallRecord) -> bool:
    """Whether a call and its gradient run on the local tensors alone; of partial tensors only sums do."""
    executable: Executable = record.executable
    if sends(record) or not _is_differentiable(record) or (record.op is not None and writes_first(record.op)):
        return False
    layouts = [layout for plan in executable.plans for layout in (plan.src, plan.dst)]
    layouts += [spec.layout for spec in executable.specs]
    return not any(isinstance(p, Partial) and p.reduce_op != "sum" for layout in layouts for p in layout.placements)


def is_local_composite(record: CallRecord) -> bool:
    """Whether a call is a composite operator that autograd recorded on the local tensors, and that sends nothing."""
    executable, run = record.executable, getattr(record.call, "func", None)
    if run is not run_recorded or type(executable) is not Executable or executable.compared:
        return False
    return not any(plan.steps for plan in (*executable.plans, *executable.decision.ends))
