"""The rules of NCCL and of torch's ProcessGroupNCCL that the contract group keeps, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

_GUIDE = "docs.nvidia.com/deeplearning/nccl/user-guide/docs"
_TORCH = "torch/csrc/distributed/c10d"


@dataclass(frozen=True, slots=True)
class Clause:
    """A requirement that NCCL states, and its source."""

    says: str
    source: str


RULES = {
    "dense": Clause("tensors must be dense", f"{_TORCH}/ProcessGroupNCCL.cpp, check_gpu_single_tensor"),
    "memory": Clause(
        "tensors must have memory of their own, here that of the CPU, and be of no subclass: give a DTensor's "
        "to_local()",
        f"{_TORCH}/ProcessGroupNCCL.cpp, check_gpu_single_tensor, which asks for CUDA",
    ),
    "contiguous": Clause("tensors must be contiguous", f"{_TORCH}/ProcessGroupNCCL.cpp, check_gpu_single_tensor"),
    "contiguous_message": Clause(
        "the memory of a tensor that is not contiguous is sent as it lies there, other elements with it; torch warns "
        "once and sends it",
        f"{_TORCH}/ProcessGroupNCCL.cpp, check_gpu_single_tensor with p2p",
    ),
    "dtype": Clause(
        "NCCL has no such dtype: send its bytes, view(torch.uint8)", f"{_TORCH}/NCCLUtils.hpp, ncclDataType"
    ),
    "one_dtype": Clause(
        "input and output must have one dtype", f"{_TORCH}/ProcessGroupNCCL.cpp, _allgather_base and others"
    ),
    "reduction": Clause("NCCL has no such reduction", f"{_TORCH}/ProcessGroupNCCL.cpp, getNcclReduceOp"),
    "bool_avg": Clause("truth values have no average", f"{_TORCH}/ProcessGroupNCCL.cpp, getNcclReduceOp"),
    "complex": Clause(
        "complex numbers are reduced as pairs of real ones, which is right for sums and averages alone",
        f"{_TORCH}/ProcessGroupNCCL.cpp, complexViewAsRealAllowed",
    ),
    "float8": Clause("float8 is moved, never reduced", f"{_TORCH}/ProcessGroupNCCL.cpp, allreduce and others"),
    "gathered_size": Clause(
        "the output must have world size times the elements of the input, the same on all ranks",
        f"{_TORCH}/ProcessGroupNCCL.cpp, _allgather_base; {_GUIDE}/api/colls.html#ncclallgather",
    ),
    "scattered_size": Clause(
        "the input must have world size times the elements of the output, the same on all ranks",
        f"{_TORCH}/ProcessGroupNCCL.cpp, _reduce_scatter_base; {_GUIDE}/api/colls.html#ncclreducescatter",
    ),
    "split_sizes": Clause(
        "the splits must add up to the first dim; without splits it must divide by the number of ranks",
        f"{_TORCH}/Utils.hpp, checkSplitSizes",
    ),
    "root": Clause("the root must be a rank of the group", f"{_TORCH}/Utils.hpp, assertRootRank"),
    "peer": Clause(
        "a message goes to another rank of the group", "torch/distributed/distributed_c10d.py, isend and irecv"
    ),
    "overlap": Clause(
        "input and output must not share memory, unless the operation is in place: the same pointer, or for gathers "
        "and scatters this rank's piece of the larger one",
        f"{_GUIDE}/usage/inplace.html",
    ),
    "one_call": Clause(
        "all ranks of a communicator make the same calls in the same order, with the same count, dtype, reduction and "
        "root; where they differ NCCL hangs, crashes or corrupts data",
        f"{_GUIDE}/usage/collectives.html",
    ),
    "message": Clause(
        "every send needs a receive of the same count and dtype on the other rank, in the same order",
        f"{_GUIDE}/usage/p2p.html",
    ),
    "grouped": Clause(
        "sends and receives that must progress together belong in one group, dist.batch_isend_irecv; without one a "
        "send waits for its receive before anything later between the two ranks begins",
        f"{_GUIDE}/usage/p2p.html; {_TORCH}/ProcessGroupNCCL.cpp, getKeySendRecv",
    ),
    "order": Clause(
        "operations on different communicators are submitted in the same order on all ranks, or can wait for each "
        "other forever",
        f"{_GUIDE}/usage/communicators.html#using-multiple-nccl-communicators-concurrently",
    ),
    "first_call": Clause(
        "the first operation of a group makes its communicator, for which each host waits: it is one that all ranks of "
        "the group make, not a group of messages between some of them",
        f"torch/distributed/distributed_c10d.py, batch_isend_irecv; {_TORCH}/ProcessGroupNCCL.cpp, initNCCLComm",
    ),
    "split": Clause(
        "where the default group has a device, new_group splits the communicator of the new group from that of the "
        "default one, a call of all its ranks: with use_local_synchronization=True those outside of the group leave it "
        "out",
        f"torch/distributed/distributed_c10d.py, _new_process_group_helper; {_GUIDE}/api/comms.html#ncclcommsplit",
    ),
    "coalescing": Clause(
        "a group begins once, ends once, and is waited for once, by the work that its end returns",
        f"{_GUIDE}/usage/groups.html; {_TORCH}/ProcessGroupNCCL.cpp, startCoalescing and endCoalescing",
    ),
    "buffer": Clause(
        "an operation runs some time before its wait ends, on a stream of its own: until then its input must not be "
        "written, nor its memory used by operations of other communicators",
        f"{_GUIDE}/usage/streams.html; torch.distributed, synchronous and asynchronous collective operations",
    ),
    "fused": Clause(
        "a kernel of symmetric memory multiplies a tensor of at least two dims by a matrix of the same dtype; what it "
        "gathers is contiguous with the gathered dim first, its place and size multiples of 16 bytes, for few rows are "
        "read as vectors of these; what it scatters divides by the number of ranks",
        "torch/distributed/_symmetric_memory/__init__.py, _fused_all_gather_matmul_impl, "
        f"_fused_matmul_reduce_scatter_impl; {_TORCH}/symm_mem/CUDASymmetricMemoryOps.cu, multimem_all_gather_kernel",
    ),
    "unsupported": Clause(
        "torch has this for gloo or MPI alone", f"{_TORCH}/Backend.hpp, whose default raises; ProcessGroup.hpp"
    ),
}
"""The rules by name."""

_TYPES = {
    torch.int8,
    torch.uint8,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
}
FLOAT8 = {torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz}
_REDUCTIONS = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
)
_LINEAR = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def reduction_name(op: Any) -> str:
    """The name of a reduction."""
    return next((name for name, known in dist.ReduceOp.RedOpType.__members__.items() if op == known), str(op))


def refuse(rule: str, what: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise an error that says what was asked, the rule, and its source."""
    raise error(refusal(rule, what))


