"""Which values of a step stay in memory until the backward pass: what autograd saves, and what the model returns.

A value is kept where it is made, or in the layout to which it is moved for a call that saves it. A view is kept with
the tensor of which it is one. Which operands and results a call saves is found by running it once, without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dshard.caches import Cache
from dshard.comm import plain
from dshard.core.trees import tensors_in
from dshard.planning.local_seconds import ONE, kernel_of
from dshard.planning.step_graph import End, GraphCall, StepGraph, is_copy
from dshard.rules.expand import Operand, expand, sizes_of
from dshard.torch_private import disable_modes

_SAVED = Cache("local work", 16384)


class SavedValues(NamedTuple):
    """Which operands and results of a call autograd saves, and for each result the operand of which it is a view."""

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    views: tuple[int | None, ...]


class KeptValues(NamedTuple):
    """The values that are kept where they are made, and the uses that keep a value that is moved for them.

    A value with `alone` its only keeper is not kept where it is made if it is moved.
    """

    made: frozenset[int]
    uses: frozenset[End]
    alone: frozenset[End]


def kept_values(graph: StepGraph) -> KeptValues:
    """The values of a step that stay until the backward pass."""
    saved = list[SavedValues]()
    for call in graph.calls:
        own = saved_values(call)
        saved.append(own._replace(views=(0,)) if _is_contiguous(call, graph, saved) else own)
    returned, kept, made = {x.number for x in graph.outputs}, set[int](), set[int]()
    uses, alone = set[End](), set[End]()
    for call, own in zip(reversed(graph.calls), reversed(saved), strict=True):
        for value, is_saved, of in zip(call.results, own.results, own.views, strict=True):
            keepers = [end for end in value.uses if _keeps(graph.calls[end.call], end.position, saved[end.call], kept)]
            is_own = is_saved or value.number in returned
            uses.update(keepers)
            kept.update([value.number] if keepers or is_own else ())
            alone.update(keepers if len(keepers) == 1 and not is_own else ())
            made.update([value.number] if of is None and value.number in kept else ())
    return KeptValues(frozenset(made), frozenset(uses), frozenset(alone))


def _is_contiguous(call: GraphCall, graph: StepGraph, saved: Sequence[SavedValues]) -> bool:
    """Whether a call makes a copy of an attention's result, which kernels lay out so that it is contiguous already."""
    value = call.operands[0]
    while value.producer is not None and saved[value.producer.call].views[value.producer.position] == 0:
        value = graph.calls[value.producer.call].operands[0]
    of = "" if value.producer is None else graph.calls[value.producer.call].name
    return call.name == "clone" and of == "scaled_dot_product_attention"


def _keeps(call: GraphCall, operand: int, saved: SavedValues, kept: set[int]) -> bool:
    """Whether a call saves an operand, or one of its views of it is kept."""
    views = [value.number for value, of in zip(call.results, saved.views, strict=True) if of == operand]
    return saved.operands[operand] or not kept.isdisjoint(views)


def saved_values(call: GraphCall) -> SavedValues:
    """What autograd saves of a call, cached by its signature."""
    if is_copy(call):
        return SavedValues((False,), (False,), (0,))
    if call.rule.chosen is not None:  # a layer of experts
        return SavedValues((True,) * len(call.operands), (False,), (None,))
    known: SavedValues | None = _SAVED.get(call.signature)
    return known or _SAVED.add(call.signature, _saved_values(call))


def _run(call: GraphCall) -> Callable[..., Any]:
    """What one rank that has all operands whole runs for a call."""
    if call.kernel is None:
        return call.run
    operands = tuple([Operand(ONE, value.shape, value.itemsize) for value in call.operands])
    sizes = sizes_of(call.rule, operands, [(value.shape, value.itemsize) for value in call.results])
    expansion = expand(call.rule, operands, (None,), {}, sizes)
    return kernel_of(call, expansion) or call.run if expansion is not None else call.run


@plain()
@disable_modes()
def _saved_values(call: GraphCall) -> SavedValues:
    leaves = [torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.needs_grad) for x in call.operands]
    with torch.enable_grad():
        operands: list[Any] = [
            x.clone() for x in leaves
        ]  # not these, which autograd keeps, and to which none may write
        before = [StorageWeakRef(x.untyped_storage()) for x in operands]
        outs: list[Any] = tensors_in(_run(call)(*operands))
        after, nodes = [StorageWeakRef(x.untyped_storage()) for x in outs], [x.grad_fn for x in outs]
    del operands, outs
    views = tuple([before.index(each) if each in before else None for each in after])
    saved, kept = (tuple([not each.expired() for each in ends]) for ends in (before, after))
    del nodes
    return SavedValues(saved, kept, views)
