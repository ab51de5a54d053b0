"""The entry of `torch.nn.functional.scaled_dot_product_attention`.

With dropout torch's kernels would draw another mask on each rank. Here the mask is drawn as for any dropout, the same
on every mesh, for the scores of a rank's loops. Rings, and loop k outside of graphs, draw it for blocks of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.comm import sum_dtype
from dshard.core.call import OperatorForm
from dshard.core.executable import ComposedExecutable, Executable
from dshard.core.operands import common_mesh, spec_like
from dshard.core.plain_tensors import implicit_replication
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.core.torch_function import autocast, bind_arguments, without_asking
from dshard.core.wrapper import Wrapper
from dshard.layout import Shape
from dshard.mesh import Coordinate
from dshard.ops.attention.attention_choice import HEADS_OF_QUERIES, SPLIT_KEYS, AttentionChoice, Candidates, Kind
from dshard.ops.attention.attention_executable import broadcast_lead, executable_of, lead_differs
from dshard.ops.attention.local_attention import Attend, Options, of_queries, whole
from dshard.ops.attention.score_functions import Dropout, ScoreFunctions
from dshard.ops.composite import are_traced, run_chosen
from dshard.ops.custom import accept_call
from dshard.ops.matmul.functions import MatmulFunction, matmul_of
from dshard.ops.matmul.options import MatmulOptions, current_options
from dshard.ops.matmul.rules import same_dtype
from dshard.ops.random import Draw, draw_for, native_dropout
from dshard.ops.small_reductions import reduce_statistics
from dshard.rules.attention_loops import Keys, RequestedLoops, attention_rule, is_grouped, leading_dims
from dshard.rules.expand import Row
from dshard.rules.rule import Rule, linear
from dshard.rules.rule_notation import parse_rule
from dshard.rules.strategy import Strategy
from dshard.torch_private import check_attention_shapes

_ALL: frozenset[Kind] = frozenset({"split keys", "own key heads", "rings"})
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_IN_GRAPH, _NONE = _ALL - {"rings"}, frozenset[Kind]()


def attention(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`scaled_dot_product_attention`: local for each head and each batch entry."""
    query, k, v, mask, dropout, causal, scale, gqa = bind_arguments(_ARGUMENTS, args, kwargs)
    dropout, causal, gqa = float(dropout or 0.0), bool(causal), bool(gqa)
    scale = None if scale is None else float(scale)  # one that a graph leaves open is no part of a key
    if dropout:
        common_mesh("attention", [t for t in (query, k, v, mask) if t is not None])
        accept_call(func, args, kwargs)
    if _heads_differ(k, v, gqa) and all(x.shape[-3] and query.shape[-3] % x.shape[-3] == 0 for x in (k, v)):
        k, v = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (k, v))  # as torch repeats each
        gqa = False
    requested = current_options().attention
    kinds = _IN_GRAPH if are_traced((query, k, v, mask)) else _ALL
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


def _heads_differ(k: Tensor, v: Tensor, gqa: bool) -> bool:
    """Whether values have other heads than keys, which torch allows where heads are grouped."""
    return gqa and k.dim() > 2 < v.dim() and k.shape[-3] != v.shape[-3]


def attention_form(args: Args, kwargs: Kwargs) -> OperatorForm | None:
    """`scaled_dot_product_attention` as one operator: with the keys of its heads, of every head, or a range of them."""
    query, k, v, mask, dropout, causal, scale, gqa = bind_arguments(_ARGUMENTS, args, kwargs)
    if lead_differs((query, k, v), bool(gqa)) or _heads_differ(k, v, bool(gqa)):
        return None
    tensors = (query, k, v) if mask is None else (query, k, v, mask)
    shapes = [tuple(t.shape) for t in tensors]
    held = sum_dtype(query.dtype).itemsize if dropout else 0
    forms: dict[str, Keys] = {SPLIT_KEYS: "split"}
    if is_grouped(shapes, bool(gqa)):
        forms[HEADS_OF_QUERIES] = "every head"
    rule, *others = [attention_rule(shapes, bool(gqa), k, bool(causal), held) for k in ("whole", *forms.values())]
    kernel = None if dropout else partial(_attention_kernel, Options(bool(causal), scale, bool(gqa)), shapes[0])
    return OperatorForm(tensors, rule, tuple(zip(forms, others, strict=True)), kernel)


