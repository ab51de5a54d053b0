"""View operators: all elements of a tensor in other dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from dshard.comm import mapped
from dshard.core.call import Call, Composed, Kernel, LocalOp, Operator, RankCall, views_first
from dshard.core.moves import expanded_as
from dshard.core.shared_memory import share_memory
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec, contiguous_stride
from dshard.core.torch_function import bind_arguments
from dshard.core.view_sync import keep_views, refuse_recorded_writes, swap_content
from dshard.errors import LayoutError
from dshard.ops.gradient_blocks import MERGED
from dshard.rules.reshape import reshape_rule
from dshard.rules.rule import MOVES, Rule, linear
from dshard.torch_private import no_dispatch, no_torch_function, tensor_references


def with_local_size(name: str) -> Kernel:
    """A kernel with the output's local shape in place of the global argument `name`."""

    def kernel(call: RankCall) -> LocalOp:
        size = call.out_local_shape()
        return call.func if size == call.out_shapes[0] else call.with_argument(name, size)

    return kernel


# -- other dims, all elements


def reshape(call: Call) -> Rule:
    """A dim may be sharded where its shards are shards of the new shape, too; else another is in its place."""
    if call.argument("dtype") is not None:  # the bits as another dtype, whose size may differ
        return call.rule("... -> ...", same_size=True)
    return replace(reshape_rule(call.shapes[0], call.out_shapes[0]), passes=MOVES, reshards=True)


def reshape_kernel(call: RankCall) -> LocalOp:
    """A kernel with the local shape in place of the global one; a view wherever the local strides allow it."""
    if call.argument("dtype") is not None:
        return call.func
    shape = call.out_local_shape()
    return lambda x, *_, **__: x.reshape(shape)


def permute(call: Call) -> Rule:
    """Any dim may be sharded."""
    dims = _names(call)
    return call.rule(f"{' '.join(dims)} -> {' '.join(dims[dim] for dim in call.argument('dims'))}", passes=MOVES)


def _names(call: Call) -> list[str]:
    return [f"d{i}" for i in range(len(call.shapes[0]))]


def transpose(call: Call) -> Rule:
    """Any dim may be sharded."""
    dims, out = _names(call), _names(call)
    if dims:
        a, b = call.argument("dim0"), call.argument("dim1")
        out[a], out[b] = dims[b], dims[a]
    return call.rule(f"{' '.join(dims)} -> {' '.join(out)}", passes=MOVES)


def t(call: Call) -> Rule:
    """Any dim may be sharded."""
    dims = _names(call)
    return call.rule(f"{' '.join(dims)} -> {' '.join(reversed(dims))}", passes=MOVES)


def unsqueeze(call: Call) -> Rule:
    """Any dim may be sharded except the new one, of size one."""
    return call.rule("... ... -> ... 1 ...", at="dim", passes=MOVES)


def squeeze(call: Call) -> Rule:
    """Any dim that stays may be sharded."""
    return call.rule("... 1 ... -> ... ...", at=_squeezed(call), passes=MOVES)


def _squeezed(call: Call) -> tuple[int, ...]:
    """The dims of size one that the call removes."""
    shape = call.shapes[0]
    dims = call.dims() if shape and call.argument("dim") != [] else ()
    return tuple(dim for dim in dims if shape[dim] == 1)


def squeeze_kernel(call: RankCall) -> LocalOp:
    """A kernel that removes only dims of global size one, as other dims may have local size one."""
    gone = _squeezed(call)
    return lambda x, *_, **__: x.squeeze(gone)


def expand(call: Call) -> Rule:
    """Any dim may be sharded except the new ones, which lead, and those that are repeated."""
    return call.rule("... -> [...] ...", same_size=True, passes=MOVES)


def strided(call: Call) -> Rule:
    """No dim may be sharded, as strides reach any element; but strides of a contiguous tensor are a reshape."""
    if _is_plain(call):
        return reshape(call)
    return call.rule("[...] -> [...]", passes=MOVES)


def _is_plain(call: Call) -> bool:
    src, dst = call.specs[0], call.outs[0]
    starts = not call.argument("storage_offset")
    return (
        starts and src.stride == contiguous_stride(src.shape) and dst.is_contiguous() and prod(src.shape) == dst.numel()
    )


def in_memory_of(call: Call, is_moved: bool) -> Callable[[Tensor], Tensor] | None:
    """The function that gives the redistributed operand of a view the strides of its spec; None if any will do.

    Needed for views by given strides, and if the operand `is_moved`: then it is a copy, to which views write.
    """
    spec = call.specs[0]
    if call.func is _ATEN.as_strided.default and not _is_plain(call):
        return partial(mapped, partial(_in_memory_as, spec))
    return partial(expanded_as, spec) if is_moved and spec.expanded_dims and views_first(call.func) else None


def _in_memory_as(spec: Spec, x: Tensor) -> Tensor:
    """The tensor with the strides of `spec`; itself if it has them."""
    return x if x.stride() == spec.stride else x.new_empty_strided(spec.shape, spec.stride).copy_(x)


