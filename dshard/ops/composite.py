"""Run a composite operator as one: its operands redistributed once, then local tensors under torch's own autograd.

The local backward pass gives each operand's gradient in the layout that the strategy says: sharded like the operand, or
a partial sum where the work was sharded and the operand was not. Second derivatives work, for the crossings between
distributed and local tensors are themselves differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.autograd.crossing import FromLocal, ToLocal, as_distributed, redistribute
from dshard.comm import LocalTensor, traced
from dshard.core.context import planning_context
from dshard.core.moves import coordinate_of, counting_as, run_on_ranks
from dshard.core.observe import OBSERVERS, Decision, observed
from dshard.core.operands import common_mesh, spec_like
from dshard.core.spec import Spec, for_shapes, spec_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout
from dshard.mesh import Coordinate
from dshard.ops.matmul.rules import same_dtype
from dshard.redistribute import plan
from dshard.rules.expand import Operand
from dshard.rules.rule import Rule
from dshard.rules.strategy import Strategy, choose

Local: TypeAlias = Callable[..., Tensor]
Locals: TypeAlias = Callable[..., tuple[Tensor, ...]]
Kernel: TypeAlias = Callable[[Strategy, Coordinate], Local]
Choice: TypeAlias = tuple[Strategy, Spec]


def run_composite(
    rule: Callable[[], Rule], local: Local, tensors: Sequence[Any], key: tuple[Any, ...], kernel: Kernel | None = None
) -> Any:
    """Run `local` on the local tensors of `tensors`, redistributed as the cheapest strategy of `rule` says.

    `key` tells calls apart whose rule or local operator differ though the specs are alike; `kernel`, where there is
    one, gives the local operator of each rank.
    """
    choice = choose_composite(rule, local, tensors, key)
    return run_choice(key, rule, choice, local, tensors, kernel)


def run_choice(
    key: tuple[Any, ...],
    rule: Callable[[], Rule],
    choice: Choice,
    local: Local,
    tensors: Sequence[Any],
    kernel: Kernel | None = None,
) -> Any:
    """Run `local` on the local tensors of `tensors` by a strategy and output spec chosen before."""
    strategy, out = choice
    if OBSERVERS:
        decision = _decision(key, rule(), strategy, out, tensors)
        return observed(decision, run_strategy, (strategy, out, local, tensors, kernel))
    return run_strategy(strategy, out, local, tensors, kernel)


def _decision(key: tuple[Any, ...], rule: Rule, strategy: Strategy, out: Spec, tensors: Sequence[Any]) -> Decision:
    specs = [spec_like(t, out.layout.mesh) for t in tensors]
    operands = tuple(Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs)
    topology = planning_context().topology_of(out.layout.mesh)
    plans = tuple(
        plan(spec.layout, layout, spec.shape, spec.itemsize, topology)
        for spec, layout in zip(specs, strategy.inputs, strict=True)
    )
    return Decision(key[0], operands, ((out.shape, out.itemsize),), rule, strategy, plans, topology)


def choose_composite(rule: Callable[[], Rule], local: Local, tensors: Sequence[Any], key: tuple[Any, ...]) -> Choice:
    """The cheapest strategy of a composite operator and the spec of its result; cached."""
    specs = [t._spec if isinstance(t, Wrapper) else None for t in tensors]
    full_key = (*key, *specs)
    choices = planning_context().choices
    choice: Choice | None = choices.get(full_key) if None not in specs else None
    if choice is None:
        choice = choices.add(full_key, _choose_composite(rule, local, tensors, key))
    else:
        choices.hits += 1
    return choice


def _choose_composite(rule: Callable[[], Rule], local: Local, tensors: Sequence[Any], key: tuple[Any, ...]) -> Choice:
    mesh = common_mesh(key[0], list(tensors))
    same_dtype(key[0], [t.dtype for t in tensors[:3] if t.is_floating_point() or t.is_complex()])
    specs = [spec_like(t, mesh) for t in tensors]
    with torch.no_grad(), for_shapes():
        out = local(*(spec.meta() for spec in specs))
    operands = [Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs]
    strategy = choose(rule(), operands, [(tuple(out.shape), out.itemsize)], planning_context().topology_of(mesh))
    return strategy, spec_of(strategy.outputs[0], tuple(out.shape), out.stride(), out.dtype, specs[0].device)


def run_strategy(
    strategy: Strategy, out: Spec, local: Local, tensors: Sequence[Any], kernel: Kernel | None = None
) -> Any:
    """Run `local`, or each rank's operator from `kernel`, on the local tensors of `tensors` under `strategy`.

    The result is a distributed tensor of spec `out`.
    """

    def local_op(coordinate: Coordinate) -> Local:
        return local if kernel is None else kernel(strategy, coordinate)

    mesh = out.layout.mesh
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    with torch._C.DisableTorchFunctionSubclass():
        laid = [redistribute(t, layout) for t, layout in zip(tensors, strategy.inputs, strict=True)]
        if not recorded:
            return wrap(run_on_ranks(mesh, local_op, tuple(t._local for t in laid), {}), out)
        if any(type(t._local) is LocalTensor for t in laid):
            of_gradients = [t._spec.with_layout(layout) for t, layout in zip(laid, strategy.gradients, strict=True)]
            return Simulated.apply(_alone(local_op), (out,), (out.layout.cotangent(),), of_gradients, *laid)[0]  # type: ignore[no-untyped-call]
        for t, moved in zip(tensors, laid, strict=True):
            if moved is not t and not traced(moved._local):
                moved._local = counting_as(t._local, moved._local)
        parts = [
            ToLocal.apply(t, t._spec.with_layout(layout)) if t.requires_grad else t._local  # type: ignore[no-untyped-call]
            for t, layout in zip(laid, strategy.gradients, strict=True)
        ]
        result = _depending_on_all(local_op(coordinate_of(mesh))(*parts), parts)
        return FromLocal.apply(result, out, out.layout.cotangent())  # type: ignore[no-untyped-call]


def _depending_on_all(out: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Make `out` depend on all local tensors: a rank that computes nothing must still join the collectives of backward.

    So must each gradient, of every order: it depends on all of them again, and is finite.
    """
    if out.numel() > 0:
        return out
    sums = [part.atan().sum() for part in parts if part.requires_grad]
    return out + 0 * torch.stack(sums).sum().cos() if sums else out


