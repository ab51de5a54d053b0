"""The backward pass of a rehearsed module: a program for each pattern of gradients that arrives.

A pattern that is met first is derived: the calls run again under autograd, on aliases of the module's own tensors, but
what their local operators give is taken from the run, so that nothing is sent, drawn or computed twice. Then their
backward pass runs, as far as autograd asks for gradients, and is recorded: it is the program of later passes. Gradients
of the module's own tensors are given to autograd, often partial sums: it adds what other nodes give, and the hooks of
the leaves reduce the sums, as those of eager passes, so that all ranks send the same, whatever each has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dshard.autograd.crossing import as_distributed, unchecked_apply
from dshard.autograd.gathered_weights import GatheredUse
from dshard.autograd.leaf_gradients import accumulating
from dshard.comm import publish_failure
from dshard.comm.events import LISTENERS, run_pending
from dshard.compile.graph_functions import skip_frames
from dshard.core.context import settings_in_force
from dshard.core.observe import unobserved
from dshard.core.signature import Context
from dshard.core.wrapper import Wrapper, wrap
from dshard.rehearsal.backward_program import BackwardProgram, Given, NoProgram, PassStage, program_of
from dshard.rehearsal.calls import local_of
from dshard.rehearsal.derivation import Derivation, inner_tensors, run_again
from dshard.rehearsal.gradient_order import Parts
from dshard.rehearsal.local_recorder import Slot
from dshard.rehearsal.record import Record
from dshard.rehearsal.region import TAP, Run
from dshard.rehearsal.staged_backward import StagedBackward
from dshard.torch_private import keeps_graph, no_torch_function, will_execute_node

MAX_PATTERNS = 8
_HAS_PARTIAL_SUM = attrgetter("has_partial_sum")
OVERWRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
    "{}, of a rehearsed module; write to it before the forward pass uses it, or after the backward pass, or to a copy"
)
TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


class Pattern(NamedTuple):
    """The key of a backward program.

    The calls answered, the operands whose gradients are asked for, those that arrived, by place, in how many segments
    the gradients are given, and which of them in one buffer.
    """

    n_answered: int
    asked: tuple[int, ...]
    grads: tuple[tuple[int, object, tuple[int, ...]], ...]
    settings: tuple[object, ...]
    accumulates: bool
    n_segments: int
    packs: tuple[tuple[int, ...], ...]


class RegionNode(torch.autograd.Function):
    """The node of autograd that stands for all calls of one run of a module, or one of the nodes behind it.

    Each gives autograd the gradients of a segment of the operands. So autograd itself knows when no other gradient of a
    leaf is to come, and calls the leaf's hook between two nodes, while the pass goes on.
    """

    @staticmethod
    def forward(ctx: Context, run: Run, segment: int, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.inner, ctx.segment = run, segment
        ctx.set_materialize_grads(False)
        if segment:
            return torch.empty(0)
        ctx.save_for_backward(*run.operands(run.record.contents.trained_of_let_go))
        return tuple([run.tensors[n] for n in run.record.places.needing])

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Run = ctx.inner
        try:
            if ctx.segment == 0:
                run.stop()
                run.given.begin(gradients(run, _asked(ctx, run.given.segments), grads, ctx))
            return None, None, *run.given.of(ctx.segment), None, None
        except Exception as error:
            publish_failure(error, run.record.contents.ranks)
            raise


skip_frames(RegionNode)


_apply = unchecked_apply(RegionNode)


def is_behind_first_node(node: Any) -> bool:
    """Whether a node of autograd gives gradients that the first node of its run computes: no pass starts there."""
    return isinstance(getattr(node, "inner", None), Run) and node.segment > 0


def begun(record: Record, inputs: Sequence[Tensor], use: GatheredUse | None) -> Run:
    """A run of a record that begins; its results have its first node."""
    run = Run(record, inputs, use)
    if record.places.needing:
        with no_torch_function(), _saving_numbers(run):
            first, *others = [*enumerate(map(run.operands, run.given.segments))]
            behind: tuple[Tensor, ...] = ()
            for i, operands in reversed(others):
                behind = (_apply(run, i, *operands, *behind),)
            _apply(run, 0, *first[1], *behind, TAP)
    return run


def _saving_numbers(run: Run) -> AbstractContextManager[object]:
    """Within the block autograd saves numbers of inputs that a run lets go: a created graph goes on to their nodes."""
    if not (let_go := run.record.contents.trained_of_let_go):
        return nullcontext()
    numbers = iter(let_go)
    return saved_tensors_hooks(lambda x: next(numbers), lambda n: run.inputs[n])


def _asked(node: Any, segments: Sequence[Sequence[int]]) -> list[int]:
    """The operands whose gradients are asked for, of the first node and of those behind it that the pass comes to."""
    asked = list[int]()
    for i, numbers in enumerate(segments):
        if i and not _is_asked(node):
            break
        after = [each for each, _ in node.next_functions]
        among = [(n, each) for n, each in zip(numbers, after, strict=False) if each is not None]
        try:
            asked += [n for n, each in among if will_execute_node(each)]
        except RuntimeError:  # torch says nothing of a leaf whose gradient `torch.autograd.grad` returns
            asked += [n for n, each in among if _is_asked(each)]
        node = after[len(numbers)] if len(after) > len(numbers) else None
    return sorted(asked)


def _is_asked(node: Any) -> bool:
    """Whether the backward pass goes on to a node: what it does not need is not computed, nor sent, on any rank."""
    try:
        return will_execute_node(node)
    except RuntimeError:
        return True


def gradients(run: Run, asked: Sequence[int], grads: Sequence[Tensor | None], ctx: Context) -> Parts:
    """The backward pass that gives the gradients of the operands `asked` for.

    Raises:
        RuntimeError: what they are computed of was freed, or written to.
    """
    record = run.record
    if not run.values:
        raise RuntimeError(TWICE)
    _check_versions(run, [n for n in run.versions if n < 0])
    given = [i for i, grad in enumerate(grads) if grad is not None]
    arrived: list[Any] = [grads[i] for i in given]
    if torch.is_grad_enabled():
        _check_versions(run, record.read)
        return _recomputed(run, asked, given, arrived, ctx)
    if LISTENERS:
        run_pending()
    if run.hooks or LISTENERS:  # a program tells nobody of what it sends
        _check_versions(run, record.read)
        return asked, _DerivedPass(run, None, asked, given, arrived).parts()
    locals_ = [local_of(grad) for grad in arrived]
    accumulates = accumulating() or True in map(_HAS_PARTIAL_SUM, record.own.gradient_leaves)
    pattern = Pattern(
        run.n_answered,
        tuple(asked),
        tuple(
            (i, grad._spec if isinstance(grad, Wrapper) else None, local.stride())
            for i, grad, local in zip(given, arrived, locals_, strict=True)
        ),
        tuple(settings_in_force()),
        accumulates,
        len(run.given.segments),
        () if accumulates else run.given.packs,
    )
    program = next((known for key, known in record.programs if key == pattern), None)
    if program is None:
        return asked, _DerivedPass(run, pattern, asked, given, arrived).parts()
    values, versions = run.values, run.versions
    if [slot for slot in program.slots if values[slot.number] is None]:  # it ended when no known program read them
        return asked, _DerivedPass(run, None, asked, given, arrived).parts()
    _check_versions(run, program.reads)
    _check_values(_written_since(values, program.fresh, run), program.slots)
    if run.overwritten:
        _check_overwritten(run, program.slots)
    if keeps_graph():
        values = values.copy()
    else:
        run.free()
    run.fixed.extend(record.own)
    del grads, arrived
    record.passes.by_program += 1
    parts = _parts(program, values, run.fixed.values, locals_)
    are_hooked = len(program.parts) == len(record.contents.trained)  # else none of the program's own code runs between
    return program.wraps, _checked(parts, program, versions) if are_hooked else parts


def _parts(program: BackwardProgram, values: list[Any], own: list[Any], grads: list[Any]) -> Iterator[dict[int, Any]]:
    """The gradients of each part of a program, which leaves them in the list that has given those that arrive."""
    running = program.run(values, own, grads)
    del values
    for numbers in program.parts:
        next(running)
        yield {n: program.wraps[n](grads.pop(0)) for n in numbers}


def _checked(parts: Iterator[dict[int, Any]], program: BackwardProgram, versions: Versions) -> Iterator[dict[int, Any]]:
    """The parts of a program between which hooks of leaves run, and may write to what the next one reads."""
    for numbers in program.part_reads:
        _check(versions, numbers & program.reads)
        yield next(parts)


def _check_versions(run: Run, numbers: Iterable[int]) -> None:
    _check(run.versions, numbers)


def _check(versions: Versions, numbers: Iterable[int]) -> None:
    with no_torch_function():
        for n in numbers:
            x, version = versions.get(n, _UNKNOWN)
            if x is not None and x._version != version:
                raise RuntimeError(OVERWRITTEN.format(tuple(x.shape)))


Versions: TypeAlias = Mapping[int, tuple[Tensor, int]]
"""Tensors by number, with their versions when the run read them."""
_UNKNOWN: tuple[Tensor | None, int] = (None, 0)


def _written_since(values: Sequence[Any], fresh: Iterable[int], run: Run) -> dict[int, tuple[int, ...]]:
    """The places of values that others have written to, with their shapes: the run's own calls never did, or before."""
    written = {n: values[n] for n in fresh if values[n] is not None and values[n]._version}
    rewritten = {slot.number: (values[slot.number], version) for slot, version in run.rewritten}
    written |= {n: x for n, (x, version) in rewritten.items() if x is not None and x._version != version}
    return {n: tuple(x.shape) for n, x in written.items()}


