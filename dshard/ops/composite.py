"""Run a composite operator as one: its operands redistributed once, then local tensors under torch's own autograd.

The local backward pass gives each operand's gradient in the layout of the strategy: sharded like the operand, or a
partial sum if the work was sharded and the operand was not. Second derivatives work, as the crossings between
distributed and local tensors are themselves differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.autograd.crossing import ToLocal, apply_to, as_distributed, from_local, redistribute, to_local
from dshard.comm import are_simulated, is_any_traced, own_coordinate
from dshard.core.call_key import call_key
from dshard.core.context import planning_context
from dshard.core.executable import ComposedExecutable, Executable, decide, wrap_as
from dshard.core.moves import counting_as, run_on_ranks
from dshard.core.observe import OBSERVERS, observed
from dshard.core.operands import common_mesh, spec_like
from dshard.core.signature import Context, Function
from dshard.core.spec import Spec, device_of_operands, for_shapes, meta_tensors, specs_of
from dshard.core.wrapper import Wrapper, each_apart, is_recorded, wrap
from dshard.layout import Layout
from dshard.mesh import Coordinate
from dshard.ops.matmul.rules import same_dtype
from dshard.rules.rule import Rule
from dshard.rules.strategy import Strategy
from dshard.torch_private import no_torch_function

Local: TypeAlias = Callable[..., Tensor]
Locals: TypeAlias = Callable[..., tuple[Tensor, ...]]
Kernel: TypeAlias = Callable[[Strategy, Coordinate], Local]


def run_composite(
    rule: Callable[[], Rule], local: Local, tensors: Sequence[Any], key: tuple[Any, ...], kernel: Kernel | None = None
) -> Any:
    """Run `local` on the local tensors of `tensors`, redistributed as the cheapest strategy of `rule` says.

    `key` distinguishes calls of equal specs whose rule or local operator differ; `kernel`, if given, returns the local
    operator of each rank. Both are cached, and so must hold no tensor.
    """
    return run_chosen(key, lambda: _choose_composite(rule, local, tensors, key[0], kernel), tensors)


def run_chosen(
    key: tuple[Any, ...], choose: Callable[[], Executable | ComposedExecutable], tensors: Sequence[Any]
) -> Any:
    """Run a composite operator by the executable that `choose` made at the first call with these specs and `key`."""
    return run_executable(planning_context().choices.of(call_key(key, tensors), choose), tensors)


def run_executable(executable: Executable | ComposedExecutable, tensors: Sequence[Any]) -> Any:
    """Run a composite operator, so that autograd records its local operator if it records an operand."""
    run: Function = executable
    args: Sequence[Any] = (tensors, {})
    if isinstance(executable, Executable):
        run, args = (partial(run_recorded, executable), tensors) if is_recorded(tensors) else (executable, (tensors,))
    decision = executable.decision
    return observed(decision, run, args) if OBSERVERS and decision is not None else run(*args)


def recorded_gradients(
    recorded: Callable[[Sequence[Any]], Tensor], tensors: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients: those of what `recorded` makes of the operands; None where they are not needed."""
    operands = each_apart(tensors)
    wanted = [x for x, is_needed in zip(operands, needed, strict=True) if is_needed]
    with torch.enable_grad():
        out = recorded(operands)
    gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple([next(gradients) if is_needed else None for is_needed in needed])


def are_traced(tensors: Sequence[Any]) -> bool:
    """Whether torch traces a graph of some of these operands, in which no sizes depend on values."""
    return is_any_traced([t._local_tensor for t in tensors if isinstance(t, Wrapper)])


def _choose_composite(
    rule: Callable[[], Rule], local: Local, tensors: Sequence[Any], name: str, kernel: Kernel | None
) -> Executable:
    mesh = common_mesh(name, list(tensors))
    same_dtype(name, [t.dtype for t in tensors[:3] if t.is_floating_point() or t.is_complex()])
    specs = [spec_like(t, mesh) for t in tensors]
    with torch.no_grad(), for_shapes():
        out = local(*meta_tensors(specs))
    decision, choice = decide(name, rule(), specs, [out])
    strategy = choice.strategy
    results = specs_of(strategy.outputs, [out], device_of_operands(specs))
    positions = [i for i, t in enumerate(tensors) if isinstance(t, Wrapper)]
    local_op: Callable[[Coordinate], Local] = (lambda at: local) if kernel is None else partial(kernel, strategy)
    return Executable(decision, local_op, results, positions, wrap_as(results[0]), gradients=strategy.gradients)


def run_recorded(executable: Executable, *tensors: Wrapper) -> Any:
    """Run a composite operator on distributed tensors so that autograd records its local operator."""
    executable.compare(tensors)
    local_op, ends = executable.local_op, executable.decision.ends
    plans, gradients = executable.plans, executable.gradients
    computed = executable.specs
    if ends:
        computed = [spec.with_layout(end.src) for spec, end in zip(executable.specs, ends, strict=True)]
    with no_torch_function():
        redistributed = [redistribute(t, p.dst) for t, p in zip(tensors, plans, strict=True)]
        if are_simulated(t._local_tensor for t in redistributed):
            specs = [t._spec.with_layout(layout) for t, layout in zip(redistributed, gradients, strict=True)]
            cotangents = [out.layout.cotangent() for out in computed]
            results = Simulated.apply(_as_tuples(local_op), computed, cotangents, specs, *redistributed)  # type: ignore[no-untyped-call]
        else:
            for t, copy in zip(tensors, redistributed, strict=True):
                if copy is not t:
                    copy._local_tensor = counting_as(t._local_tensor, copy._local_tensor)
            parts = [_recorded(t, layout) for t, layout in zip(redistributed, gradients, strict=True)]
            local = _as_tuples(local_op)(own_coordinate(executable.mesh))(*parts)
            results = [_wrapped(x, out) for x, out in zip(local, computed, strict=True)]
        results = [_moved_to(x, out.layout) for x, out in zip(results, executable.specs, strict=True)]
        if isinstance(executable, SavingExecutable):
            results = [SavedOperands.apply(x, *tensors) for x in results]  # type: ignore[no-untyped-call]
        return results[0] if len(results) == 1 else tuple(results)


