"""The collectives of all ranks of a mesh in one process, on torch's LocalTensor: one tensor for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, local_tensor_mode

from dshard.comm.transfer import Message
from dshard.comm.transport import reduce


@contextmanager
def plain() -> Iterator[None]:
    """Compute on plain tensors within the block, outside torch's LocalTensorMode."""
    mode = local_tensor_mode()
    if mode is None:
        yield
    else:
        with mode.disable():
            yield


def unstack(x: Tensor) -> dict[int, Tensor]:
    """The tensors of a LocalTensor by rank."""
    assert isinstance(x, LocalTensor)
    tensors: dict[int, Tensor] = x._local_tensors
    return tensors


def stack(tensors: Mapping[int, Tensor]) -> Tensor:
    """A LocalTensor of these tensors by rank; other simulated ranks, which are outside the mesh, get an empty one."""
    mode, like = local_tensor_mode(), next(iter(tensors.values()))
    others = frozenset() if mode is None else mode.ranks - tensors.keys()
    out: Tensor = LocalTensor({**tensors, **{rank: like.new_zeros((0,) * like.ndim) for rank in others}})
    return out


def each(function: Callable[[int, Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function(rank, tensor)` to each rank's tensor."""
    with plain(), torch.no_grad():
        return stack({rank: function(rank, t) for rank, t in unstack(x).items()})


def exchange(transfers: Mapping[int, Message], buffers: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Run one collective of all ranks: each rank's received buffer, from the buffers that the ranks send."""
    out: dict[int, Tensor] = {}
    for rank, transfer in transfers.items():
        peers = [buffers[peer] for peer in transfer.ranks]
        match transfer.collective:
            case "all_gather":
                out[rank] = torch.cat(peers)
            case "all_to_all":
                out[rank] = torch.cat([_piece(transfers, buffers, peer, transfer.index) for peer in transfer.ranks])
            case "reduce_scatter":
                terms = [_piece(transfers, buffers, peer, transfer.index) for peer in transfer.ranks]
                assert transfer.op is not None
                out[rank] = reduce(torch.stack(terms), transfer.op)
            case "all_reduce":
                assert transfer.op is not None
                out[rank] = reduce(torch.stack(peers), transfer.op)
    return out


def _piece(transfers: Mapping[int, Message], buffers: Mapping[int, Tensor], peer: int, index: int) -> Tensor:
    """The piece that `peer` sends to the rank number `index` of its group."""
    piece: Tensor = buffers[peer].split(list(transfers[peer].send))[index]
    return piece
