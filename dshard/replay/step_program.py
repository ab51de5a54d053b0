"""A recording that was seen twice, as a function of the tensors of a call and of the options of optimisers.

It is one run of a step by Python: its arguments, instructions, results, gradients, and the state that it ran in. Most
instructions of a recording are views, of which many are equal, and operators whose results nobody uses, as those that
only infer shapes. A view of a parameter is made once, not in each step. The function frees each tensor after its last
use. What remains runs below autograd and in the order of the recording, so that its results are the same to the bit,
and its collectives match those of ranks that run the step by Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from dshard.autograd.leaf_gradients import accumulating
from dshard.comm import ENDS, Collective, publish_failure, recording_calls, user_line
from dshard.core.context import settings_in_force
from dshard.core.observe import OperatorMode
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import ReplayError
from dshard.rehearsal.calls import autocast_now, kind_of, local_of, without_autocast
from dshard.rehearsal.code import Code, parted, reads, results_of, simplified, unread_draws, variable, written_by
from dshard.rehearsal.local_recorder import Instruction, Slot, StepRecorder, View, equal
from dshard.replay.step_state import (
    FUNCTIONS,
    Option,
    Options,
    StepState,
    Term,
    Terms,
    alike,
    is_plain,
    options_of,
    terms_in,
    values_in,
    with_values,
)
from dshard.torch_private import increment_version, no_torch_function, pytree

T = TypeVar("T")


class StepCall:
    """The arguments of a call, the tensors among them, and the key of recordings that may hold for it."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = [x for x in leaves if isinstance(x, Tensor)]
        self.values = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.autocast = autocast_now()
        self.key = (
            structure,
            [(type(x), repr(x) if type(x) is float else x) for x in self.values],  # 2 is not 2.0, and 0.0 not -0.0
            [(kind_of(x), _gradient_of_leaf(x)) for x in self.tensors],
            [[x is y for y in self.tensors[:i]] for i, x in enumerate(self.tensors)],
            settings_in_force(),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), accumulating(), torch.get_default_dtype()),
            (self.autocast, torch.are_deterministic_algorithms_enabled()),
        )

    def why_not(self) -> str:
        """Why no step with these arguments can be replayed; empty if one may be."""
        if not all(map(is_plain, self.values)):
            return "an argument is neither a tensor nor a number or a text"
        if any(not x.is_leaf for x in self.tensors):
            return "a gradient passes through the step to the operators before it: give it x.detach()"
        if any(isinstance(x, Wrapper) and x._view_sync is not None for x in self.tensors):
            return "an argument is a view that shares its values with a copy"
        return ""


def _gradient_of_leaf(x: Tensor) -> object:
    with no_torch_function():
        is_leaf = x.requires_grad and x.is_leaf
        return (gradient_kind(x.grad), [*(x._backward_hooks or {}).values()]) if is_leaf else None


def gradient_kind(grad: Tensor | None) -> object:
    """The part of a gradient that decides how the next one is added to it."""
    return None if grad is None else grad._spec if isinstance(grad, Wrapper) else (grad.shape, grad.dtype)


class Source(NamedTuple):
    """Where a tensor comes from: the argument or leaf's gradient with that number, the tensor itself, or numbers."""

    kind: Literal["argument", "gradient", "tensor", "literal"]
    of: Any

    def in_call(self, call: StepCall) -> Any:
        """The tensor in a call."""
        return call.tensors[self.of] if self.kind == "argument" else self.of


class StepLeaf(NamedTuple):
    """A tensor whose gradient, before of that kind, a step keeps, drops, or sets to the value of a slot, of a spec."""

    source: Source
    before: object
    change: Literal["keeps", "drops", "sets"]
    slot: Slot | None = None
    spec: Any = None


