"""Operators that join tensors, reorder, repeat, pad and mask their elements, and make new tensors like one."""

from __future__ import annotations

from dataclasses import replace

from dshard.core.call import Call, LocalOp, Operator, RankCall
from dshard.core.checks import check_cat
from dshard.core.spec import dense_stride
from dshard.ops import exchange
from dshard.ops.exchange import index_exchange
from dshard.ops.gradient_blocks import EQUAL_PARTS
from dshard.ops.views import with_local_size
from dshard.placements import ReduceOp
from dshard.rules.rule import ANY, MOVES, PassThrough, Rule, together

SAME_WHEN_EQUAL: tuple[ReduceOp, ...] = ("avg", "max", "min")
"""The reductions that leave a value unchanged if all ranks have it."""


def cat(call: Call) -> Rule:
    """Any dim may be sharded except the one along which tensors are joined."""
    ndim = len(call.out_shapes[0])  # torch skips operands of shape (0,)
    operands = ", ".join("... [] ..." if len(shape) == ndim else "[]" for shape in call.shapes)
    return call.rule(f"{operands} -> ... [] ...", at="dim", passes=_together(call))


def stack(call: Call) -> Rule:
    """Any dim may be sharded except the new one."""
    return call.rule("*... ... -> ... [] ...", at="dim", passes=_together(call))


def _together(call: Call) -> tuple[PassThrough, ...]:
    same = len({spec.dtype for spec in call.specs}) == 1
    return together(*range(len(call.specs)), ops=ANY) if same else ()


def roll(call: Call) -> Rule:
    """Any dim may be sharded except those along which elements move; none where no dim is named."""
    dims = call.argument("dims") or range(len(call.shapes[0]))
    return call.rule("... [] ... -> ... [] ...", at=dims, passes=MOVES)


def flip(call: Call) -> Rule:
    """Any dim may be sharded except those that are reversed."""
    return call.rule("... [] ... -> ... [] ...", at="dims", passes=MOVES)


def repeat(call: Call) -> Rule:
    """Any dim may be sharded except the new ones, which lead, and those that are repeated."""
    ndim, times = len(call.shapes[0]), call.argument("repeats")
    repeated = [i for i, n in enumerate(times[len(times) - ndim :]) if n != 1]
    return call.rule("... [] ... -> [...] ... [] ...", at=repeated, passes=MOVES)


def pad(call: Call) -> Rule:
    """Any dim may be sharded except those that grow or shrink."""
    pads, ndim = call.argument("pad"), len(call.shapes[0])
    changed = [ndim - 1 - i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    ops = ANY if call.argument("value") == 0 else SAME_WHEN_EQUAL
    return call.rule("... [] ... -> ... [] ...", at=changed, passes=together(0, ops=ops))


def triangle(call: Call) -> Rule:
    """Any dim may be sharded: each rank knows the positions of its rows and columns."""
    return call.rule("... -> ...", passes=MOVES)


def triangle_kernel(call: RankCall) -> LocalOp:
    """A kernel whose diagonal counts from the first row and column of the local tensor."""
    rows, columns = call.strategy.inputs[0].region(call.shapes[0], call.coordinate)[-2:]
    diagonal = call.argument("diagonal") + rows.start - columns.start
    return lambda x, *_, **__: call.func(x, diagonal)


# -- new tensors


def creation(call: Call) -> Rule:
    """Dims of the operand's size may be sharded as they are there; its values are not read."""
    alike = len(call.shapes[0]) == len(call.out_shapes[0])
    rule = call.rule("... -> ..." if alike else "[...] -> [...]", same_size=True)
    return replace(rule, unread=frozenset({0}))


def like_kernel(call: RankCall) -> LocalOp:
    """A kernel for a new tensor, whose local shape may differ from that of the first operand."""
    size = call.out_local_shape()
    if call.local_shape() == size:
        return call.func
    return lambda x, *args, **options: call.func(x.new_empty(size), *args, **options)


def strided_kernel(call: RankCall) -> LocalOp:
    """A kernel that gives local strides in the order of the global ones."""
    size = call.out_local_shape()
    stride = dense_stride(size, tuple(call.argument("stride")))
    return lambda x, _size, _stride, **options: call.func(x, size, stride, **options)


_LIKE = Operator(creation, like_kernel, blocks=True)
_NEW = Operator(creation, with_local_size("size"), blocks=True)

RULES: dict[str, Operator] = {
    "aten::cat": Operator(
        cat, alternatives=(index_exchange(exchange.concatenate),), composed=EQUAL_PARTS, check=check_cat
    ),
    "aten::stack": Operator(stack),
    "aten::flip": Operator(flip, alternatives=(index_exchange(exchange.flip),)),
    "aten::roll": Operator(roll, alternatives=(index_exchange(exchange.roll),)),
    "aten::repeat": Operator(repeat, alternatives=(index_exchange(exchange.repeat),)),
    "aten::constant_pad_nd": Operator(pad, alternatives=(index_exchange(exchange.pad),)),
    "aten::tril": Operator(triangle, triangle_kernel),
    "aten::triu": Operator(triangle, triangle_kernel),
    **{f"aten::{name}_like": _LIKE for name in ("zeros", "ones", "full", "empty")},
    **{f"aten::new_{name}": _NEW for name in ("zeros", "ones", "full", "empty")},
    "aten::new_empty_strided": Operator(creation, strided_kernel, blocks=True),
}
