"""How a layer of experts spreads the tokens that it is given, for observers: nothing of it is counted without them.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from dshard.comm import has_only_shape, measuring, of_first_rank, on_all_ranks, on_each
from dshard.core.moves import local_redistribution, run_on_ranks
from dshard.core.observe import unobserved
from dshard.core.operands import spec_like
from dshard.core.spec import contiguous_spec
from dshard.core.wrapper import Wrapper
from dshard.layout import Layout
from dshard.ops.experts.experts_choice import ExpertsChoice
from dshard.placements import Partial, Replicate, Shard
from dshard.routing import Held
from dshard.rules.expert_loops import OPERANDS
from dshard.torch_private import no_torch_function


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The tokens of one call of a layer of experts.

    `loops` is the name of the strategy, and `held` are the experts of each rank, or group of ranks with the same ones.
    `tokens` are those that this rank has, `rows` those of other ranks that came to it in the ragged form, None in other
    forms; where ranks are simulated, those of the busiest. `counts` [experts] are tokens by expert, on the device: of
    this rank's tokens, or of `all_ranks`, where these are simulated, have the same tokens, or measure.
    """

    loops: str
    held: Held
    tokens: int
    rows: int | None
    counts: Tensor
    all_ranks: bool


def routed_tokens(choice: ExpertsChoice, dim: int, index: Tensor, rows: int | None) -> RoutedTokens | None:
    """How indices spread tokens over experts, dim `dim` of parameters; None if they have no data.

    The host reads nothing, and nothing is sent unless all ranks measure.
    """
    experts, total = choice.strategy.inputs[OPERANDS], choice.specs[OPERANDS].shape[dim]
    mesh = experts.mesh
    spec = spec_like(index, mesh)
    local = index._local_tensor if isinstance(index, Wrapper) else on_all_ranks(index, mesh)
    if has_only_shape(local) or spec.has_partial:
        return None
    split = [isinstance(placement, Shard) for placement in spec.layout.placements]
    of_ranks = Layout(mesh, tuple([Partial("sum") if each else Replicate() for each in split]))
    summed = of_first_rank(local) is not local or measuring()
    with torch.no_grad(), no_torch_function(), unobserved():
        counts = run_on_ranks(mesh, lambda at: partial(_counts, total), (local,), {})
        if summed:
            whole = Layout(mesh, (Replicate(),) * mesh.ndim)
            counts = local_redistribution(contiguous_spec(of_ranks, (total,), counts.dtype, local.device), whole)(
                counts
            )
    parts = [experts.dim_range(dim, total, mesh.coordinate(rank)) for rank in mesh.ranks]
    held = {(part.start, part.stop): part for part in parts if part}
    words = [f"{name}:{row}" for name, row in zip(mesh.names, choice.strategy.rows, strict=True) if row is not None]
    return RoutedTokens(
        loops=choice.strategy.name or " ".join(words),
        held=tuple([held[ends] for ends in sorted(held)]),
        tokens=max(on_each(lambda x: prod(x.shape[:-1]), local)),
        rows=rows,
        counts=of_first_rank(counts),
        all_ranks=summed or not any(split),
    )


def _counts(total: int, index: Tensor) -> Tensor:
    """How many tokens each of `total` experts has; a number behind all is of none."""
    flat = index.reshape(-1).long()
    return flat.new_zeros(total + 1).scatter_add(0, flat, torch.ones_like(flat))[:total]
