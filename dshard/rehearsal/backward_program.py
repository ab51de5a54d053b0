"""Programs of backward passes: what a derivation recorded, as one function of the values that a run has kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dshard.comm import JoinedViews, Session
from dshard.rehearsal.answers import FILE
from dshard.rehearsal.code import Code, parted, reads, roots_of, simplified, variable, with_slots
from dshard.rehearsal.derivation import Derivation
from dshard.rehearsal.local_recorder import Instruction, Slot, View
from dshard.rehearsal.record import Record
from dshard.torch_private import OpOverload


class BackwardProgram(NamedTuple):
    """The backward pass of a pattern: `run(values, own, grads)` leaves local gradients in `grads`, part by part.

    Each part gives those of the operands in one of `parts`, of which `wraps` make gradients. It reads the forward
    values in `slots`, of which those in `fresh` were never written to within the module, the operands `reads`, by
    number, each part those in one of `part_reads`; `code` is its source.
    """

    run: Callable[..., Iterator[None]]
    parts: list[list[int]]
    wraps: Mapping[int, Callable[[Any], Any]]
    fresh: tuple[int, ...]
    slots: frozenset[Slot]
    reads: frozenset[int]
    part_reads: list[frozenset[int]]
    code: str


class NoProgram(Exception):
    """A backward pass has no program, for a reason."""


class Given(NamedTuple):
    """A gradient that a backward pass gives: its slot, and what makes it of the local tensor."""

    slot: Slot
    wrap: Callable[[Tensor], Any]


class PassStage(NamedTuple):
    """A stage of a recorded pass: how many instructions ran until its end, and the operands whose gradients it gave."""

    end: int
    numbers: list[int]


def program_of(
    record: Record,
    derivation: Derivation,
    grad_slots: Mapping[Slot, int],
    results: Mapping[int, Given],
    parts: Sequence[PassStage],
    packs: Sequence[Sequence[int]] = (),
) -> BackwardProgram:
    """The program of a recorded backward pass, which gives the `results` by number, those of each part behind it.

    Those in each of `packs` lie one after the other in one buffer.

    Raises:
        NoProgram: it reads what is not there.
    """
    own, life = record.own, record.lifetimes
    if derivation.externals.keys() - grad_slots.keys() - derivation.literals.keys():
        raise NoProgram("the backward pass reads a tensor that nothing has made")

    def renamed(slot: Slot) -> Slot:
        return slot if slot in derivation.again else life.at(slot)

    instructions = [with_slots(each, renamed) for each in _with_makers(record, derivation, parts)]
    given = {n: life.at(result.slot) for n, result in results.items()}
    instructions, same = simplified(instructions, derivation.views, given.values())
    given = {n: same.get(slot, slot) for n, slot in given.items()}
    once, rest, fixed = parted(life.fixed | derivation.literals.keys(), instructions)
    own.add(derivation.literals, once, len(derivation.views))
    rest, given = _packed(rest, parts, given, packs, derivation.views, fixed)
    pairs = [([each for each in rest if each.call == i], part.numbers) for i, part in enumerate(parts)]
    code = Code(lambda slot: f"w[{slot.number}]" if slot in fixed else f"v[{slot.number}]", {"own": _copy})
    run, source = code.function("backward", "v, w, g", _lines(pairs, given, fixed, grad_slots, code), FILE)
    read = _read_of_forward(rest, given.values(), grad_slots)
    viewed = {out: each.args[0] for each in own.once for out in each.made}

    def operands(slots: Iterable[Slot]) -> frozenset[int]:
        numbers = set[int]()
        for slot in slots:
            while slot in viewed:
                slot = viewed[slot]
            if slot in record.contents.sources:
                numbers.add(record.contents.sources[slot])
        return frozenset(numbers)

    values = read - fixed
    wraps = {n: result.wrap for n, result in results.items()}
    return BackwardProgram(
        run,
        [part.numbers for part in parts],
        wraps,
        tuple(life.fresh(values)),
        frozenset(values),
        operands(read),
        [operands(slot for each in instructions for slot in reads(each)) for instructions, _ in pairs],
        source,
    )


def _read_of_forward(instructions: Iterable[Instruction], given: Iterable[Slot], made: Iterable[Slot]) -> set[Slot]:
    """The slots that are read before they are made, beside those that are `made` before.

    What a checkpoint makes again may have been read already: its end, by the gradient of what follows it.
    """
    read, made = set[Slot](), {*made}
    for each in instructions:
        read |= {*reads(each)} - made
        made.update(each.made)
    return read | ({*given} - made)


def _with_makers(record: Record, derivation: Derivation, parts: Sequence[PassStage]) -> list[Instruction]:
    """The instructions of the backward pass, each behind those that make what it reads and was not kept.

    The `call` of each is the number of its part.
    """
    life = record.lifetimes
    stored = life.kept | life.fixed | record.contents.sources.keys() | record.own.literals.keys()
    if record.contents.reader is not None:
        stored |= {record.contents.reader}
    instructions, again = list[Instruction](), set[int]()
    for i, (start, part) in enumerate(zip([0, *(part.end for part in parts)], parts, strict=False)):
        n = len(instructions)
        for each in derivation.instructions[start : part.end]:
            _add(each, derivation, stored, instructions, again)
        instructions[n:] = [replace(each, call=i) for each in instructions[n:]]
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


def _packed(
    instructions: Sequence[Instruction],
    parts: Sequence[PassStage],
    given: Mapping[int, Slot],
    packs: Sequence[Sequence[int]],
    views: Sequence[View | None],
    fixed: Set[Slot],
) -> tuple[list[Instruction], dict[int, Slot]]:
    """The instructions and the gradients that they give, with those of each pack in one buffer."""
    given, part_of = dict(given), {n: i for i, part in enumerate(parts) for n in part.numbers}
    roots = roots_of(instructions)
    times = Counter(roots.get(slot, slot) for slot in given.values())
    last = {roots.get(slot, slot): each.call for each in instructions for slot in reads(each)}
    buffered = BufferedGradients(instructions, views, fixed | roots.keys())

    def is_shared(slot: Slot, part: int) -> bool:
        return slot in roots or times[slot] > 1 or last.get(slot, -1) > part

    for pack in packs:
        if part_of.keys() >= {*pack}:
            slots = {given[n]: part_of[n] for n in pack}
            shared = {slot for slot, part in slots.items() if is_shared(slot, part)}
            if len(slots) == len(pack):
                given |= zip(pack, buffered.put(slots, shared, {*given.values()}), strict=True)
    return buffered.instructions, given


def _lines(
    parts: Sequence[tuple[list[Instruction], list[int]]],
    results: Mapping[int, Slot],
    fixed: set[Slot],
    grad_slots: Mapping[Slot, int],
    code: Code,
) -> list[str]:
    """The lines of a backward program: each value is freed after its last use, also those of the forward pass."""
    lines = [*(f"{variable(slot)} = g[{i}]" for slot, i in grad_slots.items()), "g.clear()"]
    code.variables |= grad_slots.keys()
    instructions = [each for part, _ in parts for each in part]
    made, roots = {out for each in instructions for out in each.made}, roots_of(instructions)
    seen = set[Slot]()
    for i, (part, numbers) in enumerate(parts):
        given = [results[n] for n in numbers]
        later = {slot for after, others in parts[i + 1 :] for slot in _used(after, [results[n] for n in others])}
        lines += code.lines(part, {*given} | later | fixed)
        used_later = {roots.get(slot, slot) for slot in later}
        texts = list[str]()
        for slot in given:
            root = roots.get(slot, slot)
            shares = root in seen or root in used_later or root not in made  # a leaf may keep it, and write to it
            seen.add(root)
            texts.append(f"own({code.place(slot)})" if shares else code.place(slot))
        lines += [f"g += [{', '.join(texts)}]", *code.freed({*given} - later - fixed), "yield"]
    return lines


def _used(instructions: Sequence[Instruction], results: Iterable[Slot]) -> set[Slot]:
    return {slot for each in instructions for slot in reads(each)}.union(results)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# -- gradients that it computes in the buffer in which they are all-reduced: nothing is copied to it

_ALIGNED = 64
"""Bytes: torch's own tensors begin at a multiple of it, and libraries may round otherwise elsewhere."""