def refusal(rule: str, what: str) -> str:
    """The text of a refusal: what was asked, the rule, and its source."""
    return f"{what}: {RULES[rule].says} [NCCL contract: {rule}; {RULES[rule].source}]"


def check_tensors(what: str, tensors: Sequence[Tensor], *, message: bool = False, as_real: bool = False) -> None:
    """Refuse tensors that NCCL does not accept; complex ones are accepted if the call passes them `as_real`.

    The functions of torch.distributed pass complex tensors on as real ones; those who call a process group itself meet
    what it takes.
    """
    for x in tensors:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu":
            refuse("memory", f"{what} of a {type(x).__name__} on {x.device}")
        if x.layout != torch.strided:
            refuse("dense", f"{what} of a {x.layout} tensor")
        if not (x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))):
            shown = f"{what} of a tensor of shape {tuple(x.shape)} and strides {x.stride()}"
            refuse("contiguous_message" if message else "contiguous", shown)
        if x.dtype not in _TYPES and x.dtype not in FLOAT8 and not (as_real and x.is_complex()):
            refuse("dtype", f"{what} of {x.dtype}", TypeError)
    if len({x.dtype for x in tensors}) > 1:
        refuse("one_dtype", f"{what} of {' and '.join(sorted(str(x.dtype) for x in tensors))}", TypeError)


def check_reduction(what: str, dtype: torch.dtype, op: Any) -> None:
    """Refuse reductions that NCCL or torch's ProcessGroupNCCL does not support."""
    if not any(op == known for known in _REDUCTIONS):
        refuse("reduction", f"{what} by {reduction_name(op)}")
    if dtype in FLOAT8:
        refuse("float8", f"{what} of {dtype}", TypeError)
    if dtype == torch.bool and op == dist.ReduceOp.AVG:
        refuse("bool_avg", f"{what} of {dtype} by {reduction_name(op)}", TypeError)
    if dtype.is_complex and not any(op == linear for linear in _LINEAR):
        refuse("complex", f"{what} of {dtype} by {reduction_name(op)}")


def check_root(what: str, root: int, size: int) -> None:
    """Refuse a root outside the group."""
    if not 0 <= root < size:
        refuse("root", f"{what} with root {root} in a group of {size} ranks")


def check_peer(what: str, peer: int, rank: int, size: int) -> None:
    """Refuse messages to this rank itself, and to ranks outside the group."""
    if not 0 <= peer < size or peer == rank:
        refuse("peer", f"{what} rank {peer} on rank {rank} of a group of {size} ranks")


def check_overlap(what: str, source: Tensor, out: Tensor, offset: int = 0) -> None:
    """Refuse overlapping input and output, except in place: `source` starts `offset` elements into `out`.

    A negative offset is that of `out` in `source`.
    """
    first, second = memory(source), memory(out)
    if not meet(first, second):
        return
    if first.start != second.start + offset * source.element_size():
        refuse("overlap", what)


def memory(x: Tensor) -> range:
    """Return the addresses of the bytes of a contiguous tensor."""
    return range(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())


def meet(a: range, b: range) -> bool:
    """Whether two ranges of addresses have a byte in common."""
    return max(a.start, b.start) < min(a.stop, b.stop)
