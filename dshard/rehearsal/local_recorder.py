"""Record what a program runs on local tensors: every operator, every collective and every draw, in order.

The recording is below autograd and below distributed tensors: forward and backward passes, and optimisers, are
operators on local tensors there. Tensors are numbered as they arise; those that no instruction made are external.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dshard.comm import ENDS, Collective, user_line
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import is_for_shapes
from dshard.ops.ragged import selects
from dshard.torch_private import OpOverload, graph_task_id, is_alias_of, no_torch_dispatch

T = TypeVar("T")
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a value in a recording, by its number; most are tensors."""

    number: int


class View(NamedTuple):
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    is_contiguous: bool
    device: torch.device

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


def view_of(x: Tensor) -> View:
    """How `x` lies in its storage."""
    offset = int(x.storage_offset())
    return View(tuple(x.shape), x.stride(), offset, x.dtype, x.is_conj(), x.is_neg(), x.is_contiguous(), x.device)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call: an operator, or a function with a `key` that stands for it.

    In `args` and `kwargs` a slot stands for each recorded value. `outs` are the slots of the tensors of its result, in
    order; an operator that returns its operand, as those in place do, has no new ones. `is_view` says that these have
    the memory of the first argument, and the call does nothing else. `returned` has the whole result: a slot for each
    tensor, new or not, and other values as they are. The `line` is that of the program, `call` the number of the call
    of a function within which it ran.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[Slot | None, ...]
    is_tuple: bool = False
    is_view: bool = False
    key: object = None
    line: str = field(default="?", compare=False)
    returned: tuple[Any, ...] = field(default=(), compare=False)
    call: int = field(default=-1, compare=False)

    @property
    def operator(self) -> OpOverload | None:
        """The operator, unless this is the call of another function."""
        return self.function if isinstance(self.function, OpOverload) else None

    @property
    def name(self) -> str:
        """The operator's name, or what the function does."""
        return str(self.operator or (self.key[0] if isinstance(self.key, tuple) else self.key))

    @property
    def made(self) -> list[Slot]:
        """The slots of the new tensors."""
        return [out for out in self.outs if out is not None]

    def values_of(self, out: Any) -> dict[Slot, Any]:
        """The values of these slots in the result `out`."""
        outs = out if self.is_tuple else (out,)
        return {slot: x for slot, x in zip(self.outs, outs, strict=True) if slot is not None}

    @property
    def begins(self) -> bool:
        """Whether it begins a collective, `(tensor, buffer of the result)`."""
        return isinstance(self.key, tuple) and self.key[0] == "begin"

    @property
    def draws(self) -> bool:
        """Whether the operator draws random numbers; attention without dropout is tagged so, and draws none."""
        op = self.operator
        if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
            return False
        arguments = op._schema.arguments
        values = {a.name: a.default_value for a in arguments if a.name == "dropout_p"}
        values |= dict(zip((a.name for a in arguments), self.args, strict=False)) | dict(self.kwargs)
        return bool(values.get("dropout_p", 1.0))

    @property
    def writes(self) -> bool:
        """Whether more comes of the call than its result, such as an error, or each call has another."""
        op = self.operator
        if self.key == SAVES:
            return False
        if op is None or not op._schema.returns:
            return True
        return op._schema.is_mutable or self.draws

    def written(self) -> list[Slot]:
        """The slots that an operator writes to."""
        op, named = self.operator, dict(self.kwargs)
        assert op is not None
        arguments = op._schema.arguments
        values = dict(zip((a.name for a in arguments), self.args, strict=False)) | named
        writes = [values[a.name] for a in arguments if a.name in values and a.alias_info and a.alias_info.is_write]
        flat = [each for value in writes for each in (value if isinstance(value, tuple) else (value,))]
        return [each for each in flat if isinstance(each, Slot)]

    def same_as(self, other: Instruction) -> bool:
        """Whether both are the same call of the same values."""
        if (self.key is None) != (other.key is None) or (self.key is None and self.function is not other.function):
            return False
        of_one, of_other = ((each.key, each.args, each.kwargs, each.outs) for each in (self, other))
        return equal(of_one, of_other)


