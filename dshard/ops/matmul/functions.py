"""Torch's functions that are matmuls, the choice of their strategy, requested or the cheapest, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.autograd.crossing import as_distributed, redistribute, redistributed_operand, unchecked_apply
from dshard.comm import Program, Scoped, Session, run, run_program, traced
from dshard.core.call import OperatorForm
from dshard.core.call_key import call_key
from dshard.core.context import planning_context
from dshard.core.observe import OBSERVERS, observed
from dshard.core.operands import common_mesh, operand_of
from dshard.core.signature import Args, Context, Function, Kwargs
from dshard.core.spec import Spec, contiguous_spec, for_shapes, meta_tensors
from dshard.core.torch_function import autocast, bind_arguments
from dshard.core.wrapper import Wrapper, is_leaf, is_recorded, wrap
from dshard.layout import Shape, replicated
from dshard.mesh import Coordinate
from dshard.ops.composite import Local
from dshard.ops.matmul.matmul_executable import Matmul, matmul_of_choice, rule_with_bias
from dshard.ops.matmul.options import NO_OPTIONS, MatmulOptions, current_options, options_of
from dshard.ops.matmul.rules import bmm_rule, einsum_rule, linear_rule, matmul_rule, same_dtype
from dshard.rules.cut_factors import split_contraction, with_blocks
from dshard.rules.expand import Operand
from dshard.rules.rule import Rule
from dshard.rules.strategy import Question, StrategyChoice
from dshard.rules.strategy_choice import choose
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


class MatmulFunction(NamedTuple):
    """A function that is a matmul: its name, a function of its result without data, and the rule for two shapes.

    `infer` raises torch's own errors; `key` tells functions of one name apart.
    """

    name: str
    infer: Local
    rule: Callable[[Shape, Shape], Rule]
    key: object = None


def matmul_of(function: MatmulFunction, tensors: Sequence[Any], options: MatmulOptions | None = None) -> Any:
    """The matmul of two tensors, plus a bias if there is a third, by the cheapest strategy or the requested one."""
    cls = Wrapper.public
    tensors = autocast(tensors)
    for t in tensors:
        if type(t) is not cls and not isinstance(t, Wrapper):
            tensors = distributed_operands(function.name, tensors)
            break
    options = current_options() if options is None else options
    return multiply(choose_matmul(function, tensors, options), tensors)


def choose_matmul(function: MatmulFunction, tensors: Sequence[Any], options: MatmulOptions) -> Matmul:
    """The cheapest matmul of these tensors within the options; cached."""
    recorded = torch.is_grad_enabled()
    called = (function.name, function.key, None if options is NO_OPTIONS else options)  # which has no hash at hand
    full_key = call_key(called, tensors, recording=recorded)
    return planning_context().choices.of(full_key, partial(_choose_matmul, function, tensors, options, recorded))  # type: ignore[no-any-return]


def _choose_matmul(function: MatmulFunction, tensors: Sequence[Any], options: MatmulOptions, recorded: bool) -> Matmul:
    name, specs = function.name, [t._spec for t in tensors]
    mesh = common_mesh(name, list(tensors))
    needs, leaf = [recorded and t.requires_grad for t in tensors[:2]], [is_leaf(t) for t in tensors[:2]]
    same_dtype(name, [spec.dtype for spec in specs])
    with torch.no_grad(), for_shapes():
        out = function.infer(*meta_tensors(specs))
    operands = tuple(map(operand_of, specs[:2]))
    shape, topology = tuple(out.shape), planning_context().topology_of(mesh)

    def chosen(rule: Rule, operands: tuple[Operand, ...]) -> StrategyChoice:
        constraints = options.constraints(rule, mesh, needs, leaf)
        return choose(Question(rule, operands, ((shape, out.itemsize),), topology, constraints))

    rule = function.rule(specs[0].shape, specs[1].shape)
    if specs[0].layout.blocks or specs[1].layout.blocks:
        rule = with_blocks(rule, operands)
    choice = chosen(rule, operands)
    cut = None if options.among else split_contraction(choice.question.rule, operands)  # whose factors have other names
    if cut is not None:
        by_blocks = chosen(cut.rule, cut.operands)
        if by_blocks.strategy.seconds < choice.strategy.seconds:
            choice, specs = by_blocks, [*map(_cut_spec, specs, cut.operands), *specs[2:]]
        else:
            cut = None
    constraints, strategy = choice.question.constraints, choice.strategy
    has_result_layout = constraints.result is not None or constraints.reduced is not None
    layout = strategy.ends[0] if has_result_layout else strategy.outputs[0]
    out_spec = contiguous_spec(layout, shape, out.dtype, specs[0].device)
    return matmul_of_choice(name, choice, specs, out_spec, cut, options.streamed())


def _cut_spec(spec: Spec, operand: Operand) -> Spec:
    return contiguous_spec(operand.layout, operand.shape, spec.dtype, spec.device)


def distributed_operands(name: str, tensors: Sequence[Any]) -> Sequence[Any]:
    """The operands as distributed tensors: plain tensors of zeros that autograd made become replicated ones."""
    mesh = common_mesh(name, list(tensors))
    return [as_distributed(t, replicated(mesh)) for t in tensors]


# -- torch's functions: each runs as a matmul, or `run` takes the function and its operands; NotImplemented is no matmul

MATMUL, MM = (MatmulFunction(infer.__name__, infer, matmul_rule) for infer in (torch.matmul, torch.mm))
BMM = MatmulFunction("bmm", torch.bmm, bmm_rule)
ADDMM = MatmulFunction("addmm", lambda a, b, bias: torch.addmm(bias, a, b), matmul_rule)
LINEAR = MatmulFunction("linear", F.linear, linear_rule)


def operator_form(function: MatmulFunction, tensors: Sequence[Tensor], options: object = None) -> OperatorForm:
    """A matmul of two tensors, plus a bias along the last dim if there is a third, as one operator of a whole step."""
    rule = function.rule(*(tuple(x.shape) for x in tensors[:2]))
    return OperatorForm(tuple(tensors), rule if len(tensors) == 2 else rule_with_bias(rule))


def matmul(func: Function, args: Args, kwargs: Kwargs, run: Function = matmul_of) -> Any:
    """`torch.matmul`, `@`."""
    a, b, *out = _in_order(args, kwargs) if kwargs else args
    if out or not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dim() == 0 or b.dim() == 0:
        return NotImplemented
    return run(MM if func in (torch.mm, Tensor.mm) else MATMUL, (a, b))


def _in_order(args: Args, kwargs: Kwargs) -> Args:
    """The operands of `matmul` or `mm`, of which the first is called `input`; whatever else is given follows."""
    return (*args, *(kwargs[name] for name in sorted(kwargs, key=lambda name: name != "input")))


def rmatmul(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.__rmatmul__`."""
    return matmul(torch.matmul, (args[1], args[0]), {})


