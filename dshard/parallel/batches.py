"""Batches of a loader for as long as some data rank has any: those that have no more take part without rows."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, pairwise
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import nn

from dshard.comm import begin_rows, comparing, device_of, gather_objects, group_of_hosts, with_waits
from dshard.core.trees import map_tensors
from dshard.errors import LayoutError, PeerError
from dshard.mesh import Mesh
from dshard.parallel.boundary import boundary_of, distribute_batch
from dshard.parallel.inputs import STATES, Input, Inputs, have_values, row_of
from dshard.parallel.same_program import ranks_alike, ranks_by_value
from dshard.torch_private import pytree

BatchT = TypeVar("BatchT")
_LOOPS: Counter[Mesh] = Counter()
"""The loops over batches that this process has begun on each mesh; its other ranks have begun as many."""
_ENDED, _LOADED, _FAILED = range(3)
_STATE, _FORM, _INPUTS = 2, 3, 4
"""Columns of what ranks tell of a step: its loop, its number, one of the states above, a checksum of the batch's form,
and from there on the numbers by which inputs are compared."""


def batches(model: nn.Module, loader: Iterable[BatchT]) -> Iterator[BatchT]:
    """Batches of a loader, each as `distribute_batch` returns it, until no data rank of a parallelized model has any.

    So with `inputs="per-data-rank"` loaders may have different lengths: where one has ended batches have no rows, and
    the mean of a loss is that of all rows. With `outputs="plain"` batches are the plain rows of this data rank; the
    mean of none is NaN, with gradients of zero.

        for x, y in dshard.batches(model, loader):
            F.cross_entropy(model(x), y).backward()

    One batch is loaded ahead: before a step the ranks begin to ask who has one for the next, on a group of their own.

    Raises:
        LayoutError: ranks that must load alike have different batches, or ranks are in different loops.
        PeerError: the loader of another rank has raised an error; there that error is raised.
    """
    boundary = boundary_of(model)
    alone = group_of_hosts(boundary.plan.mesh) is None
    each: Iterator[BatchT] = iter(loader) if alone else _until_all_end(boundary.inputs, loader)
    return each if boundary.outputs.form == "plain" else (distribute_batch(model, batch) for batch in each)


def _until_all_end(inputs: Inputs, loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of this rank, and while only others have more, batches of their form without rows."""
    plan, group, known, form = inputs.plan, group_of_hosts(inputs.plan.mesh), None, b""
    columns = (_STATE, *range(_INPUTS, _INPUTS + STATES))
    for step, ((batch, own_form, error, wait), (*_, wait_ahead)) in enumerate(pairwise(_load(inputs, loader))):
        of_rank = wait()  # each rank finds the same errors
        rows = list(of_rank.values())
        if len({row[:_STATE] for row in rows}) > 1:
            _LOOPS[plan.mesh] = max(rows)[0]
            raise LayoutError(
                f"{ranks_by_value(of_rank, range(_STATE), plan.mesh)} are in different loops over dshard.batches, or "
                "at different steps of one: leave a loop, by break or by an error, on all ranks at the same step"
            )
        if any(row[_STATE] == _FAILED for row in rows):
            texts = gather_objects(error and f"{type(error).__name__}: {error}", group)
            rank, text = next(each for each in zip(sorted(plan.mesh.ranks), texts, strict=True) if each[1])
            raise error or PeerError(f"no rank has batch {step}, for the loader of rank {rank} has raised {text}")
        for alike in ranks_alike(of_rank, plan, inputs.per_data_rank):
            if len({tuple(row[c] for c in columns) for row in alike.values()}) > 1:
                raise LayoutError(inputs.differ(f"batch {step} of a loader, or its end", alike, columns))
        loaded = [row for row in rows if row[_STATE] == _LOADED]
        if not loaded:
            wait_ahead()  # nothing is left in flight, which may break off a program that ends now
            return
        if len(loaded) < len(rows) and loaded[0][_FORM] != known:
            known, form = loaded[0][_FORM], next(filter(None, gather_objects(own_form, group)))
        batch, is_on_host = (batch, True) if own_form else pickle.loads(form)
        yield batch if is_on_host else map_tensors(batch, lambda x: x.to(device_of(plan.mesh)))


def _load(inputs: Inputs, loader: Iterable[Any]) -> Iterator[tuple[Any, bytes, Exception | None, Any]]:
    """Load a batch for each step, without end: it, its form, the loader's error, and the rows of all ranks to come."""
    mesh, group = inputs.plan.mesh, with_waits(group_of_hosts(inputs.plan.mesh))
    _LOOPS[mesh] += 1
    iterator: Any = None
    for step in count():
        state, batch, form, error, named = _ENDED, None, b"", None, list[Input]()
        try:
            iterator = iter(loader) if step == 0 else iterator
            batch = next(iterator)
            state, named = _LOADED, inputs.named(batch, None)
            form = _form(batch, named) if inputs.per_data_rank else b"whole"
        except StopIteration:
            iterator = iter(())  # one that goes on after its end is asked no more
        except Exception as raised:  # the other ranks wait for this one
            state, error, iterator = _FAILED, raised, iter(())
        compares = (step == 0 or comparing()) and have_values([each.x for each in named])
        row = [_LOOPS[mesh], step, state, crc32(form), *row_of(named, compares)[:STATES]]
        yield batch, form, error, begin_rows(torch.tensor(row, device="cpu"), mesh, group)


def _form(batch: Any, named: list[Input]) -> bytes:
    """The pickled batch without its rows, with what is whole, for ranks that have none; and whether it is on hosts."""
    n_rows = row_of(named, False)[1]
    rows = {id(each.x) for each in named if each.mode != "global" and each.x.shape[:1] == (n_rows,)}
    empty = map_tensors(batch, lambda x: (x.new_empty((0, *x.shape[1:])) if id(x) in rows else x).detach().cpu())

    def are_texts(x: Any) -> bool:  # of which `DataLoader` makes no tensor, though they are rows
        return type(x) in (list, tuple) and len(x) == (n_rows or len(x)) and all(isinstance(each, str) for each in x)

    empty = pytree.tree_map(lambda x: x[:0] if are_texts(x) else x, empty, is_leaf=are_texts)
    return pickle.dumps((empty, all(each.x.is_cpu for each in named)))