def equal(a: object, b: object) -> bool:
    """Whether two arguments are equal; objects that cannot be compared have to be the same."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if a is b or isinstance(a, Tensor):
        return a is b
    if isinstance(a, float):  # nan is nan, but zeros have signs
        return repr(a) == repr(b)
    return type(a) is type(b) and not isinstance(a, torch.ScriptObject) and a == b


VIEWS_IF_POSSIBLE = (aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints)
"""Operators that make a view where they need not copy."""


def _may_be_view(func: OpOverload) -> bool:
    returns = func._schema.returns
    return (
        bool(returns)
        and not func._schema.is_mutable
        and (func is aten._unsafe_view.default or all(each.alias_info is not None for each in returns))
    )


_ON_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _reads_on_host(func: OpOverload) -> bool:
    """Whether an operator reads numbers on the host: those made of others, such as `item`, are not tagged so."""
    returns = [str(each.type) for each in func._schema.returns]
    return not _ON_HOST.isdisjoint(func.tags) or (bool(returns) and not any("Tensor" in each for each in returns))


SAVES = "state of torch's random numbers"
"""The key of a call that reads this state."""


class LocalRecorder:
    """Instructions, and the external tensors by their slots; `why_not` says why they cannot be run again."""

    def __init__(self, views: Sequence[View | None] = ()) -> None:
        self.instructions: list[Instruction] = []
        self.views: list[View | None] = [*views]  # of each slot
        self.externals: dict[Slot, Tensor] = {}
        self.literals: dict[Slot, Tensor] = {}
        self.leaves: set[int] = set()
        self.ranks: set[int] = set()
        self.why_not = ""
        self.number = -1  # of the call that runs
        self._tensors: Any = WeakIdKeyDictionary()
        self._addresses = [0] * len(views)  # of the memory of each tensor
        self._values: dict[Hashable, Slot] = {}  # waits and draws
        self._within = self._backward = False

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator on plain tensors, and record it."""
        if self._within or is_for_shapes() or self.why_not or func.namespace == "profiler":
            return func(*args, **kwargs)
        self._check(func, args)
        self._backward = self._backward or graph_task_id() >= 0
        if func is aten.lift_fresh.default:  # a tensor made of numbers of the program
            return self._lift(func(*args, **kwargs))
        recorded_args = self._recorded(args)
        recorded_kwargs = tuple((name, self._recorded(value)) for name, value in kwargs.items())
        out = self._result_of(func, args, kwargs)
        outs = out if isinstance(out, list | tuple) else (out,)
        is_view = _may_be_view(func) and all(is_alias_of(args[0], x) for x in outs)
        if is_view and func in VIEWS_IF_POSSIBLE:
            func, recorded_args = aten.view.default, (recorded_args[0], tuple(out.shape))
        self._add(func, recorded_args, recorded_kwargs, outs, is_tuple=isinstance(out, list | tuple), is_view=is_view)
        return out

    def _result_of(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        return func(*args, **kwargs)

    def call(self, key: object, function: Callable[..., T], *args: object) -> T:
        """Call a function, and record that as one instruction, whatever operators it runs."""
        if self._within or is_for_shapes() or self.why_not:
            return function(*args)
        recorded_args = self._recorded(args)
        self._within = True
        try:
            out = function(*args)
        finally:
            self._within = False
        if isinstance(key, tuple) and isinstance(key[-1], Collective):
            self.ranks.update(key[-1].ranks)
        if isinstance(out, Tensor) or out is None or out not in self._values:  # else a draw that is repeated
            self._add(function, recorded_args, (), (out,), key=key)
        if key == ENDS:
            self._values.pop(args[0], None)  # which holds the buffers of the collective
        return out

    def add_alias(self, x: Tensor, of: Tensor) -> None:
        """Record that `x` has got the memory of the tensor `of`, by no operator."""
        if not self._within and not is_for_shapes():
            self._tensors[x] = self.slot_of(of)

    def add_call(self, key: object, function: Callable[..., object], x: Tensor) -> Slot:
        """Record a call of a function with the tensor `x`, which runs beside the recording; the slot of its result."""
        out = Slot(len(self.views))
        self.views.append(None)
        self._addresses.append(0)
        self.instructions.append(Instruction(function, (self.slot_of(x),), (), (out,), key=key, line=user_line()))
        return out

    def add_leaf(self, number: int) -> None:
        """Record that a gradient of the leaf with this id arose."""
        self.leaves.add(number)

    def close(self) -> None:
        """End the recording, and drop what only it needs."""
        self._values.clear()

    def refuse(self, why: str) -> None:
        """Record that the step cannot be replayed, and why."""
        self.why_not = self.why_not or f"{why}, at {user_line()}"

    def add_read(self) -> None:
        """Record that numbers of a tensor were read on the host, which decide what comes."""
        if not self._within:
            self.refuse("numbers are read on the host, which Python may use")

    @property
    def ran_backward(self) -> bool:
        """Whether a gradient arose."""
        return bool(self.leaves) or self._backward

    def slot_of(self, x: Tensor) -> Slot:
        """The slot of a tensor; one that no instruction made becomes external."""
        slot: Slot | None = self._tensors.get(x)
        if slot is None:
            slot = self._new_slot(x)
            self.externals[slot] = x
        elif x.data_ptr() != self._addresses[slot.number]:
            self.refuse("the step gives a tensor other memory, by x.data = ... or swap_tensors")
        return slot

    def _check(self, func: OpOverload, args: Args) -> None:
        if _reads_on_host(func) and (func is not aten.index.Tensor or any(map(selects, args[1]))):
            self.refuse(f"{func} reads numbers on the host, which Python may use")
        elif torch.Tag.inplace_view in func.tags:
            self.refuse(f"{func} changes the shape of a tensor in place")
        elif func.namespace in ("c10d", "_c10d_functional"):
            self.refuse(f"{func} is a collective that dshard did not run")

    def _lift(self, x: Tensor) -> Tensor:
        """Record a tensor made of numbers of the program: a copy, which the step may overwrite."""
        slot = self._new_slot(literal := x.detach().clone())
        self.externals[slot] = self.literals[slot] = literal
        self._add(aten.clone.default, (slot,), (), (x,), is_tuple=False)
        return x

    def _new_slot(self, x: object) -> Slot:
        slot = Slot(len(self.views))
        self.views.append(view_of(x) if isinstance(x, Tensor) else None)
        self._addresses.append(x.data_ptr() if isinstance(x, Tensor) else 0)
        if isinstance(x, Tensor):
            self._tensors[x] = slot
        else:
            assert isinstance(x, Hashable)
            self._values[x] = slot
        return slot

    def _recorded(self, value: Any) -> Any:
        """An argument with a slot in place of each recorded value."""
        if isinstance(value, Tensor):
            return self.slot_of(value)
        if isinstance(value, list | tuple):
            return tuple([self._recorded(each) for each in value])
        return self._values.get(value, value) if isinstance(value, Hashable) else value

    def _add(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        outs: Sequence[Any],
        *,
        is_tuple: bool = False,
        is_view: bool = False,
        key: object = None,
    ) -> None:
        slots, returned = list[Slot | None](), list[object]()
        for out in outs:
            known = self._tensors.get(out) if isinstance(out, Tensor) else None
            is_new = known is None if isinstance(out, Tensor) else key is not None and out is not None
            slots.append(self._new_slot(out) if is_new else None)
            returned.append(slots[-1] or known or out)
        made, line = tuple(slots), user_line()
        self.instructions.append(
            Instruction(function, args, kwargs, made, is_tuple, is_view, key, line, tuple(returned), self.number)
        )


def _numbers_of(state: Tensor) -> bytes:
    """The part of a state that decides the numbers: the first word is the seed, where dshard keeps its own state."""
    with no_torch_dispatch():
        return bytes(state[8 if len(state) > 16 else 0 :].numpy())


def _draws(func: OpOverload, args: Args, kwargs: Kwargs) -> str:
    """The type of the device whose generator an operator draws from; empty if it does not, or has one of its own."""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return ""
    operands = [x for x in args if isinstance(x, Tensor)]
    device = operands[0].device if operands else torch.device(kwargs.get("device") or "cpu")
    return device.type if device.type in _STATES else ""


_STATES: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = {
    "cpu": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
}


class StepRecorder(LocalRecorder):
    """Records a step, of which nothing else runs later: with the states of torch's own random numbers.

    A recomputed layer sets the state in which it ran first: where an operator draws in another state than the last one
    left, an instruction sets it, to one that was read before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[str, bytes] = {}
        self._states: dict[tuple[str, bytes], Tensor] = {}
        for device in _STATES:
            if device == "cpu" or torch.cuda.is_initialized():
                self._keep_state(device)

    def _result_of(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        device = _draws(func, args, kwargs)
        if device:
            self._set_state(device)
        out = func(*args, **kwargs)
        if device:
            self._keep_state(device)
        return out

    def _keep_state(self, device: str) -> None:
        read = _STATES[device][0]
        key = device, _numbers_of(read())
        self._left[device] = key[1]
        if key not in self._states:
            self._states[key] = self.call(SAVES, read)

    def _set_state(self, device: str) -> None:
        """Record what sets the present state, if the last draw left another."""
        read, write = _STATES[device]
        state = _numbers_of(now := read())
        if state != self._left.get(device):
            known = self._states.get((device, state))
            if known is None:
                self.refuse("the step sets the state of torch's random numbers")
                return
            self.call("sets random numbers", write, known)
            with no_torch_dispatch():
                write(now)  # what the instruction set is of another call
            self._left[device] = state

    def close(self) -> None:
        """End the recording, and drop what only it needs."""
        for device in self._left:
            self._set_state(device)
        super().close()
        self._states.clear()
