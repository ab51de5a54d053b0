"""What a traced model is, in a line: layers, gates, parameters, experts."""

from __future__ import annotations

from collections import Counter

from torch import nn

from dshard.parallel.factors import ModelTrace
from dshard.parallel.gather_groups import blocks_of
from dshard.parallel.roles import FeatureKind, Roles


def model_summary(model: nn.Module, model_trace: ModelTrace, roles: Roles) -> str:
    """The layers, parameters and experts of a model, such as "32 layers, gated, 6.74 B parameters"."""
    words = [f"{sum(1 for _ in blocks_of(model))} layers"]
    words += ["gated"] * _is_gated(model_trace, roles)
    words += [human_count(sum(p.numel() for p in model.parameters()))]
    if model_trace.experts.experts:
        experts = model_trace.experts
        words.append(f"experts {_size(model_trace, experts.experts)} of which {_size(model_trace, experts.each)}")
    return ", ".join(words)


def human_count(parameters: int) -> str:
    """A number of parameters.

    >>> human_count(6_738_415_616), human_count(124_439_808)
    ('6.74 B parameters', '124.4 M parameters')
    """
    if parameters >= 10**9:
        return f"{parameters / 1e9:.2f} B parameters"
    return f"{parameters / 1e6:.1f} M parameters" if parameters >= 10**6 else f"{parameters:,} parameters"


def _size(model_trace: ModelTrace, classes: set[int]) -> int:
    """The size of the dims of these classes; 1 where there are none."""
    return max((dim.size for dim, _ in model_trace.parts if dim.group in classes), default=1)


def _is_gated(model_trace: ModelTrace, roles: Roles) -> bool:
    """Whether inner features, other than heads, that a matmul contracts are made of two matmuls, or packed parts."""
    made = Counter[int | None]()
    for use in model_trace.uses if not model_trace.experts.inner else ():
        for i in use.left:
            made[model_trace.parameters[use.parameter][i].group] += model_trace.packed.get(
                model_trace.parameters[use.parameter][i], 1
            )
    contracted = (
        model_trace.parameters[use.parameter][i].group
        for use in model_trace.uses
        for i in use.summed
        if (role := roles.parameters[use.parameter][i]).kind is FeatureKind.INNER and role.units == role.size
    )
    packed = any(dim.group in model_trace.experts.inner and parts == 2 for dim, parts in model_trace.packed.items())
    return packed or any(made[group] > 1 for group in contracted)
