"""Composite operators caught whole: laid out once, run on local tensors under torch's own autograd.

The local backward pass gives each operand's gradient in the layout that the strategy says: split like the operand, or a
pending sum where the work was split and the operand was not. Second derivatives work, for the crossings between
distributed and local tensors are themselves differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from types import FunctionType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.autograd import FromLocal, ToLocal, distributed, redistribute
from dshard.comm import LocalTensor, plain, unstack
from dshard.dispatch import common_mesh, spec_like
from dshard.layout import replicated
from dshard.ops.attention import attention_rule
from dshard.ops.custom import accept_call
from dshard.ops.expand import Operand
from dshard.ops.matmul.asked import Asked, asked_now
from dshard.ops.matmul.rules import bmm_rule, einsum_rule, linear_rule, matmul_rule, same_dtype
from dshard.ops.moving import on_all_ranks, run_on_ranks
from dshard.ops.observe import OBSERVERS, Decision, observed
from dshard.ops.rule import Rule
from dshard.ops.settings import current
from dshard.ops.spec import Spec, spec_of
from dshard.ops.strategy import Strategy, choose, completed
from dshard.product import decide as decide_product
from dshard.product import multiply, wrapped
from dshard.redistribute import plan

Local: TypeAlias = Callable[..., Tensor]
Choice: TypeAlias = tuple[Strategy, Spec]


def run_joint(cls: Any, rule: Callable[[], Rule], local: Local, tensors: Sequence[Any], key: tuple[Any, ...]) -> Any:
    """`local` on the local parts of `tensors`, as the cheapest strategy of `rule` lays them out.

    `key` tells calls apart whose rule or local operator differ though the specs are alike.
    """
    tensors = autocast(tensors)
    choice = decide(cls, rule, local, tensors, key)
    return run_choice(cls, key, rule, choice, local, tensors)


def autocast(tensors: Sequence[Any]) -> Sequence[Any]:
    """The operands in the dtype that autocast wants, where it is on."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    wide = (torch.float32, torch.float16, torch.bfloat16)
    return [t.to(dtype) if t.dtype in wide else t for t in tensors]


def run_choice(
    cls: Any, key: tuple[Any, ...], rule: Callable[[], Rule], choice: Choice, local: Local, tensors: Sequence[Any]
) -> Any:
    """The same, decided already."""
    strategy, out = choice
    if OBSERVERS:
        decision = _decision(cls, key, rule(), strategy, out, tensors)
        return observed(decision, run_strategy, (cls, strategy, out, local, tensors))
    return run_strategy(cls, strategy, out, local, tensors)


def _decision(
    cls: Any, key: tuple[Any, ...], rule: Rule, strategy: Strategy, out: Spec, tensors: Sequence[Any]
) -> Decision:
    specs = [spec_like(cls, t, out.layout.mesh) for t in tensors]
    operands = tuple(Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs)
    topology = current().topology_of(out.layout.mesh)
    plans = tuple(
        plan(spec.layout, layout, spec.shape, spec.itemsize, topology)
        for spec, layout in zip(specs, strategy.inputs, strict=True)
    )
    return Decision(key[0], operands, ((out.shape, out.itemsize),), rule, strategy, plans, topology)


def decide(cls: Any, rule: Callable[[], Rule], local: Local, tensors: Sequence[Any], key: tuple[Any, ...]) -> Choice:
    """The cheapest strategy and the spec of the result; looked up where it was decided before."""
    specs = [t._spec if isinstance(t, cls) else None for t in tensors]
    full_key = (*key, *specs)
    choices = current().choices
    found: Choice | None = choices.get(full_key) if None not in specs else None
    return choices.add(full_key, _decide(cls, rule, local, tensors, key)) if found is None else found


