"""Host values that a forward pass reads, such as `if mask.all()`, while it runs on tensors without data.

While a model is traced, each tensor records the call that made it. When the model reads a value, only the calls that
lead to it are computed from the data of the example. The values are kept in order, as answers: a later run without
data, on any mesh, reads the same ones. So are shapes that depend on values, such as the number of true elements of a
mask; tensors computed from such results have no data again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dshard.autograd.crossing import redistribute
from dshard.comm import COLLECTIVES_OF_TORCH, are_mixed, has_only_shape, is_any_meta
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.transforms import unwrapped
from dshard.core.trees import replace_leaves, replace_tensors, tensors_in, with_tensors
from dshard.core.wrapper import Wrapper
from dshard.dispatch.function_table import FUNCTIONS
from dshard.errors import LayoutError
from dshard.layout import replicated
from dshard.ops.losses import has_bytes, of_bytes
from dshard.ops.ragged import index_parts, is_mask, repeated, without_masks
from dshard.torch_private import disable_modes, is_functorch_wrapped

QUESTIONS = frozenset(
    {
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__),
        *(Tensor.item, Tensor.tolist, Tensor.is_nonzero, Tensor.equal, Tensor.allclose),
        *(torch.is_nonzero, torch.equal, torch.allclose, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),
    }
)
"""Functions whose results are values on the host."""


_COUNTING = frozenset(
    {
        *(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.bincount, Tensor.bincount),
        *(torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive),
    }
)
"""Functions without gradients, the sizes of whose results depend on values."""


_REPEATS = (torch.repeat_interleave, Tensor.repeat_interleave)
_COUNTING_SOMETIMES: dict[Function, Callable[[Args, Kwargs], bool]] = {
    **dict.fromkeys((torch.where, Tensor.where), lambda args, kwargs: len(args) + len(kwargs) == 1),
    F.one_hot: lambda args, kwargs: (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1,
    **dict.fromkeys(_REPEATS, lambda args, kwargs: len(args) == 1 and kwargs.get("output_size") is None),
}
"""Functions that are as those of `_COUNTING` with some arguments."""


def _is_counting(func: Function, args: Args, kwargs: Kwargs) -> bool:
    sometimes = _COUNTING_SOMETIMES.get(func)
    return func in _COUNTING if sometimes is None else sometimes(args, kwargs)


def _by_handler(func: Function, args: Args, kwargs: Kwargs) -> Callable[[], Any]:
    return partial(FUNCTIONS[func].handler, func, args, kwargs)


def _without_copy(func: Function, args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    return (lambda: args[0]) if _has_no_data(args[0]) else None


def _in_place(func: Function, args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    is_moved = _has_no_data(args[0]) and _names_device(*args[1:], *kwargs.values())
    return (lambda: _without_devices(args, kwargs)) if is_moved else None


def _by_indices(func: Function, args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    if _has_mask(args):
        return lambda: func(args[0], without_masks(*args[:2]), *args[2:])
    parts = index_parts(args[1])
    ends = [(x.start, x.stop, x.step) if isinstance(x, slice) else None for x in parts]
    if not any(map(_is_number, tensors_in(ends))):
        return None
    numbers = (slice(*replace_tensors(own, Tensor.item)) if own else x for x, own in zip(parts, ends, strict=True))
    return lambda: func(args[0], tuple(numbers), *args[2:])


def _repeated(func: Function, args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    by_tensor = any(isinstance(x, Tensor) for x in (*args[1:2], kwargs.get("repeats")))
    return (lambda: repeated(func, args, kwargs)) if by_tensor else None


def _formatted(func: Function, args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    return (lambda: format(args[0].item(), *args[1:])) if _is_number(args[0]) else None


def _of_bytes(func: Function, args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    return partial(of_bytes, func, args, kwargs) if has_bytes(args, kwargs) else None


_OTHER_FORMS: dict[Function, Callable[[Function, Args, Kwargs], Callable[[], Any] | None]] = {
    **{func: _by_handler for func, row in FUNCTIONS.items() if row.rewrites},  # type: ignore[misc]
    Tensor.cpu: _without_copy,
    Tensor.to: _in_place,
    Tensor.__format__: _formatted,
    **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__), _by_indices),
    **dict.fromkeys(_REPEATS, _repeated),
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _of_bytes),
}
"""By function, what gives a call in another form, of others, among them functions of `QUESTIONS`; None for most."""


def _names_device(*args: object) -> bool:
    """Whether arguments of `Tensor.to` say where to, perhaps by another tensor."""
    return any(isinstance(x, Tensor | torch.device | str | int) and not isinstance(x, bool) for x in args)


def _without_devices(args: Args, kwargs: Kwargs) -> Any:
    """`x.to(...)` without the device, as `x` has no data to copy."""
    x, *rest = args
    rest = [arg for arg in rest if isinstance(arg, torch.dtype | Tensor)]
    dtype = kwargs.get("dtype", next((arg if isinstance(arg, torch.dtype) else arg.dtype for arg in rest), None))
    return x if dtype is None else x.to(dtype)  # the name by which ranks call it


def _has_mask(args: Args) -> bool:
    """Whether the index in `x[index]`, or in `x[index] = value`, has a mask, so that its size depends on values."""
    _, index, *value = args
    fills = bool(value) and not (isinstance(value[0], Tensor) and value[0].dim())
    return not fills and any(map(is_mask, index_parts(index)))


class HostReadMissing(Exception):
    """A run without data and without answers read a host value."""


@dataclass(slots=True, eq=False)
class Origin:
    """The call that made some tensors, with `results` once it is computed; without a function, input tensors.

    `inputs` are the names of the model's inputs on which they depend.
    """

    function: Function | None
    operands: tuple[Args, Kwargs]
    inputs: frozenset[str]
    results: Sequence[Tensor] | None = None
    origins: list[Origin] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Result:
    """Result `number` of a call, in place of the tensor among the operands of another call."""

    origin: Origin
    number: int


class _Rewriting(TorchFunctionMode):
    """Within the block, calls that have another form are made in it; all others by `_call`."""

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        form = _OTHER_FORMS.get(func)
        again = None if form is None else form(func, args, kwargs)
        if again is None:
            return self._call(func, args, kwargs)
        with self:
            return again()

    @abstractmethod
    def _call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call a function that has no other form."""

    def _number(self, x: Tensor) -> Any:
        """The value of a tensor without dims and without data; any other tensor as it is."""
        return self._call(Tensor.item, (x,), {}) if _is_number(x) else x


