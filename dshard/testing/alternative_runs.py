"""Tests of every alternative to an operator's rule on simulated ranks, including those that are never the cheapest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dshard.core.call import AlternativePlan, Call, Operator
from dshard.core.moves import replace_leaves, replace_tensors, tensors_in
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec
from dshard.dispatch.alternative import alternatives_of
from dshard.dispatch.operator import call_of
from dshard.dispatch.registry import known
from dshard.mesh import Mesh
from dshard.rules.strategy import Strategy
from dshard.tensor import DTensor
from dshard.testing.rule_rows import Same, blaming, run_on, suggestive
from dshard.testing.simulated_ranks import distribute, whole
from dshard.torch_private import OpOverload


def check_alternatives(func: OpOverload, args: Args, kwargs: Kwargs, mesh: Mesh, same: Same) -> None:
    """Run `func` by each alternative to its rule, in all layouts of its operands, and compare with torch.

    For ranks that are simulated in this process.

    Raises:
        RuleError: an alternative has another result, or another layout than planned.
    """
    facts = known(func)
    op, arguments = facts.op, (args, kwargs)
    if op is None or not op.alternatives or facts.is_composed(args):
        return
    expected = run_on(func, arguments, [x.clone() for x in tensors_in(arguments)])
    call, _ = call_of(func, mesh, args, kwargs)
    for strategy, plan in _every_alternative(op, call, mesh):
        with blaming(f"the alternative '{strategy.name}' to the rule of {func}", mesh, strategy):
            _compare(plan, arguments, expected, same)


def _every_alternative(op: Operator, call: Call, mesh: Mesh) -> Iterator[tuple[Strategy, AlternativePlan]]:
    """Yield the alternatives for any layouts of the operands, each that has other layouts once."""
    seen = set()
    for operands in suggestive(op.rule(call), call.specs, mesh):
        placed = _in_layouts(call, [spec.with_layout(x.layout) for spec, x in zip(call.specs, operands, strict=True)])
        for strategy, plan in alternatives_of(op, op.rule(placed), placed).items():
            key = (strategy.name, plan.inputs, plan.outputs)
            if key not in seen:
                seen.add(key)
                yield strategy, plan


def _in_layouts(call: Call, specs: Sequence[Spec]) -> Call:
    rest = iter(specs)
    args, kwargs = replace_leaves((call.args, call.kwargs), lambda leaf: next(rest) if isinstance(leaf, Spec) else leaf)
    return replace(call, args=args, kwargs=kwargs, specs=tuple(specs))


def _compare(plan: AlternativePlan, arguments: tuple[Args, Kwargs], expected: Sequence[Tensor], same: Same) -> None:
    numbered = enumerate(plan.inputs)

    def placed(x: Tensor) -> DTensor:
        seed, layout = next(numbered)
        return distribute(x.detach(), layout, seed=seed)

    args, kwargs = replace_tensors(arguments, placed)
    with torch.no_grad():
        outputs = tensors_in(plan.run(*args, **kwargs))
    for output, value, layout in zip(outputs, expected, plan.outputs, strict=True):
        assert isinstance(output, DTensor)
        assert output.layout == layout, f"an output is laid out [{output.layout}], not [{layout}]"
        same(whole(output), value)
