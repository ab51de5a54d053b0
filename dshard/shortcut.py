"""Warm calls that go from the function that was called straight to the local one.

Most of torch's functions come down through autograd and the dispatcher as just one operator, or are one product. Where
nothing is recorded and nobody listens, that way adds nothing but time. So the first call of a function on operands of
these specs is watched: if one operator was all that ran, later calls run it on the local parts at once. If the function
itself, called on the local parts, is that operator again, it is what they call: torch finds its own functions faster
than operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from dshard.comm import LocalTensor, runtime_of
from dshard.dispatch import SEEN, Run, Seen
from dshard.ops.matmul.asked import nothing_asked
from dshard.ops.observe import OBSERVERS
from dshard.ops.settings import current
from dshard.product import Product

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Shortcut: TypeAlias = Callable[[Args, Kwargs], Any]
Through: TypeAlias = Callable[[Any, Any, Args, Kwargs], Any]

_make = Tensor._make_wrapper_subclass
_is_compiling = torch.compiler.is_compiling
_modes, _autocast = torch._C._len_torch_dispatch_stack, torch._C._is_any_autocast_enabled
_recording, _door_closed = torch.is_grad_enabled, torch._C.DisableTorchFunctionSubclass
_NUMBERS = frozenset({int, float, bool, complex})
_INT = frozenset({int})
_VALUES = frozenset({type(None), str, torch.dtype})
_NEVER: set[Any] = set()
"""Functions that run no operator, write to their operand or show its memory: autograd has to see those."""
_BY_KIND: set[Any] = set()
"""Functions that run one operator whatever the values of their numbers are, which need not be looked up."""


def call(cls: Any, func: Any, args: Args, kwargs: Kwargs, through: Through) -> Any:
    """`func` on distributed tensors of class `cls`: by a shortcut if there is one, else by `through`."""
    if func in _NEVER or _is_compiling() or _is_watched():
        return through(cls, func, args, kwargs)
    with _door_closed():
        key = _key(cls, func, args, kwargs)
        if key is not None:
            shortcuts = current().shortcuts
            found = shortcuts.get(key)
            if found:
                shortcuts.hits += 1
                return found(args, kwargs)
    if key is None or found is not None:
        return through(cls, func, args, kwargs)
    return _learn(cls, func, args, kwargs, through, key)


def _key(cls: Any, func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, ...] | None:
    """What tells calls apart; None where something is recorded, or among the arguments that is not looked up."""
    recording, by_kind = _recording(), func in _BY_KIND
    parts: list[Any] = [func]
    for arg in args:
        kind = type(arg)
        if kind is cls:
            if recording and arg.requires_grad:
                return None
            parts.append(arg._spec)
        elif kind in _NUMBERS:
            parts.append(kind if by_kind else (kind, arg))
        elif kind in _VALUES:
            parts.append(arg)
        elif (kind is tuple or kind is list) and set(map(type, arg)) <= _INT:
            parts.append(tuple(arg))
        else:
            return None
    for name, arg in kwargs.items():
        kind = type(arg)
        if kind is cls:
            if recording and arg.requires_grad:
                return None
            parts += (name, arg._spec)
        elif kind in _NUMBERS or kind in _VALUES:
            parts += (name, kind, arg)
        else:
            return None
    return tuple(parts)


def _is_watched() -> bool:
    """Whether somebody wants to see the operators, or something is asked of products."""
    if OBSERVERS or _modes() or _autocast() or not nothing_asked():
        return True
    return forward_ad._current_level >= 0


def _learn(cls: Any, func: Any, args: Args, kwargs: Kwargs, through: Through, key: Any) -> Any:
    seen: list[Seen] = []
    SEEN.append(seen)
    try:
        out = through(cls, func, args, kwargs)
    finally:
        SEEN.remove(seen)
    if not seen:
        _NEVER.add(func)
    else:
        current().shortcuts.add(key, _shortcut(cls, func, args, kwargs, out, seen) or False)
    return out


def _shortcut(cls: Any, func: Any, args: Args, kwargs: Kwargs, out: Any, seen: Sequence[Seen]) -> Shortcut | None:
    """How to call `func` on operands like these from now on, if what was seen of it allows."""
    run, op, op_args, op_kwargs, result = seen[0]
    first = isinstance(result, tuple) and out is result[0]
    if len(seen) > 1 or not (out is result or first) or type(out) is not cls or _is_elsewhere(out):
        return None
    given = [(i, arg) for i, arg in enumerate(args) if type(arg) is cls]
    named = [(name, arg) for name, arg in kwargs.items() if type(arg) is cls]
    operands = [arg for arg in op_args if isinstance(arg, Tensor)]
    if [*map(id, operands)] != [id(arg) for _, arg in (*given, *named)]:
        return None
    if isinstance(run, Product):
        return None if kwargs or run.streamed is not None else _of_product(cls, run, [i for i, _ in given])
    assert isinstance(run, Run)
    if run.inplace or run.views:
        _NEVER.add(func)
        return None
    if run.warm is None or (op_kwargs and any(isinstance(arg, Tensor) for arg in op_kwargs.values())):
        return None
    return _of_operator(cls, func, run, op, args, kwargs, op_args, op_kwargs, out, first)


def _is_elsewhere(x: Any) -> bool:
    """Whether the ranks are simulated, or there are none."""
    return type(x._local) is LocalTensor or x._local.is_meta or runtime_of(x._spec.layout.mesh) is None


def _of_product(cls: Any, product: Product, places: Sequence[int]) -> Shortcut:
    spec, run = product.out, product.on_local
    shape, stride, dtype, device = spec.shape, spec.stride, spec.dtype, spec.device
    i, j, *bias = places

    def call(args: Args, kwargs: Kwargs) -> Any:
        b = args[bias[0]]._local if bias else None
        out = _make(cls, shape, strides=stride, dtype=dtype, device=device)
        out._local = run(args[i]._local, args[j]._local, b)[0]
        out._spec = spec
        return out

    return call


def _of_operator(
    cls: Any,
    func: Any,
    run: Run,
    op: OpOverload,
    args: Args,
    kwargs: Kwargs,
    op_args: Args,
    op_kwargs: Kwargs,
    out: Any,
    first: bool,
) -> Shortcut | None:
    assert run.warm is not None
    assert run.warm.operator is not None
    spec, operator = out._spec, run.warm.operator
    shape, stride, dtype, device = spec.shape, spec.stride, spec.dtype, spec.device
    slots = [i for i, arg in enumerate(op_args) if isinstance(arg, Tensor)]
    places = [i for i, arg in enumerate(args) if type(arg) is cls]
    names = [name for name, arg in kwargs.items() if type(arg) is cls]
    moves = dict(run.warm.moves)
    if not moves and run.op.kernel is None and _is(func, op, args, kwargs, op_args, op_kwargs, cls):
        if not run.values:
            _BY_KIND.add(func)

        def itself(args: Args, kwargs: Kwargs) -> Any:
            out = _make(cls, shape, strides=stride, dtype=dtype, device=device)
            local = [arg._local if type(arg) is cls else arg for arg in args]
            if kwargs:
                kwargs = {name: arg._local if type(arg) is cls else arg for name, arg in kwargs.items()}
            out._local = func(*local, **kwargs)
            out._spec = spec
            return out

        return itself
    if func in _BY_KIND:
        return None
    template = list(op_args)

    def as_operator(args: Args, kwargs: Kwargs) -> Any:
        local = template.copy()
        given = [args[i]._local for i in places]
        if names:
            given += [kwargs[name]._local for name in names]
        for i, x in zip(slots, given, strict=True):
            local[i] = moves[i](x) if i in moves else x
        found = operator(*local, **op_kwargs)
        out = _make(cls, shape, strides=stride, dtype=dtype, device=device)
        out._local = found[0] if first else found
        out._spec = spec
        return out

    for i in slots:
        template[i] = None
    return as_operator


def _is(func: Any, op: OpOverload, args: Args, kwargs: Kwargs, op_args: Args, op_kwargs: Kwargs, cls: Any) -> bool:
    """Whether `func` on the local parts is that operator on them, with just the same further arguments."""
    local = [arg._local if type(arg) is cls else arg for arg in args]
    local_kwargs = {name: arg._local if type(arg) is cls else arg for name, arg in kwargs.items()}
    with torch.no_grad(), _Watch() as watch:
        func(*local, **local_kwargs)
    if len(watch.calls) != 1:
        return False
    found, found_args, found_kwargs = watch.calls[0]
    wanted = [arg._local if isinstance(arg, cls) else arg for arg in op_args]
    return found is op and _same([*found_args, found_kwargs], [*wanted, op_kwargs])


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y if isinstance(x, Tensor) else type(x) is type(y) and x == y for x, y in zip(a, b, strict=True)
    )


class _Watch(TorchDispatchMode):
    """The operators that run within the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[OpOverload, Args, Kwargs]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