class BufferedGradients:
    """The instructions of a backward program, whose gradients are put into buffers.

    `views` says how the tensor of each slot lies in its storage; those in `borrowed` have no memory that ends here.
    """

    def __init__(self, instructions: Iterable[Instruction], views: Iterable[View | None], borrowed: Set[Slot]) -> None:
        self.instructions, self._views, self._borrowed = [*instructions], [*views], {*borrowed}

    def put(self, slots: Mapping[Slot, int], shared: Container[Slot], given: Container[Slot]) -> list[Slot]:
        """Put gradients into one buffer, one after the other; their slots then.

        `slots` have the number of the part that gives each. An operator that can writes there; what others make is
        copied, at the end of its part. So is what is `shared`: something may read it later. Nothing changes where all
        would be copied, where they differ in dtype, or where the pass would hold more at once than if the buffer were
        packed at its end; so the buffer may begin behind some of its gradients. Those `given` to autograd stay.
        """
        layouts = {slot: view for slot in slots if (view := self._views[slot.number]) is not None and view.numel}
        if len(layouts) < len(slots) or len({(view.dtype, view.device) for view in layouts.values()}) > 1:
            return [*slots]
        offsets = accumulate(map(_bytes_of, layouts.values()), initial=0)
        fits = {
            slot
            for (slot, view), offset in zip(layouts.items(), offsets, strict=False)
            if slot not in shared and view.is_contiguous and offset % _ALIGNED == 0
        }
        makers = {out: i for i, each in enumerate(self.instructions) for out in each.made}
        direct = {makers[slot]: slot for slot in fits if slot in makers and _writing(self.instructions[makers[slot]])}
        last = {slot: i for i, each in enumerate(self.instructions) for slot in reads(each)}
        begin = self._begin(layouts, slots, direct, makers, last, given)
        if begin is None:
            return [*slots]
        places = {slot: self._new_slot(view) for slot, view in layouts.items()}
        call, written = self.instructions[begin].call, {slot for i, slot in direct.items() if i >= begin}
        done = self.instructions[:begin]
        make = partial(
            _in_one_buffer, JoinedViews([view.shape for view in layouts.values()]), next(iter(layouts.values()))
        )
        done.append(
            Instruction(make, (), (), tuple(places.values()), is_tuple=True, key="buffer of gradients", call=call)
        )
        now = {slot: slot for slot in slots}
        over = [slot for slot in slots if _is_over(slot, begin, makers, last) and slot not in shared]
        if over:
            done.append(self._copies(over, places, now, call))
        for i, each in enumerate(self.instructions[begin:], begin):
            if i in direct:
                form: Any = _writing(each)
                each = replace(each, function=form, kwargs=(*each.kwargs, ("out", places[direct[i]])))
                self._borrowed.add(direct[i])
            done.append(each)
        left = [slot for slot in slots if slot not in written and slot not in over]
        for part in sorted({slots[slot] for slot in left}):
            copies = self._copies([slot for slot in left if slots[slot] == part], places, now, part)
            done.insert(sum(other.call <= part for other in done), copies)
        self.instructions = done
        return [now[slot] for slot in slots]

    def _begin(
        self,
        layouts: Mapping[Slot, View],
        slots: Mapping[Slot, int],
        direct: Mapping[int, Slot],
        makers: Mapping[Slot, int],
        last: Mapping[Slot, int],
        given: Container[Slot],
    ) -> int | None:
        """The first instruction that can write to the buffer, without more memory than packing at the end takes."""
        alive, made = self._alive(last, given)
        size = sum(map(_bytes_of, layouts.values()))
        first, end = (
            sum(each.call <= part for each in self.instructions) for part in (min(slots.values()), max(slots.values()))
        )
        most = max(*alive, alive[end - 1] + size)
        for begin in sorted(i for i in direct if i < first):
            over = sum(_bytes_of(view) for slot, view in layouts.items() if _is_over(slot, begin, makers, last))
            held, fits = size, alive[begin] - made[begin] + size <= most
            for i in range(begin, len(alive)):
                held -= _bytes_of(layouts[direct[i]]) if i in direct else 0
                fits = fits and alive[i] + held - over <= most
            if fits:
                return begin
        return None

    def _alive(self, last: Mapping[Slot, int], given: Container[Slot]) -> tuple[list[int], list[int]]:
        """The bytes alive while each instruction runs, beyond those at the begin, and those that it makes."""
        alive, made, now = list[int](), list[int](), 0
        ends: defaultdict[int, list[Slot]] = defaultdict(list)
        for slot, i in last.items():
            ends[i].append(slot)
        for i, each in enumerate(self.instructions):
            made.append(sum(map(self._nbytes, each.made)))
            now += made[-1]
            alive.append(now)
            unread = [slot for slot in each.made if slot not in last]
            now -= sum(self._nbytes(slot) for slot in (*ends[i], *unread) if slot not in given)
        return alive, made

    def _nbytes(self, slot: Slot) -> int:
        view = self._views[slot.number]
        return 0 if view is None or slot in self._borrowed else _bytes_of(view)

    def _new_slot(self, like: View) -> Slot:
        self._views.append(like)
        return Slot(len(self._views) - 1)

    def _copies(
        self, slots: Sequence[Slot], places: Mapping[Slot, Slot], now: dict[Slot, Slot], call: int
    ) -> Instruction:
        """The instruction that copies these gradients to their places, in new slots, which are then those of `now`."""
        for slot in slots:
            view = self._views[slot.number]
            assert view is not None
            now[slot] = self._new_slot(view)
            self._borrowed.add(now[slot])
        args, outs = (tuple(places[slot] for slot in slots), tuple(slots)), tuple(now[slot] for slot in slots)
        return Instruction(_copied, args, (), outs, is_tuple=True, key="copies to a buffer", call=call)