class StepRecording(NamedTuple):
    """One run of a step.

    `results` are the slots of the tensors of its result, or values of Python; `specs` those of distributed tensors.
    `options` are those of the groups of parameters, `terms` what arguments may follow of them, and `varied` those that
    were seen with two values.
    """

    recorder: StepRecorder
    structure: Any
    results: list[Any]
    specs: list[Any]
    leaves: tuple[StepLeaf, ...]
    sources: dict[Slot, Source]
    state: StepState
    options: Options
    terms: Terms
    varied: frozenset[Option] = frozenset()


class CheckingRecorder(StepRecorder):
    """Records a step that must do as in an earlier recording: it begins no other collectives than that."""

    def __init__(self, expected: StepRecording, error: Callable[[str], ReplayError]) -> None:
        super().__init__()
        self._expected: Iterator[Any] = iter([each for each in expected.recorder.instructions if each.begins])
        self._error = error

    def call(self, key: Any, function: Callable[..., T], *args: object) -> T:
        """Call a function, and record that."""
        if isinstance(key, tuple) and isinstance(key[-1], Collective):
            expected = next(self._expected, None)
            if expected is None or expected.key != key:
                was = f"{expected.key[-1].kind} at {expected.line}" if expected is not None else "no other collective"
                raise self._error(f"{key[-1].kind} at {user_line()}, where it was {was}")
        return super().call(key, function, *args)


def record(step: Callable[..., Any], call: StepCall, recorder: StepRecorder) -> tuple[Any, StepRecording]:
    """Run a step by Python, and record it."""
    state = StepState(step)
    state.add(*call.tensors)
    # what a compiled graph does is not seen
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with state.adding_calls(), recording_calls(recorder), OperatorMode(recorder.run), eager:
        result = step(*call.args, **call.kwargs)
        flat, structure = pytree.tree_flatten(result)
        results = [recorder.slot_of(local_of(out)) if isinstance(out, Tensor) else out for out in flat]
        _check_results(flat, recorder)
        leaves = _leaves(call, state, recorder)
        recorder.close()
    for x in recorder.externals.values():
        recorder.slot_of(x)  # which refuses those whose memory was replaced
    sources, options = _sources(call, state, recorder), options_of(state.groups)
    for each in unread_draws(recorder.instructions):
        recorder.refuse(f"the step draws numbers that Python reads, at {each.line}")
    if state.options_changed:
        recorder.refuse("the step changes options of its optimiser: let a schedule step outside")
    recorder.externals.clear()  # which would keep the tensors of this call
    specs = [out._spec if isinstance(out, Wrapper) else None for out in flat]
    state.keep(call.tensors)
    terms = terms_in(recorder.instructions, options)
    return result, StepRecording(recorder, structure, results, specs, leaves, sources, state, options, terms)


def _check_results(results: list[Any], recorder: StepRecorder) -> None:
    for out in results:
        if isinstance(out, Tensor):
            if out.requires_grad and not (out.is_leaf or recorder.ran_backward):
                recorder.refuse("the step returns a tensor that requires a gradient, and runs no backward pass")
        elif not is_plain(out):
            recorder.refuse(f"the step returns a {type(out).__name__}, which is neither a tensor nor a number")


def _leaves(call: StepCall, state: StepState, recorder: StepRecorder) -> tuple[StepLeaf, ...]:
    """The leaves, and what the step has done to their gradients."""
    arguments = {id(x): Source("argument", i) for i, x in reversed([*enumerate(call.tensors)])}
    leaves = list[StepLeaf]()
    for i, before in state.grads.items():
        x, grad = state.tensors[i], state.tensors[i].grad
        if isinstance(x, Wrapper) and x._gradient_leaf is not None and x._gradient_leaf.has_partial_sum:
            recorder.refuse("the step leaves partial gradients: accumulate within one step")
        leaf = StepLeaf(arguments.get(i, Source("tensor", x)), gradient_kind(before), "keeps")
        if grad is None and before is not None:
            leaf = leaf._replace(change="drops")
        elif grad is not None and grad is not before:
            spec = grad._spec if isinstance(grad, Wrapper) else None
            leaf = leaf._replace(change="sets", slot=recorder.slot_of(local_of(grad)), spec=spec)
        leaves.append(leaf)
    if not recorder.leaves <= state.grads.keys():
        recorder.refuse(_UNKNOWN)
    return tuple(leaves)


