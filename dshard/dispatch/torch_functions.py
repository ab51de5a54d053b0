"""Calls of torch's functions that have no shortcut, and those that torch answers by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_exporting

from dshard.core.moves import leaves
from dshard.core.plain_tensors import PLAIN_RESULTS, may_hold_plain, refuse_plain, wrap_or_refuse_plain
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.transforms import is_differentiating_forward, is_wrapped
from dshard.dispatch import fast_path
from dshard.dispatch.composite_table import AUTOGRAD_FUNCTIONS, COMPOSITES
from dshard.ops.custom import wrapped
from dshard.torch_private import is_transforming, no_torch_function


def through(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function of torch: by its handler, as a composite operator, or as the operators that torch makes of it."""
    if is_transforming():
        return _transformed(func, args, kwargs)
    if may_hold_plain(args) or (kwargs and may_hold_plain(kwargs.values())):
        args, kwargs = wrap_or_refuse_plain(func, args, kwargs)
    handler = AUTOGRAD_FUNCTIONS.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    composite = COMPOSITES.get(func)
    with no_torch_function():
        # torch.export records operators on distributed tensors, and torch has forward derivatives of operators alone
        if composite is not None and not is_exporting() and not is_differentiating_forward():
            out = composite(func, args, kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
    return wrapped(out, (args, kwargs)) if type(out) in PLAIN_RESULTS else out


def _transformed(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function inside one that torch.func transforms, as the operators that torch makes of it."""
    if func in fast_path.BACKWARD:
        return AUTOGRAD_FUNCTIONS[func](func, args, kwargs)
    if not any(isinstance(leaf, Tensor) and is_wrapped(leaf) for leaf in leaves((args, kwargs))):
        refuse_plain(func, args, kwargs)
    with no_torch_function():
        return func(*args, **kwargs)


_ASKED: tuple[Any, ...] = (
    *(torch.Tensor.grad, torch.Tensor.is_leaf, torch.Tensor.requires_grad),
    *(torch.Tensor.is_cpu, torch.Tensor.is_cuda, torch.Tensor.is_sparse, torch.Tensor.is_meta),
)
_SET: Any = torch.Tensor.grad
QUERIES = frozenset(
    {
        *(attribute.__get__ for attribute in _ASKED),
        _SET.__set__,
        *(torch.is_floating_point, torch.is_complex, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
    }
)
"""Questions about a tensor that torch answers by itself, where no operator was recorded on its local tensor."""
