"""Simulation of all ranks of a mesh in one process, with the local tensors of every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from dshard import comm
from dshard.core.local_checks import check_strided
from dshard.core.spec import contiguous_spec
from dshard.core.subclasses import as_plain
from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.tensor import DTensor
from dshard.testing.terms import Parts, join_local_tensors, local_tensor_of
from dshard.torch_private import LocalTensorMode, current_mode, pop_mode, push_mode
from dshard.validate import as_int, check_type


@contextmanager
def simulated(ranks: int | Mesh) -> Iterator[None]:
    """Simulate `ranks` ranks, or those of a mesh, in this process: every DTensor holds the tensors of all of them.

    Meshes within the block may be pure (`dshard.Mesh`) or torch's: where torch.distributed is not initialised it is for
    the block, with a process group that sends nothing.

    >>> import torch
    >>> from dshard import Layout, Mesh, Partial, Replicate
    >>> mesh = Mesh((2, 2), ("dp", "tp"))
    >>> with simulated(mesh):
    ...     x = distribute(torch.arange(6.0), Layout(mesh, (Partial(), Replicate())))
    ...     whole(x * 2)
    tensor([ 0.,  2.,  4.,  6.,  8., 10.])

    Raises:
        MeshError: `ranks` is neither a number nor a mesh.
    """
    if not isinstance(ranks, Mesh):
        ranks = as_int(ranks, "simulated: ranks, a number or a dshard.Mesh", MeshError, least=1)
    members = frozenset(ranks.ranks if isinstance(ranks, Mesh) else range(ranks))
    with _process_group(max(members) + 1), _RanksMode(members) as mode:
        # States of the generators for each rank, put back at every operator, would undo what a checkpoint restores.
        mode._per_rank_rng_states.clear()
        yield


class _RanksMode(LocalTensorMode):
    """torch's mode of simulated ranks, but removed from the mode stack while it is disabled."""

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Disable the mode within the block."""
        is_innermost = current_mode() is self
        with super().disable():
            if is_innermost:
                pop_mode()
            try:
                yield
            finally:
                if is_innermost:
                    push_mode(self)

    def _unpatch_random_functions(self) -> None:
        """Keep torch's seed functions patched; while the mode is disabled they behave as unpatched."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        super()._unpatch_random_functions()


@contextmanager
def _process_group(world_size: int) -> Iterator[None]:
    """Provide a process group within the block: the existing one, or one that sends nothing."""
    if dist.is_initialized():
        yield
        return
    hook = sys.excepthook  # which torch wraps once more each time
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def distribute(x: Tensor, layout: Layout, *, seed: int = 0) -> DTensor:
    """A DTensor of the value `x`, which every rank passes, in any layout, with any order of axes and partials.

    Unlike `distribute_tensor` it sends nothing. The terms of a partial are random, and reduce to `x`: exactly where `x`
    holds small whole numbers, else within rounding.

    Raises:
        LayoutError: the layout has a dim that the tensor has not, or a reduction that its dtype has not.
        ArgumentError: `x` is no tensor.
    """
    check_strided(x, "distribute", "the whole tensor")
    check_type(layout, Layout, "the layout", "give a dshard.Layout", LayoutError)
    layout.check(x.shape)
    x = comm.of_first_rank(as_plain(x))  # made within simulated(...), alike on all ranks
    with comm.plain():
        part = local_tensor_of(x, layout, seed)
    local = comm.local_of(layout, lambda at, device: part(at).to(device))
    shape = tuple(x.shape)
    device = comm.device_of_result(local, layout.mesh)
    return DTensor._wrap(local, contiguous_spec(layout, shape, x.dtype, device))


def whole(x: DTensor) -> Tensor:
    """Return the global value of `x`, joined from the local tensors of all ranks by its layout.

    Every local tensor must have the shape and dtype of its layout, and replicas must be equal to the bit. It works for
    simulated ranks, and on real ones, where all ranks of the mesh call it together.

    Raises:
        AssertionError: a local tensor does not fit the layout.
        MeshError: this rank is not in the mesh.
    """
    with comm.plain():
        return join_local_tensors(_parts(x), x.layout, tuple(x.shape), x.dtype)


def parts(x: DTensor) -> dict[int, Tensor]:
    """Return the local tensors of `x` by rank of the mesh."""
    with comm.plain():
        return {x.layout.mesh.rank(at): part for at, part in _parts(x).items()}


def _parts(x: DTensor) -> Parts:
    check_type(x, DTensor, "whole and parts", "give a DTensor; a plain tensor is whole")
    mesh, local = x.layout.mesh, x._local_tensor
    if comm.are_simulated([local]):
        return {mesh.coordinate(rank): part for rank, part in comm.by_rank(local, mesh).items()}
    runtime = comm.runtime_of(mesh)
    if runtime is None or runtime.coordinate is None:
        raise MeshError(f"the mesh ({mesh}) has no processes here: use whole within simulated(mesh), or on its ranks")
    own = runtime.coordinate, local.detach().cpu()
    return dict(sorted(comm.gather_objects(own, runtime.group(mesh.names).process_group)))