_UNKNOWN = (
    "a gradient arises for a tensor that neither an argument, a module, an optimiser nor a variable of the step holds"
)


def _sources(call: StepCall, state: StepState, recorder: StepRecorder) -> dict[Slot, Source]:
    """Where the external tensors of a recording come from."""
    known = {id(local_of(x)): Source("tensor", x) for x in state.tensors.values()}
    grads = enumerate(state.grads.values())
    known |= {id(local_of(x)): Source("gradient", i) for i, x in grads if x is not None}
    known |= {id(local_of(x)): Source("argument", i) for i, x in enumerate(call.tensors)}
    sources = {
        slot: _literal(x) if slot in recorder.literals else known.get(id(x)) or Source("tensor", x)
        for slot, x in recorder.externals.items()
    }
    if any(x.requires_grad and id(x) not in known for x in recorder.externals.values()):
        recorder.refuse(_UNKNOWN)
    return sources


def _literal(x: Tensor) -> Source:
    return Source("literal", (x.dtype, tuple(x.shape), x.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()))


def matched(first: StepRecording, second: StepRecording) -> tuple[StepRecording, str]:
    """The second recording, and what differs in them; if nothing does, with what both say of options."""
    common = {place: terms & second.terms[place] for place, terms in first.terms.items() if place in second.terms}
    terms = {place: terms for place, terms in common.items() if terms}
    why = _difference(first, second, terms)
    if why:
        return second, why
    changed = {option for option, number in second.options.items() if number != first.options.get(option)}
    second.state.ignore_changes(first.state)
    return second._replace(terms=terms, varied=first.varied | changed), ""


def _difference(first: StepRecording, second: StepRecording, terms: Terms) -> str:
    one, two = first.recorder.instructions, second.recorder.instructions
    for i, (a, b) in enumerate(zip(one, two, strict=False)):
        if not a.same_as(b):
            new = {j: value for j, value in enumerate(values_in(b)) if (i, j) in terms}
            if not with_values(a, new).same_as(b):
                return _instruction_difference(a, b)
    if len(one) != len(two):
        longer, n = max(one, two, key=len), min(len(one), len(two))
        return f"{'no longer ' if longer is one else ''}{longer[n].name} at {longer[n].line}"
    for slot, source in first.sources.items():
        if not equal(source, second.sources.get(slot)):
            what = "other numbers of a tensor" if source.kind == "literal" else "another tensor that no operator made"
            user = next((each for each in one if slot in values_in(each)), None)
            return f"{user.name} at {user.line} with {what}" if user is not None else f"with {what}"
    kinds = [list(map(type, each.results)) for each in (first, second)]
    if kinds[0] != kinds[1] or first[1:4] != second[1:4]:
        return "to other results"
    return "" if equal(first.leaves, second.leaves) else "to other gradients"


def _instruction_difference(a: Instruction, b: Instruction) -> str:
    if a.name != b.name:
        return f"{b.name} at {b.line}, where it was {a.name} at {a.line}"
    values = zip(values_in(a), values_in(b), strict=False)
    others = [(x, y) for x, y in values if is_plain(x) and is_plain(y) and not alike(x, y)]
    numbers = f"{others[0][1]!r}, where it took {others[0][0]!r}" if others else "other operands"
    return f"{b.name} at {b.line} with {numbers}"


FILE = "<replay>"
"""The name of the file of programs, in tracebacks."""


