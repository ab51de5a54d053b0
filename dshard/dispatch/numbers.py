"""Numbers are reduced when they are made: a tensor without dims is whole on every rank, so that one can read it alone.

What a module makes within its forward pass, and a backward pass, stays partial, and is reduced with what it meets.
"""

from __future__ import annotations

from typing import Any

from torch.compiler import is_compiling

from dshard.autograd.crossing import NUMBER, redistribute
from dshard.comm import of_first_rank, same_memory
from dshard.core.moves import tensors_in
from dshard.core.plain_tensors import is_within_forward
from dshard.core.signature import Args, Kwargs
from dshard.core.wrapper import Wrapper
from dshard.rules.strategy import completed_layout
from dshard.torch_private import graph_task_id, is_transforming


def is_partial_number(x: object) -> bool:
    """Whether `x` is a tensor without dims whose terms lie on several ranks."""
    return isinstance(x, Wrapper) and not x._spec.shape and x._spec.has_partial


def with_numbers_reduced(out: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of a call, with partial numbers reduced that a program makes; operands and their views stay."""
    if isinstance(out, tuple):
        numbers = any(map(is_partial_number, out))
        return type(out)([with_numbers_reduced(x, args, kwargs) for x in out]) if numbers else out
    if not is_partial_number(out) or is_within_forward() or graph_task_id() != -1 or is_transforming():
        return out
    if is_compiling() or out._view_sync is not None:
        return out
    local = of_first_rank(out._local_tensor)
    for x in tensors_in((args, kwargs)):  # warm calls make views of local tensors, which autograd does not call views
        if isinstance(x, Wrapper) and same_memory(local, of_first_rank(x._local_tensor)):
            return out
    return redistribute(out, completed_layout(out._spec.layout), NUMBER)
