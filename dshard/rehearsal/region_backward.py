"""The backward pass of a rehearsed module: a program for each pattern of gradients that arrives.

A pattern that is met first is derived: the calls run again under autograd, on aliases of the module's own tensors, but
what their local operators give is taken from the run, so that nothing is sent, drawn or computed twice. What the inner
backward pass then runs is recorded, and is the program of later passes. Gradients of the module's own tensors are given
to autograd as they arise, often partial sums: the hooks of the leaves reduce them, as those of eager passes, so that
all ranks send the same, whatever each of them has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dshard.autograd.accumulation import accumulating
from dshard.autograd.crossing import unchecked_apply
from dshard.autograd.joined_gradients import within_backward_pass
from dshard.comm import publish_failure, recording_calls
from dshard.comm.events import LISTENERS, run_pending
from dshard.core.context import settings_in_force
from dshard.core.observe import OperatorMode, unobserved
from dshard.core.signature import Context
from dshard.core.wrapper import Wrapper, wrap
from dshard.rehearsal.backward_program import NoProgram, program_of
from dshard.rehearsal.calls import local_of
from dshard.rehearsal.derivation import Derivation, inner_tensors, run_again, share
from dshard.rehearsal.leaf_arrivals import Arrival, LeafGradient
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
    """What a backward program depends on: the calls answered, the operands whose gradients are asked for, and those
    that arrived, by place.
    """

    n_answered: int
    asked: tuple[int, ...]
    reduces: bool
    grads: tuple[tuple[int, object, tuple[int, ...]], ...]
    settings: tuple[object, ...]
    accumulates: bool


class RegionNode(torch.autograd.Function):
    """The node of autograd that stands for all calls of one run of a module."""

    @staticmethod
    def forward(ctx: Context, run: Run, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.inner = run
        ctx.set_materialize_grads(False)
        return tuple([run.tensors[n] for n in run.record.places.needing])

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Run = ctx.inner
        run.stop()
        trained, nodes = run.record.contents.trained, ctx.next_functions[1:]
        asked = {n: node for n, (node, _) in zip(trained, nodes, strict=True) if node is not None and _is_asked(node)}
        found = gradients(run, asked, grads)
        return None, None, *map(found.get, trained)


_apply = unchecked_apply(RegionNode)


def begun(record: Record, inputs: Sequence[Tensor]) -> Run:
    """A run of a record that begins; its results have its node."""
    run = Run(record, inputs)
    if record.places.needing:
        with no_torch_function():
            _apply(run, TAP, *run.operands(record.contents.trained))
    return run


def _is_asked(node: Any) -> bool:
    """Whether the backward pass goes on to a node: what it does not need is not computed, nor sent, on any rank."""
    try:
        return will_execute_node(node)
    except RuntimeError:  # torch says nothing of a leaf whose gradient `torch.autograd.grad` returns
        return True


def gradients(run: Run, asked: Mapping[int, Any], grads: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
    """The gradients of the operands `asked` for, by number, of which each has a node.

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
        return _recomputed(run, asked, given, arrived)
    if LISTENERS:
        run_pending()
    if run.hooks or LISTENERS:  # a program tells nobody of what it sends
        _check_versions(run, record.read)
        return _derived(run, None, asked, given, arrived)
    locals_ = [local_of(grad) for grad in arrived]
    pattern = Pattern(
        run.n_answered,
        tuple(asked),
        run.reduces,
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
        run.values = []
    run.fixed.extend(record.own)
    del grads, arrived
    record.n_programs_run += 1
    try:
        outs = program.run(values, run.fixed.values, locals_)
    except Exception as error:
        publish_failure(error, record.contents.ranks)
        raise
    found = zip(asked, outs, program.wraps, strict=True)
    return {n: x if x is None or wrapped is None else wrapped(x) for n, x, wrapped in found}


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
    run: Run, pattern: Pattern | None, asked: Mapping[int, Any], given: Sequence[int], grads: Sequence[Any]
) -> dict[int, Tensor | None]:
    """The gradients of a pattern without a program, which is made of them; None: hooks wait for gradients within."""
    record = run.record
    derivation = Derivation(run)
    record.n_derived += 1
    with recording_calls(derivation), OperatorMode(derivation.run), torch.enable_grad():
        with unobserved():
            inner = _inner_graph(run, derivation, create=False)
        arrived: dict[int, Slot] = {}
        for n, node in asked.items() if run.reduces else ():
            x = record.contents.leaves.get(n)
            if isinstance(x, Wrapper) and x._gradient_leaf is not None and not run.uses_later(n):
                with no_torch_function():
                    inner[n].register_hook(partial(_arrive, derivation, arrived, n, node, x))
        outs, operands = [inner[record.places.needing[i]] for i in given], [inner[n] for n in asked]
        hooked = [inner[n] for n, _ in run.hooks.values() if n in inner]
        n_values = len(run.values)
        if not (keeps_graph() or run.overwritten):
            inner.clear()
            derivation.let_go()
            run.values = []
        derivation.is_backward, derivation.expected = True, []
        grad_slots = {derivation.slot_of(local_of(grad)): i for i, grad in enumerate(grads)}
        with torch.no_grad():
            found = _asked_of(outs, operands, hooked, grads)
        slots = [
            arrived[n] if n in arrived else None if x is None else derivation.slot_of(local_of(x))
            for n, x in zip(asked, found, strict=True)
        ]
    read = {slot for each in derivation.instructions for slot in reads(each) if slot.number < n_values}
    if run.overwritten:
        _check_overwritten(run, map(record.lifetimes.at, read))
    record.why_not = derivation.why_not or record.why_not
    if pattern is not None and not derivation.why_not and len(record.programs) < MAX_PATTERNS:
        each = zip(asked.items(), found, strict=True)
        wraps = [None if n in arrived else _wrapping(run, n, node, x) for (n, node), x in each]
        try:
            program = program_of(record, derivation, grad_slots, slots, wraps)
        except NoProgram as error:
            record.why_not = str(error)
        else:
            record.add_program(pattern, program)
            _check_versions(run, program.reads - record.contents.counted)
    if not keeps_graph():
        run.values = []
    return dict(zip(asked, found, strict=True))


