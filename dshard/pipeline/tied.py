"""Tied parameters: several stages hold a copy, trained as one with the sum of the copies' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dshard.autograd.crossing import redistribute
from dshard.comm import device_of, gather_objects
from dshard.core.spec import contiguous_spec
from dshard.errors import ScheduleError
from dshard.layout import Layout, Shape
from dshard.pipeline.stage import Stage
from dshard.tensor import DTensor

Names: TypeAlias = tuple[tuple[int, str], ...]
"""The copies of one parameter: the number of a stage, and the parameter's name in its module."""


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """One copy of a tied parameter, with its layout on the mesh of its stage."""

    stage: int
    name: str
    layout: Layout
    shape: Shape
    dtype: torch.dtype


class Tied:
    """The copies of one parameter, of which this rank may hold one; made and used by all ranks of their stages."""

    def __init__(self, copies: Sequence[TiedCopy], stage: Stage, number: int) -> None:
        self.copies = tuple(copies)
        mine = next((copy for copy in copies if copy.stage == number), None)
        self._number = number
        self._parameter: Any = None if mine is None else stage.named_parameters().get(mine.name)
        self._device = device_of(stage.layout_mesh)
        self._before: Any = None

    @property
    def later_copy(self) -> Any:
        """This stage's copy, unless it is the first; its gradient is that of the first."""
        return None if self._number == self.copies[0].stage else self._parameter

    @torch.no_grad()
    def make_equal(self) -> None:
        """Give every copy the values of the first."""
        received = self._spread(self._parameter)
        if received is not None:
            self._parameter.copy_(received)

    def set_aside(self) -> None:
        """Set accumulated gradients aside before a step: they are sums over the copies already."""
        if self._parameter is not None:
            self._before, self._parameter.grad = self._parameter.grad, None

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of all copies on the first copy's mesh after a step, and send the sum to each."""
        first, *others = self.copies
        mine = self._parameter
        grad = None if mine is None else torch.zeros_like(mine) if mine.grad is None else mine.grad
        for copy in others:
            received = self._move(grad, copy, first)
            if self._number == first.stage:
                grad = grad + received
        received = self._spread(grad)
        if mine is not None:
            total = grad if received is None else received
            mine.grad = total if self._before is None else self._before + total
        self._before = None

    def _spread(self, value: object) -> Any:
        """The first copy's value in the layout of this rank's copy; None if this rank has the first copy, or none."""
        first, *others = self.copies
        received = [self._move(value, first, copy) for copy in others]
        return next((x for copy, x in zip(others, received, strict=True) if copy.stage == self._number), None)

    def _move(self, value: Any, src: TiedCopy, dst: TiedCopy) -> Any:
        """Reshard the value of copy `src` to the layout of `dst`; None on ranks of neither."""
        if self._number not in (src.stage, dst.stage):
            return None
        if self._number != src.stage:
            spec = contiguous_spec(src.layout, src.shape, src.dtype, self._device)
            value = DTensor(torch.empty(0, dtype=src.dtype, device=self._device), spec)
        return redistribute(value, dst.layout)


def tied_of(
    groups: Sequence[Sequence[str]], stages: Sequence[Stage], number: int, process_group: Any
) -> tuple[Tied, ...]:
    """The tied parameters that `groups` name, as "0.words.weight", made equal; called by all ranks together."""
    if not groups:
        return ()
    named = [_names(group, len(stages)) for group in groups]
    here = [[_described(stages[number], i, name) for i, name in names if i == number] for names in named]
    described = gather_objects((number, here), process_group)
    parameters = []
    for i, names in enumerate(named):
        copies = [next(each[i][0] for n, each in described if n == stage) for stage, _ in names]
        _check(copies)
        parameters.append(Tied(copies, stages[number], number))
    for tied in parameters:
        tied.make_equal()
    return tuple(parameters)


def _names(group: Sequence[str], n_stages: int) -> Names:
    copies = []
    for text in group:
        number, _, name = text.partition(".")
        if not number.isdecimal() or int(number) >= n_stages or not name:
            raise ScheduleError(
                f"tied={text!r}: write the number of a stage, below {n_stages}, and the name of its parameter, as in "
                "'0.words.weight'"
            )
        copies.append((int(number), name))
    if len({number for number, _ in copies}) < max(len(copies), 2):
        raise ScheduleError(
            f"tied={tuple(group)}: copies of a parameter are in different stages; within a stage use one parameter"
        )
    return tuple(copies)


def _described(stage: Stage, number: int, name: str) -> TiedCopy | str:
    """The copy, or the text of an error, as all ranks must know of it before any of them raises."""
    named = stage.named_parameters()
    if name not in named:
        return f"tied='{number}.{name}': stage {number} has no parameter {name}; it has {', '.join(named) or 'none'}"
    parameter: Any = named[name]  # the stage has been checked: a DTensor
    spec = parameter._spec
    return TiedCopy(number, name, spec.layout, spec.shape, spec.dtype)


def _check(copies: Sequence[TiedCopy | str]) -> None:
    for copy in copies:
        if isinstance(copy, str):
            raise ScheduleError(copy)
    kinds = {(copy.shape, copy.dtype) for copy in copies if isinstance(copy, TiedCopy)}
    if len(kinds) > 1:
        differing = "; ".join(f"{c.stage}.{c.name} {c.shape} {c.dtype}" for c in copies if isinstance(c, TiedCopy))
        raise ScheduleError(f"tied copies of one parameter have one shape and dtype, not {differing}")