def _attention_kernel(options: Options, query: Shape, strategy: Strategy, at: Coordinate) -> Attend:
    """The local attention of a rank that has all keys that its queries see."""
    queries = strategy.inputs[0].dim_range(len(query) - 2, query[-2], at)
    return _attend_at(options, query[-2], [queries], range(0))


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
    choice = Candidates(specs, options, requested, needed, kinds, held=dropout > 0).choice()
    is_split = choice.how.keys == "split" or bool(choice.how.ring.axes)
    if dropout and ("rings" not in kinds or not is_split):
        drop = partial(F.dropout, p=dropout)
        run = partial(attention_with_dropout, choice, drop)
        return ComposedExecutable(replace(choice.decision, composed=True), run)
    functions = ScoreFunctions(None, partial(_recorded, options, needed))
    make = partial(_with_dropout, options, dropout, needed, specs) if dropout else lambda: functions
    positions = [i for i, t in enumerate(tensors) if isinstance(t, Wrapper)]
    attend_at = partial(_attend_at, options, specs[0].shape[-2])
    return executable_of(choice, attend_at, make, positions)


def _attend_at(options: Options, rows: int, ranges: Sequence[range], keys: range) -> Attend:
    """The local attention of some of the query's rows: with a causal mask they see the keys that come before them."""
    queries = ranges[-1]
    return of_queries(queries, rows, options) if options.causal and len(queries) < rows else whole(options)


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
    choice = Candidates([t._spec for t in tensors], options, None, needed, _NONE, held=True).choice()
    return attention_with_dropout(choice, lambda x: native_dropout(x, dropout, repeated=draw)[0], tensors, {})


def attention_with_dropout(
    choice: AttentionChoice, drop: Callable[[Tensor], Tensor], tensors: Sequence[Wrapper], kwargs: Kwargs
) -> Wrapper:
    """Attention of query, key, value and perhaps a mask, by the loops of a choice.

    `drop` drops weights. A query that sees no key at all gets zeros.
    """
    strategy, options, end = choice.strategy, choice.options, choice.result.layout
    operands: list[Tensor] = [
        redistribute(x, layout, "attention") for x, layout in zip(tensors, strategy.inputs, strict=True)
    ]
    query, key, value, *masks = operands
    if options.gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    loops = MatmulOptions(among=(tuple(frozenset[Row]({row}) for row in strategy.rows),))
    scores = _product("q d, d k -> q k", query * factor, key.transpose(-2, -1), loops)
    if options.causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -inf)
    for mask in masks:
        scores = scores.masked_fill(mask.logical_not(), -inf) if mask.dtype == torch.bool else scores + mask
    if scores._spec.layout.axes_of(scores.dim() - 1):
        weights, total = _exponentials(scores)
        out = _product("q k, k e -> q e", drop(weights), value, loops) / total
        return redistribute(out, end, "attention")
    weights = scores.softmax(-1)
    if masks:
        weights = weights.masked_fill((scores == -inf).all(-1, keepdim=True), 0.0)
    return redistribute(_product("q k, k e -> q e", drop(weights), value, loops), end, "attention")


def _product(loops: str, a: Tensor, b: Tensor, options: MatmulOptions) -> Any:
    """One of the two matmuls of attention, whose factors are its loops."""

    def rule(*shapes: Shape) -> Rule:
        lead = leading_dims(a.dim())
        terms, out = loops.split(" -> ")
        left, right = terms.split(", ")
        return parse_rule(f"{lead} {left}, {lead} {right} -> {lead} {out}", shapes, passes=linear(0, 1), loops=True)

    return matmul_of(MatmulFunction("matmul", torch.matmul, rule, loops), (a, b), options)


