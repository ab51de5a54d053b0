"""What a traced model is, in a line: layers, gates, parameters, experts."""

from __future__ import annotations

from collections import Counter

from torch import nn

from dshard.parallel.factors import ModelTrace
from dshard.parallel.gather_groups import blocks_of
from dshard.parallel.roles import FeatureKind, Roles


def model_summary(model: nn.Module, traced: ModelTrace, roles: Roles) -> str:
    """The layers, parameters and experts of a model, such as "32 layers, gated, 6.74 B parameters"."""
    words = [f"{sum(1 for _ in blocks_of(model))} layers"]
    words += ["gated"] * _is_gated(traced, roles)
    words += [human_count(sum(p.numel() for p in model.parameters()))]
    if traced.experts.experts:
        words.append(f"experts {_size(traced, traced.experts.experts)} of which {_size(traced, traced.experts.each)}")
    return ", ".join(words)


def human_count(parameters: int) -> str:
    """A number of parameters.

    >>> human_count(6_738_415_616), human_count(124_439_808)
    ('6.74 B parameters', '124.4 M parameters')
    """
    if parameters >= 10**9:
        return f"{parameters / 1e9:.2f} B parameters"
    return f"{parameters / 1e6:.1f} M parameters" if parameters >= 10**6 else f"{parameters:,} parameters"


def _size(traced: ModelTrace, classes: set[int]) -> int:
    """The size of the dims of these classes; 1 where there are none."""
    return max((dim.size for dim, _ in traced.parts if dim.group in classes), default=1)


def _is_gated(traced: ModelTrace, roles: Roles) -> bool:
    """Whether inner features, other than heads, that a matmul contracts are made of two matmuls, or packed parts."""
    made = Counter[int | None]()
    for use in traced.uses if not traced.experts.inner else ():
        for i in use.left:
            made[traced.parameters[use.parameter][i].group] += traced.packed.get(traced.parameters[use.parameter][i], 1)
    contracted = (
        traced.parameters[use.parameter][i].group
        for use in traced.uses
        for i in use.summed
        if (role := roles.parameters[use.parameter][i]).kind is FeatureKind.INNER and role.units == role.size
    )
    packed = any(dim.group in traced.experts.inner and parts == 2 for dim, parts in traced.packed.items())
    return packed or any(made[group] > 1 for group in contracted)
