"""The entry of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.comm import plain, traced
from dshard.core.call import LocalOp
from dshard.core.executable import ComposedExecutable, Executable, wrap_as
from dshard.core.operands import common_mesh, operand_of, plans_to, spec_like
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec, for_shapes, spec_of
from dshard.core.torch_function import autocast, bind_arguments
from dshard.core.wrapper import Wrapper
from dshard.mesh import Coordinate
from dshard.ops.attention.attention_choice import AttentionChoice, Candidates, Kind
from dshard.ops.attention.broadcast_operands import broadcast_lead, lead_differs
from dshard.ops.attention.dropout import attention_with_dropout
from dshard.ops.attention.local_attention import Options, of_key_heads, of_queries, whole
from dshard.ops.attention.partial_attention import PartialAttention
from dshard.ops.attention.repeated_heads import RepeatedKeyHeads, repeated
from dshard.ops.attention.score_functions import Dropout, ScoreFunctions
from dshard.ops.composite import SavingExecutable, run_chosen
from dshard.ops.matmul.options import current_options
from dshard.ops.matmul.rules import same_dtype
from dshard.ops.random import Draw, draw_for, dropped_again
from dshard.rules.attention_loops import RequestedLoops

_ALL: frozenset[Kind] = frozenset({"split keys", "own key heads", "rings"})
_IN_GRAPH, _NONE = _ALL - {"rings"}, frozenset[Kind]()


def attention(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`scaled_dot_product_attention`: local for each head and each batch entry."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, k, v, mask, dropout, causal, scale, gqa = bind_arguments(names, args, kwargs)
    dropout, causal, gqa = float(dropout or 0.0), bool(causal), bool(gqa)
    if dropout:
        _accepted(query, k, v, mask, dropout, causal, scale, gqa)
    requested = current_options().attention
    kinds = _IN_GRAPH if any(isinstance(t, Wrapper) and traced(t._local_tensor) for t in (query, k, v, mask)) else _ALL
    if lead_differs((query, k, v), gqa):
        query, *others = broadcast_lead((query, k, v), gqa)
        if requested is None:  # keys are sent as they are: all kernels but those of blocks broadcast them
            kinds = _NONE
        else:
            k, v = others
    tensors = autocast((query, k, v) if mask is None else (query, k, v, mask))
    options = Options(causal, scale, gqa)
    needed = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
    if dropout:
        kinds -= {"own key heads"}
    make = partial(_executable, tensors, options, dropout, requested, needed, kinds)
    return run_chosen(("attention", causal, scale, gqa, dropout, requested, needed, kinds), make, tensors)


def _executable(
    tensors: Sequence[Tensor],
    options: Options,
    dropout: float,
    requested: RequestedLoops,
    needed: tuple[bool, ...],
    kinds: frozenset[Kind],
) -> Executable | ComposedExecutable:
    """The executable of the cheapest candidate of attention on operands like these."""
    mesh = common_mesh("attention", list(tensors))
    same_dtype("attention", [t.dtype for t in tensors[:3]])
    specs = [spec_like(t, mesh) for t in tensors]
    attend = whole(options)
    with torch.no_grad(), for_shapes():
        out = attend(*(spec.meta() for spec in specs))
    choice = Candidates(specs, out, options, requested, needed, kinds, held=dropout > 0).choice()
    result = spec_of(choice.end, tuple(out.shape), out.stride(), out.dtype, specs[0].device)
    is_split = choice.how.keys == "split" or bool(choice.how.ring.axes)
    if dropout and ("rings" not in kinds or not is_split):
        run = partial(attention_with_dropout, choice.strategy, choice.end, options, partial(F.dropout, p=dropout))
        return ComposedExecutable(replace(choice.decision, composed=True), run)
    if is_split:
        functions = ScoreFunctions(None, partial(_recorded, options, needed))
        make = partial(_with_dropout, options, dropout, needed, specs) if dropout else lambda: functions
        return PartialAttention(choice, specs, result, options, make)
    positions = [i for i, t in enumerate(tensors) if isinstance(t, Wrapper)]
    if choice.how.local is None:
        return _of_whole_keys(choice, specs, result, options, positions)
    return _of_own_key_heads(choice, specs, result, options, positions)


def _of_whole_keys(
    choice: AttentionChoice, specs: Sequence[Spec], result: Spec, options: Options, positions: Sequence[int]
) -> Executable:
    """Attention of ranks that have all keys of their queries."""
    kernel, gradients = partial(_kernel, choice, specs, options), choice.strategy.gradients
    saves_copies = choice.how.keys == "every head" or choice.strategy.outputs[0].leaves_empty(result.shape)
    make = SavingExecutable if saves_copies else Executable
    return make(choice.decision, kernel, [result], positions, wrap_as(result), gradients=gradients)


def _of_own_key_heads(
    choice: AttentionChoice, specs: Sequence[Spec], result: Spec, options: Options, positions: Sequence[int]
) -> RepeatedKeyHeads:
    """Attention of ranks that receive only the key heads of their queries."""
    strategy, times, asked = choice.how.local, choice.how.repeats, choice.decision.choice
    assert strategy is not None
    assert asked is not None
    inner = repeated(specs, times)
    inner = [spec if i in (1, 2) else spec.with_layout(strategy.inputs[i]) for i, spec in enumerate(inner)]
    plans = plans_to(inner, strategy.inputs)
    operands, asked = tuple(map(operand_of, inner)), replace(asked, strategy=strategy)
    decision = replace(choice.decision, operands=operands, choice=asked, plans=plans, exchanges=())
    within = replace(choice, decision=decision, strategy=strategy)
    return RepeatedKeyHeads(choice.decision, strategy, times, _of_whole_keys(within, inner, result, options, positions))


def _with_dropout(options: Options, dropout: float, needed: tuple[bool, ...], specs: Sequence[Spec]) -> ScoreFunctions:
    """Dropout of the weights of a call, by its own draw."""
    query, key = specs[:2]
    draw = draw_for(query.layout.mesh, "dropout")
    held = Dropout(dropout, draw, (*query.shape[:-1], key.shape[-2])).held
    return ScoreFunctions(held, partial(_recorded_dropout, options, needed, dropout, draw))


def _recorded(options: Options, needed: tuple[bool, ...], tensors: Sequence[Tensor]) -> Any:
    """Attention in which ranks have all keys of their queries, with differentiable gradients."""
    make = partial(_executable, tensors, options, 0.0, None, needed, _NONE)
    return run_chosen(("attention", *astuple(options), 0.0, None, needed, _NONE), make, tensors)


def _recorded_dropout(
    options: Options, needed: tuple[bool, ...], dropout: float, draw: Draw, tensors: Sequence[Wrapper]
) -> Any:
    """Attention in which ranks have all keys of their queries, and repeat a draw."""
    out: Any = None
    specs = [t._spec for t in tensors]
    with torch.no_grad(), for_shapes():
        out = whole(options)(*(spec.meta() for spec in specs))
    choice = Candidates(specs, out, options, None, needed, _NONE, held=True).choice()
    drop = partial(dropped_again, p=dropout, repeated=draw)
    return attention_with_dropout(choice.strategy, choice.end, options, drop, tensors, {})


def _kernel(choice: AttentionChoice, specs: Sequence[Spec], options: Options, at: Coordinate) -> LocalOp:
    """The local attention of the rank at a coordinate: its queries and their key heads."""
    layout, shape = choice.strategy.inputs[0], specs[0].shape
    queries = layout.dim_range(len(shape) - 2, shape[-2], at)
    attend = of_queries(queries, options) if options.causal and len(queries) < shape[-2] else whole(options)
    if choice.how.keys == "whole":
        return attend
    heads = layout.dim_range(len(shape) - 3, shape[-3], at)
    return of_key_heads(heads, shape[-3] // specs[1].shape[-3], attend)


def _accepted(query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> None:
    """Let torch refuse arguments that it would refuse on one device."""
    tensors = [t._spec.meta() if isinstance(t, Wrapper) else t for t in (query, key, value, mask)]
    common_mesh("attention", [t for t in (query, key, value, mask) if t is not None])
    dropout, causal, scale, gqa = rest
    q, k, v, m = tensors
    with torch.no_grad(), plain():
        F.scaled_dot_product_attention(q, k, v, m, dropout, causal, scale=scale, enable_gqa=gqa)
