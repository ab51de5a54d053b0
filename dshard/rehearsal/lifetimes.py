"""Plans of a record: what runs once and in each call, and how long its values are kept.

What autograd had saved when the module was recorded is kept for the backward pass, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dshard.comm import ENDS
from dshard.rehearsal.contents import Contents
from dshard.rehearsal.local_recorder import Instruction, Slot
from dshard.rehearsal.simplified import parted, reads, simplified, slots_in, written_by


@dataclass(frozen=True)
class Lifetimes:
    """Instructions without what is not needed, and the slots of their values.

    Attributes:
        once: The views of the module's own tensors, which are made once; `fixed` has their slots and those they read.
        segments: What runs in each call.
        same: The slots that others stand for; see `at`.
        maker: The call that makes a value; -1 for those of inputs and of operands that are seen on the way.
        last: The last call that uses it.
        kept: The slots that a backward pass may read.
        made_once: The slots of values that are random, or filled by other functions than operators.
        lost: The slots of values that nothing makes again of what is kept: made once, sent, written to, or of such.
        written: The slots whose memory is written to.
        new_memory: The slots of values that operators made of others, and nothing writes to.
    """

    once: list[Instruction]
    fixed: frozenset[Slot]
    segments: list[list[Instruction]]
    same: dict[Slot, Slot]
    maker: dict[Slot, int]
    last: dict[Slot, int]
    kept: frozenset[Slot]
    made_once: frozenset[Slot]
    lost: frozenset[Slot]
    written: frozenset[Slot]
    new_memory: frozenset[Slot]

    def at(self, slot: Slot) -> Slot:
        """The slot whose value stands for that of `slot`."""
        return self.same.get(slot, slot)


def lifetimes_of(contents: Contents, alive: set[Slot]) -> Lifetimes:
    """Plan what each call runs, keeps and frees; `alive` are the slots of what is alive after the forward pass."""
    raw, needs_grad = contents.instructions, bool(contents.needing)
    made_once = _made_once(raw)
    computed = {out for each in raw if not each.is_view for out in each.made}
    saved = (alive & computed) | made_once if needs_grad else set()
    results = {n: x.slot for n, x in contents.made.items()}
    instructions, same = simplified(raw, contents.views, [*results.values(), *saved])
    own = {slot for slot, n in contents.sources.items() if n in contents.leaves}
    once, rest, fixed = parted({*own, *contents.literals}, instructions)
    segments: list[list[Instruction]] = [[] for _ in contents.calls]
    for each in rest:
        segments[each.call].append(each)
    begun = {slot for each in raw if each.begins for slot in slots_in(each.args[1:])}
    written = written_by(rest) | {same.get(slot, slot) for slot in begun}
    maker = {out: each.call for each in rest for out in each.made}
    maker |= {slot: -1 for slot in contents.sources if slot not in own}
    kept = {slot for slot, i in maker.items() if i < 0 or slot in alive | made_once} if needs_grad else set()
    kept -= contents.of_weights.keys()  # which are alive, as others have not let go of them
    lost = set[Slot]()
    for each in raw:
        made = {same.get(out, out) for out in each.made}
        is_lost = each.operator is None or bool(made & (made_once | written))
        if is_lost or any(same.get(slot, slot) in lost - kept for slot in reads(each)):
            lost |= made
    uses = [(slot, each.call) for each in rest for slot in reads(each)]
    uses += [(same.get(results[n], results[n]), i) for n, i in contents.first_calls.items()]
    last = dict(maker)
    for slot, i in uses:
        if slot in last:
            last[slot] = max(last[slot], i)
    # what torch makes of nothing, such as arange, it fills by writes, and may count them
    makers = [each for each in rest if each.operator and not each.is_view and [*reads(each)]]
    new = {out for each in makers for out in each.made}
    return Lifetimes(
        once,
        frozenset(fixed),
        segments,
        same,
        maker,
        last,
        kept=frozenset(kept),
        made_once=frozenset(made_once),
        lost=frozenset(lost),
        written=frozenset(written),
        new_memory=frozenset(new - written),
    )


def _made_once(instructions: Iterable[Instruction]) -> set[Slot]:
    slots = set[Slot]()
    for each in instructions:
        if each.draws:
            slots.update(each.made)
        elif each.operator is None and each.key not in (ENDS, "draw") and not each.begins:
            slots.update(reads(each))
    return slots