class StepProgram:
    """A recording as a function; `code` is its source.

    With `in_graph` it runs in a CUDA graph, unless `why_not_captured` says why it cannot.
    """

    def __init__(self, recording: StepRecording, call: StepCall, *, in_graph: bool = False) -> None:
        self.recording, sources = recording, recording.sources
        self._terms: dict[tuple[type, frozenset[Term]], Slot] = {}
        self._numbers: dict[Slot, float] = {}
        slots = [slot for slot in recording.results if isinstance(slot, Slot)]
        outs = slots + [leaf.slot for leaf in recording.leaves if leaf.slot is not None]
        instructions, stands_for = simplified(self._with_options(), recording.recorder.views, outs)
        self._n_results, results = len(slots), [stands_for.get(slot, slot) for slot in outs]
        self.n_collectives = sum(each.begins for each in instructions)
        self.n_operators = sum(each.operator is not None for each in instructions)
        used = {slot for each in instructions for slot in reads(each)} | set(results)
        inputs = {slot for slot, source in sources.items() if source.kind in ("argument", "gradient")}
        self._inputs = sorted(used & (inputs | set(self._terms.values())), key=lambda slot: slot.number)
        self._read = {sources[slot].of for slot in self._inputs if slot in sources and sources[slot].kind == "gradient"}
        known = {slot: local_of(source.of) for slot, source in sources.items() if source.kind == "tensor"}
        known = {slot: x for slot, x in (known | recording.recorder.literals).items() if slot in used}
        once, rest, _ = parted(known, instructions)
        for each in once:
            known |= results_of(each, known)
        code = Code(variable, {variable(slot): x for slot, x in known.items()})
        lines = code.lines(rest, {*results, *known})
        views = {out for each in instructions if each.is_view for out in each.made}
        own = (f"{variable(slot)}{'.data' if slot in views else ''}, " for slot in results)  # versions of their own
        lines.append(f"return ({''.join(own)})")
        run, self.code = code.function("step", ", ".join(map(variable, self._inputs)), lines, FILE)
        self._run: Callable[..., tuple[Any, ...]] = without_autocast(run, call.autocast)
        written = written_by(instructions)
        self._written = [source for slot, source in sources.items() if slot in written and source.kind != "gradient"]
        self.ranks = tuple(recording.recorder.ranks)
        self.why_not_captured = why_not_captured(rest, recording.recorder.views, self._inputs) if in_graph else ""
        if in_graph and not self.why_not_captured:
            self._run = CapturedProgram(self._run, self._n_results)

    def _with_options(self) -> list[Instruction]:
        """The instructions, with a slot for each argument that follows an option which was seen with two values."""
        recorder = self.recording.recorder
        instructions = [*recorder.instructions]
        for (i, j), terms in self.recording.terms.items():
            if any(option in self.recording.varied for _, option in terms):
                key = type(values_in(instructions[i])[j]), terms
                slot = self._terms.setdefault(key, Slot(len(recorder.views) + len(self._terms)))
                instructions[i] = with_values(instructions[i], {j: slot})
        return instructions

    def why_stale(self) -> str:
        """Name what changed since the recording; empty if nothing did. Takes the options of the next run."""
        name = self.recording.state.changed() or self._changed_option()
        return name and f"{name} has changed"

    def _changed_option(self) -> str:
        """The name of an option whose present value was not recorded, and which no argument is known to follow."""
        before, now = self.recording.options, options_of(self.recording.state.groups)
        if now.keys() != before.keys():
            return "an option of an optimiser"
        for option, number in now.items():
            a, b, varies = number, before[option], option in self.recording.varied
            if not (alike(a, b) or (varies and type(a) is type(b) and bool(a) == bool(b))):
                return option[1]
        for (kind, terms), slot in self._terms.items():
            values = {kind(FUNCTIONS[name](now[option])) for name, option in terms}
            if len(values) > 1:
                return min(option[1] for _, option in terms)
            self._numbers[slot] = values.pop()
        return ""

    def run(self, call: StepCall) -> Any:
        """Run the step: its result, with the gradients in place."""
        leaves: list[Tensor] = [leaf.source.in_call(call) for leaf in self.recording.leaves]
        inputs = [self._input(slot, call, leaves) for slot in self._inputs]
        for i, (x, leaf) in enumerate(zip(leaves, self.recording.leaves, strict=True)):
            if leaf.change != "keeps" and i not in self._read:
                x.grad = None  # so that its memory is free
        try:
            with torch.no_grad():
                outs = self._run(*inputs)
        except Exception as error:
            publish_failure(error, self.ranks)
            raise
        written = [source.in_call(call) for source in self._written]
        wrappers: list[Tensor] = [x for x in written if isinstance(x, Wrapper)]
        if wrappers:  # others have counted the writes themselves
            increment_version(wrappers)
        made = iter(outs[self._n_results :])
        for x, leaf in zip(leaves, self.recording.leaves, strict=True):
            if leaf.change == "sets":
                x.grad = _wrapped(next(made), leaf.spec)
            elif leaf.change == "drops":
                x.grad = None
        given = iter(outs)
        results = [next(given) if isinstance(result, Slot) else result for result in self.recording.results]
        return pytree.tree_unflatten([*map(_wrapped, results, self.recording.specs)], self.recording.structure)

    def _input(self, slot: Slot, call: StepCall, leaves: Sequence[Tensor]) -> Any:
        source = self.recording.sources.get(slot)
        if source is None:
            return self._numbers[slot]
        x = leaves[source.of].grad if source.kind == "gradient" else call.tensors[source.of]
        assert x is not None
        return local_of(x)


