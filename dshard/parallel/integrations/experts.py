"""Layers of experts of transformers, told by what its decorator `use_experts_implementation` leaves on a module."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from dshard.parallel.expert_modules import ExpertsForm
from dshard.rules.expert_loops import OPERANDS

_FLAGS = ("num_experts", "_is_expert_parallel", "has_gate", "has_bias", "is_transposed", "is_concatenated")


def transformers_experts(module: nn.Module) -> ExpertsForm | None:
    """How a module decorated by transformers is a layer of experts; None for others.

    Gate and up in one parameter, one after the other, are a dim in two blocks; interleaved they are one that no mesh
    axis splits. A module whose submodules have parameters, which all experts share, is none.
    """
    if not all(name in module.__dict__ for name in _FLAGS) or module.__dict__["_is_expert_parallel"]:
        return None
    if any(True for child in module.children() for _ in child.parameters()):
        return None
    if len(inspect.signature(type(module).forward).parameters) != 1 + OPERANDS:
        return None
    terms = _terms(module)
    names = tuple(name for name, p in module._parameters.items() if p is not None)
    fits = all(
        name in terms and p.shape[0] == module.num_experts and p.dim() == len(terms[name].replace("2 ", "").split())
        for name, p in module._parameters.items()
        if p is not None
    )
    return ExpertsForm(names, ", ".join(terms[name] for name in names), ("num_experts",)) if fits and names else None


def _terms(module: Any) -> dict[str, str]:
    """The term of each parameter that transformers' own implementations of experts read."""
    up, made = ("gate_up_proj", "(2 f)" if module.is_concatenated else "[g]") if module.has_gate else ("up_proj", "f")
    if module.is_transposed:
        terms = {up: f"e d {made}", "down_proj": "e f d"}
    else:
        terms = {up: f"e {made} d", "down_proj": "e d f"}
    return {**terms, f"{up}_bias": f"e {made}", "down_proj_bias": "e d"} if module.has_bias else terms