class ForwardValues(_Rewriting):
    """Within the block, functions of tensors without data that return values on the host compute them from data.

    Each of `stand_ins` is a tensor without data, the tensor that it stands for, and the name of the input that it is
    part of, if any. `answers` are the values returned so far. `call` calls a function with its arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        stand_ins: Iterable[tuple[Tensor, Tensor, str | None]],
        call: Callable[[Function, Args, Kwargs], Any],
    ) -> None:
        super().__init__()
        self.model, self.call = type(model).__name__, call
        self.answers: list[object] = []
        self._random: Tensor | None = None  # the state in which the last random values left their generator
        self.results: dict[int, _Result] = {}
        self.kept: list[Tensor] = []  # so that their ids stay their own
        self.sharing: defaultdict[int, list[Tensor]] = defaultdict(list)
        for stand_in, data, name in stand_ins:
            results = None if has_only_shape(data) or isinstance(data, Wrapper) else [data.detach()]
            self._note([stand_in], Origin(None, ((), {}), frozenset(() if name is None else (name,)), results))

    def _call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        writes, tensors = _writes(func, kwargs), tensors_in((args, kwargs))
        if is_any_meta(tensors):
            if func in QUESTIONS:
                self.answers.append(self._answer(func, args, kwargs))
                return self.answers[-1]
            if _is_counting(func, args, kwargs):
                return self._count(func, args, kwargs)
        if func == Tensor.__getitem__ and not has_only_shape(args[0]) and is_any_meta(tensors):
            args = (self._stand_in(args[0]), *args[1:])  # or torch would bring the index to where the data is
            tensors = tensors_in((args, kwargs))
        try:
            out = self.call(func, args, kwargs)
        except RuntimeError as error:
            if not writes and are_mixed(tensors):  # torch refuses operands on two devices
                args, kwargs = replace_tensors((args, kwargs), lambda x: x if has_only_shape(x) else self._stand_in(x))
            elif not writes and _reads_numbers(error, tensors):
                args, kwargs = replace_tensors((args, kwargs), self._number)
            else:
                raise
            out = self.call(func, args, kwargs)
            tensors = tensors_in((args, kwargs))
        origin = self._origin(func, args, kwargs, tensors)
        if func in COLLECTIVES_OF_TORCH:  # without data they are not run
            self._forget(tensors, origin)
        elif writes:
            written = tensors_in((args[:1], kwargs.get("out")))
            self._forget(written, origin)
            if kwargs.get("out") is None and written and not written[0].requires_grad:
                after = Origin(partial(_written, func), origin.operands, origin.inputs, None, origin.origins)
                self.results[id(written[0])] = _Result(after, 0)
        else:
            self._note([out] if isinstance(out, Tensor) else tensors_in(out), origin)
        return out

    def _origin(self, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor]) -> Origin:
        known = [self.results.get(id(x), x) for x in tensors]
        origins = [each.origin for each in known if isinstance(each, _Result)]
        inputs = frozenset([name for each in origins for name in each.inputs])
        return Origin(func, with_tensors((args, kwargs), known), inputs, None, origins)

    def _note(self, tensors: Sequence[Tensor], origin: Origin) -> None:
        for i, x in enumerate(tensors):
            if x.is_meta and id(x) not in self.results:
                self.results[id(x)] = _Result(origin, i)
                self.kept.append(x)
                self.sharing[_storage_of(x)].append(x)

    def _forget(self, written: Sequence[Tensor], by: Origin) -> None:
        """After a write, of the tensors in that memory only the model inputs on which they depend are known."""
        for x in written:
            for alias in self.sharing.get(_storage_of(x), [x]) if has_only_shape(x) else ():
                before = self.results.get(id(alias))
                inputs = by.inputs | (before.origin.inputs if before else frozenset())
                self.results[id(alias)] = _Result(Origin(None, ((), {}), inputs), 0)

    def _stand_in(self, x: Tensor) -> Tensor:
        """A tensor without data for one that the model has made."""
        out = _without_data(x)
        self._note([out], Origin(None, ((), {}), frozenset(), [x]))
        return out

    def _count(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The results, without data, of a function whose shapes depend on values; their values are kept."""
        results = self._answer(func, args, kwargs)
        inputs = self._origin(func, args, kwargs, tensors_in((args, kwargs))).inputs
        self.answers.append(replace_tensors(results, _without_data))
        out = replace_tensors(results, _without_data)
        self._note(tensors_in(out), Origin(None, ((), {}), inputs, tensors_in(results)))
        return out

    @disable_modes()
    def _answer(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        question = self._origin(func, args, kwargs, tensors_in((args, kwargs)))
        for each in question.origins:
            self._compute(each, question)
        with torch.no_grad():
            args, kwargs = replace_leaves(question.operands, _value)
            return func(*args, **kwargs)

    def _compute(self, origin: Origin, question: Origin) -> None:
        """Compute the results of a call, and first those of the calls that it depends on."""
        stack = [origin]
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            if self._random is not None:  # a loop that draws until a condition holds would not end
                torch.set_rng_state(self._random)
            while stack:
                call = stack[-1]
                missing = [each for each in call.origins if each.results is None]
                if call.results is not None:
                    stack.pop()
                elif call.function is None or is_any_meta(tensors_in(call.operands)):
                    raise self._unknown(question)
                elif missing:
                    stack += missing
                else:
                    args, kwargs = replace_leaves(call.operands, _value)
                    call.results = tensors_in(call.function(*args, **kwargs))
            self._random = torch.get_rng_state()

    def _unknown(self, question: Origin) -> LayoutError:
        names = sorted(question.inputs)
        reason = f"; it asks for a value that depends on {', '.join(names)}" if names else ""
        way_out = f"give an example of {names[-1]} with data, leave it out of the example, or " if names else ""
        return LayoutError(
            f"the forward pass of {self.model} depends on the values of its tensors, which have no data here{reason}: "
            f"{way_out}give the placements of its parameters by name, {{pattern: placements}}"
        )


def _storage_of(x: Tensor) -> int:
    """The memory of a tensor, or of what torch.func wraps as this tensor."""
    storage: int = (unwrapped(x) if is_functorch_wrapped(x) else x).untyped_storage()._cdata
    return storage


def _value(leaf: object) -> Any:
    """The stand-in for a leaf of the operands, with data and on the host, to which `batch_norm` may write."""
    is_given = isinstance(leaf, _Result) and leaf.origin.function is None
    if isinstance(leaf, _Result):
        assert leaf.origin.results is not None
        leaf = leaf.origin.results[leaf.number]
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return leaf.to("cpu", copy=is_given) if isinstance(leaf, Tensor) else leaf


def _written(func: Function, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`x` after `func` wrote to it; `x` itself stays."""
    out = x.clone()
    func(out, *args, **kwargs)
    return out


def _writes(func: Function, kwargs: Kwargs) -> bool:
    """Whether a function writes to its first argument or to `out`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name not in ("__int__", "__invert__"))
    if func is Tensor.requires_grad_:
        return False
    return name.endswith("_") or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


class HostReads(_Rewriting):
    """Within the block, functions of `QUESTIONS` return `answers`, in their order, for tensors without data."""

    def __init__(self, answers: Sequence[object] | None) -> None:
        super().__init__()
        self.rest: Iterator[object] | None = None if answers is None else iter(answers)

    def _call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        is_counting = _is_counting(func, args, kwargs)
        if not (is_counting or func in QUESTIONS):  # most
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if _writes(func, kwargs) or not _reads_numbers(error, tensors_in((args, kwargs))):
                    raise
                args, kwargs = replace_tensors((args, kwargs), self._number)
                return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if not any(map(_has_no_data, tensors)):
            return func(*args, **kwargs)
        if self.rest is None:
            raise HostReadMissing
        if is_counting:
            for x in tensors:  # the operator has no rule
                if isinstance(x, Wrapper):
                    redistribute(x, replicated(x._spec.layout.mesh), func.__name__, as_operand=True)
        return replace_tensors(next(self.rest), _without_data)


def _without_data(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


def _has_no_data(x: Tensor) -> bool:
    return has_only_shape(x._local_tensor if isinstance(x, Wrapper) else x)


def _is_number(x: Tensor) -> bool:
    return x.dim() == 0 and _has_no_data(x)


def _reads_numbers(error: RuntimeError, tensors: Iterable[Tensor]) -> bool:
    """Whether a function failed as it reads tensors without data as numbers, as `torch.arange(lengths.max())` does."""
    return "meta tensor" in str(error).lower() and any(map(_is_number, tensors))
