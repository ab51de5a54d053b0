"""The functions that answer calls: each compares a call with the recorded one, and runs its instructions.

Values are in a list, by the numbers of their slots: those of parameters and of views of them, which are made once, and
those that later calls or the backward pass read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import getweakrefcount

from torch import Tensor

from dshard.core.view_sync import CopiedView, register_view, shown_of
from dshard.core.wrapper import Wrapper
from dshard.rehearsal.calls import MISS, Autocast, CallConditions, RecordedCall, Ref, local_of, without_autocast
from dshard.rehearsal.code import Code
from dshard.rehearsal.contents import Contents
from dshard.rehearsal.lifetimes import Lifetimes
from dshard.rehearsal.session import OWN_CALLS
from dshard.rehearsal.simplified import reads
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
        results = {n: life.at(contents.made[n].slot) for n, at in self.first_calls.items() if at == i}
        ending = {slot for slot, at in life.last.items() if at == i and slot not in life.kept}
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
