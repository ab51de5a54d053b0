"""Passes of copies of a model, alone and laid out, with batches of their own."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dshard.comm import DeviceMesh, as_mesh, device_of, gather_objects, runtime_of
from dshard.compare.alike_draws import draws_of_dshard, same_generators
from dshard.compare.comparison import Comparison, Deviation, comparison_of, deviations, distances
from dshard.compare.observed_pass import AFTER, BEFORE, OF_PARAMETER, OUTPUT, ObservedPass, Place, Rounding
from dshard.core.plain_tensors import implicit_replication
from dshard.core.signature import Args, Kwargs
from dshard.errors import ArgumentError
from dshard.parallel import data_ranks, parallelize
from dshard.parallel.boundary import boundary_of
from dshard.parallel.nested_tensors import map_tensors, nested_tensors
from dshard.parallel.precision import Precision, as_precision
from dshard.torch_dtensor import TorchDTensor
from dshard.validate import article, check_callable, check_type, shown

LOSS = "(loss)"
"""The path of the function of the model's output, which is observed as a module."""


class Loss(nn.Module):
    """A function of a model's output as a module; by default the sum of its numbers, or of its weighted elements."""

    def __init__(self, function: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.function = function

    def forward(self, out: object) -> Tensor:
        """The loss.

        Raises:
            ArgumentError: the output has no floating-point tensor, or the function returns no number.
        """
        value = _weighted_sum(out) if self.function is None else self.function(out)
        if not isinstance(value, Tensor) or value.dim():
            raise ArgumentError(f"loss: {shown(value)} is no number: return a tensor without dims, such as a mean")
        return value


def _weighted_sum(out: object) -> Tensor:
    tensors = [x for x in nested_tensors(out) if x.is_floating_point()]
    if not tensors:
        raise ArgumentError(
            f"the model returns {article(out)} without a floating-point tensor, so there is nothing to compare: give "
            "loss=, a function of the output that returns a tensor without dims, or compare a module within"
        )
    tensors = [x for x in tensors if x.requires_grad] or tensors
    numbers = [x for x in tensors if not x.dim()]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in tensors]
    return sum(numbers or [(x.double() * w).sum() for x, w in zip(tensors, weights, strict=True)])  # type: ignore[return-value]


