"""The rule of an operator, from the families' tables, torch's tags, and what users register."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tag

from dshard.caches import Cache, cached, clear_caches
from dshard.core import checks
from dshard.core.call import Call, Check, Composed, Operator, arguments_by_name, writes_first
from dshard.core.checks import CHECKS, META, REFUSES_EMPTY
from dshard.core.shared_memory import reads_more
from dshard.core.signature import Args, Kwargs
from dshard.errors import NotationError
from dshard.ops import (
    batched,
    concat,
    convolution,
    decompositions,
    distances,
    embedding,
    grouped_matmul,
    histograms,
    indexing,
    losses,
    norms,
    pointwise,
    random,
    reductions,
    slicing,
    views,
)
from dshard.ops.custom import answered, decomposed, has_out, into_out, no_resize, number
from dshard.ops.decompositions import DECOMPOSITIONS, QUESTIONS, vector_norm
from dshard.ops.experts.local_experts import RULES as CALLS_WITHOUT_DATA
from dshard.ops.foreach import INDEPENDENT_OF_VALUES
from dshard.ops.matmul import rules as matmul
from dshard.ops.random import RANDOM
from dshard.ops.views import VIEWS_IN_PLACE, in_place
from dshard.placements import ReduceOp
from dshard.rules.rule import Rule
from dshard.rules.rule import linear as linear_in
from dshard.rules.rule_notation import Side, parse_rule, read_rule
from dshard.torch_private import OpOverload, OpOverloadPacket
from dshard.validate import as_int, as_tuple, check_type, suggestion

_ATEN = torch.ops.aten


def _has_no_dim(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    return arguments_by_name(func, args, kwargs).get("dim") is None


COMPOSED: dict[OpOverload, Composed] = {
    **{func: Composed(decomposed(function)) for func, function in DECOMPOSITIONS.items()},
    _ATEN.linalg_vector_norm.default: Composed(decomposed(vector_norm), is_requested=_has_no_dim),
    **{func: Composed(answered(function)) for func, function in QUESTIONS.items()},
    **{func: Composed(function) for func, function in RANDOM.items()},
    **{func: Composed(in_place) for func in VIEWS_IN_PLACE},
    _ATEN._local_scalar_dense.default: Composed(number, is_requested=lambda func, args, kwargs: True, local=True),
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


TABLES: tuple[dict[str, Operator], ...] = (
    pointwise.RULES,
    reductions.RULES,
    views.RULES,
    slicing.RULES,
    concat.RULES,
    indexing.RULES,
    matmul.RULES,
    norms.RULES,
    embedding.RULES,
    losses.RULES,
    convolution.RULES,
    batched.RULES,
    distances.RULES,
    grouped_matmul.RULES,
    histograms.RULES,
)
META |= {**histograms.META, **grouped_matmul.META, **batched.META, **decompositions.META, **losses.META}
META |= convolution.META
_USER: dict[str | OpOverload, Operator] = {}
_TEXTS: dict[str, str] = {}


def register_rule(
    op: str,
    rule: str,
    *,
    reduce: ReduceOp | Sequence[ReduceOp] = "sum",
    linear: Sequence[int] = (),
) -> None:
    """Teach dshard an operator in one line of the rule notation (see `dshard.rules.rule_notation`).

    `op` is the operator's qualified name, such as "mylib::fused"; all its overloads get the rule. `reduce` reduces
    sharded factors that an output lacks; a partial sum passes through each of the operands `linear`.

    The operator must be there, as defined by `torch.library.custom_op`:

        register_rule("mylib::fused", "t h, h f, f h -> t h", linear=(0,))
        register_rule("mylib::soft", "... [h] -> ... [h]")       # needs all of h
        register_rule("mylib::joined", "*b [] -> b []")          # any number of operands

    Raises:
        NotationError: the name or the rule cannot be read, there is no such operator, or it has other operands.
    """
    if not isinstance(op, str) or "::" not in op:
        raise NotationError(f"{op!r} is no operator name: write namespace::name, such as 'mylib::fused'")
    check_type(rule, str, f"the rule of {op}", "write it like 'm k, k n -> m n'", NotationError)
    operands, outputs = read_rule(rule)
    _check_rule(rule, reduce)
    operand_numbers = as_tuple(linear, "linear", "give the numbers of operands, such as (0,)", NotationError)
    linear = [as_int(operand, "linear: an operand", NotationError) for operand in operand_numbers]
    n = len(operands.terms)
    unknown = [operand for operand in linear if operand < 0 or (operand >= n and operands.repeated is None)]
    if unknown:
        raise NotationError(f"the rule {rule!r} has no operand {unknown[0]}: linear counts its {n} from 0")
    _check_schema(op, rule, operands, outputs)
    passes = linear_in(*linear)

    def rule_of(call: Call) -> Rule:
        return call.rule(rule, reduce=reduce, passes=passes)

    register(op, Operator(rule_of), rule)


def register(op: str | OpOverload, row: Operator, text: str) -> None:
    """Give all overloads of the operator of this name, or one overload, this row in place of dshard's own."""
    _USER[op], _TEXTS[str(op)] = row, text
    clear_caches()


