"""The entry of a fused cross entropy: `dshard.linear_cross_entropy`, and torch's function of that name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.comm import Program, Scoped, Session, on_each, plain, publish_failure, run_program, sum_dtype
from dshard.core.call import OperatorForm
from dshard.core.call_key import call_key
from dshard.core.context import planning_context
from dshard.core.executable import ComposedExecutable
from dshard.core.moves import run_on_ranks
from dshard.core.operands import common_mesh, spec_like
from dshard.core.plain_tensors import replicated_tensor
from dshard.core.signature import Args, Context, Function, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.torch_function import autocast, bind_arguments
from dshard.core.transforms import is_differentiating_forward
from dshard.core.wrapper import Wrapper, is_recorded, wrap
from dshard.errors import ArgumentError, DtypeError, ShapeError
from dshard.layout import replicated
from dshard.ops.composite import recorded_gradients, run_executable
from dshard.ops.fused_loss.chunked_loss import ChunkedLoss, LossOptions, Reduction, of_rows
from dshard.ops.fused_loss.fused_choice import CLASSES, FEATURES, FusedCandidates, FusedChoice, fused_loss_rule
from dshard.ops.lookup import refuse_targets
from dshard.ops.losses import cross_entropy
from dshard.ops.matmul import functions
from dshard.ops.matmul.rules import same_dtype
from dshard.ops.small_reductions import SMALL_REDUCTIONS
from dshard.rules.strategy import completed_layout
from dshard.torch_private import is_transforming, no_torch_function
from dshard.validate import shown

OF_WHOLE_LOGITS: Scoped[None, bool] = Scoped("losses of whole logits", bool)
"""Within its blocks the loss of plain tensors is computed by its definition: a trace then sees what shares a factor."""


class FusedCall(NamedTuple):
    """A call of the function: x, weight, target, bias and class weights, and its options; `rows` are of a chunk."""

    tensors: tuple[Any, Any, Any, Any | None, Any | None]
    options: LossOptions
    rows: int | None = None

    @property
    def present(self) -> list[Any]:
        """The operands that are there."""
        return [t for t in self.tensors if t is not None]

    @property
    def template(self) -> FusedCall:
        """The call without its tensors: only which of them there are."""
        return self._replace(tensors=tuple(t is not None or None for t in self.tensors))  # type: ignore[arg-type]

    @property
    def has(self) -> tuple[bool, bool]:
        """Whether there is a bias, and class weights."""
        return self.tensors[3] is not None, self.tensors[4] is not None


def fused_call(
    tensors: Sequence[Any], ignored: int, reduction: object, smoothing: float, rows: int | None
) -> FusedCall:
    """A call, once its arguments are checked.

    Raises:
        ShapeError: shapes that do not fit each other.
        DtypeError: targets that are no class indices.
        ArgumentError: another reduction, smoothing or number of rows.
    """
    x, weight, target, bias, class_weight = tensors
    for name, t in zip(("x", "weight", "target", "bias", "class_weight"), tensors, strict=True):
        if not isinstance(t, Tensor) and (t is not None or name in ("x", "weight", "target")):
            raise ArgumentError(f"linear_cross_entropy: {name} is {shown(t)}; give a tensor")
    _check_shapes(x, weight, target, bias, class_weight)
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        raise DtypeError(
            f"linear_cross_entropy: the target is of {target.dtype}; it takes class indices, whole numbers: for "
            "probabilities write F.cross_entropy(F.linear(x, weight, bias), target)"
        )
    if reduction not in get_args(Reduction):
        raise ArgumentError(f"linear_cross_entropy: reduction={shown(reduction)}; use 'mean', 'sum' or 'none'")
    if not 0.0 <= smoothing <= 1.0:
        raise ArgumentError(f"linear_cross_entropy: label_smoothing={smoothing}; give a number from 0 to 1")
    if rows is not None and rows < 1:
        raise ArgumentError(f"linear_cross_entropy: rows={rows}; a chunk has at least one row: leave it out")
    if class_weight is not None and class_weight.requires_grad:
        raise ArgumentError("linear_cross_entropy: class_weight has no gradient, as in torch; give it detached")
    options = LossOptions(weight.shape[0], ignored, reduction, float(smoothing))  # type: ignore[arg-type]
    return FusedCall((x, weight, target, bias, class_weight), options, rows)


def _check_shapes(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None) -> None:
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)}"
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"linear_cross_entropy of {shapes}: give x as (..., d) and weight as (classes, d)")
    if target.shape != x.shape[:-1]:
        raise ShapeError(
            f"linear_cross_entropy of {shapes}: give target the shape {tuple(x.shape[:-1])}, a class a row"
        )
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and tuple(vector.shape) != (weight.shape[0],):
            raise ShapeError(
                f"linear_cross_entropy of {shapes}: {name} has shape {tuple(vector.shape)}; give ({weight.shape[0]},)"
            )


def run_fused(call: FusedCall) -> Any:
    """The loss of a call, of plain or distributed tensors, and of plain ones that are the same on all ranks."""
    distributed = [t for t in call.present if isinstance(t, Wrapper)]
    with no_torch_function():
        if is_transforming() or is_differentiating_forward() or (not distributed and OF_WHOLE_LOGITS.value()):
            return composite(call)
        call = _autocast(call)
        same_dtype("linear_cross_entropy", [t.dtype for t in call.tensors[:2]])
        if not distributed:
            return _run_plain(call)
        try:
            return _run_distributed(call)
        except Exception as error:
            publish_failure(error, distributed[0]._spec.layout.mesh.ranks)
            raise


def _autocast(call: FusedCall) -> FusedCall:
    """The call with its operands in the dtype of autocast, where it is on, as those of `F.linear` are.

    The loss is then in single precision, as that of `F.cross_entropy` is.
    """
    given, target, class_weight = [t for t in call.present if t is not call.tensors[2]], *call.tensors[2:5:2]
    given = given[: 2 + call.has[0]]
    x, weight, *rest = cast = autocast(given)
    if cast is given or x.dtype == torch.float64:
        return call
    options = replace(call.options, dtype=torch.float32)
    return call._replace(tensors=(x, weight, target, rest[0] if rest else None, class_weight), options=options)


def _run_plain(call: FusedCall) -> Any:
    x, _, target, *_ = call.tensors
    refuse_targets(call.options.classes, call.options.ignored, target)
    size, held = (prod(x.shape[:-1]), x.shape[-1]), (x.dtype, x.device.type)
    loss = of_rows(call.options, call.has, size, call.options.classes, held, call.rows)
    return run_recorded_loss(LocalFusedLoss(loss, partial(_recorded, call.template)), call.present)


def _run_distributed(call: FusedCall) -> Any:
    mesh = common_mesh("linear_cross_entropy", call.present)
    laid = tuple(t if t is None or isinstance(t, Wrapper) else replicated_tensor(t, mesh) for t in call.tensors)
    call = call._replace(tensors=laid)  # type: ignore[arg-type]
    tensors = call.present
    on_each(partial(refuse_targets, call.options.classes, call.options.ignored), call.tensors[2]._local_tensor)
    needed = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
    key = call_key(("linear_cross_entropy", call.options, call.has, needed, call.rows), tensors)

    def choose() -> FusedChoice:
        specs = [spec_like(t, mesh) for t in tensors]
        return FusedCandidates(specs, call.options, call.has, needed, call.rows).choice()

    choice: FusedChoice = planning_context().choices.of(key, choose)
    return run_executable(FusedLoss(choice, partial(_recorded, call.template)), tensors)


def _recorded(call: FusedCall, tensors: Sequence[Any]) -> Any:
    """The loss of operands in place of those of a call, by operators whose gradients have gradients."""
    rest = iter(tensors)
    operands = tuple(None if t is None else next(rest) for t in call.tensors)
    return composite(call._replace(tensors=operands))  # type: ignore[arg-type]


def composite(call: FusedCall) -> Any:
    """The loss by its definition, of whole logits."""
    x, weight, target, bias, class_weight = call.tensors
    options = call.options
    named: dict[str, Any] = {
        "ignore_index": options.ignored,
        "reduction": options.reduction,
        "label_smoothing": options.smoothing,
    }
    with no_torch_function():
        if not isinstance(x, Wrapper):
            logits = F.linear(x, weight, bias)
            return F.cross_entropy(_classes_second(logits), target, class_weight, **named)
        logits = functions.linear(F.linear, (x, weight, bias), {})
        logits = _classes_second(redistribute(logits, completed_layout(logits._spec.layout)))
        out = cross_entropy(F.cross_entropy, (logits, target, class_weight), named)
        return F.cross_entropy(logits, target, class_weight, **named) if out is None else out


def _classes_second(logits: Tensor) -> Tensor:
    """Logits with classes in the dim in which `F.cross_entropy` expects them."""
    return logits.movedim(-1, 1) if logits.dim() > 2 else logits


def linear_cross_entropy(*arguments: Any) -> Any:
    """`dshard.linear_cross_entropy`, a function to which `__torch_function__` applies, as it does to torch's own.

    The arguments are x, weight, target, bias, class weights, the ignored index, reduction, smoothing, and rows.
    """
    given = [t for t in arguments[:OPERANDS] if isinstance(t, Tensor)]
    if has_torch_function(given):
        return handle_torch_function(linear_cross_entropy, given, *arguments)
    return run_fused(_bound(arguments))


OPERANDS = 5
"""The number of operands, of which the last two may be None."""


def own_linear_cross_entropy(func: Function, args: Args, kwargs: Kwargs, run: Function = run_fused) -> Any:
    """`dshard.linear_cross_entropy` of distributed tensors, and of plain ones that are the same on all ranks."""
    return run(_bound(args))


def _bound(arguments: Args) -> FusedCall:
    return fused_call(arguments[:OPERANDS], *arguments[OPERANDS:])


def fused_form(call: FusedCall) -> OperatorForm | None:
    """A call as one operator, with whole or with sharded classes; with class weights, which are whole, as several."""
    has_bias, has_weight = call.has
    if has_weight:
        return None
    operands = tuple(call.present)
    shapes, is_number = [tuple(t.shape) for t in operands], call.options.reduction != "none"
    rule = fused_loss_rule(shapes, has_bias, has_weight, is_number)
    whole = replace(rule, loops=False, unsharded=frozenset({CLASSES, FEATURES}))
    by_classes = replace(whole, unsharded=frozenset({FEATURES}))
    return OperatorForm(operands, whole, ((SMALL_REDUCTIONS, by_classes),))


_OF_TORCH = (
    *("input", "linear_weight", "target", "linear_bias", "weight"),
    *("reduction", "ignore_index", "label_smoothing", "options"),
)


def torch_linear_cross_entropy(func: Function, args: Args, kwargs: Kwargs, run: Function = run_fused) -> Any:
    """`torch.nn.functional.linear_cross_entropy` of class indices; any other call is left to torch's decomposition."""
    call = _bound_of_torch(args, kwargs)
    return NotImplemented if call is None else run(call)


