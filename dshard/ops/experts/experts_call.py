"""The entry of `dshard.experts`: a layer of experts of plain or distributed tensors.

A capacity leaves each expert so many tokens, the first in order, on every mesh the same. Observers are told how a layer
spreads its tokens: nothing of it is counted without them.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dshard.comm import has_only_shape, is_captured, measuring, of_first_rank, on_all_ranks, on_each, publish_failure
from dshard.core.call_key import call_key
from dshard.core.context import are_sizes_static, planning_context
from dshard.core.executable import ComposedExecutable, Executable, wrap_as
from dshard.core.moves import local_redistribution, run_on_ranks
from dshard.core.observe import OBSERVERS, tell_observers, unobserved
from dshard.core.operands import common_mesh, spec_like
from dshard.core.spec import contiguous_spec
from dshard.core.torch_function import autocast
from dshard.core.wrapper import Wrapper
from dshard.errors import ArgumentError, ShapeError
from dshard.layout import Layout
from dshard.mesh import Coordinate
from dshard.ops.composite import are_traced, run_executable
from dshard.ops.experts.experts_choice import ExpertsCandidates, ExpertsChoice
from dshard.ops.experts.local_experts import Body, LocalExperts, experts_without_data
from dshard.ops.experts.ragged_experts import RaggedExperts
from dshard.ops.matmul.options import current_options
from dshard.placements import Partial, Replicate, Shard
from dshard.routing import Held
from dshard.rules.expert_loops import EXPERTS, OPERANDS, UNIFORM, ExpertLoops, RequestedLoops, expert_rule
from dshard.rules.rule import Rule
from dshard.torch_private import no_torch_function
from dshard.validate import as_int, check_one_of, shown


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


class PlainExperts(NamedTuple):
    """A layer of experts that runs on plain tensors: its rule, its operands, and once it has run its result.

    Observers are told before and after; what runs between is the body.
    """

    rule: Rule
    operands: Sequence[Tensor]
    out: Tensor | None = None


def run_experts(
    body: Body,
    tensors: Sequence[Tensor],
    rule: str = "e f d, e d f",
    loops: str | ExpertLoops | None = None,
    capacity: int | None = None,
    beyond: Beyond = "drop",
) -> Any:
    """A layer of experts of tokens, indices, weights and parameters: see `dshard.experts`."""
    options = current_options()
    requested = options.experts if loops is None else EXPERTS.checked(loops)
    _check_tensors(tensors)
    check_capacity(capacity, beyond)
    shapes = tuple([t._spec.shape if isinstance(t, Wrapper) else tuple(t.shape) for t in tensors])
    shape_rule = expert_rule(shapes, rule, options.routing or UNIFORM)
    distributed = [t for t in tensors if isinstance(t, Wrapper)]
    if not distributed:
        total = _total(shape_rule, tensors)
        if has_only_shape(tensors[0]):
            return experts_without_data(tensors, held=total, pairs=tensors[1].numel(), rule=rule)
        x, index, *rest = tensors
        index = _within(index, total, capacity, beyond)
        local = LocalExperts(body, range(total), total, capacity)
        return _observed(shape_rule, tensors, partial(local, x, index, *rest)) if OBSERVERS else local(x, index, *rest)
    x, index, weight, *parameters = tensors
    try:
        index = _within(index, _total(shape_rule, tensors), capacity, beyond)
        with no_torch_function():
            x, weight, *parameters = autocast((x, weight, *parameters))
            return _run(body, shape_rule, (requested, True, capacity), (x, index, weight, *parameters))
    except Exception as error:
        publish_failure(error, distributed[0]._spec.layout.mesh.ranks)
        raise


def _observed(rule: Rule, operands: Sequence[Tensor], run: Callable[[], Tensor]) -> Tensor:
    tell_observers(partial(PlainExperts, rule, operands))
    out = run()
    tell_observers(partial(PlainExperts, rule, operands, out))
    return out


def _within(index: Tensor, total: int, capacity: int | None, beyond: Beyond) -> Tensor:
    """The indices, of which those beyond the capacity are of no expert."""
    if capacity is None or not index.numel():
        return index
    return within_capacity(index.reshape(-1, index.shape[-1]), total, capacity, beyond).view(index.shape)


def _check_tensors(tensors: Sequence[Any]) -> None:
    others = [t for t in tensors if not isinstance(t, Tensor)]
    if others:
        raise TypeError(f"experts of {shown(others[0])}: x, index, weight and the parameters are tensors")
    if len(tensors) <= OPERANDS:
        raise ShapeError("experts without parameters: give at least one, whose dim e are the experts")
    index = tensors[1]
    dtype = index.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"experts: index is of {dtype}; give the numbers of experts, as whole numbers")


def _total(rule: Rule, tensors: Sequence[Tensor]) -> int:
    return int(tensors[OPERANDS].shape[rule.inputs[OPERANDS].index(("e",))])


def _run(body: Body, rule: Rule, asked: tuple[RequestedLoops, bool, int | None], tensors: Sequence[Tensor]) -> Any:
    """Run a call; `asked` are the loops requested, whether the host may be asked, and the capacity."""
    requested, may_ask, capacity = asked
    mesh = common_mesh("experts", list(tensors))
    may_ask = may_ask and not (are_sizes_static() or is_captured(mesh) or are_traced(tensors))
    records = torch.is_grad_enabled()
    needed = tuple([records and t.requires_grad for t in tensors])

    def choose() -> ExpertsChoice:
        specs = [spec_like(t, mesh) for t in tensors]
        return ExpertsCandidates(rule, specs, requested, needed, may_ask).choice()

    key = call_key(("experts", rule, requested, needed, may_ask), tensors)
    choice: ExpertsChoice = planning_context().choices.of(key, choose)
    executable = _executable(choice, body, rule, capacity, tensors)
    out = run_executable(executable, tensors)
    if OBSERVERS:
        rows = max(executable.arrived, default=0) if isinstance(executable, RaggedExperts) else None
        dim = rule.inputs[OPERANDS].index(("e",))
        tell_observers(partial(routed_tokens, choice, dim, tensors[1], rows))
    return out


def _executable(
    choice: ExpertsChoice, body: Body, rule: Rule, capacity: int | None, tensors: Sequence[Tensor]
) -> Executable | ComposedExecutable:
    """The executable of one call: what is kept of it is the choice alone, for a body may hold tensors."""
    if choice.levels:
        return RaggedExperts(choice, body, capacity, partial(_run, body, rule, (None, False, capacity)))
    positions = [i for i, t in enumerate(tensors) if isinstance(t, Wrapper)]
    kernel = partial(_kernel, choice, body, rule, capacity)
    finish, gradients = wrap_as(choice.result), choice.strategy.gradients
    return Executable(choice.decision, kernel, [choice.result], positions, finish, gradients=gradients)


def _kernel(choice: ExpertsChoice, body: Body, rule: Rule, capacity: int | None, at: Coordinate) -> LocalExperts:
    """The experts of the rank at a coordinate."""
    dim = rule.inputs[OPERANDS].index(("e",))
    total = choice.specs[OPERANDS].shape[dim]
    return LocalExperts(body, choice.strategy.inputs[OPERANDS].dim_range(dim, total, at), total, capacity)


Beyond: TypeAlias = Literal["drop", "raise"]
"""What happens to tokens beyond the capacity of an expert: it does not get them, or that is an error."""


def check_capacity(capacity: object, beyond: object) -> None:
    """Check a capacity, and what happens beyond it."""
    if capacity is not None:
        as_int(capacity, "capacity of an expert, in tokens", least=1)
    check_one_of(beyond, ["drop", "raise"], "beyond", ArgumentError)


def within_capacity(index: Tensor, total: int, capacity: int, beyond: Beyond) -> Tensor:
    """The indices [t, k], with `total`, no expert, in place of those of experts that have `capacity` tokens before.

    Raises:
        ShapeError: on all ranks, if some expert gets more, and these are not dropped.
    """
    hits = torch.zeros_like(index[:, :1]).expand(-1, total).contiguous().scatter_add(1, index, torch.ones_like(index))
    before = hits.cumsum(0) - hits
    kept = torch.where(before.gather(1, index) < capacity, index, total)
    if beyond == "raise":
        counts = hits.sum(0)
        most, expert = (int(x.item()) for x in counts.max(0))
        if most > capacity:
            raise ShapeError(
                f"experts: expert {expert} gets {most} tokens, {most - capacity} more than its capacity of {capacity}: "
                'give a higher one, or beyond="drop"'
            )
    return kept
