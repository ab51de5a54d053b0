"""The fast path of warm calls: from a torch function straight to the function of the local tensors.

Most of torch's functions reach the dispatcher as one operator, or are one matmul; then autograd and the dispatcher only
add time. So the first call of a function on operands of given specs is logged: if only one operator ran, later calls
run it on the local tensors at once. If the function itself, called on the local tensors, runs that operator, later
calls use the function, as torch finds its own functions faster than operators. `dshard.dispatch.shortcuts` makes the
shortcuts.

All of this is for speed alone: with DSHARD_FAST=0 in the environment every call goes through the dispatcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_exporting

from dshard.autograd.gathered_weights import is_local
from dshard.comm import publish_failure, recording_here
from dshard.core.call import writes_first
from dshard.core.call_key import call_key, repeats_apart
from dshard.core.context import planning_context
from dshard.core.executable import Executable
from dshard.core.moves import leaves
from dshard.core.observe import CALL_LOGS, OBSERVERS, CallRecord, observed
from dshard.core.plain_tensors import PLAIN_RESULTS, may_hold_plain, refuse_plain, wrap_or_refuse_plain
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.transforms import is_differentiating_forward, is_wrapped
from dshard.core.wrapper import Wrapper
from dshard.dispatch.composite_table import AUTOGRAD_FUNCTIONS, COMPOSITES, WITH_PLAIN
from dshard.dispatch.logged_call import Shortcut
from dshard.dispatch.numbers import is_partial_number, with_numbers_reduced
from dshard.dispatch.shortcuts import BY_KIND, is_one_operator, shortcut_of
from dshard.ops.custom import wrapped
from dshard.ops.matmul.options import OPTION_BLOCKS, current_options
from dshard.placements import Replicate
from dshard.torch_private import (
    is_autocasting,
    is_transforming,
    is_view_replay_enabled,
    n_dispatch_modes,
    no_torch_function,
    saved_tensor_hooks,
    set_view_replay_enabled,
)

Uncached: TypeAlias = Callable[[Any, Args, Kwargs], Any]

_is_compiling = torch.compiler.is_dynamo_compiling  # what traces operators is a mode
_is_recording = torch.is_grad_enabled
_HOOKS: Any = Tensor._backward_hooks
BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_NEVER: set[object] = {*BACKWARD, *WITH_PLAIN, _HOOKS.__set__}
"""Functions that are never cached: in-place ones, queries, and entry points of backward passes.

Nor the setter of hooks: autograd calls it for a written view while it holds a lock, so the view must not be queried.
"""
_WRITES: set[object] = set()
"""Functions among `_NEVER` that are one in-place operator, and so make no view."""
_PLACES = object()
"""Stands in a key before the places of arguments that are one object."""
AS_IT_IS = ()
"""Cached in place of a shortcut: call torch's own function, and let autograd record the distributed tensors."""
FAST = os.environ.get("DSHARD_FAST", "1") != "0"


