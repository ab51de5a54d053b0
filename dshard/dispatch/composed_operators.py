"""The operators that run as others, whatever their arguments: they have no rule of their own.

Calls that the rule of an operator cannot say stand in that operator's row, as `Operator.composed`.
"""

from __future__ import annotations

import torch

from dshard.core import checks
from dshard.core.call import Check, Composed, arguments_by_name
from dshard.core.signature import Args, Kwargs
from dshard.ops.custom import answered, decomposed, no_resize, number
from dshard.ops.decompositions import DECOMPOSITIONS, QUESTIONS
from dshard.ops.random import RANDOM
from dshard.ops.views import VIEWS_IN_PLACE, in_place
from dshard.torch_private import OpOverload

_ATEN = torch.ops.aten


def _is_requested(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    return True


def _has_no_dim(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    return arguments_by_name(func, args, kwargs).get("dim") is None


COMPOSED: dict[OpOverload, Composed] = {
    **{func: Composed(decomposed(function)) for func, function in DECOMPOSITIONS.items()},
    **{
        func: Composed(decomposed(function), is_requested=_has_no_dim)
        for func, function in DECOMPOSITIONS.items()
        if func._schema.name in ("aten::norm", "aten::linalg_vector_norm")
    },
    **{func: Composed(answered(function)) for func, function in QUESTIONS.items()},
    **{func: Composed(function) for func, function in RANDOM.items()},
    **{func: Composed(in_place) for func in VIEWS_IN_PLACE},
    _ATEN._local_scalar_dense.default: Composed(number, is_requested=_is_requested, local=True),
    _ATEN.resize_.default: Composed(no_resize),
    _ATEN.resize_as_.default: Composed(no_resize),
}
"""The functions that run in place of these operators, by the operators."""

CHECKS_WITHOUT_RULE: dict[str, Check] = {
    "aten::multinomial": checks.check_multinomial,
    "aten::complex": checks.check_complex,
    "aten::masked_scatter": checks.check_masked_scatter,
    "aten::linalg_lstsq": checks.check_lstsq,
    "aten::narrow_copy": checks.check_narrow_copy,
    "aten::as_strided_scatter": checks.check_strided_scatter,
}
"""The checks of operators that no table has: of these, of torch's pointwise ones, and of those without a rule."""
