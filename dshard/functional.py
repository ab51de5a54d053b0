"""Matmuls with a requested strategy, or layout of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.compile.graph_functions import traceable
from dshard.errors import ArgumentError, DShardError, MixedError
from dshard.layout import layout_of
from dshard.ops.attention.flex import flex_attention as flex_attention  # public beside matmul
from dshard.ops.experts.experts_call import experts as experts
from dshard.ops.experts.local_experts import mlp_experts as mlp_experts
from dshard.ops.matmul import functions
from dshard.ops.matmul.options import MatmulOptions, Saved, check_saved, check_strategy, current_options, stream_of
from dshard.placements import Placement
from dshard.rules.matmul_loops import Schedule
from dshard.rules.panel_stream import Stream
from dshard.tensor import DTensor
from dshard.validate import article, check_type, shown


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
    return functions.matmul(torch.matmul, (input, other), {}, options)  # type: ignore[no-any-return]


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
    return functions.linear(F.linear, (input, weight, bias), {}, options)  # type: ignore[no-any-return]


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
