"""`compare` runs a model alone and laid out, and names the first module that differs by more than rounding."""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard.comm import DeviceMesh, as_mesh, device_of, gather_objects, is_any_meta, runtime_of, taking_part
from dshard.compare.comparison import (
    Comparison,
    Deviation,
    ModuleComparison,
    ObservedPass,
    Place,
    deviations,
    errors,
    first_difference,
)
from dshard.core.plain_tensors import implicit_replication
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import spec_of
from dshard.core.trees import nested_tensors, replace_tensors, tensors_in
from dshard.core.wrapper import DISTRIBUTED, Wrapper, wrap
from dshard.errors import ArgumentError, MeshError
from dshard.layout import replicated
from dshard.mesh import Mesh
from dshard.ops.random import get_rng_state, is_random, manual_seed, set_rng_state
from dshard.parallel import parallelize
from dshard.parallel.boundary import boundary_of
from dshard.parallel.model_plan import PlanArgument
from dshard.parallel.precision import Precision, as_precision
from dshard.parallel.reachable_state import ReachableState
from dshard.torch_private import OpOverload, TorchDispatchMode
from dshard.validate import article, check_callable, check_type, shown

__all__ = ["Comparison", "Deviation", "ModuleComparison", "compare"]

LayOut: TypeAlias = Callable[[nn.Module, Any], object]
FEW, MANY = 3, 8
"""Passes rounded at random: before anything is found to differ, and then."""


def compare(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: PlanArgument | LayOut = "auto",
    /,
    *args: object,
    loss: Callable[[Any], Tensor] | None = None,
    precision: object = None,
    **kwargs: object,
) -> Comparison:
    """Run copies of `model` alone and laid out, forward and backward, and name the first module that differs.

    Call it on all ranks, with the whole batch in `args` and `kwargs`; each rank gets the same result. `model` is
    unchanged. `plan` and `precision` are those of `parallelize`; in place of a plan a function of a copy and the mesh
    may lay it out, in place.

    `loss` is a function of the model's output; by default the elements of the output are added with random weights.
    Random operators draw alike, so dropout may be on. Values may differ as much as roundings of their dtypes explain,
    whose effect is measured: some passes alone are rounded at random after each module. So it takes a few times the
    time and memory of a step on one device, on every rank: use a small batch and few layers.

        print(dshard.compare(model, mesh, "data x megatron", ids, loss=lambda out: F.cross_entropy(out, targets)))

    Raises:
        ArgumentError: no model, one that cannot be copied or has no data, whose output has no floating-point tensor, or
            whose passes alone differ from each other: its values are not determined.
        MeshError: a mesh without processes, or without this rank.
        StrategyError: as of `parallelize`, as is LayoutError.
    """
    pure = as_mesh(mesh)
    if taking_part(pure) is None:
        raise MeshError(f"compare on the mesh ({pure}), without a process here: call it on the ranks of a device mesh")
    check_type(model, nn.Module, "the model", "give an nn.Module")
    if loss is not None:
        check_callable(loss, "loss", "give a function of the model's output")
    if any(isinstance(x, DISTRIBUTED) for x in nested_tensors((args, kwargs))):
        raise ArgumentError("compare was given a batch of distributed tensors: give the whole batch, plain")
    passes = _Passes(model, mesh, (args, kwargs), loss, as_precision(precision) or Precision())
    laid_out, alone = passes.laid_out(plan), passes.alone()
    again = passes.compared(alone, passes.alone(), []).deviation
    if again is not None and again.error > again.allowed**0.5:
        raise ArgumentError(
            f"two passes of {alone.kinds['']} alone differ in {again.module or 'the model itself'}, {again.what}, by "
            f"{again.error:.1e} of its size: keep no state between calls, and draw by torch's operators"
        )
    changed: list[dict[Place, float]] = []
    for roundings in FEW, MANY:
        changed += [errors(alone, passes.alone(seed)) for seed in range(len(changed), roundings)]
        found = passes.compared(alone, laid_out, changed)
        if found.deviation is None:
            break
    return found


class _Loss(nn.Module):
    """A function of a model's output, observed as a module is; by default the sum of its elements, weighted."""

    def __init__(self, function: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.function = function or _weighted_sum

    def forward(self, out: object) -> Tensor:
        value = self.function(out)
        if not isinstance(value, Tensor) or value.dim():
            raise ArgumentError(
                f"the loss of {article(out)} is {shown(value)}: give loss=, a function of the model's output that "
                "returns a floating-point tensor without dims, such as a mean"
            )
        return value


def _weighted_sum(out: object) -> Any:
    generator, tensors = torch.Generator().manual_seed(1), [x for x in nested_tensors(out) if x.is_floating_point()]
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in tensors]
    return sum((x.double() * weight).sum() for x, weight in zip(tensors, weights, strict=True))