def _bound_of_torch(args: Args, kwargs: Kwargs) -> FusedCall | None:
    bound = bind_arguments(_OF_TORCH, args, kwargs)
    x, weight, target, bias, class_weight, reduction, ignored, smoothing, options = bound
    if weight.dim() != 2 or x.dim() not in (1, 2) or target.is_floating_point():
        return None
    rows = None if options is None else options.batch_chunk_size
    rows = rows if isinstance(rows, int) and rows > 0 else None
    reduction, ignored = "mean" if reduction is None else reduction, -100 if ignored is None else ignored
    return fused_call((x, weight, target, bias, class_weight), ignored, reduction, smoothing or 0.0, rows)


# -- the executable of a fused cross entropy, and its node in autograd's graph
# The gradients of a loss that is a number are computed in the forward pass, with the logits of each chunk, and are
# multiplied in the backward pass. Those of a loss for each row are computed from the logits once more.

Recorded: TypeAlias = Callable[[Sequence[Any]], Any]
"""The loss of operands by operators whose gradients have gradients."""
Needed: TypeAlias = tuple[bool, bool, bool]
"""Whether x, weight and bias get a gradient."""


class FusedLoss(ComposedExecutable):
    """A fused cross entropy of distributed tensors; `recorded` is the loss of which there are second derivatives."""

    def __init__(self, choice: FusedChoice, recorded: Recorded) -> None:
        super().__init__(choice.decision, self._run)
        self.loss, self.result, self.recorded = choice.loss, choice.result, recorded
        self.layouts, self.mesh = choice.strategy.inputs, choice.result.layout.mesh
        x, wide = choice.specs[0], sum_dtype(choice.specs[0].dtype)
        self.factor = contiguous_spec(replicated(self.mesh), (), wide, x.device)
        pairs = list(zip(choice.specs, choice.strategy.gradients, strict=True))
        of_operands = [pairs[i] for i in (0, 1, 3)[: 2 + self.loss.has_bias]]
        self.of_operands = [contiguous_spec(at, s.shape, s.dtype, s.device) for s, at in of_operands]
        x_spec, weight, *bias = self.of_operands
        self.summed = [x_spec, weight.with_dtype(self.loss.sums), *(spec.with_dtype(wide) for spec in bias)]

    def _run(self, tensors: Args, kwargs: Kwargs) -> Any:
        moved = [redistribute(t, layout) for t, layout in zip(tensors, self.layouts, strict=True)]
        return run_recorded_loss(self, moved)

    def forward(self, tensors: Sequence[Any], needed: Needed) -> list[Tensor]:
        """The loss; with one that is a number, also the factor of the gradients that follow, of those needed."""
        local = run_program(self.mesh, partial(self.loss.program, needed), [t._local_tensor for t in tensors])
        loss: list[Tensor] = [wrap(local[0], self.result)]
        if len(local) == 1:
            return loss
        return [*loss, wrap(local[1], self.factor), *self._wrapped(local[2:], self.summed, needed)]

    def backward(self, grad: Tensor, tensors: Sequence[Any], kept: Sequence[Any], needed: Needed) -> list[Tensor]:
        """The gradients that are needed: of what the forward pass has kept, or of the operands once more."""
        grad = self.like_result(grad)
        if not kept:
            operands = [t._local_tensor for t in (grad, *tensors)]
            local = run_program(self.mesh, partial(self.loss.gradients, needed), operands)
            return [
                x.to(spec.dtype)
                for x, spec in zip(self._wrapped(local, self.summed, needed), self._needed(needed), strict=True)
            ]
        specs = self._needed(needed)
        scaled = partial(self.loss.scaled, dtypes=[spec.dtype for spec in specs])
        local = run_on_ranks(self.mesh, lambda at: scaled, tuple(x._local_tensor for x in (grad, *kept)), {})
        return [wrap(x, spec) for x, spec in zip(local, specs, strict=True)]

    def like_result(self, grad: Tensor) -> Any:
        """The gradient of the result in the result's layout."""
        return redistribute(as_distributed(grad, self.result.layout), self.result.layout)

    def _needed(self, needed: Needed) -> list[Spec]:
        return [spec for spec, is_needed in zip(self.of_operands, needed, strict=False) if is_needed]

    @staticmethod
    def _wrapped(local: Sequence[Tensor], specs: Sequence[Spec], needed: Needed) -> list[Tensor]:
        return [wrap(x, spec) for x, spec, is_needed in zip(local, specs, needed, strict=False) if is_needed]


