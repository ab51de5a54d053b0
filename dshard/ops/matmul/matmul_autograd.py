"""Matmuls under autograd: forward, backward, and both gradients at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.comm import Program, Scoped, Session, run, run_program, traced
from dshard.core.observe import CALL_LOG, OBSERVERS, CallRecord, log, observed
from dshard.core.wrapper import wrap
from dshard.mesh import Coordinate
from dshard.ops.matmul.matmul_executable import MatmulExecutable

Rerun: TypeAlias = Callable[[Callable[[], Sequence[Any]], int], None]
RECOMPUTE_HOOKS: Scoped[Rerun, list[Rerun]] = Scoped("reruns", list)
"""Callbacks before a matmul that autograd records; only the last runs, with a getter of saved tensors and a count."""


class Multiply(torch.autograd.Function):
    """The autograd node of a matmul. Saves the operands, and redistributed copies of those worth keeping."""

    @staticmethod
    def forward(ctx: Any, product: MatmulExecutable, *tensors: Any) -> Any:
        ctx.product = product
        a, b = tensors[:2]
        need_a, need_b = ctx.needs_input_grad[2], ctx.needs_input_grad[1]
        keep_a, keep_b = product.kept[0] and need_a, product.kept[1] and need_b

        def saved(moved: Sequence[Tensor] | None = None) -> list[Any]:
            if moved is None and (keep_a or keep_b):
                moved = [run(p, t._local) for p, t in zip(product.plans, tensors[:2], strict=True)]
            return [
                a if need_a else None,
                b if need_b else None,
                product.wrap_moved(0, moved) if keep_a and moved else None,
                product.wrap_moved(1, moved) if keep_b and moved else None,
            ]

        reruns = RECOMPUTE_HOOKS.value()
        if reruns:
            n = need_a + need_b + keep_a + keep_b
            reruns[-1](lambda: [t for t in saved() if t is not None], n)
        out, moved = product(tensors)
        ctx.save_for_backward(*saved(moved))
        return wrap(out, product.out)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        product = ctx.product
        a, b, moved_a, moved_b = ctx.saved_tensors
        layout = product.cotangent
        grad = redistribute(as_distributed(grad, layout), layout)
        plain = not torch.is_grad_enabled()
        if plain:
            a, b = (a if moved_a is None else moved_a), (b if moved_b is None else moved_b)
        a, b = (
            (a if wanted_gradients(ctx, 1) else None),
            (b if wanted_gradients(ctx, 0) else None),
        )  # each is for the other's gradient
        gradients: list[Any] = [None] * (2 if product.bias is None else 3)
        if product.bias is not None and wanted_gradients(ctx, 2):
            dims = len(product.out.shape) - 1
            gradients[2] = grad.sum(tuple(range(dims))) if dims else grad
        if plain and not OBSERVERS and type(grad._local) is Tensor and not grad._local.is_meta:
            back = product.back(grad._spec, None if a is None else a._spec, None if b is None else b._spec)
            if back is not None:
                gradients[:2] = back(grad._local, a, b)
                return (None, *gradients)
        gradients[:2] = _gradients(ctx, product, grad, a, b, plain)
        return (None, *gradients)


def _gradients(ctx: Any, product: MatmulExecutable, grad: Any, a: Any, b: Any, plain: bool) -> list[Any]:
    """The gradients of both operands in every case: observed, recorded, overlapped, complex, or without data."""
    gradients: list[Any] = [None, None]
    need_a, need_b = wanted_gradients(ctx, 0), wanted_gradients(ctx, 1)
    if need_a:
        other: Any = torch.conj_physical(b) if b.is_complex() else b
        first = product.gradient(0, grad._spec, other._spec)
        if need_b and plain and first.overlaps() and not traced(grad._local):
            given: Any = torch.conj_physical(a) if a.is_complex() else a
            second = product.gradient(1, grad._spec, given._spec)
            gradients[:2] = both_gradients((first, (grad, other)), (second, (given, grad)))
            return gradients
        gradients[0], moved = multiply_keeping(first, (grad, other))
        if plain and first.streamed is None:  # both products want it in one layout, so it is moved once
            grad = first.wrap_moved(0, moved)
    if need_b:
        other = torch.conj_physical(a) if a.is_complex() else a
        gradients[1] = multiply(product.gradient(1, grad._spec, other._spec), (other, grad))
    return gradients


def wanted_gradients(ctx: Any, i: int) -> bool:
    """Whether the running backward pass needs the gradient of tensor `i` of a matmul.

    A pass that is asked for the gradients of some tensors runs only the nodes that lead to them.
    """
    if not ctx.needs_input_grad[1 + i]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[i][0]))
    except RuntimeError:  # torch does not tell of a leaf within autograd.grad, which goes there if it was asked to
        return True


def both_gradients(
    first: tuple[MatmulExecutable, Sequence[Any]], second: tuple[MatmulExecutable, Sequence[Any]]
) -> list[Any]:
    """Two matmuls, of which the second is computed while the result of the first is reduced."""
    run: Callable[..., Any] = _both_gradients
    args: tuple[Any, ...] = (first, second)
    if OBSERVERS:
        for product, _ in (first, second):
            run, args = observed, (product.decision(), run, args)
    return run(*args)  # type: ignore[no-any-return]


def _both_gradients(
    first: tuple[MatmulExecutable, Sequence[Any]], second: tuple[MatmulExecutable, Sequence[Any]]
) -> list[Any]:
    programs = [product.executor().program for product, _ in (first, second)]
    n = len(first[1])

    def program(at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[tuple[Tensor, ...]]:
        rest = yield from programs[0](at, space, tensors[:n])
        other = yield from (yield from programs[1](at, space, tensors[n:]))
        return (yield from rest), other

    tensors = [t._local for _, given in (first, second) for t in given]
    plans = [p for product, _ in (first, second) for p in (*product.plans, product.end)]
    gradients = run_program(first[0].mesh, program, tensors, plans)
    return [wrap(x, product.out) for x, (product, _) in zip(gradients, (first, second), strict=True)]


def multiply(product: MatmulExecutable, tensors: Sequence[Any]) -> Any:
    """Run the matmul of these distributed tensors, recorded by autograd where one needs a gradient."""
    return multiply_keeping(product, tensors)[0]


def multiply_keeping(product: MatmulExecutable, tensors: Sequence[Any]) -> tuple[Any, Sequence[Tensor]]:
    """Run a matmul; returns its result and, where no gradient is recorded, the redistributed local operands."""
    cut = product.cut
    if cut is not None:
        (a, b, *bias), (dim_a, dim_b) = tensors, cut.dims
        tensors = (a.unflatten(dim_a, cut.sizes), b.unflatten(dim_b, cut.sizes), *bias)
    if OBSERVERS:
        result: tuple[Any, Sequence[Tensor]] = observed(product.decision(), _multiply, (product, tensors))
        return result
    out = _multiply(product, tensors)
    if CALL_LOG and cut is None:
        log(CallRecord(product, None, tuple(tensors), {}, out[0]))
    return out


def _multiply(product: MatmulExecutable, tensors: Sequence[Any]) -> tuple[Any, Sequence[Tensor]]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return Multiply.apply(product, *tensors), ()  # type: ignore[no-untyped-call]
    out, moved = product(tensors)
    return wrap(out, product.out), moved
