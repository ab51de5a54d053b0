"""The inputs of a parallelized module: global batches, equal on all ranks, or the rows of each data rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dshard.comm import checksum, comparing, gather_rows, simulated_ranks, traced
from dshard.core.wrapper import DISTRIBUTED, is_recorded
from dshard.errors import CompileError, LayoutError
from dshard.mesh import Coordinate
from dshard.parallel.batch_rows import Rows, data_coordinate
from dshard.parallel.nested_tensors import map_tensors, named_tensors, nested_tensors
from dshard.parallel.plan_values import Plan
from dshard.placements import Replicate
from dshard.tensor import DTensor
from dshard.torch_private import is_transforming

MODES = ("global", "per-data-rank")
MAX_TENSORS = 30
"""The most plain tensors in one call: so many numbers of each rank are exchanged."""


class Inputs:
    """Lays out plain inputs of a model by its plan: global batches, or if `per_data_rank` the rows of each data rank.

    The ranks compare their inputs at the first call, and at all calls in debug mode. `rows` are those of the last call,
    None for global batches.
    """

    def __init__(self, plan: Plan, per_data_rank: bool) -> None:
        self.plan, self.per_data_rank = plan, per_data_rank
        self.compared = False
        self.rows: Rows | None = None

    def __call__(self, inputs: object, names: Callable[[], Sequence[tuple[Tensor, str]]] = tuple) -> Any:
        """Lay out the plain tensors of nested `inputs` where needed; `names` returns their names for errors."""
        plain = [x for x in nested_tensors(inputs) if _is_plain(x)]
        if not plain:
            return inputs
        if self.per_data_rank and is_dynamo_compiling():
            raise CompileError(
                "the rows of each data rank within a compiled region: ranks cannot ask each other how many there are "
                "there; lay the batch out before, model(distribute_batch(model, x)), or compile the blocks of the model"
            )
        compares = (not self.compared or comparing()) and _have_values(plain)
        if self.per_data_rank or (compares and not self.compared):
            rows, of_rows = self._exchange(inputs, names, compares)
            self.compared |= compares
            if self.per_data_rank:
                self.rows = rows
                return map_tensors(inputs, lambda x: self._laid_out(x, id(x) in of_rows) if _is_plain(x) else x)
        if is_recorded(plain):
            return map_tensors(inputs, self._differentiable)
        return inputs

    def _laid_out(self, x: Tensor, is_rows: bool) -> DTensor:
        if is_rows and self.rows is not None:
            return self.rows.join(x)
        return _replicated(x, self.plan)

    def _differentiable(self, x: Any) -> Any:
        """An input that needs a gradient as a DTensor that passes it on; others are laid out later, by the plan."""
        return _replicated(x, self.plan) if _is_plain(x) and x.requires_grad else x

    def _exchange(
        self, inputs: object, names: Callable[[], Sequence[tuple[Tensor, str]]], compares: bool
    ) -> tuple[Rows, set[int]]:
        """Gather each rank's number of rows, and the ids of tensors that have the rows as first dim on all ranks.

        Raises:
            LayoutError: ranks that must have the same inputs differ.
        """
        named = [(path, x) for path, x in named_tensors(inputs) if _is_plain(x)]
        if len(named) > MAX_TENSORS:
            raise LayoutError(
                f"{len(named)} plain tensors in one call: lay some out before; {MAX_TENSORS} are compared"
            )
        count = next((x.shape[0] for _, x in named if x.dim()), 0)
        plain = [x for _, x in sorted(named, key=lambda pair: pair[0])]  # a dict may have another order on each rank
        of_rank = gather_rows(_row(plain, count, compares), self.plan.mesh, is_check=not self.per_data_rank)
        if len({row[0] for row in of_rank.values()}) > 1:
            raise LayoutError(self._differ("other tensors, or tensors of other dtypes or sizes", of_rank, [0]))
        counts = {at: row[1] for at, row in of_rank.items()}
        are_rows = [x.dim() > 0 and all(of_rank[at][2 + i] == counts[at] for at in counts) for i, x in enumerate(plain)]
        for i, x in enumerate(plain):
            columns = [2 + i, 2 + MAX_TENSORS + i]
            for group in self._alike(of_rank, are_rows[i] and self.per_data_rank):
                if len({tuple(row[c] for c in columns) for row in group.values()}) > 1:
                    name = next((name for tensor, name in names() if tensor is x), f"tensor {i + 1}")
                    raise LayoutError(self._differ(name, group, columns))
        return Rows(self.plan, counts), {id(x) for x, is_rows in zip(plain, are_rows, strict=True) if is_rows}

    def _alike(
        self, of_rank: dict[Coordinate, tuple[int, ...]], by_data_rank: bool
    ) -> list[dict[Coordinate, tuple[int, ...]]]:
        """The rows of numbers by groups of ranks that must have the same inputs: all, or those of each data rank."""
        if not by_data_rank:
            return [of_rank]
        groups: dict[Coordinate, dict[Coordinate, tuple[int, ...]]] = {}
        for at, row in of_rank.items():
            groups.setdefault(data_coordinate(self.plan, at), {})[at] = row
        return list(groups.values())

    def _differ(self, what: str, of_rank: dict[Coordinate, tuple[int, ...]], columns: Sequence[int]) -> str:
        alike: dict[tuple[int, ...], list[int]] = {}
        for at, row in of_rank.items():
            alike.setdefault(tuple(row[c] for c in columns), []).append(self.plan.mesh.rank(at))
        ranks = " and ".join(f"ranks {ranks}" for ranks in alike.values())
        if self.per_data_rank:
            way_out = (
                "with inputs='per-data-rank' all ranks of a data rank give the same rows, and all ranks the same rest: "
                "load by dshard.data_ranks(model), and seed alike"
            )
        else:
            way_out = (
                "each is given the whole batch, so load and seed alike on all ranks; where each loads rows of its own, "
                "parallelize(..., inputs='per-data-rank') takes them"
            )
        return f"a parallelized module is given different data, {what}, on {ranks}: {way_out}"


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DISTRIBUTED)


def _have_values(plain: Sequence[Tensor]) -> bool:
    """Whether the values of these tensors can be read, and belong to one rank, not to simulated ranks."""
    return simulated_ranks() is None and not is_transforming() and not any(x.is_meta or traced(x) for x in plain)


def _replicated(x: Tensor, plan: Plan) -> DTensor:
    return DTensor.from_local(x, plan.mesh, (Replicate(),) * plan.mesh.ndim, shape=x.shape)


def _row(plain: Sequence[Tensor], count: int, compares: bool) -> list[int]:
    """The numbers that ranks compare: a digest of kinds and sizes, the rows, first dims, and checksums of values."""
    kinds = crc32(str([(tuple(x.shape[1:]), x.dim(), x.dtype) for x in plain]).encode())
    empty = [0] * (MAX_TENSORS - len(plain))
    sizes = [x.shape[0] if x.dim() else -1 for x in plain]
    values = [checksum(x) - 2**63 if type(x) is Tensor else 0 for x in plain] if compares else [0] * len(plain)
    return [kinds, count, *sizes, *empty, *values, *empty]
