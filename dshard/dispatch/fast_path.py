"""Warm calls that go from the function that was called straight to the local one.

Most of torch's functions come down through autograd and the dispatcher as just one operator, or are one product. Where
nobody listens, that way adds nothing but time. So the first call of a function on operands of these specs is watched:
if one operator was all that ran, later calls run it on the local parts at once. If the function itself, called on the
local parts, is that operator again, it is what they call: torch finds its own functions faster than operators. What is
recorded is in `dshard.dispatch.recorded_path`.

All of it is for speed alone: with DSHARD_FAST=0 in the environment every call takes the dispatcher's way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from dshard.comm import publish_failure
from dshard.core.call_log import WATCHED, CallRecord
from dshard.core.context import planning_context
from dshard.core.observe import OBSERVERS, observed
from dshard.core.transforms import is_transforming
from dshard.core.wrapper import Wrapper
from dshard.dispatch.operator import OperatorExecutable
from dshard.dispatch.recorded_path import (
    Args,
    Kwargs,
    Shortcut,
    is_itself,
    is_simulated,
    tracked_shortcut,
    view_shortcut,
)
from dshard.ops.matmul.matmul_executable import MatmulExecutable
from dshard.ops.matmul.options import ASKING, has_no_options

Uncached: TypeAlias = Callable[[Any, Args, Kwargs], Any]

_make, _STRIDED = Tensor._make_wrapper_subclass, torch.strided  # given by position: names take it longer
_is_compiling = torch.compiler.is_dynamo_compiling  # what traces operators is a mode
_modes, _autocast = torch._C._len_torch_dispatch_stack, torch._C._is_any_autocast_enabled
_recording, _door_closed = torch.is_grad_enabled, torch._C.DisableTorchFunctionSubclass
_NUMBERS = frozenset({int, float, bool, complex})
_INT = frozenset({int})
_VALUES = frozenset({type(None), str, torch.dtype})
_replays, _replay = torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_HOOKS: Any = Tensor._backward_hooks
_NEVER: set[Any] = {Tensor.backward, torch.autograd.backward, torch.autograd.grad, _HOOKS.__set__}
"""Functions that run no operator or write to their operand: autograd has to see those. And what runs many of others.

Autograd sets hooks of a view that was written to while it holds a lock, and must not be asked anything about the view.
"""
_WRITES: set[Any] = set()
"""Those of them that are one operator that writes to its operand, and so make no view."""
FAST = os.environ.get("DSHARD_FAST", "1") != "0"
_BY_KIND: set[Any] = set()
"""Functions that run one operator whatever the values of their numbers are, which need not be looked up."""


def call(func: Any, args: Args, kwargs: Kwargs, through: Uncached) -> Any:
    """`func` on distributed tensors of class `cls`: by a shortcut if there is one, else by `through`."""
    if _is_compiling():
        return through(func, args, kwargs)
    try:
        if func in _NEVER or _is_special():
            if func in _WRITES:
                return through(func, args, kwargs)
            return _views_replayed(through, func, args, kwargs)
        with _door_closed():
            key = _key(func, args, kwargs)
            if key is not None:
                shortcuts = planning_context().shortcuts
                found = shortcuts.get(key)
                if found:
                    shortcuts.hits += 1
                    return _watched(found, args, kwargs) if OBSERVERS else found(args, kwargs)
        if key is None or found is not None:
            return _views_replayed(through, func, args, kwargs)
        return _views_replayed(_specialise, func, args, kwargs, through, key)
    except Exception as error:
        publish_failure(error, _ranks(args))
        raise


def _ranks(args: Args) -> tuple[int, ...]:
    """The ranks of the mesh of the first distributed operand."""
    flat = (x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,)))
    return next((x._spec.layout.mesh.ranks for x in flat if isinstance(x, Wrapper)), ())


def _views_replayed(run: Callable[..., Any], *given: Any) -> Any:
    """`run` with views that autograd makes anew by the function that made them.

    Else it would take them by the strides of the whole tensor, when a write through one is recorded, and gather for it.
    """
    before = _replays()
    _replay(True)
    try:
        return run(*given)
    finally:
        _replay(before)


def _watched(found: Shortcut, args: Args, kwargs: Kwargs) -> Any:
    """The same for somebody who wants to see the operators."""
    run: Callable[..., Any] = found
    given: tuple[Any, ...] = (args, kwargs)
    for decision in getattr(found, "decisions", ()):
        run, given = partial(observed, decision(), run), (given,)
    return run(*given)


def _key(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, ...] | None:
    """What tells calls apart; None where something among the arguments is not looked up.

    An operand that is recorded is followed by whether it is a leaf. Nor is looked up what is recorded while somebody
    wants to see the tensors that are saved, who is shown distributed ones; nor what is not, while somebody wants to see
    the operators.
    """
    cls = Wrapper.public
    recording, by_kind, recorded = _recording(), func in _BY_KIND, False
    parts: list[Any] = [func]
    for arg in args:
        kind = type(arg)
        if kind is cls:
            parts.append(arg._spec)
            if recording and arg.requires_grad:
                recorded = True
                parts.append(arg.is_leaf)
        elif kind in _NUMBERS:
            parts.append(kind if by_kind else (kind, arg))
        elif kind in _VALUES:
            parts.append(arg)
        elif (kind is tuple or kind is list) and set(map(type, arg)) <= _INT:
            parts.append(tuple(arg))
        else:
            return None
    for name, arg in kwargs.items():
        kind = type(arg)
        if kind is cls:
            parts += (name, arg._spec)
            if recording and arg.requires_grad:
                recorded = True
                parts.append(arg.is_leaf)
        elif kind in _NUMBERS or kind in _VALUES:
            parts += (name, kind, arg)
        else:
            return None
    if _saved_tensor_hooks(True) is not None if recorded else OBSERVERS:
        return None
    return tuple(parts)


def _is_special() -> bool:
    """Whether the fast path is off, operators are intercepted, cast or transformed, or products have options."""
    if not FAST or _modes() or _autocast() or is_transforming() or (ASKING and not has_no_options()):
        return True
    return forward_ad._current_level >= 0


def _specialise(func: Any, args: Args, kwargs: Kwargs, through: Uncached, key: Any) -> Any:
    cls = Wrapper.public
    seen: list[CallRecord] = []
    with WATCHED.entered(seen):
        out = through(func, args, kwargs)
    if not any(isinstance(run, OperatorExecutable | MatmulExecutable) for run, *_ in seen) or getattr(
        seen[0][0], "inplace", False
    ):
        _NEVER.add(func)
        if len(seen) == 1 and _is_method_in_place(func):
            _WRITES.add(func)
    elif type(out) is not cls:
        planning_context().shortcuts.add(key, False)
    elif _recording() and any(type(arg) is cls and arg.requires_grad for arg in (*args, *kwargs.values())):
        with _door_closed():
            found = tracked_shortcut(func, args, kwargs, out, seen, by_kind=func in _BY_KIND)
            planning_context().shortcuts.add(key, found or False)
            if found is not None:  # the graph is the same, whether a rank has met such a call before or not
                del seen[:], out
                return found(args, kwargs)
    else:
        planning_context().shortcuts.add(key, _shortcut(func, args, kwargs, out, seen) or False)
    return out


def _is_method_in_place(func: Any) -> bool:
    """Whether `func` is called like one operator in place; `x[i] = y` may be one, or write through views."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _shortcut(func: Any, args: Args, kwargs: Kwargs, out: Any, seen: Sequence[CallRecord]) -> Shortcut | None:
    """How to call `func` on operands like these from now on, if what was seen of it allows."""
    cls = Wrapper.public
    run, op, op_args, op_kwargs, result = seen[0]
    first = isinstance(result, tuple) and out is result[0]
    if len(seen) > 1 or not (out is result or first) or type(out) is not cls or is_simulated(out):
        return None
    given = [(i, arg) for i, arg in enumerate(args) if type(arg) is cls]
    named = [(name, arg) for name, arg in kwargs.items() if type(arg) is cls]
    operands = [arg for arg in op_args if isinstance(arg, Tensor)]
    if [*map(id, operands)] != [id(arg) for _, arg in (*given, *named)]:
        return None
    if isinstance(run, MatmulExecutable):
        return None if kwargs or run.streamed is not None else _of_product(run, [i for i, _ in given])
    if not isinstance(run, OperatorExecutable):
        return None
    if run.views:
        return view_shortcut(func, args, kwargs, out, seen)
    if run.warm is None or (op_kwargs and any(isinstance(arg, Tensor) for arg in op_kwargs.values())):
        return None
    return _of_operator(func, run, op, args, kwargs, op_args, op_kwargs, out, first)


