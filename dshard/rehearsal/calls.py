"""Calls of functions on distributed tensors, and the conditions under which a later call is the same.

Equal means: the same function, the same objects as distributed operands, and all other arguments equal in type and
value, zeros by their sign. What has no value that can be compared has to be the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from dshard.comm import ScopedState
from dshard.core.wrapper import Wrapper
from dshard.dispatch.planned_calls import Position
from dshard.rehearsal.code import Code
from dshard.rehearsal.local_recorder import Instruction
from dshard.torch_private import is_autocasting, no_torch_function, pytree

MISS: Any = object()
"""What a call that differs gives in place of its result."""
MISSING = object()
_BY_VALUE = (torch.dtype, torch.device, torch.memory_format, torch.layout)


@dataclass(frozen=True, slots=True)
class Ref:
    """In recorded arguments and results: the tensor of this number."""

    number: int


Autocast = tuple[tuple[str, torch.dtype, bool], ...]
"""The types of devices with autocast, the dtype of each, and whether casts of weights are cached."""


def autocast_now() -> Autocast:
    """The state of autocast."""
    if not is_autocasting():
        return ()
    cached = torch.is_autocast_cache_enabled()
    return tuple([(d, torch.get_autocast_dtype(d), cached) for d in _DEVICES if torch.is_autocast_enabled(d)])


_DEVICES = ("cpu", "cuda")


def without_autocast(run: Callable[..., Any], state: Autocast) -> Callable[..., Any]:
    """A function of recorded operators as it runs where autocast has this state: they were recorded below it."""
    if not state:
        return run
    devices = [device for device, _, _ in state]

    def run_as_recorded(*args: Any) -> Any:
        for device in devices:
            torch.set_autocast_enabled(device, False)
        try:
            return run(*args)
        finally:
            for device in devices:
                torch.set_autocast_enabled(device, True)

    return run_as_recorded


class ForwardPass(NamedTuple):
    """Whether a laid-out module's forward pass runs, and how far its planned calls are before a call, and after it."""

    runs: bool
    before: Position
    after: Position


class CallSettings(NamedTuple):
    """The settings of a call: the values of dshard's, what restores them, and the kernels of attention torch had."""

    values: list[object]
    states: Sequence[ScopedState[Any, Any]]
    kernels: tuple[SDPBackend, ...]


def attention_kernels() -> tuple[SDPBackend, ...]:
    """The kernels of attention that torch may choose."""
    enabled = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    return tuple([kernel for kernel, is_enabled in enabled.items() if is_enabled])


@dataclass(slots=True)
class RecordedCall:
    """A recorded call: its function, arguments and results, the state it ran in, and its local operators.

    `late` has the operands that are seen first here, and what is known of them. `checkpoint` stands for the checkpoint
    of torch that the call ran in. `writes` are numbers of tensors whose versions it counted up. `forward` is the pass
    of a laid-out module that ran; `autocast` is that of torch, `saves_weights` says that autograd saved gathered
    weights.
    """

    func: Any
    args: Any
    kwargs: Any
    grad: bool
    settings: CallSettings
    forward: ForwardPass
    autocast: Autocast = ()
    checkpoint: object = None
    saves_weights: bool = False
    out: Any = None
    late: dict[int, Kind] = field(default_factory=dict)
    writes: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    line: str = "?"

    @property
    def within(self) -> bool:
        """Whether a laid-out module's forward pass ran."""
        return self.forward.runs

    @property
    def outs(self) -> list[Any]:
        """The values of its result, in order."""
        return pytree.tree_leaves(self.out)  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.func, "__name__", str(self.func)).strip("_")

    @property
    def refs(self) -> set[int]:
        """The numbers of its operands."""
        return {x.number for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Ref)}


Kind = tuple[Any, ...]
"""What decides how an operand is used, beside its values."""


def local_of(x: Tensor) -> Tensor:
    """The local tensor of a distributed tensor, or the plain tensor itself."""
    return x._local_tensor if isinstance(x, Wrapper) else x


def kind_of(x: Tensor) -> Kind:
    """The kind of an operand: its class, layout, sizes, dtype, and what autograd and dshard know of it."""
    local = local_of(x)
    with no_torch_function():
        lies = (x.requires_grad, local.stride(), local.is_conj(), local.is_neg())
        if isinstance(x, Wrapper):
            return type(x), x._spec, x.is_leaf if x._leaf is None else x._leaf, x._matmul, *lies
        return type(x), x.shape, x.dtype, x.device, *lies


def is_ready(x: Tensor) -> bool:
    """Whether the local tensor of an operand is there; local views are made now."""
    if not isinstance(x, Wrapper):
        return True
    if type(x.__dict__.get("_lazy_local")) is partial:  # of no collective
        x._local_tensor  # noqa: B018
    return "_local_tensor" in x.__dict__