class Simulated(torch.autograd.Function):
    """The autograd node of a local operator on ranks simulated in one process; backward runs each rank's backward pass.

    That is a local operator as well, of the gradients of the outputs and the operands. `outs` are the specs of the
    outputs and `cotangents` the layouts of their gradients; `of_gradients` are the specs of the operands' gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local_op: Callable[[Coordinate], Locals],
        outs: Sequence[Spec],
        cotangents: Sequence[Layout],
        of_gradients: Sequence[Spec],
        *tensors: Any,
    ) -> tuple[Any, ...]:
        ctx.local_op, ctx.outs, ctx.cotangents, ctx.of_gradients = (local_op, outs, cotangents, of_gradients)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(True)
        results = run_on_ranks(outs[0].layout.mesh, local_op, tuple(t._local for t in tensors), {})
        return tuple(wrap(local, spec) for local, spec in zip(results, outs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[4:]
        pairs = zip(grads, ctx.cotangents, strict=True)
        laid = [redistribute(as_distributed(grad, layout), layout) for grad, layout in pairs]
        wanted = [i for i, is_needed in enumerate(needed) if is_needed]
        found = Simulated.apply(  # type: ignore[no-untyped-call]
            lambda at: _pull_back(ctx.local_op(at), len(grads), needed),
            [ctx.of_gradients[i] for i in wanted],
            [tensors[i]._spec.layout for i in wanted],
            [*ctx.outs, *ctx.of_gradients],
            *laid,
            *tensors,
        )
        out: list[Any] = [None] * len(tensors)
        for i, grad in zip(wanted, found, strict=True):
            out[i] = grad
        return (None,) * 4 + tuple(out)


def _alone(local_op: Callable[[Coordinate], Local]) -> Callable[[Coordinate], Locals]:
    """Wrap a local operator with one output as one that returns a tuple."""
    return lambda at: lambda *parts: (local_op(at)(*parts),)


def _pull_back(local: Locals, n: int, needed: Sequence[bool]) -> Locals:
    """A function from `n` output gradients of `local`, and its operands, to the operands' gradients that are needed.

    It can be differentiated itself, where autograd records its operands.
    """

    def pull(*given: Tensor) -> tuple[Tensor, ...]:
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        with torch.enable_grad():
            parts = [
                x if x.requires_grad else x.detach().requires_grad_(is_needed)
                for x, is_needed in zip(given[n:], needed, strict=True)
            ]
            pairs = [(out, grad) for out, grad in zip(local(*parts), given[:n], strict=True) if out.requires_grad]
        wanted = [x for x, is_needed in zip(parts, needed, strict=True) if is_needed]
        if not pairs:
            return tuple(map(torch.zeros_like, wanted))
        outs, grads = zip(*pairs, strict=True)
        options = {"create_graph": recorded, "allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(outs, wanted, grads, **options)

    return pull
