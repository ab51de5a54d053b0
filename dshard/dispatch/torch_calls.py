"""Calls of torch's functions on distributed tensors: by a handler, as a composite operator, or as torch's operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from dshard.autograd.crossing import NUMBER, redistribute
from dshard.comm import of_first_rank, publish_failure, same_memory
from dshard.core.plain_tensors import (
    PLAIN_RESULTS,
    is_within_forward,
    may_hold_plain,
    refuse_plain,
    replicated_tensor,
    wrap_or_refuse_plain,
)
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.subclasses import is_causal_bias, refuse_own_rules
from dshard.core.torch_function import bind_arguments
from dshard.core.transforms import is_differentiating_forward, is_wrapped, is_written_down, refuse_constants
from dshard.core.trees import leaves, tensors_in
from dshard.core.wrapper import Wrapper
from dshard.dispatch.function_table import FUNCTIONS, FunctionRow
from dshard.dispatch.planned_calls import PLANNED
from dshard.ops.custom import composed_into_out, is_composed_with_out, wrapped
from dshard.placements import Replicate
from dshard.rules.strategy import completed_layout
from dshard.torch_private import (
    graph_task_id,
    is_transforming,
    is_view_replay_enabled,
    n_dispatch_modes,
    no_torch_function,
    set_view_replay_enabled,
)

_is_compiling = torch.compiler.is_dynamo_compiling  # what traces operators is a mode


def call(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call `func` on distributed tensors; an error of this rank is told to the others."""
    row = FUNCTIONS.get(func)
    if _is_compiling():
        return call_function(row, func, args, kwargs)
    if PLANNED.name is not None and getattr(func, "__name__", None) == PLANNED.name and not is_transforming():
        return PLANNED.run(call, func, args, kwargs)
    try:
        if row is not None and row.is_backward and not _creates_graph(func, args, kwargs):
            return call_function(row, func, args, kwargs)
        if not torch.is_grad_enabled() or is_view_replay_enabled():
            out = call_function(row, func, args, kwargs)
        else:
            # Autograd makes views again by their function, not by strides: by those of the global tensor a recorded
            # write through a view would gather.
            set_view_replay_enabled(True)
            try:
                out = call_function(row, func, args, kwargs)
            finally:
                set_view_replay_enabled(False)
        if Wrapper.keeps_terms and torch.is_grad_enabled():
            out = _keeping_terms(out, args, kwargs)
        return out if type(out) is Wrapper.public and out._spec.shape else with_numbers_reduced(out, args, kwargs)
    except Exception as error:
        publish_failure(error, _ranks(args))
        raise


def _keeping_terms(out: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of an operator on operands of whose gradients the user wants each rank's term.

    Where it is replicated, its gradient stays partial on the same mesh axes.
    """
    cls = Wrapper.public
    kept = [x._leaf for x in (*args, *kwargs.values()) if type(x) is cls and type(x._leaf) is tuple]
    axes = sorted({axis for each in kept for axis in each}) if kept else ()
    for x in () if not kept else out if isinstance(out, list | tuple) else (out,):
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


def call_function(row: FunctionRow | None, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function of torch: by the handler of its row, or as the operators that torch runs."""
    if is_transforming():
        return _transformed(row, func, args, kwargs)
    if row is not None and row.when == "with plain":
        return row.handler(func, args, kwargs)
    if n_dispatch_modes() and (row is None or row.when != "own"):
        refuse_constants((args, kwargs), getattr(func, "__name__", str(func)), is_operator=True)
    if may_hold_plain(args) or (kwargs and may_hold_plain(kwargs.values())):
        args, kwargs = wrap_or_refuse_plain(func, args, kwargs)
    if row is not None and row.when == "own":
        return row.handler(func, args, kwargs)
    with no_torch_function():
        if kwargs and kwargs.get("out") is not None and is_composed_with_out(func) and not _is_recorded(args, kwargs):
            return composed_into_out(func, args, kwargs)
        # A graph has operators on distributed tensors, and torch has forward derivatives of operators alone.
        if row is not None and not is_written_down() and not is_differentiating_forward():
            out = row.handler(func, args, kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
    return wrapped(out, (args, kwargs)) if type(out) in PLAIN_RESULTS else out


def _is_recorded(args: Args, kwargs: Kwargs) -> bool:
    """Whether autograd would record a call; it refuses one with `out`."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in((args, kwargs)))


def _transformed(row: FunctionRow | None, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function within a torch.func transform, as the operators that torch decomposes it into."""
    if row is not None and row.is_backward:
        return row.handler(func, args, kwargs)
    if not any(isinstance(leaf, Tensor) and is_wrapped(leaf) for leaf in leaves((args, kwargs))):
        refuse_plain(func, args, kwargs)
    with no_torch_function():
        return func(*args, **kwargs)


def is_partial_number(x: object) -> bool:
    """Whether `x` is a tensor without dims whose terms lie on several ranks."""
    return isinstance(x, Wrapper) and not x._spec.shape and x._spec.has_partial


def with_numbers_reduced(out: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of a call, with partial numbers reduced that a program makes; operands and their views stay."""
    if isinstance(out, tuple):
        numbers = any(map(is_partial_number, out))
        return type(out)([with_numbers_reduced(x, args, kwargs) for x in out]) if numbers else out
    if not is_partial_number(out) or is_within_forward() or graph_task_id() != -1 or is_transforming():
        return out
    if is_compiling() or is_written_down() or out._view_sync is not None:
        return out
    local = of_first_rank(out._local_tensor)
    for x in tensors_in((args, kwargs)):  # warm calls make views of local tensors, which autograd does not call views
        if isinstance(x, Wrapper) and same_memory(local, of_first_rank(x._local_tensor)):
            return out
    return redistribute(out, completed_layout(out._spec.layout), NUMBER)


_DEFAULT = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def by_other_class(func: Function, types: Iterable[Any], args: Args, kwargs: Kwargs) -> Any:
    """The result by another class's `__torch_function__`; NotImplemented where it is plain data, or leaves it to us."""
    others = [kind for kind in types if not issubclass(kind, Wrapper)]
    if func is F.scaled_dot_product_attention and any(map(is_causal_bias, others)):
        args, kwargs = _without_bias(args, kwargs)
        return func(*args, **kwargs)
    refuse_own_rules(getattr(func, "__name__", str(func)), others)
    for kind in others:
        if getattr(kind.__torch_function__, "__func__", _DEFAULT) is not _DEFAULT:
            out = kind.__torch_function__(func, types, args, kwargs)
            if out is not NotImplemented:
                return out
    return NotImplemented


def _without_bias(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of attention with is_causal for a CausalBias, or a replicated mask of its alignment.

    Raises:
        ValueError: as on one device, beside `is_causal`.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, bias, dropout, causal, scale, gqa = bind_arguments(names, args, kwargs)
    refuse_own_rules("scaled_dot_product_attention", map(type, (q, k, v)))
    if causal:
        raise ValueError("CausalBias should not be used with causal=True")
    n, m, mask = bias.seq_len_q, bias.seq_len_kv, None
    is_upper_left = n == m or bias.variant == type(bias.variant).UPPER_LEFT
    if not is_upper_left:  # of which kernels of different devices have different ideas
        operand = next(x for x in (q, k, v) if isinstance(x, Wrapper))
        lower_right = torch.ones(n, m, dtype=torch.bool, device=operand.device).tril(m - n)
        mask = replicated_tensor(lower_right, operand._spec.layout.mesh)
    return (q, k, v, mask, dropout or 0.0, is_upper_left), {"scale": scale, "enable_gqa": bool(gqa)}