def bmm(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.bmm`."""
    return NotImplemented if len(args) != 2 or kwargs else matmul_of(BMM, args)


def einsum(func: Function, args: Args, kwargs: Kwargs, run: Function = matmul_of) -> Any:
    """`torch.einsum`: a matmul if there are two operands; others, and products of two dtypes, torch decomposes."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if kwargs or not isinstance(equation, str) or len(operands) != 2:
        return NotImplemented
    rule = einsum_rule(equation, *(tuple(x.shape) for x in operands))
    if rule is None or (operands[0].dtype != operands[1].dtype and not _is_contracting(rule)):
        return NotImplemented
    return run(MatmulFunction("einsum", partial(torch.einsum, equation), lambda *shapes: rule, equation), operands)


def _is_contracting(rule: Rule) -> bool:
    """Whether a factor of the operands is not one of the output."""
    inner, outer = ({factor for dims in each for dim in dims for factor in dim} for each in (rule.inputs, rule.outputs))
    return inner > outer


def addmm(func: Function, args: Args, kwargs: Kwargs, run: Function = matmul_of) -> Any:
    """`torch.addmm` of a bias along the last dim: a matmul with a bias, as `linear` is."""
    if len(args) != 3 or kwargs or args[0].dim() != 1 or args[0].dtype != args[1].dtype:
        return NotImplemented
    bias, a, b = args
    return run(ADDMM, (a, b, bias)) if bias.shape[0] == b.shape[-1] else NotImplemented


def linear(func: Function, args: Args, kwargs: Kwargs, run: Function = matmul_of) -> Any:
    """`torch.nn.functional.linear`. If the result is partial, one rank adds the bias.

    A bias that is broadcast is left to torch, which adds it to the product.
    """
    x, weight, bias = bind_arguments(("input", "weight", "bias"), args, kwargs)
    if bias is not None and bias.shape != weight.shape[:1]:
        return NotImplemented
    return run(LINEAR, (x, weight) if bias is None else (x, weight, bias), options_of(weight))
