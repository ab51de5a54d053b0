"""Values that a forward pass asks for, such as `if mask.all()`, while it runs on tensors without data.

While a model is traced, each tensor is known by the call that made it. So where the model asks for a value, what leads
to it is computed from the data of the example, and nothing else is. The answers are kept in their order: a later run
without data, on any mesh, asks the same questions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dshard.core.moves import leaves, replace_leaves, tensors_in
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError
from dshard.torch_private import disable_modes

QUESTIONS = frozenset(
    {
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__),
        *(Tensor.item, Tensor.tolist, Tensor.is_nonzero, Tensor.equal, Tensor.allclose),
        *(torch.is_nonzero, torch.equal, torch.allclose),
    }
)
"""Functions whose results are values on the host."""


class NoAnswers(Exception):
    """A question was asked in a run without data that has no answers."""


@dataclass(slots=True, eq=False)
class Origin:
    """The call that made some tensors, `results` once it is computed; without a function, tensors that were given.

    `inputs` are the names of the model's inputs that they depend on.
    """

    function: Function | None
    operands: tuple[Args, Kwargs]
    inputs: frozenset[str]
    results: Sequence[Tensor] | None = None
    origins: list[Origin] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Result:
    """The tensor number `number` among the results of a call, in place of a tensor among the operands of another."""

    origin: Origin
    number: int


class ForwardValues(TorchFunctionMode):
    """Within the block, questions about tensors without data are answered by `given` and what was computed from it.

    `given` are pairs of a tensor without data and the tensor that it stands for, with the name of the input that it is
    part of, if any. `answers` are those so far.
    """

    def __init__(self, model: nn.Module, given: Iterable[tuple[Tensor, Tensor, str | None]]) -> None:
        super().__init__()
        self.model = type(model).__name__
        self.answers: list[object] = []
        self.made: dict[int, _Result] = {}
        self.kept: list[Tensor] = []  # so that their ids stay their own
        self.sharing: defaultdict[int, list[Tensor]] = defaultdict(list)
        for stand_in, data, name in given:
            results = None if data.is_meta or isinstance(data, Wrapper) else [data.detach()]
            self._note([stand_in], Origin(None, ((), {}), frozenset(() if name is None else (name,)), results))

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if func in QUESTIONS and any(x.is_meta for x in tensors_in((args, kwargs))):
            self.answers.append(self._answer(func, args, kwargs))
            return self.answers[-1]
        origin = self._origin(func, args, kwargs)
        out = func(*args, **kwargs)
        if _writes(func, kwargs):
            self._forget(tensors_in((args[:1], kwargs.get("out"))), origin)
        else:
            self._note(tensors_in(out), origin)
        return out

    def _origin(self, func: Function, args: Args, kwargs: Kwargs) -> Origin:
        origins: list[Origin] = []

        def known(leaf: object) -> Any:
            if not isinstance(leaf, Tensor):
                return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
            made = self.made.get(id(leaf))
            if made is None:
                return leaf
            origins.append(made.origin)
            return made

        operands = replace_leaves((args, kwargs), known)
        return Origin(func, operands, frozenset(name for each in origins for name in each.inputs), None, origins)

    def _note(self, tensors: Sequence[Tensor], origin: Origin) -> None:
        for i, x in enumerate(tensors):
            if x.is_meta and id(x) not in self.made:
                self.made[id(x)] = _Result(origin, i)
                self.kept.append(x)
                self.sharing[x.untyped_storage()._cdata].append(x)

    def _forget(self, written: Sequence[Tensor], by: Origin) -> None:
        """After a write, the tensors of that memory have values of which no more is known than their inputs."""
        for x in written:
            for alias in self.sharing.get(x.untyped_storage()._cdata, [x]) if x.is_meta else ():
                before = self.made.get(id(alias))
                inputs = by.inputs | (before.origin.inputs if before else frozenset())
                self.made[id(alias)] = _Result(Origin(None, ((), {}), inputs), 0)

    @disable_modes()
    def _answer(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        asked = self._origin(func, args, kwargs)
        for each in asked.origins:
            self._compute(each, asked)
        with torch.no_grad():
            return func(*map(_value, asked.operands[0]), **{name: _value(x) for name, x in asked.operands[1].items()})

    def _compute(self, wanted: Origin, asked: Origin) -> None:
        """Compute the results of a call, and before it those that it needs."""
        stack = [wanted]
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            while stack:
                call = stack[-1]
                missing = [each for each in call.origins if each.results is None]
                if call.results is not None:
                    stack.pop()
                elif call.function is None or any(x.is_meta for x in leaves(call.operands) if isinstance(x, Tensor)):
                    raise self._unknown(asked)
                elif missing:
                    stack += missing
                else:
                    args, kwargs = replace_leaves(call.operands, _value)
                    call.results = tensors_in(call.function(*args, **kwargs))

    def _unknown(self, asked: Origin) -> LayoutError:
        names = sorted(asked.inputs)
        wanted = f"; it asks for a value that depends on {', '.join(names)}" if names else ""
        way_out = f"give an example of {names[-1]} with data, leave it out of the example, or " if names else ""
        return LayoutError(
            f"the forward pass of {self.model} depends on the values of its tensors, which have no data here{wanted}: "
            f"{way_out}give the placements of its parameters by name, {{pattern: placements}}"
        )


def _value(leaf: object) -> Any:
    """The stand-in for a leaf of the operands, with data and on the host."""
    if isinstance(leaf, _Result):
        assert leaf.origin.results is not None
        leaf = leaf.origin.results[leaf.number]
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _writes(func: Function, kwargs: Kwargs) -> bool:
    """Whether a function writes to its first argument or to `out`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name not in ("__int__", "__invert__"))
    return name.endswith("_") or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


class Replies(TorchFunctionMode):
    """Within the block, questions about tensors without data are answered by `answers`, in their order."""

    def __init__(self, answers: Sequence[object] | None) -> None:
        super().__init__()
        self.rest: Iterator[object] | None = None if answers is None else iter(answers)

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in QUESTIONS or not any(map(_has_no_data, tensors_in((args, kwargs)))):
            return func(*args, **kwargs)
        if self.rest is None:
            raise NoAnswers
        return next(self.rest)


def _has_no_data(x: Tensor) -> bool:
    return x._local_tensor.is_meta if isinstance(x, Wrapper) else x.is_meta


def named_inputs(model: nn.Module, args: Args, kwargs: Mapping[str, object]) -> list[tuple[Tensor, str]]:
    """The tensors among the inputs of a model, in order, with the name of the parameter that each is given for."""
    names = [p.name for p in signature(model.forward).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    names += [f"argument {i}" for i in range(len(names), len(args))]  # of `*args`
    given = (*zip(names, args, strict=False), *kwargs.items())
    return [(x, name) for name, arg in given for x in tensors_in(arg)]
