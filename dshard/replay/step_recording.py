"""One run of a step by Python: its instructions, results, changed gradients, and the state that it ran in."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from dshard.comm import Collective, recording_calls, user_line
from dshard.core.observe import OperatorMode
from dshard.core.wrapper import Wrapper
from dshard.errors import ReplayError
from dshard.rehearsal.local_recorder import Instruction, Slot, StepRecorder
from dshard.replay.optimizer_options import Option, Place, Term, options_of, terms_in, values_in, with_values
from dshard.replay.step_call import Call, gradient_kind, local_of
from dshard.replay.step_state import Held, StepState, alike, is_plain
from dshard.torch_private import pytree

T = TypeVar("T")


class Leaf(NamedTuple):
    """A tensor whose gradient a step may change: an argument by its number, or one that the step refers to.

    The step keeps its gradient, drops it, or sets it to the value of the `slot`, of this spec, or plain. `before` is
    the kind of the gradient before the step.
    """

    number: int | None
    tensor: Tensor | None
    before: object
    change: Literal["keeps", "drops", "sets"]
    slot: Slot | None = None
    spec: Any = None

    def of(self, call: Call) -> Tensor:
        """The tensor in a call."""
        x = self.tensor if self.number is None else call.tensors[self.number]
        assert x is not None
        return x

    def same_as(self, leaf: Leaf) -> bool:
        """Whether both are one tensor, and the step does the same to its gradient."""
        return self.tensor is leaf.tensor and self._replace(tensor=None) == leaf._replace(tensor=None)


class Source(NamedTuple):
    """Where an external tensor comes from: the argument or the gradient of that number, or the `owner`.

    `tensor` returns it, if it is no argument and no gradient: literals are made of numbers of the program, and others
    are kept alive by something else.
    """

    kind: Literal["argument", "gradient", "owned", "literal", "other"]
    number: int = -1
    owner: Tensor | None = None
    tensor: Callable[[], Tensor | None] = lambda: None

    def same_as(self, source: Source) -> bool:
        """Whether both are one tensor, or equal literals."""
        if self.kind == source.kind == "literal":
            a, b = self.tensor(), source.tensor()
            return a is not None and b is not None and torch.equal(a, b)
        same = self.kind == source.kind and self.number == source.number and self.owner is source.owner
        return same and (self.kind != "other" or self.tensor() is source.tensor())


class Recording(NamedTuple):
    """One run of a step.

    `results` are the slots of the local tensors of its result, or values of Python; `specs` those of distributed
    tensors. `options` are those of the `groups` of parameters, `terms` what arguments may follow of them, and `varied`
    those that were seen with two values.
    """

    recorder: StepRecorder
    structure: Any
    results: list[Any]
    specs: list[Any]
    leaves: list[Leaf]
    sources: dict[Slot, Source]
    held: Held
    groups: list[dict[str, Any]]
    options: dict[Option, int | float]
    terms: dict[Place, frozenset[Term]]
    varied: frozenset[Option] = frozenset()

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of the step."""
        return self.recorder.instructions


class CheckingRecorder(StepRecorder):
    """Records a step that must do as in an earlier recording: it begins no other collectives than that."""

    def __init__(self, expected: Recording, error: Callable[[str], ReplayError]) -> None:
        super().__init__()
        self._expected: Iterator[Any] = iter([each for each in expected.instructions if _begins(each.key)])
        self._error = error

    def call(self, key: Any, function: Callable[..., T], *args: object) -> T:
        """Call a function, and record that.

        Raises:
            ReplayError: it begins a collective that the recording has not; nothing is sent.
        """
        if _begins(key):
            expected = next(self._expected, None)
            if expected is None or expected.key != key:
                was = f"{expected.key[-1].kind} at {expected.line}" if expected is not None else "no other collective"
                raise self._error(f"{key[-1].kind} at {user_line()}, where it was {was}")
        return super().call(key, function, *args)


def _begins(key: Any) -> bool:
    return isinstance(key, tuple) and isinstance(key[-1], Collective)


def record(step: Callable[..., Any], call: Call, recorder: StepRecorder) -> tuple[Any, Recording]:
    """Run a step by Python, and record it.

    Raises:
        ReplayError: it begins other collectives than the recorder expects.
    """
    state = StepState(step)
    state.add_tensors(call.tensors)
    with state.gathering(), recording_calls(recorder), OperatorMode(recorder.run), _without_compiling():
        result = step(*call.args, **call.kwargs)
        flat, structure = pytree.tree_flatten(result)
        results = [recorder.slot_of(local_of(out)) if isinstance(out, Tensor) else out for out in flat]
        _check_results(flat, recorder)
        leaves = _leaves(call, state, recorder)
        recorder.close()
    for x in recorder.externals.values():
        recorder.slot_of(x)  # which refuses those whose memory was replaced
    sources = _sources(recorder, call, state)
    if any(leaf not in state.tensors for leaf in recorder.leaves) or any(
        source.kind == "other" and recorder.externals[slot].requires_grad for slot, source in sources.items()
    ):
        recorder.refuse(
            "a gradient arises for a tensor that neither an argument, a module, an optimiser nor a variable of the "
            "step holds"
        )
    recorder.externals.clear()  # which would keep the tensors of this call
    groups = state.groups()
    options = options_of(groups)
    if state.options_changed:
        recorder.refuse("the step changes options of its optimiser: let a schedule step outside")
    return result, Recording(
        recorder,
        structure,
        results,
        [out._spec if isinstance(out, Wrapper) else None for out in flat],
        leaves,
        sources,
        state.held(call.tensors),
        groups,
        options,
        terms_in(recorder.instructions, options),
    )