@dataclass(frozen=True, slots=True)
class Listed:
    """An operator that has a rule: its name, its family, and a line about the rule; for a registered one, the rule."""

    op: str
    family: str
    summary: str


def rules() -> tuple[Listed, ...]:
    """Every operator that has a rule by name, in the order of the names.

    Beside these, all that torch tags pointwise has the rule of pointwise operators. The rule of a call depends on its
    shapes: docs/operators.md writes each out for an example.

    >>> next(row.summary for row in rules() if row.op == "aten::mm")
    'Any dim may be sharded; a sharded contraction leaves a partial sum.'
    """
    listed = {name: Listed(name, "yours", text) for name, text in _TEXTS.items()}
    for table in reversed(TABLES):
        listed |= {name: Listed(name, _family(op), _first_line(op)) for name, op in table.items() if name not in _TEXTS}
    return tuple(listed[name] for name in sorted(listed))


def _family(op: Operator) -> str:
    return op.rule.__module__.removeprefix("dshard.ops.").partition(".")[0]


def _first_line(op: Operator) -> str:
    return (op.rule.__doc__ or "").partition("\n")[0]


def _check_schema(op: str, rule: str, operands: Side, outputs: Side) -> None:
    """Refuse an operator that does not exist, or whose overloads have other numbers of operands and outputs."""
    namespace, _, name = op.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name.isidentifier() else None
    if packet is None or not hasattr(packet, "overloads"):
        others = vars(getattr(torch.ops, namespace)).items()
        names = [f"{namespace}::{other}" for other, value in others if isinstance(value, OpOverloadPacket)]
        hint = "a rule is that of all overloads: leave out" if "." in name else "define it before its rule, or look up"
        raise NotationError(
            f"there is no operator {op!r}: {hint} {repr('.' + name.partition('.')[2]) if '.' in name else 'its name'}"
            f"{suggestion(op, names)}"
        )
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    operand_counts = [
        _tensor_counts([argument.type for argument in s.arguments if not argument.is_out]) for s in schemas
    ]
    output_counts = [_tensor_counts([result.type for result in s.returns]) for s in schemas]
    if not any(
        _fits(operands, low, high) and (not rest or _fits(outputs, least, rest))
        for (low, high), (least, rest) in zip(operand_counts, output_counts, strict=True)
    ):
        raise NotationError(
            f"the rule {rule!r} has {len(operands.terms)} operands and {len(outputs.terms)} outputs, but {op} is "
            f"{schemas[0]}: "
            "give a term for each tensor, in their order"
        )
    for schema in schemas:
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        returned = [result.alias_info for result in schema.returns]
        if written and not any(a.is_out for a in schema.arguments) and None in (returned or [None]):
            raise NotationError(
                f"{op} writes to {', '.join(written)}, and returns something else, {schema}: a rule is of results; "
                "leave the rule out, and every rank computes all, or define an operator that returns what it computes"
            )