class Passes:
    """Passes of copies of a model, alone and laid out."""

    def __init__(
        self, model: Any, mesh: DeviceMesh, plan: Any, batch: tuple[Args, Kwargs], loss: Any, options: Kwargs
    ) -> None:
        self.model, self.mesh, self.plan, self.batch, self.loss, self.options = model, mesh, plan, batch, loss, options
        self.pure = as_mesh(mesh)
        self.device = device_of(self.pure)
        self.precision = as_precision(options["precision"]) or Precision()
        self.strategy = ""
        if loss is not None:
            check_callable(loss, "loss", "give a function of the model's output")
        if any(isinstance(x, TorchDTensor) for x in nested_tensors(batch)):
            raise ArgumentError("compare was given a batch of distributed tensors: give the whole batch, plain")

    def check_determined(self) -> None:
        """Refuse a model that alone, with one batch and one seed, does not return what it returned before.

        Raises:
            ArgumentError: naming a module whose output differs.
        """
        alone = self._alone()
        found = self._of_all_ranks(deviations(alone, self._alone(), [{}], 0.0))
        other = next((x for x in found if x.what == OUTPUT and x.error > x.allowed**0.5), None)
        if other is not None:
            raise ArgumentError(
                f"two passes of {alone.kinds['']} alone differ in {other.module or 'the model itself'} by "
                f"{other.error:.1e} of its {other.what}: keep no state between calls, and draw by torch's operators"
            )

    def compared(self, roundings: int, *, isolated: bool = False) -> Comparison:
        """Compare a pass alone with one laid out; others, rounded at random, tell by how much they may differ."""
        laid_out = self._laid_out()
        alone = self._alone(isolated=isolated)
        changed = [distances(alone, self._alone(i, isolated=isolated)) for i in range(roundings)]
        other = self._observed(*laid_out, ObservedPass(isolated=isolated))
        reduced = self.precision.reduce_dtype or self.precision.param_dtype
        mine = deviations(alone, other, changed, torch.finfo(reduced).eps if reduced else 0.0)
        return comparison_of(alone, self.strategy, self._of_all_ranks(mine))

    def _of_all_ranks(self, mine: dict[Place, Deviation]) -> list[Deviation]:
        """The worst deviation of any rank at each place."""
        found: dict[Place, Deviation] = {}
        for of_rank in gather_objects(mine, runtime_of(self.pure).group(self.pure.names).process_group):  # type: ignore[union-attr]
            found |= {at: max(found.get(at, x), x, key=lambda each: each.excess) for at, x in of_rank.items()}
        return list(found.values())

    def _laid_out(self) -> tuple[nn.Module, tuple[Args, Kwargs]]:
        """A copy that is laid out, and its batch: the whole one, or the rows of this data rank."""
        model, (args, kwargs) = self._copy(), self._copied_batch()
        with same_generators(self.device):
            if callable(self.plan):
                self.strategy = getattr(self.plan, "__name__", "a function")
                return self.plan(model, self.mesh), (args, kwargs)
            parallelize(model, self.mesh, self.plan, *args, **self.options, **kwargs)
        self.strategy = boundary_of(model).plan.strategy
        n, i = data_ranks(model) if self.options["inputs"] == "per-data-rank" else (1, 0)
        rows = next((x.shape[0] for x in nested_tensors(self.batch) if x.dim()), 0)

        def own(x: Tensor) -> Tensor:
            return x[i * rows // n : (i + 1) * rows // n] if x.dim() and x.shape[0] == rows else x

        return model, map_tensors(self._copied_batch(), own)

    def _alone(self, seed: int | None = None, *, isolated: bool = False) -> ObservedPass:
        """A pass of a copy alone, rounded at random if there is a seed for it."""
        rounding = None if seed is None else Rounding(seed, self.device)
        model, batch = self._copy(), self.precision.inputs(self._copied_batch())
        for p in model.parameters():
            p.data = p.data.to(self.precision.used(p.dtype))
            p.data = p.data if rounding is None else rounding(p.data)
        model.register_forward_hook(lambda module, args, out: self.precision.outputs(out))
        roots = [*model.parameters(), *model.buffers(), *nested_tensors(batch)]
        with draws_of_dshard(self.pure, roots):
            return self._observed(model, batch, ObservedPass(rounding, isolated=isolated))

    def _observed(self, model: nn.Module, batch: tuple[Args, Kwargs], observed: ObservedPass) -> ObservedPass:
        """Run a pass, and observe it."""
        args, kwargs = batch
        loss = Loss(self.loss)
        observed.keep_state(model, BEFORE)
        for path, module in [*model.named_modules(), (LOSS, loss)]:
            observed.watch(path, module)
        with same_generators(self.device), implicit_replication():
            value = loss(model(*args, **kwargs))
            if value.requires_grad:
                value.backward()
        observed.keep_state(model, AFTER)
        observed.keep_state(model, OF_PARAMETER)
        observed.gather()
        return observed

    def _copied_batch(self) -> tuple[Args, Kwargs]:
        own = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in nested_tensors(self.batch)}
        return deepcopy(self.batch, own)

    def _copy(self) -> nn.Module:
        """A copy of the model without gradients.

        Raises:
            ArgumentError: there is none.
        """
        way_out = "give an nn.Module, or a function that makes it"
        if not isinstance(self.model, nn.Module):
            check_callable(self.model, "the model", way_out)
            with same_generators(self.device):
                model: nn.Module = self.model()
            check_type(model, nn.Module, "what the function of the model returned", way_out)
        else:
            try:
                model = deepcopy(self.model)
            except Exception as error:
                raise ArgumentError(f"{type(self.model).__name__} cannot be copied ({error}): {way_out}") from error
        if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
            raise ArgumentError(f"{type(model).__name__} has parameters or buffers without data: {way_out} with values")
        model.zero_grad()
        return model
