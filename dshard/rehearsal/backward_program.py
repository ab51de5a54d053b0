"""Programs of backward passes: what a derivation recorded, as one function of the values that a run has kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dshard.rehearsal.answers import FILE
from dshard.rehearsal.code import Code, variable
from dshard.rehearsal.derivation import Derivation
from dshard.rehearsal.local_recorder import Instruction, Slot
from dshard.rehearsal.record import Record
from dshard.rehearsal.simplified import parted, reads, roots_of, simplified, with_slots


class Program(NamedTuple):
    """The backward pass of a pattern: `run(values, own, grads)` gives local gradients, and `wraps` makes them whole.

    It reads the forward values in `slots`, of which those in `fresh` were never written to within the module, the
    operands `reads`, by number; `code` is its source.
    """

    run: Callable[..., Sequence[Any]]
    wraps: list[Callable[[Any], Any] | None]
    fresh: tuple[int, ...]
    slots: frozenset[Slot]
    reads: frozenset[int]
    code: str


class NoProgram(Exception):
    """A backward pass has no program, for a reason."""


def program_of(
    record: Record,
    derivation: Derivation,
    grad_slots: Mapping[Slot, int],
    results: Sequence[Slot | None],
    wraps: list[Callable[[Any], Any] | None],
) -> Program:
    """The program of a recorded backward pass.

    Raises:
        NoProgram: it reads what is not there.
    """
    own, life = record.own, record.lifetimes
    if derivation.externals.keys() - grad_slots.keys() - derivation.literals.keys():
        raise NoProgram("the backward pass reads a tensor that nothing has made")

    def renamed(slot: Slot) -> Slot:
        return slot if slot in derivation.again else life.at(slot)

    instructions = [with_slots(each, renamed) for each in _with_makers(record, derivation)]
    given = [None if slot is None else life.at(slot) for slot in results]
    instructions, same = simplified(instructions, derivation.views, [slot for slot in given if slot is not None])
    given = [None if slot is None else same.get(slot, slot) for slot in given]
    once, rest, fixed = parted(life.fixed | derivation.literals.keys(), instructions)
    own.add(derivation.literals, once, len(derivation.views))
    code = Code(lambda slot: f"w[{slot.number}]" if slot in fixed else f"v[{slot.number}]", {"own": _copy})
    run, source = code.function("backward", "v, w, g", _lines(rest, given, fixed, grad_slots, code), FILE)
    made = {out for each in rest for out in each.made}
    read = {slot for each in rest for slot in reads(each)} | {slot for slot in given if slot is not None}
    read -= made | grad_slots.keys()
    viewed = {out: each.args[0] for each in own.once for out in each.made}
    numbers = set[int]()
    for slot in read:
        while slot in viewed:
            slot = viewed[slot]
        if slot in record.contents.sources:
            numbers.add(record.contents.sources[slot])
    values = read - fixed
    fresh = [slot.number for slot in values if life.maker.get(slot, -1) >= 0 and slot in life.new_memory]
    return Program(run, wraps, tuple(fresh), frozenset(values), frozenset(numbers), source)


def _with_makers(record: Record, derivation: Derivation) -> list[Instruction]:
    """The instructions of the backward pass, each behind those that make what it reads and was not kept."""
    life = record.lifetimes
    stored = life.kept | life.fixed | record.contents.sources.keys() | record.own.literals.keys()
    instructions, again = list[Instruction](), set[int]()
    for each in derivation.instructions:
        _add(each, derivation, stored, instructions, again)
    return instructions


def _add(
    each: Instruction, derivation: Derivation, stored: Set[Slot], instructions: list[Instruction], again: set[int]
) -> None:
    life = derivation.record.lifetimes
    for slot in reads(each):
        if slot.number >= derivation.n_forward or life.at(slot) in stored or slot in derivation.again:
            continue
        maker = derivation.record.contents.makers.get(slot)
        if maker is None or life.at(slot) in life.written:
            raise NoProgram("the backward pass reads a value that cannot be made again")
        if id(maker) not in again:
            again.add(id(maker))
            _add(maker, derivation, stored, instructions, again)
    instructions.append(each)


def _lines(
    instructions: Sequence[Instruction],
    results: Sequence[Slot | None],
    fixed: set[Slot],
    grad_slots: Mapping[Slot, int],
    code: Code,
) -> list[str]:
    """The lines of a backward program: each value is freed after its last use, also those of the forward pass."""
    lines = [*(f"{variable(slot)} = g[{i}]" for slot, i in grad_slots.items()), "g.clear()"]
    code.variables |= grad_slots.keys()
    lines += code.lines(instructions, {slot for slot in results if slot is not None} | fixed)
    made, roots = {out for each in instructions for out in each.made}, roots_of(instructions)
    seen, texts = set[Slot](), list[str]()
    for result in results:
        if result is None:
            texts.append("None")
            continue
        root = roots.get(result, result)
        shares = root in seen or root not in made  # a leaf may keep it, and write to it
        seen.add(root)
        texts.append(f"own({code.place(result)})" if shares else code.place(result))
    return [*lines, f"return [{', '.join(texts)}]"]


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
