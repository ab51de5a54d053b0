"""Local tensors, wherever they live: what callers ask of them and do with them, so that they need not ask where.

This file and `world` alone know that ranks may be simulated, traced, or without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from dshard.comm.runtime import is_outside, runtime_of, simulated_ranks
from dshard.comm.traced_collectives import traced
from dshard.mesh import Mesh
from dshard.torch_private import LocalTensor, disable_modes, local_tensor_mode, no_functions

T = TypeVar("T")


@contextmanager
def plain() -> Iterator[None]:
    """Compute on plain tensors within the block, outside torch's LocalTensorMode."""
    mode = local_tensor_mode()
    if mode is None:
        yield
    else:
        with mode.disable():
            yield


@contextmanager
def neutral_state() -> Iterator[None]:
    """Within the block no modes, autocast or hooks of saved tensors of the program act, and gradients are recorded.

    Default dtype and device stay: whoever makes a tensor names them.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    cast = torch.autocast("cpu", enabled=False)
    with disable_modes(), no_functions(), torch.inference_mode(False), torch.enable_grad(), cast, hooks:
        yield


def are_simulated(values: Iterable[object]) -> bool:
    """Whether there are local tensors of simulated ranks among these."""
    return LocalTensor in map(type, values)  # one call of Python, not many


def _is_stack(x: object) -> bool:
    return are_simulated((x,))


def is_alike_on_simulated(x: Tensor) -> bool:
    """Whether simulated ranks have equal values in `x`; of a tensor of this process alone there is nothing to ask."""
    if not _is_stack(x):
        return True
    with plain():
        first, *others = unstack(x).values()
        return all(torch.equal(first, other) for other in others)


def of_rank(rank: int, x: Any) -> Any:
    """The local tensor of a simulated rank; `x` itself where ranks are not simulated, or it is no tensor."""
    return unstack(x)[rank] if _is_stack(x) else x


def of_first_rank(x: Tensor) -> Tensor:
    """The local tensor of the first simulated rank; `x` itself where ranks are not simulated."""
    return next(iter(unstack(x).values())) if _is_stack(x) else x


def unstack(x: Tensor) -> dict[int, Tensor]:
    """The tensors of a LocalTensor by rank."""
    tensors: dict[int, Tensor] = x._local_tensors  # type: ignore[attr-defined]
    return tensors


def stack(tensors: Mapping[int, Tensor]) -> Tensor:
    """A LocalTensor of these tensors by rank; other simulated ranks, which are outside the mesh, get an empty one."""
    mode, like = local_tensor_mode(), next(iter(tensors.values()))
    others = frozenset() if mode is None else mode.ranks - tensors.keys()
    out: Tensor = LocalTensor({**tensors, **{rank: like.new_zeros((0,) * like.ndim) for rank in others}})
    return out


def per_rank(mesh: Mesh, function: Callable[[int], Tensor]) -> Tensor:
    """Call `function(rank)` for each rank of the mesh, and stack the tensors that it returns."""
    with plain():
        return stack({rank: function(rank) for rank in mesh.ranks})


def on_all_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """A plain tensor, equal on all ranks, as a local tensor: stacked for all ranks if they are simulated."""
    return x if simulated_ranks() is None or _is_stack(x) else stack(dict.fromkeys(mesh.ranks, x))


def on_each(function: Callable[..., Any], *local: Tensor) -> list[Any]:
    """The results of a function of local tensors: of this rank's, or of each simulated one's."""
    if not _is_stack(local[0]):
        return [function(*local)]
    with plain():
        return [function(*parts) for parts in zip(*(unstack(x).values() for x in local), strict=True)]


def mapped(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of this rank's local tensor, or of each simulated one's; `x` itself if it changes none."""
    parts = on_each(function, x)
    if not _is_stack(x):
        return parts[0]  # type: ignore[no-any-return]
    same = all(part is before for part, before in zip(parts, unstack(x).values(), strict=True))
    return x if same else stack(dict(zip(unstack(x), parts, strict=True)))


def by_rank(x: Tensor, mesh: Mesh) -> dict[int, Tensor]:
    """The local tensors that this process has: its own, or those of all simulated ranks; none on a rank outside.

    Without processes it is that of the first rank.
    """
    if _is_stack(x):
        return {rank: unstack(x)[rank] for rank in mesh.ranks}
    runtime = runtime_of(mesh)
    if runtime is None:
        return {mesh.ranks[0]: x}
    return {} if runtime.coordinate is None else {runtime.rank: x}


def has_data(x: Tensor) -> bool:
    """Whether `x` has numbers, on this rank or on simulated ones."""
    return not (has_only_shape(x) or traced(x))


def has_only_shape(x: Tensor) -> bool:
    """Whether there will never be numbers in `x`: it is planned with, or stands for the tensors of other ranks."""
    return x.is_meta


def with_form(run: Callable[..., T], form: Callable[..., T]) -> Callable[..., T]:
    """The function `run` on tensors, or its `form` on those that have only a shape, as the first argument tells."""
    return lambda *args, **kwargs: (form if has_only_shape(args[0]) else run)(*args, **kwargs)


def is_any_meta(tensors: Sequence[Tensor]) -> bool:
    """Whether some of these tensors are on the meta device: what is planned with them has no data."""
    return True in [x.is_meta for x in tensors]  # one call of Python, not many


def are_mixed(tensors: Sequence[Tensor]) -> bool:
    """Whether some of these tensors have only a shape, and others have data."""
    return len({x.is_meta for x in tensors}) > 1


def is_own(x: Tensor) -> bool:
    """Whether `x` has the numbers of this rank alone: the ranks are not simulated."""
    return has_data(x) and simulated_ranks() is None


def is_absent(local: Tensor, mesh: Mesh) -> bool:
    """Whether a local tensor has no data because this rank is outside the mesh."""
    return local.is_meta and is_outside(mesh)