def _wrapped(local: Any, spec: Any) -> Any:
    return local if spec is None else wrap(local, spec)


DEVICE = "cuda"
"""The type of device on which all of a graph runs."""


def why_not_captured(
    instructions: Iterable[Instruction], views: Sequence[View | None], inputs: Collection[Slot]
) -> str:
    """Why no graph can stand for these instructions on tensors `inputs` of each call; empty if one can.

    `views` says how the tensor of each slot lies in its storage; a slot beyond stands for an option that is a number.
    """
    for each in instructions:
        where = f"{each.name} at {each.line}"
        if each.operator is None and not (each.begins or each.key == ENDS):
            return f"{where} takes other numbers of the host in each call"
        slots = [*reads(each), *each.made]
        if any(slot.number >= len(views) for slot in slots):
            return f"{where} follows an option of an optimiser that is a number: give the option as a tensor"
        kinds = {view.device.type for slot in slots if (view := views[slot.number]) is not None}
        if kinds - {DEVICE}:
            return f"{where} runs on {min(kinds - {DEVICE})}"
        if each.operator is not None and not written_by([each]).isdisjoint(inputs):
            return f"{where} writes to an argument, or adds to a gradient of an earlier call: call zero_grad first"
    return ""


class CapturedProgram:
    """A program that is captured at its first call, and launched from then on.

    Arguments are copied to the graph's own memory. The first `n_copied` results are copies; the others, which are
    gradients, lie in the graph's memory, and the next call overwrites them.
    """

    def __init__(self, run: Callable[..., tuple[Any, ...]], n_copied: int) -> None:
        self._run, self._n_copied = run, n_copied
        self._inputs: list[Tensor] = []
        self._launch: Callable[[], None] | None = None
        self._results: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._launch is None:
            self._inputs = [x.clone(memory_format=torch.preserve_format) for x in inputs]
            self._launch, self._results = captured(self._run, self._inputs)
        elif inputs:
            torch._foreach_copy_(self._inputs, inputs, non_blocking=True)
        self._launch()
        copies = [x.clone() for x in self._results[: self._n_copied]]
        return (*copies, *self._results[self._n_copied :])


def captured(run: Callable[..., tuple[Any, ...]], inputs: Sequence[Tensor]) -> tuple[Callable[[], None], Any]:
    """Capture a run on these tensors, without running it: the function that launches it, and its results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog, another thread, asks for events
        results = run(*inputs)
    return graph.replay, results
