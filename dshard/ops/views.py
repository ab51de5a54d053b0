"""Operators that show all elements of a tensor in other dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from dshard.comm import LocalTensor, plain, stack, unstack
from dshard.core.call import Call, Kernel, LocalOp, Operator, names, out_local_shape
from dshard.core.spec import Spec, contiguous_stride
from dshard.mesh import Coordinate
from dshard.rules.reshape import reshape_rule
from dshard.rules.rule import ANY, LINEAR, PassThrough, Rule, Term
from dshard.rules.strategy import Strategy

PASS = (PassThrough(frozenset({0}), ANY),)
"""The pass-throughs of an operator that only moves elements: any partial operand passes."""


def moved(src: Term, *outputs: Term) -> Rule:
    """The rule of an operator that moves elements of one operand."""
    return Rule((src,), outputs, passes=PASS)


def kept(ndim: int, whole: Iterable[int] = ()) -> Term:
    """A term of `ndim` dims, those in `whole` without a factor.

    >>> kept(3, (1,))
    (('0',), (), ('2',))
    """
    out = set(whole)
    return tuple(() if i in out else (str(i),) for i in range(ndim))


def dims_of(call: Call, name: str, ndim: int) -> tuple[int, ...]:
    """The argument `name`, one dim or several, as tensor dims counted from 0. Unlike `Call.dims`, [] names none."""
    given = call.argument(name)
    given = [given] if isinstance(given, int) else given
    return tuple(dim + ndim if dim < 0 else dim for dim in given)


def with_local_size(name: str) -> Kernel:
    """A kernel: the operator, with the output's local shape in place of its global argument `name`."""

    def kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
        size = out_local_shape(call, strategy, coordinate)
        if size == call.out_shapes[0]:
            return call.func
        at = [argument.name for argument in call.func._schema.arguments].index(name)

        def local(*args: Any, **kwargs: Any) -> Any:
            if at < len(args):
                return call.func(*args[:at], size, *args[at + 1 :], **kwargs)
            return call.func(*args, **{**kwargs, name: size})

        return local

    return kernel


# -- other dims, all elements


def reshape(call: Call) -> Rule:
    """Any reshape, and the view of the bits as another dtype."""
    src, dst = call.shapes[0], call.out_shapes[0]
    if call.argument("dtype") is not None:
        return _bits(call)
    rule = reshape_rule(src, dst)
    return Rule(rule.inputs, rule.outputs, rule.unsharded, passes=PASS, sizes=rule.sizes)


def _bits(call: Call) -> Rule:
    ndim = len(call.shapes[0])
    term = kept(ndim, () if call.shapes == call.out_shapes else (ndim - 1,))
    return Rule((term,), (term,))


def reshape_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel with the local shape in place of the global one; a view wherever the local strides allow it."""
    if call.argument("dtype") is not None:
        return call.func
    shape = out_local_shape(call, strategy, coordinate)
    return lambda x, *_, **__: x.reshape(shape)


def permute(call: Call) -> Rule:
    """The dims in another order."""
    term = names(len(call.shapes[0]))
    return moved(term, tuple(term[dim] for dim in dims_of(call, "dims", len(term))))


def transpose(call: Call) -> Rule:
    """Two dims exchanged."""
    term = names(len(call.shapes[0]))
    out = list(term)
    if term:
        a, b = call.dim("dim0"), call.dim("dim1")
        out[a], out[b] = out[b], out[a]
    return moved(term, tuple(out))


def t(call: Call) -> Rule:
    """The transpose of a tensor of at most two dims."""
    term = names(len(call.shapes[0]))
    return moved(term, term[::-1])


def unsqueeze(call: Call) -> Rule:
    """A new dim of size one."""
    term = names(len(call.shapes[0]))
    at = call.dim(ndim=len(term) + 1)
    return moved(term, (*term[:at], (), *term[at:]))


def squeeze(call: Call) -> Rule:
    """Dims of size one go."""
    gone = _squeezed(call)
    ndim = len(call.shapes[0])
    return moved(kept(ndim, gone), tuple((str(i),) for i in range(ndim) if i not in gone))


def _squeezed(call: Call) -> tuple[int, ...]:
    shape = call.shapes[0]
    default = call.func._schema.overload_name == ""
    named = range(len(shape)) if default else dims_of(call, "dim", len(shape))
    return tuple(dim for dim in named if 0 <= dim < len(shape) and shape[dim] == 1)


def squeeze_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel that drops only dims whose global size is one: a local tensor may have that size by chance."""
    gone = _squeezed(call)
    return lambda x, *_, **__: x.squeeze(gone)


def expand(call: Call) -> Rule:
    """Dims of size one are repeated, new ones lead."""
    src, dst = call.shapes[0], call.out_shapes[0]
    new = len(dst) - len(src)
    term = tuple((str(i),) if n == dst[new + i] else () for i, n in enumerate(src))
    return moved(term, ((),) * new + term)


