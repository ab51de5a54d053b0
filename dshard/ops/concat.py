"""Operators that join tensors, reorder, repeat, pad and mask their elements, and make new tensors like one."""

from __future__ import annotations

from dshard.core.call import Call, LocalOp, Operator, names, out_local_shape, pending_all
from dshard.layout import Shape
from dshard.mesh import Coordinate
from dshard.ops.views import dims_of, kept, moved, with_local_size
from dshard.placements import ReduceOp
from dshard.rules.rule import ANY, PassThrough, Rule
from dshard.rules.strategy import Strategy

SAME_WHEN_EQUAL: tuple[ReduceOp, ...] = ("avg", "max", "min")
"""The reductions that leave a value unchanged if all ranks have it."""


def cat(call: Call) -> Rule:
    """The joined dim stays whole. torch skips operands of shape (0,)."""
    ndim = len(call.out_shapes[0])
    term = kept(ndim, (call.dim(ndim=ndim),))
    inputs = tuple(term if len(shape) == ndim else ((),) for shape in call.shapes)
    return Rule(inputs, (term,), passes=_together(call))


def stack(call: Call) -> Rule:
    """A new dim of one index for each operand."""
    ndim = len(call.shapes[0])
    term, at = names(ndim), call.dim(ndim=ndim + 1)
    return Rule((term,) * len(call.specs), ((*term[:at], (), *term[at:]),), passes=_together(call))


def _together(call: Call) -> tuple[PassThrough, ...]:
    same = len({spec.dtype for spec in call.specs}) == 1
    return pending_all(len(call.specs), ANY) if same else ()


def roll(call: Call) -> Rule:
    """Elements move along some dims; if none is named, anywhere."""
    ndim = len(call.shapes[0])
    term = kept(ndim, dims_of(call, "dims", ndim) or range(ndim))
    return moved(term, term)


def flip(call: Call) -> Rule:
    """Dims in the opposite order, or a plane turned."""
    ndim = len(call.shapes[0])
    term = kept(ndim, dims_of(call, "dims", ndim))
    return moved(term, term)


def repeat(call: Call) -> Rule:
    """New dims lead. Dims that are repeated stay whole."""
    src, times = call.shapes[0], call.argument("repeats")
    new = len(times) - len(src)
    term = kept(len(src), [i for i in range(len(src)) if times[new + i] != 1])
    return moved(term, ((),) * new + term)


def pad(call: Call) -> Rule:
    """Dims that grow or shrink stay whole. A padding of zeros lets every pending reduction pass."""
    src, pads = call.shapes[0], call.argument("pad")
    changed = [len(src) - 1 - i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    term = kept(len(src), changed)
    passing = ANY if call.argument("value") == 0 else SAME_WHEN_EQUAL
    return Rule((term,), (term,), passes=(PassThrough(frozenset({0}), passing),))


def triangle(call: Call) -> Rule:
    """Elements beyond a diagonal become zero: any dim may be split, the kernel knows where it stands."""
    term = names(len(call.shapes[0]))
    return moved(term, term)


def triangle_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel whose diagonal counts from the first row and column of the local tensor."""
    rows, columns = strategy.inputs[0].region(call.shapes[0], coordinate)[-2:]
    diagonal = call.argument("diagonal") + rows.start - columns.start
    return lambda x, *_, **__: call.func(x, diagonal)


# -- new tensors


def creation(call: Call) -> Rule:
    """A new tensor, split where the first is and has the same size. Nothing of the first is read."""
    src, dst = call.shapes[0], call.out_shapes[0]
    if len(src) != len(dst):
        return Rule((((),) * len(src),), (((),) * len(dst),), unread=frozenset({0}))
    term = tuple((str(i),) if n == m else () for i, (n, m) in enumerate(zip(src, dst, strict=True)))
    return Rule((term,), (term,), unread=frozenset({0}))


def like_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel for a new tensor, whose local shape may differ from that of the first operand."""
    size = out_local_shape(call, strategy, coordinate)
    if strategy.inputs[0].local_shape(call.shapes[0], coordinate) == size:
        return call.func
    return lambda x, *args, **options: call.func(x.new_empty(size), *args, **options)


def strided_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel that gives local strides in the order of the global ones."""
    size = out_local_shape(call, strategy, coordinate)
    stride = dense_stride(size, tuple(call.argument("stride")))
    return lambda x, _size, _stride, **options: call.func(x, size, stride, **options)


def dense_stride(shape: Shape, like: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor of `shape` without gaps whose dims lie in memory in the order of the strides `like`.

    >>> dense_stride((2, 3), (1, 10))
    (1, 2)
    """
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


_NEW = Operator(creation, with_local_size("size"))

RULES: dict[str, Operator] = {
    "aten::cat": Operator(cat),
    "aten::stack": Operator(stack),
    "aten::flip": Operator(flip),
    "aten::rot90": Operator(flip),
    "aten::roll": Operator(roll),
    "aten::repeat": Operator(repeat),
    "aten::constant_pad_nd": Operator(pad),
    "aten::tril": Operator(triangle, triangle_kernel),
    "aten::triu": Operator(triangle, triangle_kernel),
    **{f"aten::{name}_like": Operator(creation, like_kernel) for name in ("zeros", "ones", "full", "empty")},
    **{f"aten::new_{name}": _NEW for name in ("zeros", "ones", "full", "empty")},
    "aten::new_empty_strided": Operator(creation, strided_kernel),
}