def _of_product(product: MatmulExecutable, places: Sequence[int]) -> Shortcut:
    cls = Wrapper.public
    spec, run = product.out, product.on_local
    shape, stride, dtype, device = spec.shape, spec.stride, spec.dtype, spec.device
    i, j, *bias = places

    def call(args: Args, kwargs: Kwargs) -> Any:
        b = args[bias[0]]._local if bias else None
        out = _make(cls, shape, stride, None, None, dtype, _STRIDED, device)
        out._local = run(args[i]._local, args[j]._local, b)[0]
        out._spec = spec
        return out

    return call


def _of_operator(
    func: Any,
    run: OperatorExecutable,
    op: OpOverload,
    args: Args,
    kwargs: Kwargs,
    op_args: Args,
    op_kwargs: Kwargs,
    out: Any,
    first: bool,
) -> Shortcut | None:
    cls = Wrapper.public
    assert run.warm is not None
    assert run.warm.operator is not None
    spec, operator = out._spec, run.warm.operator
    shape, stride, dtype, device = spec.shape, spec.stride, spec.dtype, spec.device
    slots = [i for i, arg in enumerate(op_args) if isinstance(arg, Tensor)]
    places = [i for i, arg in enumerate(args) if type(arg) is cls]
    names = [name for name, arg in kwargs.items() if type(arg) is cls]
    moves = dict(run.warm.moves)
    if not moves and run.op.kernel is None and is_itself(func, args, kwargs, (run, op, op_args, op_kwargs, out)):
        if not run.values:
            _BY_KIND.add(func)

        def itself(args: Args, kwargs: Kwargs) -> Any:
            out = _make(cls, shape, stride, None, None, dtype, _STRIDED, device)
            local = [arg._local if type(arg) is cls else arg for arg in args]
            if kwargs:
                kwargs = {name: arg._local if type(arg) is cls else arg for name, arg in kwargs.items()}
            out._local = func(*local, **kwargs)
            out._spec = spec
            return out

        return itself
    if func in _BY_KIND:
        return None
    template = list(op_args)

    def as_operator(args: Args, kwargs: Kwargs) -> Any:
        local = template.copy()
        given = [args[i]._local for i in places]
        if names:
            given += [kwargs[name]._local for name in names]
        for i, x in zip(slots, given, strict=True):
            local[i] = moves[i](x) if i in moves else x
        found = operator(*local, **op_kwargs)
        out = _make(cls, shape, stride, None, None, dtype, _STRIDED, device)
        out._local = found[0] if first else found
        out._spec = spec
        return out

    for i in slots:
        template[i] = None
    return as_operator