def strided(call: Call) -> Rule:
    """Any strides over the whole tensor; the plain ones of a plain tensor are a reshape."""
    if _is_plain(call):
        return reshape(call)
    src, dst = call.shapes[0], call.out_shapes[0]
    return moved(((),) * len(src), ((),) * len(dst))


def _is_plain(call: Call) -> bool:
    src, dst = call.specs[0], call.outs[0]
    starts = not call.argument("storage_offset")
    return (
        starts and src.stride == contiguous_stride(src.shape) and dst.is_contiguous() and prod(src.shape) == dst.numel()
    )


def counts_memory(call: Call) -> bool:
    """Whether strides are given that count in memory, where the operand must have the memory format of its strides."""
    return call.func is _ATEN.as_strided.default and not _is_plain(call)


def in_memory_as(spec: Spec, whole: Tensor) -> Tensor:
    """The tensor with the strides of `spec`; itself if it has them."""
    if type(whole) is LocalTensor:
        with plain():
            parts = {rank: in_memory_as(spec, part) for rank, part in unstack(whole).items()}
            return whole if all(parts[rank] is part for rank, part in unstack(whole).items()) else stack(parts)
    return whole if whole.stride() == spec.stride else whole.new_empty_strided(spec.shape, spec.stride).copy_(whole)


def strided_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel whose offset counts from the start of the operand, which has all its memory: see `strided_of_base`."""
    if _is_plain(call):
        return reshape_kernel(call, strategy, coordinate)

    def local(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
        return x.as_strided(size, stride, x.storage_offset() + (storage_offset or 0))

    return local


def strided_of_base(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any strides over the memory of a view, which is that of its base."""
    x, size, stride, *rest = args
    start = rest[0] if rest else kwargs.get("storage_offset")
    with torch._C.DisableTorchFunctionSubclass():
        return func(x._base, size, stride, x.storage_offset() if start is None else start)


# -- complex numbers


def as_real(call: Call) -> Rule:
    """Real and imaginary parts become a last dim."""
    term = names(len(call.shapes[0]))
    return Rule((term,), ((*term, ()),), passes=(PassThrough(frozenset({0}), LINEAR),))


def as_complex(call: Call) -> Rule:
    """The last dim becomes one complex number."""
    term = names(len(call.out_shapes[0]))
    return Rule(((*term, ()),), (term,), passes=(PassThrough(frozenset({0}), LINEAR),))


def conjugate(call: Call) -> Rule:
    """Every element by itself."""
    term = names(len(call.shapes[0]))
    return Rule((term,), (term,), passes=(PassThrough(frozenset({0}), LINEAR),))


def done_now(operator: LocalOp) -> Kernel:
    """Resolve torch's lazy conjugate and negative bits: collectives read memory as it is."""
    return lambda call, strategy, coordinate: operator


# -- the same tensor in other dims


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change a tensor in place to the dims of the view."""
    x: Any = args[0]
    out = VIEWS_IN_PLACE[func](*args, **kwargs)
    x._local, x._spec = out._local, out._spec
    with no_dispatch():
        func(*args, **kwargs)
    return x


_ATEN = torch.ops.aten

VIEWS_IN_PLACE: dict[Any, Any] = {
    _ATEN.t_.default: _ATEN.t.default,
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
    _ATEN.squeeze_.default: _ATEN.squeeze.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.squeeze_.dims: _ATEN.squeeze.dims,
    _ATEN.as_strided_.default: _ATEN.as_strided.default,
}

CUSTOM: dict[Any, Callable[..., Any]] = dict.fromkeys(VIEWS_IN_PLACE, in_place)
OF_BASE: dict[Any, Callable[..., Any]] = {_ATEN.as_strided.default: strided_of_base}
"""Operators that reach memory beyond a view of which they are called."""

_RESHAPE = Operator(reshape, reshape_kernel)

RULES: dict[str, Operator] = {
    **{f"aten::{name}": _RESHAPE for name in ("view", "reshape", "_unsafe_view", "_reshape_alias")},
    "aten::permute": Operator(permute),
    "aten::transpose": Operator(transpose),
    "aten::t": Operator(t),
    "aten::unsqueeze": Operator(unsqueeze),
    "aten::squeeze": Operator(squeeze, squeeze_kernel),
    "aten::expand": Operator(expand, with_local_size("size")),
    "aten::view_as_real": Operator(as_real),
    "aten::view_as_complex": Operator(as_complex),
    "aten::_conj": Operator(conjugate, done_now(torch.conj_physical)),
    "aten::_neg_view": Operator(conjugate, done_now(torch.neg)),
    "aten::as_strided": Operator(strided, strided_kernel),
}
