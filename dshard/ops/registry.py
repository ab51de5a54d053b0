"""Which rule an operator has: the families' tables, torch's tags, and what users register."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from torch import Tag
from torch._ops import OpOverload

from dshard.caches import clear_caches
from dshard.errors import NotationError
from dshard.ops import (
    addmm,
    batched,
    blocks,
    convolution,
    indexing,
    joins,
    losses,
    nn,
    out,
    parts,
    pointwise,
    random,
    reductions,
    shift,
    split,
    spread,
    turn,
    views,
)
from dshard.ops.call import Call, Op, writes_first
from dshard.ops.custom import CUSTOM, RULED
from dshard.ops.decompositions import decomposition_of
from dshard.ops.matmul import rules as matmul
from dshard.ops.rule import Pending, Rule, parse_rule
from dshard.placements import ReduceOp

TABLES: tuple[dict[str, Op], ...] = (
    pointwise.RULES,
    reductions.RULES,
    views.RULES,
    parts.RULES,
    joins.RULES,
    indexing.RULES,
    matmul.RULES,
    addmm.RULES,
    nn.RULES,
    losses.RULES,
    convolution.RULES,
    batched.RULES,
)
_USER: dict[str | OpOverload, Op] = {}
_TEXTS: dict[str, str] = {}


def register_rule(
    op: str,
    rule: str,
    *,
    reduce: ReduceOp | Sequence[ReduceOp] = "sum",
    linear: Sequence[int] = (),
) -> None:
    """Teach dshard an operator in one line of the rule notation (see `dshard.ops.rule`).

    `op` is the operator's qualified name, such as "mylib::fused"; all its overloads get the rule. `reduce` is the
    reduction of split factors that an output lacks, `linear` the operands through each of which a pending sum passes.

    >>> register_rule("mylib::fused", "t h, h f, f h -> t h", linear=(0,))

    Raises:
        NotationError: the name or the rule cannot be read.
    """
    if "::" not in op:
        raise NotationError(f"{op!r} is no operator name: write namespace::name, such as 'mylib::fused'")
    left = rule.partition("->")[0]
    operands = len(left.split(",")) if left.strip() else 0
    _check_text(rule, operands, reduce)
    beyond = [operand for operand in linear if not 0 <= operand < operands]
    if beyond:
        raise NotationError(f"the rule {rule!r} has no operand {beyond[0]}: linear counts its {operands} from 0")
    pending = tuple(Pending(frozenset({operand})) for operand in linear)

    def of(call: Call) -> Rule:
        return parse_rule(rule, call.shapes, reduce=reduce, pending=pending)

    register(op, Op(of), rule)


def register(op: str | OpOverload, found: Op, says: str) -> None:
    """Let all overloads of the operator of this name, or the one overload, have `found` in place of dshard's own."""
    _USER[op], _TEXTS[str(op)] = found, says
    find.cache_clear()
    FACTS.clear()
    clear_caches()


@dataclass(frozen=True, slots=True)
class Listed:
    """An operator that has a rule: its name, its family, and what the rule says; of one's own, the rule itself."""

    op: str
    family: str
    says: str


def rules() -> tuple[Listed, ...]:
    """Every operator that has a rule by name, in the order of the names.

    Beside these, all that torch tags pointwise has the rule of pointwise operators. The rule of a call depends on its
    shapes: docs/operators.md writes each out for an example.

    >>> next(row.says for row in rules() if row.op == "aten::mm")
    'A product, linear in its operands.'
    """
    found = {name: Listed(name, "yours", text) for name, text in _TEXTS.items()}
    for table in reversed(TABLES):
        found |= {name: Listed(name, _family(op), _says(op)) for name, op in table.items() if name not in _TEXTS}
    return tuple(found[name] for name in sorted(found))


def _family(op: Op) -> str:
    return op.rule.__module__.removeprefix("dshard.ops.").partition(".")[0]


def _says(op: Op) -> str:
    return (op.rule.__doc__ or "").partition("\n")[0]


def _check_text(rule: str, operands: int, reduce: ReduceOp | Sequence[ReduceOp]) -> None:
    """Read the rule once with operands that fit, so that a mistake shows at registration."""
    left = rule.partition("->")[0]
    terms = [part.replace("(", " ( ").split() for part in left.split(",")][:operands]
    depth = [_ndim(term) for term in terms]
    read = parse_rule(rule, [(2,) * n for n in depth], reduce=reduce)
    if len(read.reduce) not in (1, len(read.outputs)):
        raise NotationError(f"the rule {rule!r} has {len(read.outputs)} outputs: give one reduction, or one for each")


