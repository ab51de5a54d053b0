"""The backward pass of a rehearsed module: a program for each pattern of gradients that arrives.

A pattern that is met first is derived: the calls run again under autograd, on aliases of the module's own tensors, but
what their local operators give is taken from the run, so that nothing is sent, drawn or computed twice. What the inner
backward pass then runs is recorded, and is the program of later passes. Gradients of the module's own tensors are given
to autograd, often partial sums: it adds what other nodes give, and the hooks of the leaves reduce the sums, as those of
eager passes, so that all ranks send the same, whatever each of them has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dshard.autograd.accumulation import accumulating
from dshard.autograd.crossing import unchecked_apply
from dshard.autograd.gathered_weights import GatheredUse
from dshard.comm import publish_failure, recording_calls
from dshard.comm.events import LISTENERS, run_pending
from dshard.core.context import settings_in_force
from dshard.core.observe import OperatorMode, unobserved
from dshard.core.signature import Context
from dshard.core.wrapper import Wrapper, wrap
from dshard.rehearsal.backward_program import BackwardProgram, NoProgram, program_of
from dshard.rehearsal.calls import local_of
from dshard.rehearsal.derivation import Derivation, inner_tensors, run_again
from dshard.rehearsal.gradient_order import Parts
from dshard.rehearsal.local_recorder import Slot
from dshard.rehearsal.record import Record
from dshard.rehearsal.region import TAP, Run
from dshard.rehearsal.simplified import reads
from dshard.torch_private import keeps_graph, no_torch_function, will_execute_node

MAX_PATTERNS = 8
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
    """The key of a backward program: the calls answered, the operands whose gradients are asked for, and those
    that arrived, by place.
    """

    n_answered: int
    asked: tuple[int, ...]
    grads: tuple[tuple[int, object, tuple[int, ...]], ...]
    settings: tuple[object, ...]
    accumulates: bool


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
        ctx.save_for_backward(*run.operands(run.record.contents.trained_weights))
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


_apply = unchecked_apply(RegionNode)


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
    """Within the block autograd saves numbers of gathered weights, by which a created graph goes on to their nodes."""
    if not (weights := run.record.contents.trained_weights):
        return nullcontext()
    numbers = iter(weights)
    return saved_tensors_hooks(lambda x: next(numbers), lambda n: run.inputs[n])


def _asked(node: Any, segments: Sequence[Sequence[int]]) -> list[int]:
    """The operands whose gradients are asked for, of the first node and of those behind it that the pass comes to."""
    asked = list[int]()
    for i, numbers in enumerate(segments):
        if i and not _is_asked(node):
            break
        after = [each for each, _ in node.next_functions]
        asked += [n for n, each in zip(numbers, after, strict=False) if each is not None and _is_asked(each)]
        node = after[len(numbers)] if len(after) > len(numbers) else None
    return sorted(asked)


def _is_asked(node: Any) -> bool:
    """Whether the backward pass goes on to a node: what it does not need is not computed, nor sent, on any rank."""
    try:
        return will_execute_node(node)
    except RuntimeError:  # torch says nothing of a leaf whose gradient `torch.autograd.grad` returns
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
        return _derived(run, None, asked, given, arrived)
    locals_ = [local_of(grad) for grad in arrived]
    pattern = Pattern(
        run.n_answered,
        tuple(asked),
        tuple(
            (i, grad._spec if isinstance(grad, Wrapper) else None, local.stride())
            for i, grad, local in zip(given, arrived, locals_, strict=True)
        ),
        tuple(settings_in_force()),
        accumulating() or any(leaf.has_partial_sum for leaf in record.own.gradient_leaves),
    )
    program = next((known for key, known in record.programs if key == pattern), None)
    if program is None:
        return _derived(run, pattern, asked, given, arrived)
    _check_versions(run, program.reads)
    for number in program.fresh:
        if run.values[number]._version:
            raise RuntimeError(OVERWRITTEN.format(tuple(run.values[number].shape)))
    if run.overwritten:
        _check_overwritten(run, program.slots)
    values = run.values
    if keeps_graph():
        values = values.copy()
    else:
        run.free()
    run.fixed.extend(record.own)
    del grads, arrived
    record.passes["by program"] += 1
    return program.wraps, _parts(program, values, run.fixed.values, locals_)


def _parts(program: BackwardProgram, values: list[Any], own: list[Any], grads: list[Any]) -> Iterator[dict[int, Any]]:
    """The gradients of each part of a program, which leaves them in the list that has given those that arrive."""
    running = program.run(values, own, grads)
    del values
    for numbers in program.parts:
        next(running)
        yield {n: program.wraps[n](grads.pop(0)) for n in numbers}


def _check_versions(run: Run, numbers: Iterable[int]) -> None:
    with no_torch_function():
        for n in numbers:
            x, version = run.versions.get(n, _UNKNOWN)
            if x is not None and x._version != version:
                raise RuntimeError(OVERWRITTEN.format(tuple(x.shape)))


_UNKNOWN: tuple[Tensor | None, int] = (None, 0)


def _check_overwritten(run: Run, slots: Iterable[Slot]) -> None:
    for slot in slots:
        x = run.values[slot.number]
        if isinstance(x, Tensor) and x.untyped_storage()._cdata in run.overwritten:
            raise RuntimeError(OVERWRITTEN.format(tuple(x.shape)))


def _derived(
    run: Run, pattern: Pattern | None, asked: Sequence[int], given: Sequence[int], grads: Sequence[Any]
) -> Parts:
    """The gradients of a pattern without a program, which is made of them; None: hooks wait for gradients within."""
    record = run.record
    derivation = Derivation(run)
    record.passes["derived"] += 1
    with recording_calls(derivation), OperatorMode(derivation.run), torch.enable_grad():
        with unobserved():
            inner = _inner_graph(run, derivation, None)
        outs, operands = [inner[record.places.needing[i]] for i in given], [inner[n] for n in asked]
        hooked = [inner[n] for n, _ in run.hooks.values() if n in inner]
        arrived = list[int]()
        for n in asked:
            with no_torch_function():
                inner[n].register_hook(partial(_note, arrived, n))
        n_values = len(run.values)
        if not (keeps_graph() or run.overwritten):
            inner.clear()
            derivation.let_go()
            run.values = []
        derivation.is_backward, derivation.expected = True, []
        grad_slots = {derivation.slot_of(local_of(grad)): i for i, grad in enumerate(grads)}
        with torch.no_grad():
            gradients_asked = _asked_of(outs, operands, hooked, grads)
        found = {n: x for n, x in zip(asked, gradients_asked, strict=True) if x is not None}
        slots = {n: derivation.slot_of(local_of(found[n])) for n in arrived if n in found}
    read = {slot for each in derivation.instructions for slot in reads(each) if slot.number < n_values}
    if run.overwritten:
        _check_overwritten(run, map(record.lifetimes.at, read))
    record.why_not = derivation.why_not or record.why_not
    if pattern is not None and not derivation.why_not and len(record.programs) < MAX_PATTERNS:
        try:
            program = program_of(record, derivation, grad_slots, slots, {n: _wrapping(x) for n, x in found.items()})
        except NoProgram as error:
            record.why_not = str(error)
        else:
            record.add_program(pattern, program)
            _check_versions(run, program.reads - record.contents.counted)
    if not keeps_graph():
        run.free()
    return found, iter([found])


def _note(arrived: list[int], n: int, grad: Tensor) -> None:
    arrived.append(n)


def _asked_of(
    outs: Sequence[Any], operands: Sequence[Any], hooked: Sequence[Any], grads: Sequence[Any], *, create: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of the operands; those of hooked tensors are computed with them."""
    asked = [*operands, *hooked]
    found = torch.autograd.grad(outs, asked, grads, create_graph=create, allow_unused=True) if asked else ()
    return found[: len(operands)]


