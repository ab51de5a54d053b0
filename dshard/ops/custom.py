"""Operators that are not one local operator: decomposed ones, values on the host, lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.caches import Cache, cached
from dshard.comm import device_of_result, is_absent, is_any_meta, of_first_rank, plain, read_number, run_number
from dshard.core.call import arguments_by_name
from dshard.core.call_key import call_key
from dshard.core.checks import accept, refusing
from dshard.core.moves import local_redistribution
from dshard.core.observe import OBSERVERS, observed
from dshard.core.shared_memory import APART, refuse_shared
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import for_shapes, spec_of
from dshard.core.transforms import refuse_batched
from dshard.core.trees import leaves, replace_leaves
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import LayoutError, MixedError, ShapeError
from dshard.layout import replicated
from dshard.ops.pointwise import is_pointwise
from dshard.torch_private import OpOverload, no_torch_function

Custom: TypeAlias = Callable[[OpOverload, Args, Kwargs], Any]
_ACCEPTED = Cache("accepted calls")


def decomposed(function: Function) -> Custom:
    """Run `function`, made of operators on distributed tensors, once torch has accepted the arguments."""

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        if not func._can_decompose():
            check(func, args, kwargs)
        with no_torch_function():
            out = function(*args, **kwargs)
        return wrapped(out, (args, kwargs))

    return run


def wrapped(out: Any, arguments: Any) -> Any:
    """`out` with its plain tensors, which are equal on every rank, as replicated ones on the mesh of the arguments.

    Raises:
        MixedError: Autograd has recorded one, as distributed tensors were written to it.
    """
    had = set(map(id, leaves(arguments)))
    if not any(_is_new_plain(leaf, had) for leaf in leaves(out)):
        return out
    operands = [leaf for leaf in leaves(arguments) if isinstance(leaf, Wrapper)]
    layout, meta = replicated(operands[0]._spec.layout.mesh), is_any_meta([x._local_tensor for x in operands])

    def as_replicated(leaf: Any) -> Any:
        refuse_batched(leaf, "an operator")
        if not _is_new_plain(leaf, had):
            return leaf
        if leaf.requires_grad:
            raise MixedError(
                f"torch's own code ({leaf.grad_fn and leaf.grad_fn.name()}) wrote distributed tensors to a plain one, "
                "from which gradients of any order would not come back whole: compose the result, as by torch.stack, "
                "torch.cat or F.pad"
            )
        leaf = leaf.to("meta") if meta else leaf
        return wrap(
            leaf, spec_of(layout, tuple(leaf.shape), leaf.stride(), leaf.dtype, device_of_result(leaf, layout.mesh))
        )

    return replace_leaves(out, as_replicated)


def _is_new_plain(leaf: object, had: set[int]) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, Wrapper) and id(leaf) not in had


def answered(function: Function) -> Custom:
    """Run `function`, whose result is no tensor and is equal on every rank."""

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        with no_torch_function():
            return function(*args, **kwargs)

    return run


def check(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Let torch refuse arguments that it would refuse on one device; on meta tensors, once for each kind of arguments.

    A generator is left out, as torch does not take a CPU generator for meta tensors.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    key = call_key(func, args, kwargs)
    if key in _ACCEPTED:
        _ACCEPTED.hits += 1
        return
    known: dict[int, Tensor] = {}
    meta_args, meta_kwargs = replace_leaves(
        (args, kwargs), lambda leaf: known.setdefault(id(leaf), _meta(leaf)) if isinstance(leaf, Tensor) else leaf
    )
    accept(func, meta_args, meta_kwargs)
    _ACCEPTED.add(key, True)


def accept_call(function: Function, args: Args, kwargs: Kwargs) -> None:
    """Let torch refuse a call of one of its functions, without data."""
    meta_args, meta_kwargs = replace_leaves(
        (args, kwargs), lambda leaf: _meta(leaf) if isinstance(leaf, Tensor) else leaf
    )
    with plain(), torch.no_grad(), for_shapes(), suppress(NotImplementedError), refusing():
        function(*meta_args, **meta_kwargs)


def _meta(x: Any) -> Tensor:
    if isinstance(x, Wrapper):
        return x._spec.meta()
    return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")


def number(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """item(): the number in the global tensor, equal on every rank; 0 on ranks outside the mesh."""
    spec = args[0]._spec
    if is_absent(args[0]._local_tensor, spec.layout.mesh):
        return torch.zeros((), dtype=spec.dtype, device="cpu").item()
    move = local_redistribution(spec, replicated(spec.layout.mesh))
    if OBSERVERS and move.plan.steps:
        local = observed(move.decision(str(func), explicit=True), run_number, (move.plan, args[0]._local_tensor))
    else:
        local = run_number(move.plan, args[0]._local_tensor)
    return read_number(of_first_rank(local))


def no_resize(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """resize_: only to the shape that the tensor has."""
    x, shape = args[0], args[1].shape if isinstance(args[1], Tensor) else args[1]
    if tuple(shape) != tuple(x.shape):
        raise LayoutError(
            f"{func}: a distributed tensor of shape {tuple(x.shape)} is not resized to {tuple(shape)}: "
            "make a new one, by reshape, narrow or torch.nn.functional.pad"
        )
    return x


# -- operators with `out=`: the form without it runs, and its result is written to `out`, which keeps its layout


def has_out(func: OpOverload) -> bool:
    """Whether `func` is the form of an operator that takes `out`."""
    return any(argument.is_out for argument in func._schema.arguments)


def into_out(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run the operator's form without `out`, and copy the result into `out`."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    arguments = arguments_by_name(func, args, kwargs)
    check(func, args, kwargs)
    if is_pointwise(func) or func._schema.name in APART:
        for name in names:
            refuse_shared(func, arguments[name], {n: value for n, value in arguments.items() if n not in names})
    with no_torch_function():
        return written_to_out(func, args, kwargs)


def written_to_out(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The operands `out` with the result of the operator's form without `out` copied into them, unchecked."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    arguments, form = arguments_by_name(func, args, kwargs), without_out(func)
    outs = tuple(arguments.pop(name) for name in names)
    if not _is_alike(form, func):  # one that makes a tensor, and takes its options
        arguments |= {"dtype": outs[0].dtype, "device": outs[0].device}
    _write(func, outs, form(**arguments))
    if not func._schema.returns:
        return None
    return outs[0] if len(outs) == 1 else outs


def composed_into_out(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run a function that `is_composed_with_out`, without `out`, and copy its results into `out`.

    Torch writes within it to views of `out`, of which those of a shard may be copies, or to empty tensors of its own.
    """
    accept_call(func, args, kwargs)
    out = kwargs["out"]
    result = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    _write(func.__name__, leaves(out), result)
    return out if isinstance(out, Tensor) else type(result)(out)