def _ndim(tokens: list[str]) -> int:
    text = " ".join(tokens)
    while "(" in text and ")" in text:
        start, end = text.index("("), text.index(")")
        text = f"{text[:start]} merged {text[end + 1 :]}"
    return len([token for token in text.split() if token != "..."])


@cache
def find(func: OpOverload) -> Op | None:
    """What the tables say of `func`, an in-place operator having the rule of its functional form."""
    name = func._schema.name
    if func in _USER:
        return _USER[func]
    tables: tuple[Mapping[Any, Op], ...] = (_USER, *TABLES)
    for table in tables:
        found = table.get(name) or (table.get(name[:-1]) if name.endswith("_") and not name.endswith("__") else None)
        if found is not None:
            return found
    plain = pointwise.is_pointwise(func) and not random.is_random(func)
    return Op(pointwise.pointwise, values=False) if plain else None


Instead = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Known:
    """What the tables say of an operator, all in one look-up.

    `instead`, where there is one, tells from the arguments what runs in its place, if anything; `values` whether the
    rule depends on the values of scalar arguments; `writes` whether elements of the first
    operand are written, not its shape alone.
    """

    func: OpOverload
    op: Op | None
    instead: Callable[[tuple[Any, ...]], Instead | None] | None
    values: bool
    writes: bool


FACTS: dict[int, Known] = {}
"""What is known of operators, by their identity."""


def known(func: OpOverload) -> Known:
    """What the tables say of `func`."""
    found = FACTS.get(id(func))
    if found is None:
        op = find(func)
        writes = writes_first(func) and Tag.inplace_view not in func.tags
        found = FACTS[id(func)] = Known(func, op, _instead(func), op is None or op.values, writes)
    return found


def _instead(func: OpOverload) -> Callable[[tuple[Any, ...]], Instead | None] | None:
    if out.has_out(func):
        return lambda args: out.into_out
    if func in _USER or func._schema.name in _USER:
        return None
    custom = CUSTOM.get(func) or views.CUSTOM.get(func) or random.CUSTOM.get(func)
    if custom is not None:
        return lambda args: custom
    if func in views.OF_BASE:
        of_base = views.OF_BASE[func]
        return lambda args: of_base if args[0]._is_view() else None
    if func in spread.SPREAD:
        row = spread.SPREAD[func]
        return lambda args: row.run if row.pays(args) else None
    if func in blocks.BLOCKS or func in turn.TURNED:
        return _along(func)
    if func in shift.SHIFTS:
        moves, run = shift.SHIFTS[func]
        return lambda args: run if moves(args) else None
    if func in split.SPLITS:
        return lambda args: split.pieces if split.pays(args) else None
    if func in indexing.MASKED:
        return lambda args: indexing.MASKED[func] if indexing.has_mask(args) else None
    if func in nn.MEANS:
        position = [argument.name for argument in func._schema.arguments].index("reduction")
        return lambda args: nn.MEANS[func] if args[position] == nn.MEAN else None
    return None


def _along(func: OpOverload) -> Callable[[tuple[Any, ...]], Instead | None]:
    """By summaries of blocks, or with the split moved to another dim, where one of these pays."""
    ways = [(along.pays, along.run) for along in (blocks.BLOCKS.get(func),) if along is not None]
    if func in turn.TURNED:
        ways.append((turn.pays(func), turn.run))
    return lambda args: next((run for pays, run in ways if pays(args)), None)


Path: TypeAlias = Literal["rule", "decomposition", "fallback"]


def path_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path:
    """By which way a call runs: its rule, other operators, or replicated on every rank."""
    facts = known(func)
    instead = None if facts.instead is None else facts.instead(args)
    if instead is not None:
        ruled = instead in RULED or any(
            func in table for table in (blocks.BLOCKS, shift.SHIFTS, split.SPLITS, turn.TURNED)
        )
        return "rule" if ruled else "decomposition"
    if facts.op is not None:
        return "rule"
    return "fallback" if decomposition_of(func) is None else "decomposition"
