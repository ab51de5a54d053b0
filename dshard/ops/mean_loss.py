"""The mean cross entropy of rows that are sharded, as warm calls run it: on the local rows, with one collective.

torch records the local sum of the losses; the sums and the weights of all ranks are added in one collective, as in
`mean_nll_loss`. The backward pass sends nothing, and is torch's own from the sum of the losses on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed, redistribute, to_local, tracked_local, unchecked_apply
from dshard.comm import is_outside, runner
from dshard.core.moves import LocalRedistribution, local_redistribution
from dshard.core.observe import OBSERVERS
from dshard.core.signature import Args, Context, Function, Kwargs
from dshard.core.spec import Spec, spec_of
from dshard.core.torch_function import bind_arguments
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout, interned, replicated
from dshard.ops.losses import SUM
from dshard.ops.vocab_parallel import LOSS_ARGUMENTS
from dshard.placements import Partial, Shard
from dshard.rules.strategy import completed_layout

WarmCall: TypeAlias = Callable[[Args, Kwargs], Any]
_NLL = torch.ops.aten.nll_loss_forward.default


def mean_cross_entropy(func: Function, args: Args, kwargs: Kwargs, out: Wrapper) -> WarmCall | None:
    """The shortcut of calls like this one, whose result was `out`; None unless it is a mean over sharded rows only."""
    x, target, weight, average, ignored, reduce, reduction, smoothing = bind_arguments(LOSS_ARGUMENTS, args, kwargs)
    if average is not None or reduce is not None or smoothing or reduction not in (None, "mean") or len(args) < 2:
        return None
    if not _are_rows(x, target) or (weight is not None and not _is_constant(weight, x)):
        return None
    spec, layout, local = x._spec, x._spec.layout, out._local_tensor
    if is_outside(layout.mesh) or type(local) is not Tensor or local.is_meta or not out.requires_grad:
        return None
    terms = interned(
        Layout(layout.mesh, tuple(Partial("sum") if isinstance(p, Shard) else p for p in layout.placements))
    )
    partial_sum = spec_of(terms, (), (), spec.dtype, spec.device)
    move = local_redistribution(partial_sum, completed_layout(terms))
    if move.spec is not out._spec:
        return None
    of_both = runner(replace(move.plan, shape=(2,)))  # as `begin_together` sends them, which takes more calls
    gradient, ignored = spec.with_layout(layout.cotangent()), -100 if ignored is None else ignored

    def call(args: Args, kwargs: Kwargs) -> Any:
        if OBSERVERS:  # which see each operator
            return func(*args, **kwargs)
        x, target = args[:2]
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        by_class = None if weight is None else weight._local_tensor
        log_probabilities = torch.log_softmax(tracked_local(x, gradient, True), 1)
        total, count = _NLL(log_probabilities, target._local_tensor, by_class, SUM, ignored)
        return _mean(total, count, move, of_both)

    again: Any = call
    again.repeats = True  # a first call has sent what it sends
    return again  # type: ignore[no-any-return]


def _are_rows(x: object, target: object) -> bool:
    """Whether these are logits and classes of the same sharded rows, and each rank has some rows."""
    cls = Wrapper.public
    if type(x) is not cls or type(target) is not cls or x._spec.layout != target._spec.layout:
        return False
    spec: Spec = x._spec
    if x.dim() != 2 or target.dim() != 1 or target.is_floating_point() or spec.has_partial:
        return False
    return spec.layout.sharded_dims() == (0,) and not spec.layout.leaves_empty(spec.shape)


def _is_constant(weight: object, x: Wrapper) -> bool:
    """Whether all ranks have the weights of the classes of `x`, which need no gradient."""
    if type(weight) is not Wrapper.public or weight.requires_grad:
        return False
    return weight._spec.layout == replicated(x._spec.layout.mesh) and weight._spec.dtype is x._spec.dtype


class _Mean(torch.autograd.Function):
    """The sum of the losses of all ranks over the sum of their weights; backward: the local sum's gradient."""

    @staticmethod
    def forward(
        ctx: Context, total: Tensor, count: Tensor, move: LocalRedistribution, of_both: Callable[[Tensor], Tensor]
    ) -> Any:
        ctx.move = move
        total, every = of_both(torch.stack((total, count))).unbind()
        ctx.save_for_backward(every)
        return wrap(total / every, move.spec)

    @staticmethod
    def backward(ctx: Context, grad: Any) -> tuple[Tensor, None, None, None]:
        move: LocalRedistribution = ctx.move
        grad = redistribute(as_distributed(grad, move.spec.layout), move.spec.layout)
        local = to_local(grad, move.source) if torch.is_grad_enabled() else grad._local_tensor
        (count,) = ctx.saved_tensors
        return local / count, None, None, None


_mean = unchecked_apply(_Mean)
