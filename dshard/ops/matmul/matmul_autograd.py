"""Matmuls under autograd: forward, backward, and both gradients at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed, redistribute, redistributed_operand, unchecked_apply
from dshard.comm import Program, Scoped, Session, run, run_program, traced
from dshard.core.observe import OBSERVERS, observed
from dshard.core.signature import Args, Context, Function
from dshard.core.wrapper import Wrapper, is_recorded, wrap
from dshard.mesh import Coordinate
from dshard.ops.matmul.matmul_executable import Matmul
from dshard.torch_private import will_execute_node

Rerun: TypeAlias = Callable[[Callable[[], Sequence[Any]], int], None]
RECOMPUTE_HOOKS: Scoped[Rerun, list[Rerun]] = Scoped("reruns", list)
"""Callbacks before a matmul that autograd records; only the last runs, with a getter of saved tensors and a count."""


class Multiply(torch.autograd.Function):
    """The autograd node of a matmul: saves the operands, and the redistributed copies that `kept` selects."""

    @staticmethod
    def forward(ctx: Context, matmul: Matmul, *tensors: Wrapper) -> Wrapper:
        if matmul.executable.compared:
            matmul.executable.compare(tensors)
        ctx.matmul = matmul
        a, b = tensors[:2]
        need_a, need_b = ctx.needs_input_grad[2], ctx.needs_input_grad[1]
        keep_a, keep_b = matmul.kept[0] and need_a, matmul.kept[1] and need_b

        def saved(moved: Sequence[Tensor] | None = None) -> list[Wrapper | None]:
            if moved is None and (keep_a or keep_b):
                moved = [run(p, t._local_tensor) for p, t in zip(matmul.planned.plans, tensors[:2], strict=False)]
            return [
                a if need_a else None,
                b if need_b else None,
                matmul.wrap_moved(0, moved) if keep_a and moved else None,
                matmul.wrap_moved(1, moved) if keep_b and moved else None,
            ]

        if RECOMPUTE_HOOKS.anywhere and (reruns := RECOMPUTE_HOOKS.value()):
            n = need_a + need_b + keep_a + keep_b
            reruns[-1](lambda: [t for t in saved() if t is not None], n)
        local = [t._local_tensor for t in tensors]
        in_bulk = matmul.streamed is None
        out = matmul.executable.run(local) if in_bulk else matmul.run_streamed(local, whole=keep_a or keep_b)
        ctx.save_for_backward(*saved(local))
        return wrap(out, matmul.out)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        matmul: Matmul = ctx.matmul
        a, b, moved_a, moved_b = ctx.saved_tensors
        layout = matmul.out.layout.cotangent()
        grad = redistribute(as_distributed(grad, layout), layout)
        plain = not torch.is_grad_enabled()
        if plain:
            a, b = (a if moved_a is None else moved_a), (b if moved_b is None else moved_b)
        need_a, need_b, *need_bias = map(partial(needs_gradient, ctx), range(len(matmul.specs)))
        gradients: list[Tensor | None] = [None] * len(matmul.specs)
        if any(need_bias):
            dims = len(matmul.out.shape) - 1
            gradients[2] = grad.sum(tuple(range(dims))) if dims else grad
        if need_a:
            other: Any = torch.conj_physical(b) if b._spec.dtype.is_complex else b
            first = matmul.gradient(0, grad._spec, other._spec)
            if need_b and plain and first.overlaps and not traced(grad._local_tensor):
                conj_a: Any = torch.conj_physical(a) if a._spec.dtype.is_complex else a
                second = matmul.gradient(1, grad._spec, conj_a._spec)
                gradients[:2] = overlapped((first, (grad, other)), (second, (conj_a, grad)))
                return (None, *gradients)
            both = need_b and plain and first.executable.plans[0].steps and first.leaves_whole(0)
            local: list[Tensor] | None = [] if both else None
            gradients[0] = multiply(first, (grad, other), local)
            if local is not None:
                grad = first.wrap_moved(0, local)  # both matmuls want it in one layout, so it is moved once
        if need_b:
            other = torch.conj_physical(a) if a._spec.dtype.is_complex else a
            gradients[1] = multiply(matmul.gradient(1, grad._spec, other._spec), (other, grad))
        return (None, *gradients)


_record = unchecked_apply(Multiply)


def needs_gradient(ctx: Context, i: int) -> bool:
    """Whether the running backward pass needs the gradient of tensor `i` of a matmul.

    `torch.autograd.grad` of some tensors runs only the nodes that lead to them.
    """
    if not ctx.needs_input_grad[1 + i]:
        return False
    try:
        return bool(will_execute_node(ctx.next_functions[i][0]))
    except RuntimeError:  # torch does not tell of a leaf within autograd.grad, which goes there if it was asked to
        return True


def overlapped(first: tuple[Matmul, Sequence[Tensor]], second: tuple[Matmul, Sequence[Tensor]]) -> list[Wrapper]:
    """Run two matmuls; the second is computed while the result of the first is reduced."""
    run: Function = _overlapped
    args: Args = (first, second)
    if OBSERVERS:
        for matmul, _ in (first, second):
            run, args = observed, (matmul.executable.decision, run, args)
    return run(*args)  # type: ignore[no-any-return]


def _overlapped(first: tuple[Matmul, Sequence[Any]], second: tuple[Matmul, Sequence[Any]]) -> list[Wrapper]:
    programs = [matmul.executor().program for matmul, _ in (first, second)]
    n = len(first[1])

    def program(at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[tuple[Tensor, ...]]:
        rest = yield from programs[0](at, space, tensors[:n])
        other = yield from (yield from programs[1](at, space, tensors[n:]))
        return (yield from rest), other

    tensors = [t._local_tensor for _, operands in (first, second) for t in operands]
    plans = [p for matmul, _ in (first, second) for p in matmul.planned.plans]
    gradients = run_program(first[0].executable.mesh, program, tensors, plans)
    return [wrap(x, matmul.out) for x, (matmul, _) in zip(gradients, (first, second), strict=True)]


def multiply(matmul: Matmul, tensors: Sequence[Any], local: list[Tensor] | None = None) -> Wrapper:
    """Run the matmul of these distributed tensors, recorded by autograd if one needs a gradient.

    If it is not recorded, the redistributed local operands are appended to `local`.
    """
    executable, cut = matmul.executable, matmul.cut
    if cut is not None:
        (a, b, *bias), (dim_a, dim_b) = tensors, cut.dims
        pair = a.unflatten(dim_a, cut.sizes), b.unflatten(dim_b, cut.sizes)
        # Of several dims of size one a reshape shards another than the cut, and of no elements it shards none.
        specs = zip(pair, matmul.specs, strict=False)
        tensors = (*(redistributed_operand(x, spec.layout) for x, spec in specs), *bias)
    call: Function = executable
    args: Args = (tensors,)
    if is_recorded(tensors):
        call, args = _record, (matmul, *tensors)
    elif local is not None:
        call, args = _leaving_operands, (matmul, tensors, local)
    return observed(executable.decision, call, args) if OBSERVERS else call(*args)  # type: ignore[no-any-return]


def _leaving_operands(matmul: Matmul, tensors: Sequence[Wrapper], local: list[Tensor]) -> Wrapper:
    matmul.executable.compare(tensors)
    local += [t._local_tensor for t in tensors]
    in_bulk = matmul.streamed is None
    return wrap(matmul.executable.run(local) if in_bulk else matmul.run_streamed(local, whole=True), matmul.out)