def call(func: Function, args: Args, kwargs: Kwargs, through: Uncached) -> Any:
    """Call `func` on distributed tensors: by a cached shortcut if there is one, else by `through`."""
    if _is_compiling():
        return through(func, args, kwargs)
    try:
        if (
            func in _NEVER
            or not FAST
            or (n_dispatch_modes() and not recording_here())
            or is_autocasting()
            or is_transforming()
            or forward_ad._current_level >= 0
        ):
            if func in _WRITES or (func in BACKWARD and not _creates_graph(func, args, kwargs)):
                return through(func, args, kwargs)
            return with_numbers_reduced(_with_view_replay(through, func, args, kwargs), args, kwargs)
        with no_torch_function():
            key = call_key(func, args, kwargs, func not in BY_KIND, _is_recording(), False)
            if key is not None and key[1]:
                hooks = saved_tensor_hooks(True)
                if hooks is not None and not is_local(hooks):  # which get distributed tensors
                    key = None
            elif OBSERVERS:  # which see all that is not recorded
                key = None
            if OPTION_BLOCKS and key is not None:
                key = (*key, id(current_options()))  # equal options are one object, which is kept
            if key is not None:
                shortcuts = planning_context().shortcuts
                shortcut = shortcuts.get(key)
                if shortcut is None and (places := repeats_apart(args, kwargs)):
                    key = (*key, _PLACES, places)
                    shortcut = shortcuts.get(key)
                if shortcut:
                    shortcuts.hits += 1
                    return _observed_shortcut(shortcut, args, kwargs) if OBSERVERS else shortcut(args, kwargs)
                if shortcut is AS_IT_IS:
                    shortcuts.hits += 1
                    return func(*args, **kwargs)
        if key is None or shortcut is not None:
            return with_numbers_reduced(_with_view_replay(through, func, args, kwargs), args, kwargs)
        terms = _axes_of_terms(args, kwargs) if key[1] else ()
        if terms:
            out = _keeping_terms(terms, _with_view_replay(through, func, args, kwargs))
            return with_numbers_reduced(out, args, kwargs)
        return _with_view_replay(_specialise, func, args, kwargs, through, key)
    except Exception as error:
        publish_failure(error, _ranks(args))
        raise


def _axes_of_terms(args: Args, kwargs: Kwargs) -> tuple[int, ...]:
    """The mesh axes on which the gradient of an operand is to stay partial: the user wants each rank's term."""
    kept = [x._leaf for x in (*args, *kwargs.values()) if isinstance(x, Wrapper) and isinstance(x._leaf, tuple)]
    return tuple(sorted({axis for axes in kept for axis in axes}))


def _keeping_terms(axes: tuple[int, ...], out: Any) -> Any:
    """The result of an operator on such operands: where it is replicated, its gradient stays partial, too."""
    for x in out if isinstance(out, list | tuple) else (out,):
        if isinstance(x, Wrapper) and x._leaf is None:
            x._leaf = tuple([axis for axis in axes if x._spec.layout.placements[axis] == Replicate()]) or None
    return out


def _ranks(args: Args) -> tuple[int, ...]:
    """The ranks of the mesh of the first distributed operand."""
    flat = (x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,)))
    return next((x._spec.layout.mesh.ranks for x in flat if isinstance(x, Wrapper)), ())