def _check_values(written: Mapping[int, tuple[int, ...]], read: Iterable[Slot]) -> None:
    for slot in read if written else ():
        if slot.number in written:
            raise RuntimeError(OVERWRITTEN.format(written[slot.number]))


def _check_overwritten(run: Run, slots: Iterable[Slot]) -> None:
    for slot in slots:
        x = run.values[slot.number]
        if isinstance(x, Tensor) and x.untyped_storage()._cdata in run.overwritten:
            raise RuntimeError(OVERWRITTEN.format(tuple(x.shape)))


class _DerivedPass:
    """The gradients of a pattern without a program, which is made of them; None: hooks wait for gradients within."""

    def __init__(
        self, run: Run, pattern: Pattern | None, asked: Sequence[int], given: Sequence[int], grads: Sequence[Any]
    ) -> None:
        self._run, self._pattern = run, pattern
        self._derivation = derivation = Derivation(run)
        run.record.passes.derived += 1
        with derivation.recording(), torch.enable_grad():
            with unobserved():
                inner = inner_tensors(run, derivation, None)
                self._staged = StagedBackward(asked, [*run.hooks.values()])
                run_again(run, derivation, inner, self._staged)
            needing = run.record.places.needing
            self._staged.begin({needing[i]: grad for i, grad in zip(given, grads, strict=True)})
            self._layouts = {n: inner[n]._spec.layout for n in asked if isinstance(inner[n], Wrapper)}
            self._n_values, life = len(run.values), run.record.lifetimes
            self._written = _written_since(run.values, life.fresh(life.kept), run)
            if not (keeps_graph() or run.overwritten):
                inner.clear()
                derivation.let_go()
                run.values = []
            derivation.is_backward, derivation.expected = True, []
            self._grad_slots = {derivation.slot_of(local_of(grad)): i for i, grad in enumerate(grads)}
        self._n_checked = 0
        self._results, self._stages = dict[int, Given](), list[PassStage]()
        self._segments = [wanted for each in run.given.segments if (wanted := [n for n in each if n in asked])] or [[]]

    def parts(self) -> Iterator[dict[int, Tensor | None]]:
        """The gradients of each segment, which arise when they are asked for."""
        derivation, staged = self._derivation, self._staged
        for numbers in self._segments:
            is_last = numbers is self._segments[-1]
            with derivation.recording(), torch.no_grad():
                found = staged.until(numbers)
                if is_last:
                    staged.end()
                there = {n: x for n, x in found.items() if x is not None}
                there |= {n: as_distributed(x, self._layouts[n]) for n, x in there.items() if n in self._layouts}
                given = {n: Given(derivation.slot_of(local_of(x)), _wrapping(x)) for n, x in there.items()}
                self._results |= given
                self._check_versions([each.slot for each in given.values()])
            if there:
                self._stages.append(PassStage(len(derivation.instructions), [*there]))
            if is_last:
                self._end()
            yield {**found, **there}

    def _check_versions(self, given: Iterable[Slot]) -> None:
        """Check what the stage has read or given; later the program may write to leaves whose gradients it has."""
        new = self._derivation.instructions[self._n_checked :]
        self._n_checked += len(new)
        read = self._derivation.operands_of(self._derivation.read_by(new, given))
        _check_versions(self._run, read - self._run.record.contents.counted)

    def _end(self) -> None:
        run, record, derivation = self._run, self._run.record, self._derivation
        given, life = [each.slot for each in self._results.values()], record.lifetimes
        read = {
            life.at(slot) for slot in derivation.read_by(derivation.instructions, given) if slot.number < self._n_values
        }
        if run.overwritten:
            _check_overwritten(run, read)
        _check_values(self._written, read)
        record.why_not = derivation.why_not or record.why_not
        if self._pattern is not None and not derivation.why_not and len(record.programs) < MAX_PATTERNS:
            *before, last = self._stages or [PassStage(0, [])]
            parts = [*before, last._replace(end=len(derivation.instructions))]
            try:
                packs = self._pattern.packs
                program = program_of(record, derivation, self._grad_slots, self._results, parts, packs)
            except NoProgram as error:
                record.why_not = str(error)
            else:
                record.add_program(self._pattern, program)
        if not keeps_graph():
            run.free()