class LocalFusedLoss:
    """A fused cross entropy of plain tensors: on simulated ranks they are one tensor of all, and so written to once."""

    def __init__(self, loss: ChunkedLoss, recorded: Recorded) -> None:
        self.loss, self.recorded = loss, recorded

    @plain()
    def forward(self, tensors: Sequence[Tensor], needed: Needed) -> list[Tensor]:
        """The loss; with one that is a number, also the factor of the gradients that follow, of those needed."""
        loss, *rest = self._finished(self.loss.program(needed, (), Session(), tensors))
        return [loss, *rest[:1], *_of(rest[1:], needed)]

    @plain()
    def backward(self, grad: Tensor, tensors: Sequence[Tensor], kept: Sequence[Tensor], needed: Needed) -> list[Tensor]:
        """The gradients that are needed: of what the forward pass has kept, or of the operands once more."""
        x, weight, _, *rest = tensors
        dtypes = [t.dtype for t in _of((x, weight, *rest[: self.loss.has_bias]), needed)]
        if kept:
            return list(self.loss.scaled(grad, *kept, dtypes=dtypes))
        gradients = _of(self._finished(self.loss.gradients(needed, (), Session(), (grad, *tensors))), needed)
        return [each.to(dtype) for each, dtype in zip(gradients, dtypes, strict=True)]

    @staticmethod
    def like_result(grad: Tensor) -> Tensor:
        """The gradient itself."""
        return grad

    @staticmethod
    def _finished(program: Program[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What a program returns that sends nothing."""
        try:
            next(program)
        except StopIteration as stop:
            results: tuple[Tensor, ...] = stop.value
            return results
        raise AssertionError("a rank that has everything sends nothing")


def run_recorded_loss(loss: FusedLoss | LocalFusedLoss, tensors: Sequence[Any]) -> Any:
    """The loss of these operands, recorded by autograd if it records one of them."""
    if is_recorded(tensors):
        return _Fused.apply(loss, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return loss.forward(tensors, (False, False, False))[0]


class _Fused(torch.autograd.Function):
    """The autograd node of a fused cross entropy; the gradient has the layout of its result."""

    @staticmethod
    def forward(ctx: Context, loss: FusedLoss | LocalFusedLoss, *tensors: Tensor) -> Tensor:
        has_bias = loss.loss.has_bias
        of_x, of_weight, _, *rest = ctx.needs_input_grad[1:]
        ctx.loss, ctx.needed, ctx.n_operands = loss, (of_x, of_weight, has_bias and rest[0]), len(tensors)
        out, *kept = loss.forward(tensors, ctx.needed)
        ctx.save_for_backward(*tensors, *kept)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        loss: FusedLoss | LocalFusedLoss = ctx.loss
        saved, n = ctx.saved_tensors, ctx.n_operands
        tensors, kept = saved[:n], saved[n:]
        if torch.is_grad_enabled():
            needed, grad = ctx.needs_input_grad[1:], loss.like_result(grad)
            return (None, *recorded_gradients(lambda x: loss.like_result(loss.recorded(x)), tensors, grad, needed))
        gradients = iter(loss.backward(grad, tensors, kept, ctx.needed))
        of_x, of_weight, of_bias = (next(gradients) if is_needed else None for is_needed in ctx.needed)
        rest = ((of_bias, None) if loss.loss.has_bias else (None,))[: n - 3]
        return (None, of_x, of_weight, None, *rest)


def _of(tensors: Sequence[Any], needed: Needed) -> list[Any]:
    """Those tensors that are needed."""
    return [x for x, is_needed in zip(tensors, needed, strict=False) if is_needed]