class _Passes:
    """Passes of copies of a model, alone and laid out, with copies of a batch."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, batch: tuple[Args, Kwargs], loss: Any, precision: Precision
    ) -> None:
        self.model, self.mesh, self.batch, self.loss, self.precision = model, mesh, batch, loss, precision
        self.pure, self.strategy = as_mesh(mesh), ""

    def laid_out(self, plan: Any) -> ObservedPass:
        """A pass of a copy that is laid out."""
        model, batch = self._copied()
        args, kwargs = batch
        with same_generators():
            if callable(plan):
                self.strategy = getattr(plan, "__name__", "a function")
                if plan(model, self.mesh) not in (model, None):
                    raise ArgumentError(f"{self.strategy} returned another module than it was given: lay that one out")
            else:
                parallelize(model, self.mesh, plan, *args, outputs="distributed", precision=self.precision, **kwargs)
                self.strategy = boundary_of(model).plan.strategy
        observed = self._run(model, batch, ObservedPass())
        observed.gather()
        return observed

    def alone(self, seed: int | None = None) -> ObservedPass:
        """A pass of a copy alone, rounded at random if there is a seed for it."""
        generator = None if seed is None else torch.Generator(device_of(self.pure)).manual_seed(seed)
        observed = ObservedPass(generator)
        model, batch = self._copied()
        batch = self.precision.inputs(batch, [])
        for p in model.parameters():
            p.data = observed.rounded(p.data.to(self.precision.used(p.dtype)))
        model.register_forward_hook(lambda module, args, out: self.precision.outputs(out))
        roots = [*model.parameters(), *model.buffers(), *nested_tensors(batch)]
        with draws_of_dshard(self.pure, roots):
            return self._run(model, batch, observed)

    def compared(
        self, alone: ObservedPass, other: ObservedPass, changed: Sequence[Mapping[Place, float]]
    ) -> Comparison:
        """Compare passes by the worst deviation of any rank at each place."""
        reduced = self.precision.reduce_dtype or self.precision.param_dtype
        mine = deviations(alone, other, changed, torch.finfo(reduced).eps if reduced else 0.0)
        worst: dict[Place, Deviation] = {}
        for of_rank in gather_objects(mine, runtime_of(self.pure).group(self.pure.names).process_group):  # type: ignore[union-attr]
            worst |= {at: max(worst.get(at, x), x, key=lambda each: each.excess) for at, x in of_rank.items()}
        calls, of_module = Counter(module for module, _ in alone.calls), defaultdict(list)
        for deviation in worst.values():
            of_module[deviation.module].append(deviation)
        rows = (ModuleComparison(at, alone.kinds[at], calls[at], tuple(of_module[at])) for at in {**calls, **of_module})
        first = first_difference(alone.calls, alone.ended, worst.values())
        return Comparison(alone.kinds[""], self.strategy, tuple(rows), first)

    def _run(self, model: nn.Module, batch: tuple[Args, Kwargs], observed: ObservedPass) -> ObservedPass:
        args, kwargs = batch
        loss = _Loss(self.loss)
        for path, module in [*model.named_modules(), ("(loss)", loss)]:
            observed.watch(path, module)
        with same_generators(), implicit_replication():
            value = loss(model(*args, **kwargs))
            if value.requires_grad:
                value.backward()
        observed.keep_state(model)
        return observed

    def _copied(self) -> tuple[nn.Module, tuple[Args, Kwargs]]:
        """Copies of the model and the batch."""
        own = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in nested_tensors(self.batch)}
        kind = type(self.model).__name__
        try:
            model = deepcopy(self.model)
        except Exception as error:
            raise ArgumentError(f"{kind} cannot be copied ({error}): give it a __deepcopy__ that can") from error
        if is_any_meta([*model.parameters(), *model.buffers()]):
            raise ArgumentError(f"{kind} has parameters or buffers without data: give a model with values")
        return model, deepcopy(self.batch, own)


# -- random values that a plain model draws as the laid-out one does


@contextmanager
def draws_of_dshard(mesh: Mesh, roots: Iterable[Tensor]) -> Iterator[None]:
    """Within the block random operators on what follows from `roots` draw what they draw on distributed tensors.

    Those are the tensors that a laid-out model has distributed. What a model makes from nothing is plain there, too,
    and draws from torch's generator. All other operators run as they are, attention as several, of which one draws.
    """
    with sdpa_kernel(SDPBackend.MATH), _DrawsOfDShard(mesh, roots):
        yield


class _DrawsOfDShard(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, mesh: Mesh, roots: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout = replicated(mesh)
        _mark(roots)

    def __torch_dispatch__(self, func: Any, types: object, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        follows = any(hasattr(x, "_dshard_follows") for x in tensors_in((args, kwargs)))
        if follows and isinstance(func, OpOverload) and is_random(func):
            operands: dict[int, Tensor] = {}
            wrapped_args, wrapped_kwargs = replace_tensors((args, kwargs), lambda x: self._wrapped(x, operands))
            out = func(*wrapped_args, **wrapped_kwargs)
            out = replace_tensors(out, lambda x: operands.get(id(x), x._local_tensor))  # type: ignore[attr-defined]
        else:
            out = func(*args, **kwargs)
        if follows:
            _mark(tensors_in(out))
        return out

    def _wrapped(self, x: Tensor, operands: dict[int, Tensor]) -> Wrapper:
        wrapped = wrap(x.data, spec_of(self.layout, tuple(x.shape), x.stride(), x.dtype, x.device))
        operands[id(wrapped)] = x
        return wrapped


def _mark(tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        x._dshard_follows = True  # type: ignore[attr-defined]


@contextmanager
def same_generators() -> Iterator[None]:
    """Within the block the generators of torch, dshard, Python and numpy begin alike; afterwards they are as before."""
    draws = get_rng_state()
    with ReachableState().replaced({}):  # restores dshard's mark in torch's generator, too, and last
        for seed in torch.manual_seed, random.seed, manual_seed:
            seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        try:
            yield
        finally:
            set_rng_state(draws)
