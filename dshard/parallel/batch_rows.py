"""Rows of a batch on the data ranks: the coordinates on the mesh axes that shard the batch, the first axis slowest.

Each data rank has any number of rows. Concatenated in the order of data ranks, they are the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from operator import mul
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.comm import own_coordinate
from dshard.compile.graph_functions import skip_frames
from dshard.core.plain_tensors import declare_shares, implicit_replication
from dshard.core.signature import Context
from dshard.core.trees import named_tensors, nested_tensors
from dshard.layout import Layout, Shape, replicated
from dshard.mesh import Coordinate
from dshard.parallel.plan_values import ModelPlan
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.tensor import DTensor

OfBatch: TypeAlias = Literal["rows and sequence", "rows", "neither"]
"""Which sizes of a batch the first dims of a tensor have."""


_ROWS, _WHOLE = Shard(0), Replicate()


def data_axes(plan: ModelPlan) -> tuple[str, ...]:
    """The mesh axes that shard the batch."""
    return tuple(name for name, p in zip(plan.mesh.names, plan.inputs[""], strict=True) if p == Shard(0))


def rows_alone(batch: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements of a batch of which only the rows are sharded."""
    return tuple([p if p == _ROWS else _WHOLE for p in batch])


def layouts_of_batch(batch: Layout) -> dict[str, Layout]:
    """The layouts of inputs of which a plan says nothing else, by which sizes of the batch their first dims have."""
    rows = Layout(batch.mesh, rows_alone(batch.placements))
    return {"rows and sequence": batch, "rows": rows, "neither": replicated(batch.mesh)}


class InputLayouts:
    """The layouts of a model's inputs: those that a plan names, and of others by which sizes of the batch they have.

    Without `arguments`, the names of the model's, inputs are a batch outside of it, named by keys of dicts alone.
    """

    def __init__(self, plan: ModelPlan, ndim: int = 1, arguments: Sequence[str] | None = None) -> None:
        self.ndim, self.arguments = ndim, arguments
        self.layouts = layouts_of_batch(Layout(plan.mesh, plan.inputs[""]))
        self.dims: dict[str, int] = {}
        for name, placements in plan.inputs.items():
            if not name:  # the batch
                continue
            self.layouts[f"input {name}"] = Layout(plan.mesh, placements)
            self.dims[name] = 1 + max([p.dim for p in placements if isinstance(p, Shard)], default=-1)

    def keys(self, inputs: object) -> list[str]:
        """For each tensor, in the order of `map_tensors`, the key of its layout among the `layouts`."""
        shapes = [tuple(x.shape) for x in nested_tensors(inputs)]
        sizes = sizes_of_batch(shapes, self.ndim)
        keys: list[str] = [has_of_batch(shape, sizes) for shape in shapes]
        if self.dims and sizes[0] is not None:
            for i, (path, _) in enumerate(named_tensors(inputs)):
                name = ".".join(path if self.arguments is None else argument_path(path, self.arguments))
                if self.dims.get(name, len(shapes[i]) + 1) <= len(shapes[i]):
                    keys[i] = f"input {name}"
        return keys


def sizes_of_batch(shapes: Sequence[Shape], ndim: int) -> tuple[int | None, int | None]:
    """The sizes of batch and sequence: the first dim of the first tensor of `ndim` dims, the second of one of two.

    Without such a tensor there is no batch: what a model then takes is one row of it.
    """
    rows = next((shape[0] for shape in shapes if len(shape) >= ndim), None)
    return rows, next((shape[1] for shape in shapes if len(shape) > 1), None)


def has_of_batch(shape: Shape, sizes: tuple[int | None, int | None]) -> OfBatch:
    """Which first dims of an input have the batch and sequence `sizes`."""
    rows, length = sizes
    if not shape or shape[0] != rows:
        return "neither"
    return "rows and sequence" if len(shape) > 1 and shape[1] == length else "rows"


def argument_names(model: nn.Module) -> list[str]:
    """The names of the parameters of `forward` that are given by position."""
    return [p.name for p in signature(model.forward).parameters.values() if p.kind is not p.KEYWORD_ONLY]