def _fits(side: Side, fewest: float, most: float) -> bool:
    """Whether there are terms for so many tensors."""
    n = len(side.terms)
    return fewest <= n <= most if side.repeated is None else n - 1 <= most


def _tensor_counts(types: Sequence[object]) -> tuple[float, float]:
    """The fewest and the most tensors among values of these types."""
    kinds = list(map(str, types))
    fewest = kinds.count("Tensor")
    many = any("Tensor" in kind and "List[" in kind for kind in kinds)
    return fewest, inf if many else fewest + kinds.count("Optional[Tensor]")


def _check_rule(rule: str, reduce: ReduceOp | Sequence[ReduceOp]) -> None:
    """Read a rule with operands that fit, so that a mistake shows at registration."""
    parsed = parse_rule(rule, read_rule(rule)[0].example(), reduce=reduce)
    if len(parsed.reduce) not in (1, len(parsed.outputs)):
        raise NotationError(f"the rule {rule!r} has {len(parsed.outputs)} outputs: give one reduction, or one for each")
    inputs = {name for term in parsed.inputs for dim in term for name in dim}
    new = sorted({name for term in parsed.outputs for dim in term for name in dim} - inputs - parsed.unsharded)
    if new:
        raise NotationError(
            f"the rule {rule!r} splits {new[0]!r}, which no operand has: write it [{new[0]}], so that it is not sharded"
        )


@cached("operators", 16384)
def find(func: OpOverload) -> Operator | None:
    """The row of `func` in the tables; an in-place operator has the row of its functional form."""
    name = func._schema.name
    if func in _USER:
        return _USER[func]
    tables: tuple[Mapping[Any, Operator], ...] = (_USER, *TABLES, CALLS_WITHOUT_DATA)
    for table in tables:
        row = table.get(name) or (table.get(name[:-1]) if name.endswith("_") and not name.endswith("__") else None)
        if row is not None:
            return row
    is_plain_pointwise = pointwise.is_pointwise(func) and not random.is_random(func)
    return Operator(pointwise.pointwise, values=False) if is_plain_pointwise else None


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about an operator, cached so that a call needs one look-up.

    `op` is its row. `composed` says which of its calls run as other operators, `values` whether the rule depends on the
    values of scalar arguments, `changes` whether the first operand is changed in place, and `writes` whether its
    elements are, not its shape alone; `reads` whether there are other operands, too.
    """

    func: OpOverload
    op: Operator | None
    composed: Composed | None
    values: bool
    changes: bool
    writes: bool
    reads: bool

    def is_composed(self, args: Args) -> bool:
        """Whether a call with these arguments runs as other operators."""
        return self.composed is not None and self.composed.applies(args)


FACTS = Cache("operators")
"""The facts about operators, by `id`."""


def known(func: OpOverload) -> Known:
    """The facts about `func`, from the cache."""
    facts: Known | None = FACTS.get(id(func))
    if facts is None:
        op = find(func)
        changes = writes_first(func)
        writes = changes and Tag.inplace_view not in func.tags
        values = func not in INDEPENDENT_OF_VALUES and (op is None or op.values)
        reads = writes and reads_more(func)
        facts = FACTS.add(id(func), Known(func, op, _composed(func, op), values, changes, writes, reads))
    return facts


def _composed(func: OpOverload, op: Operator | None) -> Composed | None:
    if has_out(func):
        return Composed(into_out)
    if func in _USER or func._schema.name in _USER:
        return None
    return COMPOSED.get(func) or (None if op is None else op.composed.get(func))


CHECKS |= CHECKS_WITHOUT_RULE
CHECKS |= {name: op.check for table in TABLES for name, op in table.items() if op.check is not None}
REFUSES_EMPTY |= {name for table in TABLES for name, op in table.items() if op.refuses_empty}