def is_own(x: Tensor) -> bool:
    """Whether a tensor is no view with memory of its own."""
    return not isinstance(x, Wrapper) or x._view_sync is None


def memory_of(x: Tensor) -> int | None:
    """The memory of a tensor, or that of its base if it is a view with memory of its own; None while it has none."""
    while isinstance(x, Wrapper) and x._view_sync is not None:
        x = x._view_sync.base
    local = x.__dict__.get("_local_tensor") if isinstance(x, Wrapper) else x
    return None if local is None else int(local.untyped_storage()._cdata)


def is_like(x: object, kind: Kind) -> bool:
    """Whether an operand is of a recorded kind."""
    return type(x) is kind[0] and is_ready(x) and is_own(x) and kind_of(x) == kind  # type: ignore[arg-type]


def is_like_plain(x: Tensor, shape: Any, dtype: Any, device: Any, stride: Any, is_conj: bool, is_neg: bool) -> bool:
    """Whether a plain tensor without a gradient is of a recorded kind."""
    return (
        x.shape == shape
        and x.dtype is dtype
        and x.stride() == stride
        and x.device == device
        and not x.requires_grad
        and x.is_conj() is is_conj
        and x.is_neg() is is_neg
    )


_INT = frozenset({int})


def _all_int(values: Sequence[object]) -> bool:
    return _INT.issuperset(map(type, values))


class CallConditions:
    """The conditions, as code, under which the arguments of a call are those of a recorded one.

    `place` is the code of the object with a number. Lines in `late` keep operands that are seen first here; conditions
    in `after` hold once these are kept.
    """

    def __init__(self, call: RecordedCall, code: Code, place: Callable[[int], str]) -> None:
        self.code, self.place, self.late, self.after = code, place, dict(call.late), list[str]()
        self.conditions, self.first_seen = list[str](), list[tuple[int, str]]()
        self._new = frozenset(call.late)
        code.names |= {"all_int": _all_int, "is_like": is_like, "is_like_plain": is_like_plain, "MISSING": MISSING}
        code.names["Tensor"] = Tensor
        self.conditions.append(f"len(args) == {len(call.args)}")
        for i, value in enumerate(call.args):
            self._add(value, f"args[{i}]")
        self.conditions.append(f"len(kwargs) == {len(call.kwargs)}" if call.kwargs else "not kwargs")
        for name, value in call.kwargs.items():
            self._add(value, f"kwargs.get({name!r}, MISSING)")
        names = [name for _, name in self.first_seen]
        self.conditions += [f"{a} is not {b}" for i, a in enumerate(names) for b in names[:i]]

    def _add(self, value: Any, name: str) -> None:
        conditions = self.conditions
        kind = type(value)
        if isinstance(value, Ref):
            self._add_tensor(value.number, name)
        elif value is None or value is True or value is False or value is Ellipsis:
            conditions.append(f"{name} is {value}")
        elif kind is int or kind is str or (kind is float and isfinite(value) and value):
            conditions.append(f"{name}.__class__ is {kind.__name__} and {name} == {value!r}")
        elif kind is float:
            conditions.append(f"{name}.__class__ is float and repr({name}) == {repr(value)!r}")
        elif kind in _BY_VALUE:
            of, constant = self.code.constant(kind, "k"), self.code.constant(value, "k")
            conditions.append(f"{name}.__class__ is {of} and {name} == {constant}")
        elif isinstance(value, list | tuple):
            conditions.append(f"{name}.__class__ is {self.code.constant(kind, 'k')} and len({name}) == {len(value)}")
            if value and _all_int(value):
                conditions.append(f"{name} == {self.code.constant(value, 'k')} and all_int({name})")
            else:
                for i, each in enumerate(value):
                    self._add(each, f"{name}[{i}]")
        elif kind is dict:
            conditions.append(f"{name}.__class__ is dict and len({name}) == {len(value)}")
            for key, each in value.items():
                self._add(each, f"{name}.get({self.code.constant(key, 'k')}, MISSING)")
        elif kind is slice:
            conditions.append(f"{name}.__class__ is slice")
            for part in ("start", "stop", "step"):
                self._add(getattr(value, part), f"{name}.{part}")
        else:
            conditions.append(f"{name} is {self.code.constant(value, 'k')}")

    def _add_tensor(self, number: int, name: str) -> None:
        if number in self.late:
            kind = self.late.pop(number)
            if kind[0] is Tensor:
                rest = ", ".join(self.code.constant(each, "k") for each in (*kind[1:4], *kind[5:]))
                self.conditions.append(f"{name}.__class__ is Tensor and is_like_plain({name}, {rest})")
            else:
                self.conditions.append(f"is_like({name}, {self.code.constant(kind, 'k')})")
            self.first_seen.append((number, name))
        elif number in self._new:
            self.after.append(f"{name} is {self.place(number)}")
        else:
            self.conditions.append(f"{name} is {self.place(number)}")