def argument_path(path: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The path of a tensor in `(args, kwargs)` as one that begins with the name of its argument, or its number."""
    kind, argument, *rest = path
    if kind != "0":
        return argument, *rest
    return names[int(argument)] if int(argument) < len(names) else f"argument {argument}", *rest


def argument_tensors(model: nn.Module, args: object, kwargs: object) -> list[tuple[tuple[str, ...], Tensor]]:
    """The tensors among the arguments of a model, in order, each with the names and numbers that lead to it."""
    names = argument_names(model)
    return [(argument_path(path, names), x) for path, x in named_tensors((args, kwargs))]


def data_coordinate(plan: ModelPlan, at: Coordinate) -> Coordinate:
    """The first coordinate of the data rank that `at` belongs to."""
    return tuple(i if p == Shard(0) else 0 for i, p in zip(at, plan.inputs[""], strict=True))


@dataclass(frozen=True)
class Rows:
    """The number of rows, `counts`, that the rank at each coordinate of the plan's mesh has of a batch."""

    plan: ModelPlan
    counts: Mapping[Coordinate, int]

    @cached_property
    def by_data_rank(self) -> list[int]:
        """The rows of each data rank."""
        mesh = self.plan.mesh
        return [self.counts[at] for at in mesh.peers(data_axes(self.plan), (0,) * mesh.ndim)]

    @cached_property
    def total(self) -> int:
        """The rows of the global batch."""
        return sum(self.by_data_rank)

    @cached_property
    def own(self) -> int:
        """The rows of this rank."""
        return self.counts[own_coordinate(self.plan.mesh)]

    @cached_property
    def are_chunks(self) -> bool:
        """Whether each rank's rows are its shard of the global batch under the plan."""
        layout = Layout(self.plan.mesh, rows_alone(self.plan.inputs[""]))
        return all(layout.local_shape((self.total,), at) == (n,) for at, n in self.counts.items())

    def join(self, x: Tensor) -> DTensor:
        """The global batch with `x` as the rows of this rank. Differentiable; only uneven rows are sent."""
        mesh, batch = self.plan.mesh, rows_alone(self.plan.inputs[""])
        if self.are_chunks:
            return DTensor.from_local(x, mesh, batch, shape=(self.total, *x.shape[1:]))
        most = max(self.by_data_rank)
        filled = F.pad(x, [0, 0] * (x.dim() - 1) + [0, most - len(x)])
        padded = DTensor.from_local(filled, mesh, batch, shape=(most * len(self.by_data_rank), *x.shape[1:]))
        places = [i * most + j for i, n in enumerate(self.by_data_rank) for j in range(n)]
        return self._chosen(padded, places).redistribute(placements=batch)

    def part(self, x: DTensor) -> Tensor:
        """This rank's rows of the global batch `x`, plain; its gradient is weighted by the share of rows."""
        batch = rows_alone(self.plan.inputs[""])
        if not self.are_chunks:
            most = max(self.by_data_rank)
            starts = [sum(self.by_data_rank[:i]) for i in range(len(self.by_data_rank))]
            last = max(self.total - 1, 0)
            x = self._chosen(x, [min(start + j, last) for start in starts for j in range(most)])
        return self._with_weighed_gradient(x.redistribute(placements=batch).to_local())[: self.own]

    def unweighted(self, x: Tensor) -> Tensor:
        """Rows of this rank from code on plain rows, where gradients are not weighted, as those after `part` are."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return _WeighGradient.apply(x, 1 / (self._weight or 1.0))  # type: ignore[no-any-return, no-untyped-call]

    def whole(self, x: DTensor) -> Tensor:
        """The global `x`, plain, which has no rows; gradients are weighted by the data ranks' shares of the rows."""
        whole = x.redistribute(placements=replicated(self.plan.mesh).placements)
        return self._with_weighed_gradient(whole.to_local(grad_placements=self._terms.placements))

    def declare_shares(self) -> None:
        """Declare that numbers which the program computes of plain rows are means over those of this rank."""
        declare_shares(self._terms, self._weight)

    @property
    def _terms(self) -> Layout:
        batch = rows_alone(self.plan.inputs[""])
        return Layout(self.plan.mesh, tuple([Partial() if isinstance(p, Shard) else Replicate() for p in batch]))

    @property
    def _weight(self) -> float:
        """The share of the rows that this rank has."""
        return self.own / max(self.total, 1)

    def _with_weighed_gradient(self, local: Tensor) -> Tensor:
        """`local`, whose gradient is multiplied by this rank's share of the rows, as losses are means over rows.

        By a hook: the program may write to what it gets, as `loss /= 2`, and autograd refuses that of a view that a
        function of our own returns. It is the gradient of the values as they are here, whatever is written later.
        """
        if torch.is_grad_enabled() and local.requires_grad:
            local.register_hook(partial(mul, self._weight))
        return local

    def _chosen(self, x: DTensor, places: list[int]) -> DTensor:
        with implicit_replication():
            return x.index_select(0, torch.tensor(places, device=x.to_local().device))  # type: ignore[return-value]


class _WeighGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *grads: object) -> Any:
        return grads[0] * ctx.weight, None


skip_frames(_WeighGradient)
