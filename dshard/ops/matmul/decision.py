"""Choose the strategy of a matmul: the requested one, or the cheapest; cached for the next call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed
from dshard.core.call_key import call_key
from dshard.core.context import planning_context
from dshard.core.operands import common_mesh, operand_of
from dshard.core.spec import Spec, contiguous_stride, for_shapes, spec_of
from dshard.layout import replicated
from dshard.ops.matmul.matmul_executable import Matmul, matmul_of_strategy
from dshard.ops.matmul.options import NO_OPTIONS, MatmulOptions
from dshard.ops.matmul.rules import same_dtype
from dshard.rules.expand import Operand
from dshard.rules.rule import Rule
from dshard.rules.split_contraction import split_contraction
from dshard.rules.strategy import Constraints, Strategy, choose

Infer: TypeAlias = Callable[..., Tensor]


def choose_matmul(
    name: str, rule: Callable[[], Rule], infer: Infer, tensors: Sequence[Any], asked: MatmulOptions, key: Any = None
) -> Matmul:
    """The cheapest matmul of these tensors within the options `asked`; cached.

    `infer` gives the result without data, or torch's own error; `key` tells rules of one name and shape apart.

    Raises:
        MeshError: operands on different meshes.
        DtypeError: operands of different dtypes.
    """
    recorded = torch.is_grad_enabled()
    called = (name, key, None if asked is NO_OPTIONS else asked)  # which has no hash at hand
    full_key = call_key(called, tensors, recording=recorded)
    choices = planning_context().choices
    matmul: Matmul | None = choices.get(full_key)
    if matmul is None:
        common_mesh(name, list(tensors))
        specs = [t._spec for t in tensors]
        needs, leaf = [recorded and t.requires_grad for t in tensors[:2]], [is_leaf(t) for t in tensors[:2]]
        matmul = choices.add(full_key, _choose_matmul(name, rule, infer, specs, asked, needs, leaf))
    else:
        choices.hits += 1
    return matmul


def is_leaf(x: Any) -> bool:
    """Whether `x`, or the tensor that it stands for in a trace, is a leaf of autograd."""
    traced_leaf: bool | None = x._leaf
    return x.is_leaf if traced_leaf is None else traced_leaf


def _choose_matmul(
    name: str,
    rule: Callable[[], Rule],
    infer: Infer,
    specs: Sequence[Spec],
    asked: MatmulOptions,
    needs: Sequence[bool],
    leaf: Sequence[bool],
) -> Matmul:
    mesh = specs[0].layout.mesh
    same_dtype(name, [spec.dtype for spec in specs])
    with torch.no_grad(), for_shapes():
        out = infer(*(spec.meta() for spec in specs))
    operands = [*map(operand_of, specs[:2])]
    shape, topology = tuple(out.shape), planning_context().topology_of(mesh)

    def chosen(rule: Rule, operands: Sequence[Operand]) -> tuple[Strategy, Constraints]:
        wanted = asked.wanted(rule, mesh, needs, leaf)
        return choose(rule, operands, [(shape, out.itemsize)], topology, wanted), wanted

    matmul_rule = rule()
    strategy, wanted = chosen(matmul_rule, operands)
    cut = split_contraction(matmul_rule, operands)
    if cut is not None:
        by_blocks, wanted_so = chosen(cut.rule, cut.operands)
        if by_blocks.seconds < strategy.seconds:
            matmul_rule, strategy, wanted = cut.rule, by_blocks, wanted_so
            specs = (*map(_cut_spec, specs, cut.operands), *specs[2:])
        else:
            cut = None
    asked_where = wanted.result is not None or wanted.reduced is not None
    layout = strategy.ends[0] if asked_where else strategy.outputs[0]
    out_spec = spec_of(layout, shape, contiguous_stride(shape), out.dtype, specs[0].device)
    return matmul_of_strategy(name, matmul_rule, specs, out_spec, strategy, wanted, cut, asked.streamed())


def _cut_spec(spec: Spec, operand: Operand) -> Spec:
    return spec_of(operand.layout, operand.shape, contiguous_stride(operand.shape), spec.dtype, spec.device)


def distributed_operands(name: str, tensors: Sequence[Any]) -> Sequence[Any]:
    """The operands as distributed tensors: plain tensors of zeros that autograd made become replicated ones.

    Raises:
        MeshError: operands on different meshes.
        MixedError: a plain tensor among them.
    """
    mesh = common_mesh(name, list(tensors))
    return [as_distributed(t, replicated(mesh)) for t in tensors]