def _wrapping(grad: Tensor) -> Callable[[Tensor], Any]:
    """The function that makes gradients like this one of local tensors."""
    return partial(wrap, spec=grad._spec) if isinstance(grad, Wrapper) else lambda local: local


def _inner_graph(run: Run, derivation: Derivation, ctx: Context | None) -> dict[int, Any]:
    """The tensors of calls that have run again, by number, with hooks that wait for their gradients.

    With the context of the first node they are connected to autograd's graph.
    """
    inner = inner_tensors(run, derivation, ctx)
    run_again(run, derivation, inner)
    for n, hook in run.hooks.values():
        if n in inner:
            inner[n].register_hook(hook)
    return inner


def _recomputed(run: Run, asked: Sequence[int], given: Sequence[int], grads: Sequence[Any], ctx: Context) -> Parts:
    """The gradients by autograd of the calls, which are run again on the module's own tensors: a graph is created."""
    record = run.record
    derivation = Derivation(run, creates_graph=True)
    record.passes["derived"] += 1
    record.order.alone = True
    saving = saved_tensors_hooks(derivation.saved_with_value, lambda x: x)
    with torch.enable_grad(), recording_calls(derivation), OperatorMode(derivation.run), saving:
        inner = _inner_graph(run, derivation, ctx)
        outs, operands = [inner[record.places.needing[i]] for i in given], [inner[n] for n in asked]
        hooked = [inner[n] for n, _ in run.hooks.values() if n in inner]
        derivation.is_backward, derivation.expected = True, []
        found = _asked_of(outs, operands, hooked, grads, create=True)
    if not keeps_graph():
        run.free()
    return asked, iter([dict(zip(asked, found, strict=True))])