def _recorded(x: Wrapper, gradient: Layout) -> Tensor:
    """The local tensor of `x`, recorded if `x` is; its gradient has the layout `gradient`."""
    if not x.requires_grad:
        return x._local_tensor
    return apply_to(x, ToLocal, to_local)(x, x._spec.with_layout(gradient))  # type: ignore[no-any-return]


def _wrapped(local: Tensor, spec: Spec) -> Wrapper:
    """The result of which this rank has `local`, recorded as that is."""
    return from_local(local, spec, spec.layout.cotangent()) if local.requires_grad else wrap(local, spec)


def _moved_to(x: Wrapper, layout: Layout) -> Wrapper:
    """`x` in another layout, with the version counter of `x`, as the local operator may have saved it."""
    moved = redistribute(x, layout)
    if moved is not x:
        moved._local_tensor = counting_as(x._local_tensor, moved._local_tensor)
    return moved


class SavingExecutable(Executable):
    """A composite operator whose local operator saves copies; so its operands and its result are saved as well."""

    __slots__ = ()


class SavedOperands(torch.autograd.Function):
    """The result of a composite operator, with its operands saved, so that backward refuses a write to any of them."""

    @staticmethod
    def forward(ctx: Context, out: Wrapper, *operands: Wrapper) -> Wrapper:
        result = wrap(out._local_tensor, out._spec)
        ctx.save_for_backward(*operands, result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors[:-1]
        return (grad, *(None for _ in operands))


class Simulated(torch.autograd.Function):
    """The autograd node of a local operator on ranks simulated in one process; backward runs each rank's backward pass.

    The backward pass is a local operator, too, of the gradients of the outputs and the operands. `outs` are the specs
    of the outputs, `cotangents` the layouts of their gradients, and `of_gradients` the specs of the operands'
    gradients.
    """

    @staticmethod
    def forward(
        ctx: Context,
        local_op: Callable[[Coordinate], Locals],
        outs: Sequence[Spec],
        cotangents: Sequence[Layout],
        of_gradients: Sequence[Spec],
        *tensors: Wrapper,
    ) -> tuple[Wrapper, ...]:
        ctx.local_op, ctx.outs, ctx.cotangents, ctx.of_gradients = (local_op, outs, cotangents, of_gradients)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(True)
        results = run_on_ranks(outs[0].layout.mesh, local_op, tuple(t._local_tensor for t in tensors), {})
        return tuple(wrap(local, spec) for local, spec in zip(results, outs, strict=True))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[4:]
        pairs = zip(grads, ctx.cotangents, strict=True)
        gradients = [redistribute(as_distributed(grad, layout), layout) for grad, layout in pairs]
        differentiated = [i for i, is_needed in enumerate(needed) if is_needed]
        results = Simulated.apply(  # type: ignore[no-untyped-call]
            lambda at: _pull_back(ctx.local_op(at), len(grads), needed),
            [ctx.of_gradients[i] for i in differentiated],
            [tensors[i]._spec.layout for i in differentiated],
            [*ctx.outs, *ctx.of_gradients],
            *gradients,
            *tensors,
        )
        out: list[Tensor | None] = [None] * len(tensors)
        for i, grad in zip(differentiated, results, strict=True):
            out[i] = grad
        return (None,) * 4 + tuple(out)


def _as_tuples(local_op: Callable[[Coordinate], Any]) -> Callable[[Coordinate], Locals]:
    """Wrap a local operator so that it returns a tuple, also of one output."""

    def at(coordinate: Coordinate) -> Locals:
        local = local_op(coordinate)

        def run(*parts: Tensor) -> tuple[Tensor, ...]:
            out = local(*parts)
            return out if isinstance(out, tuple) else (out,)

        return run

    return at


def _pull_back(local: Locals, n: int, needed: Sequence[bool]) -> Locals:
    """A function from `n` output gradients of `local`, and its operands, to the needed gradients of the operands.

    It is differentiable if autograd records its operands.
    """

    def pull(*tensors: Tensor) -> tuple[Tensor, ...]:
        recorded = is_recorded(tensors)
        with torch.enable_grad():
            parts = [
                x.view_as(x) if x.requires_grad else x.detach().requires_grad_(is_needed)
                for x, is_needed in zip(tensors[n:], needed, strict=True)
            ]
            pairs = [(out, grad) for out, grad in zip(local(*parts), tensors[:n], strict=True) if out.requires_grad]
        differentiated = [x for x, is_needed in zip(parts, needed, strict=True) if is_needed]
        if not pairs:
            return tuple(map(torch.zeros_like, differentiated))
        outs, grads = zip(*pairs, strict=True)
        options = {"create_graph": recorded, "allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(outs, differentiated, grads, **options)

    return pull
