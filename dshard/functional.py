"""Matmuls with a requested strategy, or layout of the result, layers of experts, and a loss of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dshard.compile.graph_functions import as_graph_function, call_in_graph, traceable
from dshard.core.signature import Args, Function, Kwargs
from dshard.dispatch.planned_calls import PLANNED
from dshard.errors import ArgumentError, CompileError, DShardError, MixedError
from dshard.layout import layout_of
from dshard.ops.attention.flex import flex_attention as flex_attention  # public beside matmul
from dshard.ops.experts.experts_call import Beyond, run_experts
from dshard.ops.experts.local_experts import Body, mlp
from dshard.ops.fused_loss import fused_call
from dshard.ops.fused_loss.chunked_loss import Reduction
from dshard.ops.matmul import functions
from dshard.ops.matmul.options import MatmulOptions, Saved, check_saved, check_strategy, current_options, stream_of
from dshard.placements import Placement
from dshard.rehearsal.session import own_call
from dshard.rules.expert_loops import ExpertLoops
from dshard.rules.matmul_loops import Schedule
from dshard.rules.panel_stream import Stream
from dshard.tensor import DTensor
from dshard.validate import article, check_callable, check_type, shown


@traceable
def matmul(
    input: DTensor,
    other: DTensor,
    *,
    strategy: str | Schedule | None = None,
    out_placements: Sequence[Placement] | None = None,
    saved: Saved | None = None,
    panels: int | Literal["auto"] | Stream | None = None,
) -> DTensor:
    """`torch.matmul` of distributed tensors, by the cheapest strategy or a requested one.

    `strategy` is a name (see `strategies`) or a `Schedule`. `out_placements` are the placements of the result, which
    count in the choice. `saved` says which operands the backward pass keeps (see `use_strategy`). With `panels`, a
    number or a `Stream`, the matmul and its gradients run in panels, one multiplied while the next is sent; "auto"
    takes the number of panels that is priced to be the fastest.

    Raises:
        StrategyError: there is no such strategy, or not on this mesh, or less than one panel.
        LayoutError: placements that do not fit the result.
    """
    if not (isinstance(input, DTensor) and isinstance(other, DTensor)):
        raise _operand_error(input, other)
    ndim = len(torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])) + (input.ndim > 1) + (other.ndim > 1)
    options = _options((input, other), ndim, strategy, out_placements, saved, panels)
    return functions.matmul_of(functions.MATMUL, (input, other), options)  # type: ignore[no-any-return]


@traceable
def linear(
    input: DTensor,
    weight: DTensor,
    bias: DTensor | None = None,
    *,
    strategy: str | Schedule | None = None,
    out_placements: Sequence[Placement] | None = None,
    saved: Saved | None = None,
    panels: int | Literal["auto"] | Stream | None = None,
) -> DTensor:
    """`torch.nn.functional.linear` of distributed tensors, by the cheapest strategy or a requested one.

    `weight` is stored [out, in]; the options are those of `matmul`.

    Raises:
        StrategyError: there is no such strategy, or not on this mesh, or less than one panel.
        LayoutError: placements that do not fit the result.
    """
    if not (isinstance(input, DTensor) and isinstance(weight, DTensor)):
        raise _operand_error(input, weight)
    if bias is not None:
        check_type(bias, Tensor, "bias", "give a DTensor, or None")
    options = _options((input, weight), input.ndim - 2 + weight.ndim, strategy, out_placements, saved, panels)
    tensors = (input, weight) if bias is None else (input, weight, bias)
    return functions.matmul_of(functions.LINEAR, tensors, options)  # type: ignore[no-any-return]


def _operand_error(*tensors: object) -> DShardError:
    """The error for operands that are not all DTensors."""
    other = next(t for t in tensors if not isinstance(t, DTensor))
    if not isinstance(other, Tensor):
        return ArgumentError(f"a product of {shown(other)}, {article(other)}: it multiplies two DTensors")
    return MixedError(
        "a product with a strategy multiplies two DTensors: wrap a plain torch.Tensor with "
        "distribute_tensor(x, mesh, placements)"
    )


def _options(
    tensors: tuple[DTensor, DTensor],
    ndim: int,
    strategy: str | Schedule | None,
    out_placements: Sequence[Placement] | None,
    saved: Saved | None,
    panels: int | Literal["auto"] | Stream | None,
) -> MatmulOptions:
    now = current_options()
    mesh = tensors[0].layout.mesh
    if strategy is not None:
        check_strategy(strategy)
    if saved is not None:
        check_saved(saved)
    result = None if out_placements is None else layout_of(mesh, out_placements, ndim)
    stream = now.stream if panels is None else stream_of(panels)
    return MatmulOptions(
        now.strategy if strategy is None else strategy, result, now.saved if saved is None else saved, stream
    )


class ExpertBody:
    """A function that computes the experts of a rank, known to graphs of torch.compile: see `dshard.experts`.

    >>> body = ExpertBody(lambda rows, ends, scale: rows * scale[0])
    """

    def __init__(self, function: Body) -> None:
        if is_dynamo_compiling():
            raise CompileError("an ExpertBody made in a compiled region: make it outside, as the attribute of a module")
        check_callable(function, "the body of experts", "give a function (rows, ends, *parameters) -> rows")
        self.function = function
        self.graph_name = as_graph_function(_experts_in_graph, function)

    def __call__(self, rows: Tensor, ends: Tensor, *parameters: Tensor) -> Tensor:
        """Compute rows that are sorted by expert."""
        return self.function(rows, ends, *parameters)


def experts(
    body: Body,
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    *parameters: Tensor,
    rule: str = "e f d, e d f",
    loops: str | ExpertLoops | None = None,
    capacity: int | None = None,
    beyond: Beyond = "drop",
) -> Any:
    """Sum over the experts of each token, weighted, what they make of it: the layer of a mixture of experts.

    `x` are tokens (..., d), `index` the experts of each (..., k) as whole numbers, `weight` their weights (..., k). The
    result is (..., d). All may be plain tensors, or distributed in any layout.

    `body(rows, ends, *parameters)` computes with plain local tensors: rows (n, d), sorted by expert, and this rank's
    parts of the `parameters`; `ends` (int32) are where the rows of each of its experts end. It returns (n, d). It is
    any differentiable function; `dshard.mlp_experts()` is one. Rows may follow behind the last end, whose results do
    not count, and it is not called without rows. In a compiled region it is an `ExpertBody`.

    `rule` has a term for each parameter: e are experts, d features of tokens, f inner features, of which mesh axes may
    split e and f, and `[name]` any dim that they may not. `loops` are those of `dshard.rules.expert_loops`: a name, a
    loop for each mesh axis, or None for the cheapest: t moves experts, e moves tokens, f splits each expert, "ragged"
    sends each token only to the ranks that have its experts. In a compiled graph there is no "ragged", which asks the
    host for numbers of tokens.

    With a `capacity` an expert takes at most so many tokens, the first in order, on every mesh the same ones, and in a
    graph its rows are no more. Those `beyond` are dropped: they do not count. With "raise" they are an error, for which
    the host reads the numbers of tokens.

    Each parameter gets a gradient, zeros for experts without tokens.

    Raises:
        ShapeError: shapes of index, weight and parameters that do not fit; a body that returns others than rows; more
            tokens than the capacity of an expert, with `beyond="raise"`.
        NotationError: a rule that has no term for a parameter, or one without e.
        StrategyError: requested loops that are impossible.
        IndexError: an index of no expert.

    >>> y = dshard.experts(dshard.mlp_experts(), x, index, weight, up, down)  # doctest: +SKIP
    """
    if is_dynamo_compiling():
        if not isinstance(body, ExpertBody):
            raise CompileError(
                "experts in a compiled region, of a body that is a plain function: make it an ExpertBody outside, "
                "body = dshard.ExpertBody(function)"
            )
        options = {"rule": rule, "loops": loops, "capacity": capacity, "beyond": beyond}
        return call_in_graph(body.graph_name, x, index, weight, *parameters, **options)
    return _experts(body, x, index, weight, *parameters, rule=rule, loops=loops, capacity=capacity, beyond=beyond)


@own_call
def _experts(body: Body, *tensors: Tensor, **options: Any) -> Any:
    if PLANNED.name == "experts":
        return PLANNED.run(_called, run_experts, (body, tensors), options)
    return run_experts(body, tensors, **options)


def _called(func: Function, args: Args, kwargs: Kwargs) -> Any:
    return func(*args, **kwargs)


def _experts_in_graph(body: Body, *tensors: Tensor, **options: Any) -> Any:
    return run_experts(body, tensors, **options)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    rows: int | None = None,
) -> Any:
    """Cross entropy of `F.linear(x, weight, bias)`, by chunks of rows, whose logits are never there as a whole.

    `x` has shape (..., d), `weight` (classes, d), `target` the shape (...) and class indices, `bias` and `class_weight`
    (classes,). All may be plain, or distributed in any layout; plain ones beside distributed ones are the same on all
    ranks. The loss is a number, or has the shape of `target` with `reduction="none"`. It is that of
    `torch.nn.functional.cross_entropy`, with the classes in the last dim of the logits: ignored rows, class weights and
    label smoothing count as there. In half precision logarithms are rounded as there, and the losses of rows summed in
    single; a gradient of the weight in bfloat16 is rounded once for each of up to 16 chunks.

    The gradients of a loss that is a number are computed in the forward pass, chunk by chunk, and multiplied in the
    backward pass, so that logits are computed once (Liger Kernel, Hsu et al. 2024); those of `reduction="none"` are
    computed from the logits once more. Gradients of gradients are those of whole logits.

    A chunk has so many `rows` of each rank; without it an eighth of them, or fewer, so that its logits take no more
    memory than `x`, or up to a quarter in half precision on GPUs. Each mesh axis shards rows, classes or features, by
    price: sharded rows send one number, sharded classes two numbers of each row (Shoeybi et al., Megatron-LM, section
    3).

    Raises:
        ShapeError: shapes that do not fit each other.
        DtypeError: a target that is no class index.
        ArgumentError: an argument that is none of those above, or class weights that need a gradient.
        IndexError: a target that is no class.

    >>> x, weight = torch.ones(2, 3), torch.zeros(4, 3)
    >>> linear_cross_entropy(x, weight, torch.tensor([0, 3])).exp()
    tensor(4.)
    """
    options = (class_weight, ignore_index, reduction, label_smoothing, rows)
    if is_dynamo_compiling():
        return call_in_graph(_LOSS_IN_GRAPH, x, weight, target, bias, *options)
    return fused_call.linear_cross_entropy(x, weight, target, bias, *options)


_LOSS_IN_GRAPH = as_graph_function(fused_call.linear_cross_entropy)


_SILU = ExpertBody(partial(mlp, F.silu))


def mlp_experts(activation: Callable[[Tensor], Tensor] = F.silu) -> ExpertBody:
    """The body of experts that are multilayer perceptrons without bias, by torch's grouped product where it has one.

    Of parameters up (e, f, d) and down (e, d, f) it is down(activation(up x)); of gate, up and down it is
    down(activation(gate x) * up x), with the rule "e f d, e f d, e d f".
    """
    return _SILU if activation is F.silu else ExpertBody(partial(mlp, activation))