def strided_kernel(call: RankCall) -> LocalOp:
    """A kernel whose offset counts from the start of the operand, which has all its memory: see `strided_of_base`."""
    if _is_plain(call):
        return reshape_kernel(call)

    def local(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
        return x.as_strided(size, stride, x.storage_offset() + (storage_offset or 0))

    return local


def strided_of_base(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`as_strided` of a view: strides over the memory of its base.

    Raises:
        LayoutError: its elements are other numbers than those of its base, as parts of complex ones are.
    """
    x, size, stride, *rest = args
    start = rest[0] if rest else kwargs.get("storage_offset")
    with no_torch_function():
        base = x._base
        if x.dtype != base.dtype or (x.is_complex() and not share_memory(x, base)):
            raise LayoutError(
                f"as_strided of a view in {x.dtype} of other numbers, of {base.dtype}, such as x.real or "
                "x.conj(): call it on a copy of the view, x.real.clone().as_strided(...)"
            )
        return func(base, size, stride, x.storage_offset() if start is None else start)


def as_strided(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`as_strided`; where nothing is recorded, of a view as of its base, which autograd then makes it of again.

    The gradient of a later write would else be without the elements that the view has not. Of a recorded view torch's
    own has none of these before a write, but has them after it, which is refused.
    """
    x, size, stride, start = bind_arguments(("input", "size", "stride", "storage_offset"), args, kwargs)
    if not x._is_view():
        return NotImplemented
    if not (x.requires_grad and torch.is_grad_enabled()):
        return strided_of_base(func, (x, size, stride, start), {})
    if not torch.compiler.is_compiling() and _reaches_beyond(
        x, size, stride, x.storage_offset() if start is None else start
    ):
        refuse_recorded_writes(x)
    return NotImplemented


def _reaches_beyond(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> bool:
    """Whether these strides give elements in memory that `x` does not have."""
    if 0 in size:
        return False
    first, end = x.storage_offset(), _end(x.shape, x.stride(), x.storage_offset())
    if x.numel() == 0 or start < first or _end(size, stride, start) > end:
        return True
    if x.numel() == end - first:
        return False
    with no_dispatch():
        has = torch.zeros(end - first, dtype=torch.bool)
        has.as_strided(x.shape, x.stride()).fill_(True)
        return not has.as_strided(size, stride, start - first).all()


def _end(size: Sequence[int], stride: Sequence[int], start: Any) -> int:
    return 1 + int(start) + sum([(n - 1) * step for n, step in zip(size, stride, strict=True)])


# -- complex numbers


def as_real(call: Call) -> Rule:
    """Any dim may be sharded except the new one, of real and imaginary part."""
    return call.rule("... -> ... []", passes=linear(0))


def as_complex(call: Call) -> Rule:
    """Any dim may be sharded except the last one, of real and imaginary part."""
    return call.rule("... [] -> ...", passes=linear(0))


def conjugate(call: Call) -> Rule:
    """Any dim may be sharded."""
    return call.rule("... -> ...", passes=linear(0))


def done_now(operator: LocalOp) -> Kernel:
    """Resolve torch's lazy conjugate and negative bits: collectives read memory as it is."""
    return lambda call: operator


# -- the same tensor in other dims


def in_place(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Give a tensor in place the dims of the view."""
    x: Any = args[0]
    out = VIEWS_IN_PLACE[func](*args, **kwargs)
    keep_views(x, out._local_tensor)
    x._local_tensor, x._spec = out._local_tensor, out._spec
    with no_dispatch():
        func(*args, **kwargs)
    return x


def with_other_dims(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Give a tensor other dims in place where it is a view or has views: a view of what it was takes its place.

    Autograd makes views again by their functions: of other dims, the gradient of a later write would be that of a
    write to other elements.
    """
    x: Any = args[0]
    base = x._base if x._is_view() else x
    if x.requires_grad and (base.is_leaf or not torch.is_grad_enabled()):  # torch refuses leaves and their views
        return NotImplemented
    if base is x and tensor_references(x) == 1:
        return NotImplemented
    with torch.enable_grad():  # where nothing is recorded, either, it is to be no view that may not be written
        view = _VIEWS_OF_METHODS[func](*args, **kwargs)
    try:
        swap_content(x, view)
    except RuntimeError as error:
        name = func.__name__
        raise LayoutError(
            f"{name} of a tensor that is a view or has views, and that retains its gradient: make a new one, "
            f"x = x.{name.removesuffix('_')}(...), and call x.retain_grad() on that"
        ) from error
    return x


def _strided_once(*args: Any, **kwargs: Any) -> Any:
    view = as_strided(torch.as_strided, args, kwargs)
    return torch.as_strided(*args, **kwargs) if view is NotImplemented else view


_VIEWS_OF_METHODS: dict[Any, Function] = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze")
}
_VIEWS_OF_METHODS |= dict.fromkeys((torch.as_strided_, Tensor.as_strided_), _strided_once)
GIVE_OTHER_DIMS = tuple(_VIEWS_OF_METHODS)
"""The functions that give a tensor other dims in place."""

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

_OF_VIEW = {_ATEN.as_strided.default: Composed(strided_of_base, lambda args: args[0]._is_view())}
"""Operators of a view that reach memory beyond it."""

_RESHAPE = Operator(reshape, reshape_kernel, composed=MERGED, blocks=True)

RULES: dict[str, Operator] = {
    **{f"aten::{name}": _RESHAPE for name in ("view", "reshape", "_unsafe_view", "_reshape_alias")},
    "aten::permute": Operator(permute),
    "aten::transpose": Operator(transpose),
    "aten::t": Operator(t),
    "aten::unsqueeze": Operator(unsqueeze),
    "aten::squeeze": Operator(squeeze, squeeze_kernel, blocks=True),
    "aten::expand": Operator(expand, with_local_size("size"), blocks=True),
    "aten::view_as_real": Operator(as_real),
    "aten::view_as_complex": Operator(as_complex),
    "aten::_conj": Operator(conjugate, done_now(torch.conj_physical)),
    "aten::_neg_view": Operator(conjugate, done_now(torch.neg)),
    "aten::as_strided": Operator(strided, strided_kernel, composed=_OF_VIEW),
}