def _check_results(results: list[Any], recorder: StepRecorder) -> None:
    for out in results:
        if isinstance(out, Tensor):
            if out.requires_grad and not (out.is_leaf or recorder.ran_backward):
                recorder.refuse("the step returns a tensor that requires a gradient, and runs no backward pass")
        elif not is_plain(out):
            recorder.refuse(f"the step returns a {type(out).__name__}, which is neither a tensor nor a number")


def _leaves(call: Call, state: StepState, recorder: StepRecorder) -> list[Leaf]:
    """The leaves, and what the step has done to their gradients."""
    numbers = {id(x): i for i, x in reversed([*enumerate(call.tensors)])}
    leaves = list[Leaf]()
    for i, before in state.grads.items():
        x, grad = state.tensors[i], state.tensors[i].grad
        if isinstance(x, Wrapper) and x._gradient_leaf is not None and x._gradient_leaf.has_partial_sum:
            recorder.refuse("the step leaves partial gradients: accumulate within one step")
        leaf = Leaf(numbers.get(i), None if i in numbers else x, gradient_kind(before), "keeps")
        if grad is None and before is not None:
            leaf = leaf._replace(change="drops")
        elif grad is not None and grad is not before:
            spec = grad._spec if isinstance(grad, Wrapper) else None
            leaf = leaf._replace(change="sets", slot=recorder.slot_of(local_of(grad)), spec=spec)
        leaves.append(leaf)
    return leaves


def _itself(x: Tensor) -> Tensor:
    return x


def _sources(recorder: StepRecorder, call: Call, state: StepState) -> dict[Slot, Source]:
    """Where the external tensors of a recording come from."""
    arguments = {id(x): i for i, x in enumerate(call.locals)}
    before = {id(local_of(x)): i for i, x in enumerate(state.grads.values()) if x is not None}
    owners = {id(local_of(x)): x for x in state.tensors.values()}
    sources: dict[Slot, Source] = {}
    for slot, x in recorder.externals.items():
        number = id(x)
        if slot in recorder.literals:
            sources[slot] = Source("literal", tensor=partial(_itself, x))
        elif number in arguments:
            sources[slot] = Source("argument", arguments[number])
        elif number in before:
            sources[slot] = Source("gradient", before[number])
        elif number in owners:
            sources[slot] = Source("owned", owner=owners[number], tensor=partial(_itself, x))
        else:
            sources[slot] = Source("other", tensor=weakref.ref(x))
    return sources


def matched(first: Recording, second: Recording) -> tuple[Recording, str]:
    """The second recording with what both say of options, and what differs in them; empty if nothing does."""
    common = {place: terms & second.terms[place] for place, terms in first.terms.items() if place in second.terms}
    common = {place: terms for place, terms in common.items() if terms}
    why = _difference(first, second, common)
    changed = {option for option, number in second.options.items() if number != first.options.get(option)}
    held = second.held if why else second.held.since(first.held)
    return second._replace(terms=common, varied=first.varied | changed, held=held), why


def _difference(first: Recording, second: Recording, terms: Mapping[Place, frozenset[Term]]) -> str:
    one, two = first.instructions, second.instructions
    for i, (a, b) in enumerate(zip(one, two, strict=False)):
        if a.same_as(b):
            continue
        new = dict(enumerate(values_in(b)))
        args, kwargs = with_values(a, {j: value for j, value in new.items() if (i, j) in terms})
        if not replace(a, args=args, kwargs=kwargs).same_as(b):
            return _instruction_difference(a, b)
    if len(one) != len(two):
        longer, n = max(one, two, key=len), min(len(one), len(two))
        return f"{'no longer ' if longer is one else ''}{longer[n].name} at {longer[n].line}"
    for slot, source in first.sources.items():
        other = second.sources.get(slot)
        if other is None or not source.same_as(other):
            what = "other numbers of a tensor" if source.kind == "literal" else "another tensor that no operator made"
            user = next((each for each in one if slot in values_in(each)), None)
            return f"{user.name} at {user.line} with {what}" if user is not None else f"with {what}"
    kinds = [list(map(type, each.results)) for each in (first, second)]
    if kinds[0] != kinds[1] or first[1:4] != second[1:4]:
        return "to other results"
    same = len(first.leaves) == len(second.leaves) and all(map(Leaf.same_as, first.leaves, second.leaves))
    return "" if same else "to other gradients"


def _instruction_difference(a: Instruction, b: Instruction) -> str:
    if a.name != b.name:
        return f"{b.name} at {b.line}, where it was {a.name} at {a.line}"
    values = zip(values_in(a), values_in(b), strict=False)
    others = [(x, y) for x, y in values if is_plain(x) and is_plain(y) and not alike(x, y)]
    numbers = f"{others[0][1]!r}, where it took {others[0][0]!r}" if others else "other operands"
    return f"{b.name} at {b.line} with {numbers}"


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Within the block compiled functions run by Python: what a compiled graph does is not seen."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