def _asked_of(
    outs: Sequence[Any], operands: Sequence[Any], hooked: Sequence[Any], grads: Sequence[Any], *, create: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of the operands; those of hooked tensors are computed with them."""
    asked = [*operands, *hooked]
    found = torch.autograd.grad(outs, asked, grads, create_graph=create, allow_unused=True) if asked else ()
    return found[: len(operands)]


def _wrapping(run: Run, n: int, node: Any, grad: Tensor | None) -> Callable[[Tensor], Any] | None:
    """The function that wraps later gradients of an operand like this one, or None if it is plain."""
    if not isinstance(grad, Wrapper):
        return None
    x = run.record.contents.leaves.get(n)
    is_alone = run.reduces and not run.uses_later(n)
    if is_alone and isinstance(x, Wrapper) and x._gradient_leaf is not None and x._spec is grad._spec:
        return LeafGradient(x, node)
    return partial(wrap, spec=grad._spec)


def _inner_graph(run: Run, derivation: Derivation, *, create: bool) -> dict[int, Any]:
    """The tensors of calls that have run again, by number, with hooks that wait for their gradients."""
    inner = inner_tensors(run, create=create)
    trained = run.record.contents.trained
    for n, x in zip(trained, run.operands(trained), strict=True):
        share(derivation, inner[n], x)
    run_again(run, derivation, inner)
    for n, hook in run.hooks.values():
        if n in inner:
            inner[n].register_hook(hook)
    return inner


def _arrive(derivation: Derivation, arrived: dict[int, Slot], n: int, node: Any, x: Wrapper, grad: Any) -> Any:
    """The hook of an alias of the leaf `x`: its gradient is reduced now, and in each later pass at this place."""
    if not isinstance(grad, Wrapper) or "_local_tensor" not in grad.__dict__:
        return None
    if grad._spec.layout is x._gradient_leaf.layout:
        return None
    arrival = Arrival(x, node, grad._spec)
    arrived[n] = derivation.add_call(("leaf", n), arrival, grad._local_tensor)
    with derivation._unrecorded(), within_backward_pass():
        return arrival.reduced(grad._local_tensor)


def _recomputed(
    run: Run, asked: Mapping[int, Any], given: Sequence[int], grads: Sequence[Any]
) -> dict[int, Tensor | None]:
    """The gradients by autograd of the calls, which are run again on the module's own tensors: a graph is created."""
    record = run.record
    derivation = Derivation(run, creates_graph=True)
    record.n_derived += 1
    saving = saved_tensors_hooks(derivation.saved_with_value, lambda x: x)
    with torch.enable_grad(), recording_calls(derivation), OperatorMode(derivation.run), saving:
        inner = _inner_graph(run, derivation, create=True)
        outs, operands = [inner[record.places.needing[i]] for i in given], [inner[n] for n in asked]
        hooked = [inner[n] for n, _ in run.hooks.values() if n in inner]
        derivation.is_backward, derivation.expected = True, []
        found = _asked_of(outs, operands, hooked, grads, create=True)
    if not keeps_graph():
        run.values = []
    return dict(zip(asked, found, strict=True))