def _creates_graph(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether a backward pass is recorded: only then are its views differentiated, and may have to be replayed.

    A view that can be replayed holds its base, so with replay no gradient would have a sole owner.
    """
    position = 4 if func is torch.autograd.grad else 3
    return bool(args[position] if len(args) > position else kwargs.get("create_graph"))


def _with_view_replay(run: Function, *args: object) -> Any:
    """Call `run` with view replay on: autograd then makes views again by their function, not by strides."""
    before = is_view_replay_enabled()  # by strides of the global tensor a recorded write through a view would gather
    set_view_replay_enabled(True)
    try:
        return run(*args)
    finally:
        set_view_replay_enabled(before)


def _observed_shortcut(shortcut: Shortcut, args: Args, kwargs: Kwargs) -> object:
    """Run a shortcut within the observers, which get the decisions of its operators."""
    run: Function = shortcut
    run_args: Args = (args, kwargs)
    for decision in getattr(shortcut, "decisions", ()):
        run, run_args = partial(observed, decision, run), (run_args,)
    return run(*run_args)


def _specialise(func: Function, args: Args, kwargs: Kwargs, through: Uncached, key: tuple[Any, ...]) -> Any:
    """Call `func` by `through`, and cache a shortcut under `key`, or False if the log allows none."""
    records: list[CallRecord] = []
    with CALL_LOGS.entered(records):
        out = through(func, args, kwargs)
    if _is_never_cached(func, out, records):
        _NEVER.add(func)
        if len(records) == 1 and _is_method_in_place(func):
            _WRITES.add(func)
        return with_numbers_reduced(out, args, kwargs)
    shortcut: Any = None
    if type(out) is Wrapper.public and _ran_executables(records):
        with no_torch_function():
            shortcut = shortcut_of(func, args, kwargs, out, records, key[1])
            if shortcut is None and key[1] and is_one_operator(args, kwargs, out, records):
                shortcut = AS_IT_IS
    kept = False if shortcut is None else shortcut
    if shortcut is not None and is_partial_number(out):
        kept = partial(_number, shortcut or (lambda args, kwargs: func(*args, **kwargs)))
    planning_context().shortcuts.add(key, kept)
    if not shortcut or not key[1] or getattr(shortcut, "repeats", False):
        return with_numbers_reduced(out, args, kwargs)
    with no_torch_function():  # the graph is the same, whether a rank has met such a call before or not
        computed = [each.computed for each in records if each.computed]
        del records[:], out
        with ExitStack() as modes:
            for results in computed:
                modes.enter_context(results.replaying())
            out = shortcut(args, kwargs)
    return with_numbers_reduced(out, args, kwargs)


def _number(run: Shortcut, args: Args, kwargs: Kwargs) -> object:
    """Run the shortcut of a call whose result is a partial number, and reduce that."""
    return with_numbers_reduced(_observed_shortcut(run, args, kwargs), args, kwargs)


def _is_never_cached(func: Function, out: object, records: Sequence[CallRecord]) -> bool:
    """Whether no call of `func` can be cached: it is a query, which runs nothing on tensors, or writes by its name.

    Where one call wrote, as `relu(x, inplace=True)`, or ran nothing, as `flatten` of a vector, its other calls can.
    """
    if records and _is_write(records[0]):
        return getattr(func, "__name__", "").endswith("_")
    return not _ran_executables(records) and not any(isinstance(leaf, Tensor) for leaf in leaves(out))


def _ran_executables(records: Sequence[CallRecord]) -> bool:
    """Whether the call ran operators of which the first writes to none of its operands."""
    return any(isinstance(each.executable, Executable) for each in records) and not _is_write(records[0])


def _is_write(record: CallRecord) -> bool:
    """Whether an executable of an in-place operator ran."""
    return record.executable is not None and record.op is not None and writes_first(record.op)


def _is_method_in_place(func: Function) -> bool:
    """Whether `func` has the name of one in-place operator; `x[i] = y` may be one, or write through views."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


# -- calls without a shortcut


def through(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function of torch: by its handler, as a composite operator, or as the operators that torch runs."""
    if is_transforming():
        return _transformed(func, args, kwargs)
    if func in WITH_PLAIN:
        return WITH_PLAIN[func](func, args, kwargs)
    if may_hold_plain(args) or (kwargs and may_hold_plain(kwargs.values())):
        args, kwargs = wrap_or_refuse_plain(func, args, kwargs)
    handler = AUTOGRAD_FUNCTIONS.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    composite = COMPOSITES.get(func)
    with no_torch_function():
        # torch.export records operators on distributed tensors, and torch has forward derivatives of operators alone
        if composite is not None and not is_exporting() and not is_differentiating_forward():
            out = composite(func, args, kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
    return wrapped(out, (args, kwargs)) if type(out) in PLAIN_RESULTS else out


def _transformed(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function within a torch.func transform, as the operators that torch decomposes it into."""
    if func in BACKWARD:
        return AUTOGRAD_FUNCTIONS[func](func, args, kwargs)
    if not any(isinstance(leaf, Tensor) and is_wrapped(leaf) for leaf in leaves((args, kwargs))):
        refuse_plain(func, args, kwargs)
    with no_torch_function():
        return func(*args, **kwargs)


_Tensor: Any = torch.Tensor
QUERIES = {
    **dict.fromkeys(
        (
            *(_Tensor.is_leaf.__get__, _Tensor.requires_grad.__get__),
            *(torch.is_floating_point, torch.is_complex, _Tensor.is_floating_point, _Tensor.is_complex),
        ),
        True,
    ),
    **dict.fromkeys((_Tensor.dim, _Tensor.numel, _Tensor.is_contiguous), False),
}
"""Queries that torch answers and that raise nothing; true for those of which an operator that was recorded on the local
tensor changes the answer."""