def _exponentials(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The exponentials of scores whose keys are sharded, and their sum over each row."""
    most = reduce_statistics(scores.detach().amax(-1, keepdim=True), "attention")
    weights = (scores - most.masked_fill(most == -inf, 0.0)).exp()
    total = reduce_statistics(weights.sum(-1, keepdim=True), "attention")
    return weights, total.masked_fill(total == 0, 1.0)


# -- `torch.nn.functional.multi_head_attention_forward`, which `nn.MultiheadAttention` and `nn.Transformer` call
# Torch's own function merges the batch with the heads, and no layout of the merged dim shards the heads. Here the dims
# stay separate, and attention is `scaled_dot_product_attention`, so that mesh axes shard heads, batch or sequence.

_NAMES = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights"),
    *("attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k"),
    *("static_v", "average_attn_weights", "is_causal"),
)
_DEFAULTS = {"training": True, "need_weights": True, "average_attn_weights": True}
_torchs_own = without_asking(F.multi_head_attention_forward)


def multi_head_attention(func: Function, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor | None]:
    """`multi_head_attention_forward` of distributed or meta tensors; called with `__torch_function__` enabled.

    Calls with `bias_k`, `bias_v`, `add_zero_attn`, `static_k` or `static_v` run torch's own function.
    """
    arguments = _DEFAULTS | dict(zip(_NAMES, bind_arguments(_NAMES, args, _DEFAULTS | kwargs), strict=True))
    rare = any(arguments[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    if rare or arguments["add_zero_attn"]:
        with implicit_replication():  # it makes zeros of its own
            return _torchs_own(*args, **kwargs)  # type: ignore[no-any-return]
    query, key, value, heads = (arguments[name] for name in ("query", "key", "value", "num_heads"))
    padding, mask = arguments["key_padding_mask"], arguments["attn_mask"]
    is_batched = check_attention_shapes(query, key, value, padding, mask, heads)
    _check(arguments)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in _projected(arguments))  # sequence, (batch,) heads, features
    q, k, v = (x.permute(1, 2, 0, 3) if is_batched else x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    causal = bool(arguments["is_causal"]) and padding is None and not arguments["need_weights"]
    bias = None if causal else _bias(mask, padding, heads, q.dtype)
    dropout = arguments["dropout_p"] if arguments["training"] else 0.0
    weights = None
    if arguments["need_weights"]:
        scores = q * (1 / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        out = weights @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal)
    out = out.permute(2, 0, 1, 3).flatten(2)
    out = F.linear(out if is_batched else out.squeeze(1), arguments["out_proj_weight"], arguments["out_proj_bias"])
    if weights is not None and arguments["average_attn_weights"]:
        weights = weights.mean(1)
    return out, weights if weights is None or is_batched else weights.squeeze(0)


def _check(arguments: dict[str, Any]) -> None:
    """Refuse what torch refuses."""
    query, key, value, heads = (arguments[name] for name in ("query", "key", "value", "num_heads"))
    width, expected = query.shape[-1], arguments["embed_dim_to_check"]
    if width != expected or width % heads:
        raise AssertionError(
            f"multi_head_attention_forward of {width} features with {heads} heads: "
            f"the module has {expected} features, and each head as many as the others"
        )
    if key.shape[:-1] != value.shape[:-1] or (not arguments["use_separate_proj_weight"] and key.shape != value.shape):
        raise AssertionError(f"the key's shape {tuple(key.shape)} does not match the value's {tuple(value.shape)}")
    if arguments["is_causal"] and arguments["attn_mask"] is None:
        raise RuntimeError("is_causal says that attn_mask is causal: give that mask, too")
    mask, rows = arguments["attn_mask"], query.shape[1] if query.dim() > 2 else 1
    sizes = (query.shape[0], key.shape[0])
    if mask is not None and tuple(mask.shape) not in (sizes, (rows * heads, *sizes)):
        raise RuntimeError(
            f"an attn_mask of shape {tuple(mask.shape)}: give one of shape {sizes}, or {(rows * heads, *sizes)}"
        )


def _projected(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The queries, keys and values: by one matmul if they are projections of one tensor."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    weight, bias = arguments["in_proj_weight"], arguments["in_proj_bias"]
    if not arguments["use_separate_proj_weight"]:
        if query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        weights = weight.chunk(3)
    else:
        weights = tuple(arguments[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"))
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))


def _bias(mask: Tensor | None, padding: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """The sum of both additive masks, with dims batch, heads, queries, keys; None without masks."""
    bias = None
    if mask is not None:
        bias = _added(mask, dtype)
        bias = bias.unflatten(0, (-1, heads)) if mask.dim() > 2 else bias
    if padding is not None:
        hidden = _added(padding, dtype)
        hidden = hidden[:, None, None] if padding.dim() > 1 else hidden
        bias = hidden if bias is None else bias + hidden
    return bias


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive form of a mask: minus infinity where a boolean mask is true."""
    return mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