def _is_over(slot: Slot, begin: int, makers: Mapping[Slot, int], last: Mapping[Slot, int]) -> bool:
    """Whether a gradient is made before an instruction, and nothing reads it from there on."""
    return makers.get(slot, begin) < begin and last.get(slot, -1) < begin


def _bytes_of(view: View) -> int:
    return view.numel * view.dtype.itemsize


def _writing(each: Instruction) -> Callable[..., Tensor] | None:
    """The form of an instruction's operator that writes its one result to `out`."""
    return None if each.is_tuple or each.is_view or len(each.outs) != 1 else writing_variant(each.operator)


def writing_variant(op: OpOverload | None) -> Callable[..., Tensor] | None:
    """The form of an operator of one result that writes it to `out`."""
    if op is None or len(op._schema.returns) != 1 or op._schema.is_mutable:
        return None
    own = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        if [(argument.name, str(argument.type)) for argument in arguments] == [*own, ("out", "Tensor")]:
            form: Callable[..., Tensor] = getattr(packet, name)
            return form
    return None


def _in_one_buffer(parts: JoinedViews, like: View) -> list[Tensor]:
    return parts.unpack(torch.empty(sum(parts.sizes), dtype=like.dtype, device=like.device), Session())


def _copied(places: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    torch._foreach_copy_(places, values)
    return places
