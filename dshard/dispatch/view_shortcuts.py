"""Shortcuts of warm calls that make a view."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from dshard.autograd.crossing import LocalGraph, local_graph_of
from dshard.core.call import views_first
from dshard.core.moves import sharing_version
from dshard.core.observe import CallRecord
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.view_sync import RESHAPED_VIEWS, register_if_copy
from dshard.core.wrapper import Wrapper
from dshard.dispatch.logged_call import Shortcut, distributed_operands, is_itself
from dshard.torch_private import is_view_replay_enabled, no_torch_dispatch, set_view_replay_enabled

_is_recording = torch.is_grad_enabled


def view_shortcut(
    func: Function, args: Args, kwargs: Kwargs, out: Wrapper, records: Sequence[CallRecord]
) -> Shortcut | None:
    """The shortcut of a view of one tensor, or None if the log allows none.

    torch itself makes the view of the distributed tensor, without dispatch, so that autograd knows its base. The local
    view is made at its first use.
    """
    cls = Wrapper.public
    if not _takes_one_view(args, kwargs, out, records):
        return None
    executable, _, op_args, op_kwargs, *_ = records[0]
    take_view: Any = executable.operator.above_autograd
    rest, options = op_args[1:], op_kwargs
    if is_itself(func, args, kwargs, records[0]):
        # torch finds its own functions faster than operators
        take_view, rest, options = func, args[1:], kwargs
    spec, recorded = out._spec, torch.is_grad_enabled() and out.requires_grad
    reshapes = records[0].op in RESHAPED_VIEWS
    take_view_below_autograd = sharing_version(take_view)

    def take_local(x: Wrapper, view: ref[Wrapper] | None) -> Tensor:
        base = x._local_tensor
        local: Tensor = take_view_below_autograd(base, *rest, **options)
        if view is not None and not local._is_view():
            register_if_copy(view(), local, x)
        return local

    def call(args: Args, kwargs: Kwargs) -> object:
        x = args[0]
        if x._view_sync is not None:
            return func(*args, **kwargs)
        replays = (recorded or _is_recording()) and not is_view_replay_enabled()
        if replays:  # it may be written to; see `dshard.dispatch.fast_path`
            set_view_replay_enabled(True)
        guard = no_torch_dispatch()
        try:
            out = func(*args, **kwargs).as_subclass(cls)
        finally:
            del guard  # it guards while it is there, and costs half as much as by `with`
            if replays:
                set_view_replay_enabled(False)
        out._spec = spec
        source = local_graph_of(x) if recorded else None
        if source is None:
            base = x._local_tensor
            out._local_tensor = local = take_view(base, *rest, **options)
            if reshapes and not local._is_view():
                register_if_copy(out, local, x)
        else:  # later operators continue from the local graph
            out._lazy_local = partial(take_local, x, ref(out) if reshapes else None)
            out._local_graph = LocalGraph(out._version, make=lambda: take_view(source.at_home(), *rest, **options))
        return out

    return call


def _takes_one_view(args: Args, kwargs: Kwargs, out: Wrapper, records: Sequence[CallRecord]) -> bool:
    """Whether one operator ran, which made a view of the call's first argument, and nothing was communicated."""
    executable, op, op_args, *_ = records[0]
    if len(records) > 1 or op is None or not views_first(op) or out._spec is not executable.specs[0]:
        return False
    if executable.operator is None or executable.moves:
        return False
    if not out._is_view() or out._view_sync is not None:  # detached, or a view of a copy
        return False
    operands = distributed_operands(args, kwargs)
    return len(operands) == 1 and operands[0][0] == 0 and op_args[0] is args[0]