@cached("forms without out", 4096)
def is_composed_with_out(func: Function) -> bool:
    """Whether torch runs this function of tensors, one of its own, as other operators where `out` is given."""
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    forms = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return any(has_out(x) and x._can_decompose() and "Tensor" in str(x._schema.arguments[0].type) for x in forms)


@cached("forms without out", 4096)
def without_out(func: OpOverload) -> OpOverload:
    """The form of the operator that takes no `out`."""
    for name in func.overloadpacket.overloads():
        overload: OpOverload = getattr(func.overloadpacket, name)
        if not overload._schema.is_mutable and (_is_alike(overload, func) or _is_alike(overload, func, _OPTIONS)):
            return overload
    raise LayoutError(f"{func} cannot write into a distributed tensor: call it without out= and use its result")


_OPTIONS = ("dtype", "layout", "device", "pin_memory")
"""The further arguments of an operator that makes a tensor, in its form without `out`."""


def _is_alike(form: OpOverload, func: OpOverload, options: Sequence[str] = ()) -> bool:
    """Whether `form` takes the arguments of `func` other than `out`, and then `options`."""
    taken = [(a.name, str(a.type)) for a in form._schema.arguments]
    names = [name for name, _ in taken[len(taken) - len(options) :]]
    required = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    return names == list(options) and taken[: len(taken) - len(options)] == required


def _write(func: object, outs: Sequence[Any], result: Any) -> None:
    for out, value in zip(leaves(outs), leaves(result), strict=True):
        if out.shape != value.shape:
            raise ShapeError(
                f"{func}: out has shape {tuple(out.shape)}, the result {tuple(value.shape)}; a distributed tensor is "
                "not resized: give out that shape"
            )
        if not torch.can_cast(value.dtype, out.dtype):
            raise ShapeError(
                f"{func}: a result of {value.dtype} cannot be cast to out, of {out.dtype}: give a wider one"
            )
        out.copy_(value)
