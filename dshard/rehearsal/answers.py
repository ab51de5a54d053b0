"""The functions that answer calls: each compares a call with the recorded one, and runs its instructions.

Values are in a list, by the numbers of their slots: those of parameters and of views of them, which are made once, and
those that later calls or the backward pass read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import getweakrefcount

from torch import Tensor

from dshard.comm import DRAW, ENDS
from dshard.core.view_sync import CopiedView, register_view, shown_of
from dshard.core.wrapper import Wrapper
from dshard.rehearsal.calls import MISS, Autocast, CallConditions, RecordedCall, Ref, local_of, without_autocast
from dshard.rehearsal.code import Code, parted, reads, simplified, slots_in, written_by
from dshard.rehearsal.contents import Contents
from dshard.rehearsal.local_recorder import Instruction, Slot
from dshard.rehearsal.session import OWN_CALLS
from dshard.torch_private import increment_version, no_torch_function, pytree, tensor_references

FILE = "<rehearsed>"
"""The name of the file of the code of calls, in tracebacks."""
_ONE = pytree.tree_structure(0)


class Answer(NamedTuple):
    """An answered call: the function called, the state it was recorded in, and the function that runs it.

    `run(args, kwargs, tensors, values)` returns the result, or MISS if the arguments differ.
    """

    func: Any
    grad: bool
    settings: list[object]
    checkpoint: bool
    autocast: Autocast
    run: Callable[..., Any]


def answers_of(contents: Contents, lifetimes: Lifetimes, versions: dict[int, int]) -> tuple[list[Answer], list[str]]:
    """The answer to each call, and its source; `versions` are the places of the versions of operands first seen."""
    writer = _Writer(contents, lifetimes, versions)
    answers, sources = list[Answer](), list[str]()
    for i, call in enumerate(contents.calls):
        run, source = writer.function(i, call)
        run = without_autocast(run, call.autocast)
        answers.append(
            Answer(call.func, call.grad, call.settings.values, call.checkpoint is not None, call.autocast, run)
        )
        sources.append(source)
    return answers, sources


class _Writer:
    """Writes the functions of a record, which share their constants."""

    def __init__(self, contents: Contents, lifetimes: Lifetimes, versions: dict[int, int]) -> None:
        self.contents, self.lifetimes, self.versions = contents, lifetimes, versions
        self.slots = {n: slot for slot, n in contents.sources.items()}
        self.first_calls = contents.first_calls
        self.first_results = _by_call(self.first_calls)
        self.last_uses = _by_call(lifetimes.last)
        self.drops: dict[int, list[int]] = {}
        for n, i in contents.dropped.items():
            result = contents.made.get(n)
            if (
                result is not None
                and not result.is_plain
                and (result.copy or lifetimes.at(result.slot) not in lifetimes.kept)
            ):
                self.drops.setdefault(max(i, self.first_calls[n] + 1), []).append(n)
        names = {"MISS": MISS, "R": getrefcount, "uses": tensor_references, "weak": getweakrefcount, "local": local_of}
        names |= {"version": version_of, "written": _count_writes, "unflatten": pytree.tree_unflatten}
        names |= {"copied": _register_copy, "shown": shown_of}
        self.code = Code(lambda slot: f"v[{slot.number}]", names)

    def place(self, n: int) -> str:
        """How the code names the object number `n`."""
        leaves = self.contents.leaves
        return self.code.constant(leaves[n], "p") if n in leaves else f"o[{n}]"

    def function(self, i: int, call: RecordedCall) -> tuple[Callable[..., Any], str]:
        """The function that answers a call, and its source."""
        code, contents, life = self.code, self.contents, self.lifetimes
        code.variables.clear()
        same = CallConditions(call, code, self.place)
        lines = [f"if not ({' and '.join(same.conditions)}): return MISS"]
        for n, name in same.first_seen:
            lines.append(f"o[{n}] = {name}; v[{self.versions[n]}] = version({name})")
            if n in self.slots:
                lines.append(f"v[{self.slots[n].number}] = local({name})")
        lines += [f"if not ({condition}): return MISS" for condition in same.after]
        for n in self.drops.get(i, ()):
            attributes = ["_local_tensor"] if contents.made[n].copy is None else ["_local_tensor", "_view_sync"]
            pops = "; ".join(f"x.__dict__.pop({each!r}, None)" for each in attributes)
            lines += [f"x = o[{n}]", f"if R(x) == 3 and uses(x) == 1 and not weak(x): {pops}"]
        results = {n: life.at(contents.made[n].slot) for n in self.first_results[i]}
        ending = {slot for slot in self.last_uses[i] if slot not in life.kept}
        segment, given = life.segments[i], set(results.values())
        stored = {slot for each in segment for slot in each.made if slot not in ending}
        stay = {slot for each in segment for slot in (*reads(each), *each.made)} - (ending - given)
        lines += code.lines(segment, stay, stored)
        if call.func in OWN_CALLS and call.outs == [
            None
        ]:  # it hooks the operand, whose gradient comes from elsewhere, too
            hooked = [ref.number for ref in call.args if isinstance(ref, Ref) and ref.number not in contents.made]
            lines += [f"{code.constant(OWN_CALLS[call.func])}({self.place(n)})" for n in hooked]
        if call.writes:
            lines.append(f"written([{', '.join(map(self.place, call.writes))}])")
        for n, slot in results.items():
            value = code.place(slot)
            lines.append(f"o[{n}] = {value}" if contents.made[n].is_plain else f"o[{n}]._local_tensor = {value}")
            copy, weight = contents.made[n].copy, contents.of_weights.get(contents.made[n].slot)
            if weight is not None:
                lines.append(f"{value}._view_syncs = shown(local(o[{weight}]))")
            if copy is not None and copy.origin is None:
                lines.append(f"o[{n}]._view_sync = {self.place(copy.of)}._view_sync")
            elif copy is not None:
                lines.append(f"copied(o[{n}], {self.place(copy.of)}, {code.constant(copy.origin)})")
        lines += code.freed(slot for slot in ending & given if slot not in code.variables)
        outs = [self.place(ref.number) if isinstance(ref, Ref) else code.constant(ref) for ref in call.outs]
        lines.append(f"return {_structured(pytree.tree_structure(call.out), outs, code)}")
        return code.function(f"call_{i}_{call.name}", "args, kwargs, o, v", lines, FILE)


def version_of(x: Tensor) -> int:
    """How often a tensor was written to, as autograd counts; 0 for those of inference mode."""
    with no_torch_function():
        return 0 if x.is_inference() else x._version


def _register_copy(view: Wrapper, base: Wrapper, origin: CopiedView) -> None:
    """Keep a view with memory of its own equal to its base."""
    register_view(view, replace(origin, base=base, local=view._local_tensor))


def _count_writes(tensors: Sequence[Tensor]) -> None:
    """Count a write to the distributed ones: plain ones have counted it themselves."""
    increment_version([x for x in tensors if isinstance(x, Wrapper)])


def _structured(structure: Any, outs: Sequence[str], code: Code) -> str:
    """The code of a nested result."""
    if structure == _ONE:
        return outs[0]
    if structure == pytree.tree_structure((0,) * len(outs)):
        return f"({''.join(out + ', ' for out in outs)})"
    if structure == pytree.tree_structure([0] * len(outs)):
        return f"[{', '.join(outs)}]"
    return f"unflatten([{', '.join(outs)}], {code.constant(structure)})"


def _by_call(calls: Mapping[Any, int]) -> defaultdict[int, list[Any]]:
    """The keys by the number of the call that is their value."""
    out = defaultdict[int, list[Any]](list)
    for key, i in calls.items():
        out[i].append(key)
    return out


# -- plans of a record: what runs once and in each call, and how long its values are kept
# What autograd had saved when the module was recorded is kept for the backward pass, nothing else.


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
        written: The slots whose memory is written to; `rewritten` those of results that get a gradient, and are kept.
        new_memory: The slots of values that operators made of others, and nothing fills or writes to.
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
    rewritten: frozenset[Slot]
    new_memory: frozenset[Slot]

    def at(self, slot: Slot) -> Slot:
        """The slot whose value stands for that of `slot`."""
        return self.same.get(slot, slot)

    def fresh(self, slots: Iterable[Slot]) -> list[int]:
        """The numbers of those slots whose values the calls have made, and never written to."""
        return [slot.number for slot in slots if self.maker.get(slot, -1) >= 0 and slot in self.new_memory]


def lifetimes_of(contents: Contents, alive: set[Slot]) -> Lifetimes:
    """Plan what each call runs, keeps and frees; `alive` are the slots of what is alive after the forward pass."""
    raw, needs_grad = contents.instructions, bool(contents.needing)
    filled = _filled(raw)
    made_once = filled | {out for each in raw if each.draws for out in each.made}
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
    kept -= {each.slot for each in contents.let_go.values()}
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
        rewritten=frozenset(kept & written & {x.slot for x in contents.made.values() if x.kind[4]}),
        new_memory=frozenset(new - written - {same.get(slot, slot) for slot in filled}),
    )


def _filled(instructions: Iterable[Instruction]) -> set[Slot]:
    """The slots of values that other functions than operators fill."""
    fills = [x for x in instructions if x.operator is None and x.key not in (ENDS, DRAW) and not x.begins]
    return {slot for each in fills for slot in reads(each)}
