"""Gradients of tensors that a program took apart, in a backward pass: sharded in blocks where their parts are sharded.

The gradient of a tensor that was split into equal parts is theirs, one after the other; that of a dim that a view cut
is a dim merged of the parts. What is sharded alike within each part is blocks of the whole, so nothing is sent, as
nothing was where the tensor itself was sharded in blocks. Autograd joins parts by `cat`, and merges dims by a view, as
a program may; but what a program joins or merges, whose parts were not one tensor, it gets in ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dshard.caches import cached
from dshard.core.call import Composed
from dshard.core.call_key import call_key
from dshard.core.checks import infer
from dshard.core.context import planning_context
from dshard.core.executable import Executable, decide, wrap_as
from dshard.core.observe import OBSERVERS, observed
from dshard.core.plain_tensors import is_within_forward
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec, specs_of
from dshard.core.wrapper import Wrapper
from dshard.layout import Layout, Shape
from dshard.rules.reshape import reshape_rule
from dshard.rules.rule import ANY, MOVES, Rule, together
from dshard.rules.rule_notation import parse_rule
from dshard.torch_private import OpOverload, graph_task_id


def _is_backward() -> bool:
    """Whether autograd calls; a forward pass within its own, such as that of a checkpoint, is as it was before."""
    return graph_task_id() >= 0 and not torch.is_grad_enabled() and not is_within_forward()


# -- parts joined by `cat`


def are_equal_parts(args: Args) -> bool:
    """Whether a backward pass joins tensors of one layout and shape along a dim that is sharded in ranges."""
    if not _is_backward() or not isinstance(args[0][0], Wrapper):
        return False
    spec: Spec = args[0][0]._spec
    dim = (args[1] if len(args) > 1 else 0) % max(1, len(spec.shape))
    is_sharded = bool(spec.layout.axes_of(dim)) and dim not in spec.layout.blocks
    return is_sharded and len(args[0]) > 1 and all(isinstance(x, Wrapper) and _is_alike(x._spec, spec) for x in args[0])


def _is_alike(a: Spec, b: Spec) -> bool:
    return a is b or (a.layout is b.layout and a.shape == b.shape and a.dtype is b.dtype)


def joined_in_blocks(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The parts joined by `cat`, each of them a block."""
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    key = call_key(("gradients of equal parts", dim), parts)
    make = partial(_joining, func, [x._spec for x in parts], dim)
    return _run(planning_context().choices.of(key, make), parts)


def _run(executable: Executable, tensors: Sequence[Any]) -> Any:
    return observed(executable.decision, executable, (tensors,)) if OBSERVERS else executable(tensors)


def _joining(func: OpOverload, specs: Sequence[Spec], dim: int) -> Executable:
    spec, n = specs[0], len(specs)
    out = infer(func, ([each.meta() for each in specs], dim), {})
    passes = together(*range(n), ops=ANY)
    shapes = [each.shape for each in specs]
    rule = parse_rule(f"*... m ... -> ... ({n} m) ...", shapes, [tuple(out.shape)], at=[dim], passes=passes)
    decision, choice = decide(str(func), rule, specs, [out])
    results = specs_of(choice.strategy.outputs, [out], spec.device)
    return Executable(decision, lambda at: lambda *parts: torch.cat(parts, dim), results, range(n), wrap_as(results[0]))


EQUAL_PARTS = {torch.ops.aten.cat.default: Composed(joined_in_blocks, are_equal_parts, local=True)}


# -- dims merged by a view


def merges_within_parts(args: Args) -> bool:
    """Whether a backward pass merges dims of which one is sharded that is not the first, and none before it is."""
    if not _is_backward() or not isinstance(args[0], Wrapper):
        return False
    spec: Spec = args[0]._spec
    return len(args[1]) < len(spec.shape) and _rule_in_blocks(spec.layout, spec.shape, tuple(args[1])) is not None


@cached("rules", 4096)
def _rule_in_blocks(layout: Layout, src: Shape, dst: Shape) -> Rule | None:
    """The rule of a reshape in which dims before a sharded one are its blocks; None if there are none such."""
    if layout.blocks or min(dst, default=0) < 0:
        return None
    rule, blocks = reshape_rule(src, dst), set[str]()
    sharded = {names[0] for dim, names in enumerate(rule.inputs[0]) if names and layout.axes_of(dim)}
    for names in rule.outputs[0]:
        first = next((i for i, name in enumerate(names) if name in sharded), 0)
        blocks |= {*names[:first]}
    if not blocks or blocks & sharded:
        return None
    return replace(rule, passes=MOVES, unsharded=rule.unsharded | blocks, blocks=frozenset(blocks))


def merged_in_blocks(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The view, of which each part that was not sharded is a block."""
    x, shape = args[0], tuple(args[1])
    key = call_key(("gradient of a dim that was cut", shape), [x])
    return _run(planning_context().choices.of(key, partial(_merging, func, x._spec, shape)), [x])


def _merging(func: OpOverload, spec: Spec, shape: Shape) -> Executable:
    out, rule = infer(func, (spec.meta(), shape), {}), _rule_in_blocks(spec.layout, spec.shape, shape)
    assert rule is not None
    decision, choice = decide(str(func), rule, [spec], [out])
    results = specs_of(choice.strategy.outputs, [out], spec.device)
    layout = results[0].layout
    return Executable(
        decision,
        lambda at: lambda local: local.reshape(layout.local_shape(shape, at)),
        results,
        range(1),
        wrap_as(results[0]),
    )


_ATEN = torch.ops.aten

MERGED = {
    func: Composed(merged_in_blocks, merges_within_parts, local=True)
    for func in (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
}
