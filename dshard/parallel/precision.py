"""Mixed precision: the dtypes in which a model's weights are used, and its gradients reduced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard.comm import check_reduced
from dshard.core.trees import GivenCopy, map_given
from dshard.core.wrapper import Wrapper
from dshard.errors import ArgumentError
from dshard.torch_private import pytree
from dshard.validate import article, shown


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a parallelized model, as in torch's `MixedPrecisionPolicy`; None leaves a dtype unchanged.

    Parameters are stored, and stepped by optimisers, in their own dtype. They are gathered and used in `param_dtype`;
    their gradients are reduced in `reduce_dtype`, by default `param_dtype`. Inputs of the model, and of modules whose
    weights are gathered together, are cast to `param_dtype` if `cast_forward_inputs`; outputs of the model are cast to
    `output_dtype`. Only floating-point tensors are cast; buffers are not.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ArgumentError(
                    f"precision: {name} is {shown(dtype)}: give a dtype such as torch.bfloat16, or None"
                )
        if self.reduced is not None:
            check_reduced(self.reduced, "precision: gradients are reduced")

    @property
    def reduced(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced; None: their own."""
        return self.reduce_dtype or self.param_dtype

    def used(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter that is stored in `stored` is used."""
        return self.param_dtype if self.param_dtype is not None and stored.is_floating_point else stored

    def without_data(self, x: Tensor) -> Tensor:
        """A tensor without data of the form in which the parameter `x` is used."""
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=self.used(x.dtype), device="meta")

    def inputs(self, inputs: object, copies: list[GivenCopy]) -> Any:
        """The inputs of a module, cast to `param_dtype` if `cast_forward_inputs`; see `map_given`."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return inputs
        return map_given(inputs, partial(_cast, self.param_dtype), copies)

    def outputs(self, out: object) -> Any:
        """The outputs of the model, cast to `output_dtype`."""
        return pytree.tree_map_only(Tensor, self.output, out)

    def output(self, x: Tensor) -> Tensor:
        """A tensor that the model returns, cast to `output_dtype`."""
        return _cast(self.output_dtype, x)

    def reduce(self, parameters: Iterable[object]) -> None:
        """Set the dtype in which the gradients of these parameters are reduced."""
        for x in parameters:
            if isinstance(x, Wrapper) and x._gradient_leaf is not None and x._spec.dtype.is_floating_point:
                x._gradient_leaf.reduce_dtype = self.reduced


def as_precision(value: object) -> Precision | None:
    """The `precision` argument as a `Precision`: one of ours, or torch's `MixedPrecisionPolicy`."""
    if value is None or isinstance(value, Precision):
        return value
    names = [field.name for field in fields(Precision)]
    if isinstance(value, type) or not all(hasattr(value, name) for name in names):
        raise ArgumentError(
            f"precision: {shown(value)} is {article(value)}: give dshard.parallel.Precision(torch.bfloat16, "
            "torch.float32), say, or torch's MixedPrecisionPolicy"
        )
    return Precision(*(getattr(value, name) for name in names))


def _cast(dtype: torch.dtype | None, x: Tensor) -> Tensor:
    return x if dtype is None or not x.is_floating_point() else x.to(dtype)