def _wrapping(grad: Tensor) -> Callable[[Tensor], Any]:
    """The function that makes gradients like this one of local tensors."""
    return partial(wrap, spec=grad._spec) if isinstance(grad, Wrapper) else lambda local: local


def _recomputed(run: Run, asked: Sequence[int], given: Sequence[int], grads: Sequence[Any], ctx: Context) -> Parts:
    """The gradients by autograd of the calls, which are run again on the module's own tensors: a graph is created."""
    record = run.record
    derivation = Derivation(run, creates_graph=True)
    record.passes.derived += 1
    record.passes.create_graph = True
    saving = saved_tensors_hooks(derivation.saved_with_value, lambda x: x)
    with torch.enable_grad(), derivation.recording(), saving:
        inner = inner_tensors(run, derivation, ctx)
        run_again(run, derivation, inner)
        outs, operands = [inner[record.places.needing[i]] for i in given], [inner[n] for n in asked]
        hooked = [inner[n] for n, _ in run.hooks.values() if n in inner]
        for n, hook in run.hooks.values():
            if n in inner:
                inner[n].register_hook(hook)
        derivation.is_backward, derivation.expected = True, []
        found: Sequence[Tensor | None] = ()
        if operands or hooked:  # gradients of these are computed for their hooks
            found = torch.autograd.grad(outs, [*operands, *hooked], grads, create_graph=True, allow_unused=True)
    if not keeps_graph():
        run.free()
    return asked, iter([dict(zip(asked, found, strict=False))])
