"""Operators that show a tensor's elements in other dims or a part of them, and the backward forms of these.

A dim of which an operator takes a part stays whole: its term carries no factor there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch.utils._mode_utils import no_dispatch

from dshard.layout import Shape
from dshard.mesh import Coordinate
from dshard.ops.call import Call, Kernel, LocalOp, Op, names, out_local_shape, pending_all
from dshard.ops.reshape import reshape_rule
from dshard.ops.rule import ANY, LINEAR, Pending, Rule, Term
from dshard.ops.strategy import Strategy

PASS = (Pending(frozenset({0}), ANY),)
"""Moving elements commutes with any pending reduction."""


def moved(src: Term, *outputs: Term) -> Rule:
    """Elements of one operand in other places."""
    return Rule((src,), outputs, pending=PASS)


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


# -- other dims, all elements


def reshape(call: Call) -> Rule:
    """Any reshape, and the view of the bits as another dtype."""
    src, dst = call.shapes[0], call.out_shapes[0]
    if call.argument("dtype") is not None:
        return _bits(call)
    found = reshape_rule(src, dst)
    return Rule(found.inputs, found.outputs, found.whole, pending=PASS, sizes=found.sizes)


def _bits(call: Call) -> Rule:
    ndim = len(call.shapes[0])
    term = kept(ndim, () if call.shapes == call.out_shapes else (ndim - 1,))
    return Rule((term,), (term,))


def reshape_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """The local shape replaces the global one. A view wherever the local strides allow it."""
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
    """Only dims whose global size is one: a shard may have that size by chance."""
    gone = _squeezed(call)
    return lambda x, *_, **__: x.squeeze(gone)


def expand(call: Call) -> Rule:
    """Dims of size one are repeated, new ones lead."""
    src, dst = call.shapes[0], call.out_shapes[0]
    new = len(dst) - len(src)
    term = tuple((str(i),) if n == dst[new + i] else () for i, n in enumerate(src))
    return moved(term, ((),) * new + term)


# -- a part of the elements

Part: TypeAlias = Callable[[Call, Shape, Shape], tuple[Term, Term]]
"""The terms of a tensor of the first shape and of its part, of the second, for forward, backward and scatter forms."""


def select(call: Call, src: Shape, part: Shape) -> tuple[Term, Term]:
    """One index of a dim, which goes."""
    dim = call.dim(ndim=len(src))
    term = kept(len(src), (dim,))
    return term, (*term[:dim], *term[dim + 1 :])


def slice_(call: Call, src: Shape, part: Shape) -> tuple[Term, Term]:
    """Some indices of a dim. Where these are all, the dim may be split."""
    dim = call.dim(ndim=len(src))
    term = kept(len(src), () if src == part else (dim,))
    return term, term


def diagonal(call: Call, src: Shape, part: Shape) -> tuple[Term, Term]:
    """A diagonal of two dims becomes the last dim."""
    dims = (call.dim("dim1", len(src)), call.dim("dim2", len(src)))
    term = kept(len(src), dims)
    return term, (*(dim for i, dim in enumerate(term) if i not in dims), ())


def windows(call: Call, src: Shape, part: Shape) -> tuple[Term, Term]:
    """Windows of a dim, whose elements become the last dim."""
    name = "dimension" if call.argument("dimension") is not None else "dim"
    term = kept(len(src), (call.dim(name, len(src)),)) if src else ()
    return term, (*(term or ((),) * (len(part) - 1)), ())


def taken(part: Part) -> Callable[[Call], Rule]:
    """Tensor -> part."""

    def rule(call: Call) -> Rule:
        src, out = part(call, call.shapes[0], call.out_shapes[0])
        return moved(src, out)

    return rule


def put_back(part: Part) -> Callable[[Call], Rule]:
    """Gradient of the part -> gradient of the tensor, zero elsewhere."""

    def rule(call: Call) -> Rule:
        out, src = part(call, call.out_shapes[0], call.shapes[0])
        return moved(src, out)

    return rule


def replaced(part: Part) -> Callable[[Call], Rule]:
    """Tensor and another part -> tensor with that part."""

    def rule(call: Call) -> Rule:
        src, new = part(call, *call.shapes)
        return Rule((src, new), (src,), pending=pending_all(2, ANY))

    return rule


def with_local_size(name: str) -> Kernel:
    """The operator itself, its argument `name` the output's local shape in place of the global one."""

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


def split(call: Call) -> Rule:
    """Pieces of a dim."""
    term = kept(len(call.shapes[0]), (call.dim(),))
    return moved(term, *[term] * len(call.outs))


def unbind(call: Call) -> Rule:
    """A tensor for each index of a dim, which goes."""
    dim = call.dim()
    term = kept(len(call.shapes[0]), (dim,))
    return moved(term, *[(*term[:dim], *term[dim + 1 :])] * len(call.outs))


# -- complex numbers


def as_real(call: Call) -> Rule:
    """Real and imaginary parts become a last dim."""
    term = names(len(call.shapes[0]))
    return Rule((term,), ((*term, ()),), pending=(Pending(frozenset({0}), LINEAR),))


def as_complex(call: Call) -> Rule:
    """The last dim becomes one complex number."""
    term = names(len(call.out_shapes[0]))
    return Rule(((*term, ()),), (term,), pending=(Pending(frozenset({0}), LINEAR),))


# -- the same tensor in other dims


def in_place(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the tensor itself the dims of the view."""
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
}

CUSTOM: dict[Any, Callable[..., Any]] = dict.fromkeys(VIEWS_IN_PLACE, in_place)

_RESHAPE = Op(reshape, reshape_kernel)
_BACKWARD = with_local_size("input_sizes")

RULES: dict[str, Op] = {
    **{f"aten::{name}": _RESHAPE for name in ("view", "reshape", "_unsafe_view", "_reshape_alias")},
    "aten::permute": Op(permute),
    "aten::transpose": Op(transpose),
    "aten::t": Op(t),
    "aten::unsqueeze": Op(unsqueeze),
    "aten::squeeze": Op(squeeze, squeeze_kernel),
    "aten::expand": Op(expand, with_local_size("size")),
    "aten::view_as_real": Op(as_real),
    "aten::view_as_complex": Op(as_complex),
    "aten::select": Op(taken(select)),
    "aten::slice": Op(taken(slice_)),
    "aten::diagonal": Op(taken(diagonal)),
    "aten::unfold": Op(taken(windows)),
    "aten::select_backward": Op(put_back(select), _BACKWARD),
    "aten::slice_backward": Op(put_back(slice_), _BACKWARD),
    "aten::diagonal_backward": Op(put_back(diagonal), _BACKWARD),
    "aten::unfold_backward": Op(put_back(windows), _BACKWARD),
    "aten::select_scatter": Op(replaced(select)),
    "aten::slice_scatter": Op(replaced(slice_)),
    "aten::diagonal_scatter": Op(replaced(diagonal)),
    "aten::split": Op(split),
    "aten::split_with_sizes": Op(split),
    "aten::unsafe_split": Op(split),
    "aten::unsafe_split_with_sizes": Op(split),
    "aten::unbind": Op(unbind),
}