def _decide(cls: Any, rule: Callable[[], Rule], local: Local, tensors: Sequence[Any], key: tuple[Any, ...]) -> Choice:
    mesh = common_mesh(cls, key[0], list(tensors))
    same_dtype(key[0], [t.dtype for t in tensors[:3]])
    specs = [spec_like(cls, t, mesh) for t in tensors]
    with torch.no_grad():
        out = local(*(spec.meta() for spec in specs))
    operands = [Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs]
    strategy = choose(rule(), operands, [(tuple(out.shape), out.itemsize)], current().topology_of(mesh))
    return strategy, spec_of(strategy.outputs[0], tuple(out.shape), out.stride(), out.dtype, specs[0].device)


def run_strategy(cls: Any, strategy: Strategy, out: Spec, local: Local, tensors: Sequence[Any]) -> Any:
    """`local` on the local parts of `tensors` under `strategy`, its result a distributed tensor of spec `out`."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    with torch._C.DisableTorchFunctionSubclass():
        laid = [redistribute(t, layout) for t, layout in zip(tensors, strategy.inputs, strict=True)]
        if not recorded:
            result = run_on_ranks(out.layout.mesh, lambda coordinate: local, tuple(t._local for t in laid), {})
            return cls._wrap(result, out)
        if any(type(t._local) is LocalTensor for t in laid):
            return Simulated.apply(cls, strategy, out, local, *laid)  # type: ignore[no-untyped-call]
        parts = [
            ToLocal.apply(t, layout) if t.requires_grad else t._local  # type: ignore[no-untyped-call]
            for t, layout in zip(laid, strategy.gradients, strict=True)
        ]
        result = _connected(local(*parts), parts)
        return FromLocal.apply(result, cls, out, out.layout.cotangent())  # type: ignore[no-untyped-call]


def _connected(out: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """`out`, made to depend on all parts: a rank that computes nothing must still meet the others in its backward."""
    if out.numel() > 0:
        return out
    for part in parts:
        if part.requires_grad:
            out = out + 0 * part.sum()
    return out


class Simulated(torch.autograd.Function):
    """The same for all ranks simulated in one process: each rank's backward pass is run from its saved operands."""

    @staticmethod
    def forward(ctx: Any, cls: Any, strategy: Strategy, out: Spec, local: Local, *tensors: Any) -> Any:
        ctx.cls, ctx.strategy, ctx.out, ctx.local = cls, strategy, out, local
        ctx.save_for_backward(*tensors)
        return cls._wrap(
            run_on_ranks(out.layout.mesh, lambda coordinate: local, tuple(t._local for t in tensors), {}), out
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        tensors = ctx.saved_tensors
        layout = ctx.out.layout.cotangent()
        laid = redistribute(distributed(ctx.cls, grad, layout), layout)
        pull = _pull_back(ctx.local, ctx.needs_input_grad[4:])
        grads = run_on_ranks(
            ctx.out.layout.mesh, lambda coordinate: pull, (laid._local, *(t._local for t in tensors)), {}
        )
        rest = iter(grads)
        wrapped = [
            ctx.cls._wrap(next(rest), t._spec.with_layout(layout)) if needed else None
            for t, layout, needed in zip(tensors, ctx.strategy.gradients, ctx.needs_input_grad[4:], strict=True)
        ]
        return (None, None, None, None, *wrapped)


def _pull_back(local: Local, needed: Sequence[bool]) -> Callable[..., list[Tensor]]:
    def pull(grad: Tensor, *parts: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [part.detach().requires_grad_(is_needed) for part, is_needed in zip(parts, needed, strict=True)]
            out = _connected(local(*inputs), inputs)
        wanted = [x for x in inputs if x.requires_grad]
        return list(torch.autograd.grad(out, wanted, grad))

    return pull


# -- the operators


def multiplied(
    cls: Any,
    name: str,
    rule: Callable[[], Rule],
    infer: Local,
    tensors: Sequence[Any],
    asked: Asked | None = None,
    key: Any = None,
) -> Any:
    """The product of two tensors, and perhaps a bias, by the cheapest strategy, or the one asked for."""
    tensors = autocast(tensors)
    for t in tensors:
        if type(t) is not cls and not isinstance(t, cls):
            tensors = wrapped(cls, name, tensors)
            break
    asked = asked_now() if asked is None else asked
    return multiply(cls, decide_product(cls, name, rule, infer, tensors, asked, key), tensors)


def matmul(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked | None = None) -> Any:
    """`torch.matmul`, `@`."""
    a, b, *out = (*args, *kwargs.values())
    infer = torch.mm if func in (torch.mm, Tensor.mm) else torch.matmul
    if out or not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dim() == 0 or b.dim() == 0:
        return _plain(func, args, kwargs)
    return multiplied(
        cls, infer.__name__, lambda: matmul_rule(tuple(a.shape), tuple(b.shape)), infer, (a, b), asked=asked
    )


def rmatmul(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.__rmatmul__`."""
    return matmul(cls, torch.matmul, (args[1], args[0]), {})


def bmm(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.bmm`."""
    if len(args) != 2 or kwargs:
        return _plain(func, args, kwargs)
    a, b = args
    return multiplied(cls, "bmm", lambda: bmm_rule(tuple(a.shape), tuple(b.shape)), torch.bmm, (a, b))


def einsum(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.einsum`: of two operands a product, of others as torch breaks it up."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if kwargs or not isinstance(equation, str) or len(operands) != 2:
        return _plain(func, args, kwargs)
    a, b = operands
    rule = einsum_rule(equation, tuple(a.shape), tuple(b.shape))
    if rule is None:
        return _plain(func, args, kwargs)

    def infer(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum(equation, a, b)

    return multiplied(cls, "einsum", lambda: rule, infer, (a, b), key=equation)


def linear(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked | None = None) -> Any:
    """`torch.nn.functional.linear`. Of a result left pending one rank adds the bias."""
    x, weight, bias = args if len(args) == 3 and not kwargs else _bound(("input", "weight", "bias"), args, kwargs)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return multiplied(
        cls, "linear", lambda: linear_rule(tuple(x.shape), tuple(weight.shape)), F.linear, tensors, asked=asked
    )


def attention(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`: local for each head and each batch entry."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, k, v, mask, dropout, causal, scale, gqa = _bound(names, args, kwargs)
    causal, gqa = bool(causal), bool(gqa)
    if dropout:
        _accepted(cls, query, k, v, mask, dropout, causal, scale, gqa)
        return _attention_with_dropout(query, k, v, mask, dropout, causal, scale, gqa)
    tensors = (query, k, v) if mask is None else (query, k, v, mask)

    def local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa)

    def rule() -> Rule:
        return attention_rule([tuple(t.shape) for t in tensors], causal, gqa)

    return run_joint(cls, rule, local, tensors, ("attention", causal, scale, gqa))


def _accepted(cls: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> None:
    """Let torch refuse arguments that it would refuse on one device."""
    tensors = [t._spec.meta() if isinstance(t, cls) else t for t in (query, key, value, mask)]
    common_mesh(cls, "attention", [t for t in (query, key, value, mask) if t is not None])
    dropout, causal, scale, gqa = rest
    q, k, v, m = tensors
    with torch.no_grad(), plain():
        F.scaled_dot_product_attention(q, k, v, m, dropout, causal, scale=scale, enable_gqa=gqa)


def _attention_with_dropout(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Any:
    """Attention by operators on distributed tensors: torch's kernels would draw a mask of their own on each rank."""
    if gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -inf)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if mask is not None:  # a query that sees no key at all gets zeros
        weights = weights.masked_fill((scores == -inf).all(-1, keepdim=True), 0.0)
    return F.dropout(weights, dropout) @ value


def getitem(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[index]`, `x[index] = value`: a list of positions counts as a replicated tensor."""
    x, index, *value = args
    if isinstance(x, cls):
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, list) for part in parts):
            index = tuple(_replicated(cls, part, x) if isinstance(part, list) else part for part in parts)
    return _plain(func, (x, index, *value), kwargs)


def completing(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that is not linear, above autograd: what is pending is completed once, for the backward pass, too.

    Not where it may be asked to write to its operand; and torch may refuse the arguments first.
    """
    pending = any(isinstance(arg, cls) and arg._spec.pending for arg in args)
    if pending and not kwargs.get("inplace") and not any(arg is True for arg in args):
        accept_call(cls, func, args, kwargs)
        args = tuple([_complete(func, arg) if isinstance(arg, cls) and arg._spec.pending else arg for arg in args])
    return _plain(func, args, kwargs)


def _complete(func: Any, x: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return redistribute(x, completed(x._spec.layout), func.__name__)


def tensor_split(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.tensor_split`: where to split may be a tensor, whose numbers torch would read from memory."""
    x, where, dim = _bound(("input", "tensor_indices_or_sections", "dim"), args, kwargs)
    if not isinstance(where, cls):
        return _plain(func, args, kwargs)
    numbers = where.full_tensor()
    if type(numbers) is LocalTensor:
        numbers = next(iter(unstack(numbers).values()))
    return _plain(torch.tensor_split, (x, numbers, 0 if dim is None else dim), {})


def _replicated(cls: Any, values: list[Any], like: Any) -> Any:
    local = torch.tensor(values, device=like._spec.device)
    layout = replicated(like._spec.layout.mesh)
    spec = spec_of(layout, tuple(local.shape), local.stride(), local.dtype, local.device)
    return cls._wrap(on_all_ranks(local, layout.mesh), spec)


def _bound(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    unknown = set(given) - set(names)
    if unknown or len(args) > len(names):
        raise TypeError(
            f"unexpected arguments {sorted(unknown) or args[len(names) :]}; the parameters are {', '.join(names)}"
        )
    return [given.get(name) for name in names]


def by_this_door(function: Any) -> Callable[..., Any]:
    """Run a function of torch's that starts a backward pass: what is recomputed on the way must come in here again.

    `__torch_function__` is usually switched off while a function that it was asked about runs, for that would ask once
    more. So this runs a copy of the function that does not ask.
    """
    names = dict(function.__globals__)
    names |= dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda operands: False)
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return lambda cls, func, args, kwargs: copy(*args, **kwargs)


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def closing(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler run with this door closed: what it asks of its operands does not come in here again."""

    def handle(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return handler(cls, func, args, kwargs)

    return handle


_CLOSING: dict[Any, Callable[..., Any]] = {
    torch.matmul: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.bmm: bmm,
    Tensor.bmm: bmm,
    torch.einsum: einsum,
    torch.functional.einsum: einsum,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: rmatmul,
    F.linear: linear,
    F.scaled_dot_product_attention: attention,
    torch.tensor_split: tensor_split,
    Tensor.tensor_split: tensor_split,
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: getitem,
}
NONLINEAR = (
    *(getattr(F, name) for name in ("relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu")),
    *(
        getattr(F, name)
        for name in ("softplus", "hardswish", "hardtanh", "logsigmoid", "glu", "softmax", "log_softmax")
    ),
    *(getattr(F, name) for name in ("layer_norm", "rms_norm", "group_norm", "dropout", "cross_entropy", "normalize")),
    *(getattr(module, name) for module in (torch, Tensor) for name in ("relu", "tanh", "sigmoid", "softmax", "exp")),
    *(getattr(module, name) for module in (torch, Tensor) for name in ("log_softmax", "log", "sqrt", "rsqrt", "pow")),
)
_CLOSING |= dict.fromkeys(NONLINEAR, completing)
JOINT: dict[Any, Callable[..., Any]] = {
    **{func: closing(handler) for func, handler in _CLOSING.items()},
    **{func: by_this_door(func) for func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)},
}
