"""The gradient of a tensor that was split into equal parts: theirs, one after the other.

Parts that are sharded alike are blocks of the joined gradient, so nothing is sent, as nothing was where the tensor
itself was sharded in blocks. Autograd joins them by `cat`, as a program may; but what a program joins, whose parts were
not one tensor, it gets in ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
from dshard.rules.rule import ANY, together
from dshard.rules.rule_notation import parse_rule
from dshard.torch_private import OpOverload, graph_task_id


def are_equal_parts(args: Args) -> bool:
    """Whether a backward pass joins tensors of one layout and shape along a dim that is sharded in ranges.

    A forward pass that runs again within it, such as that of a checkpoint, joins as it did the first time.
    """
    if graph_task_id() < 0 or torch.is_grad_enabled() or is_within_forward() or not isinstance(args[0][0], Wrapper):
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
    choices = planning_context().choices
    executable: Executable | None = choices.get(key)
    if executable is None:
        executable = choices.add(key, _executable(func, [x._spec for x in parts], dim))
    else:
        choices.hits += 1
    return observed(executable.decision, executable, (parts,)) if OBSERVERS else executable(parts)


def _executable(func: OpOverload, specs: Sequence[Spec], dim: int) -> Executable:
    spec, n = specs[0], len(specs)
    out = infer(func, ([each.meta() for each in specs], dim), {})
    passes = together(*range(n), ops=ANY)
    shapes = [each.shape for each in specs]
    rule = parse_rule(f"*... m ... -> ... ({n} m) ...", shapes, [tuple(out.shape)], at=[dim], passes=passes)
    decision, choice = decide(str(func), rule, specs, [out])
    results = specs_of(choice.strategy.outputs, [out], spec.device)
    return Executable(decision, lambda at: partial(_cat, dim), results, range(n), wrap_as(results[0]))


def _cat(dim: int, *parts: Tensor) -> Tensor:
    return torch.cat(parts, dim)


EQUAL_PARTS = {torch.ops.aten.cat.default: Composed(joined_in_blocks, are_equal_parts, local=True)}
