"""A process group that behaves as NCCL, on CPU tensors and without a GPU.

    nccl_contract.register()
    dist.init_process_group("nccl_contract", ...)

It refuses what NCCL and torch's ProcessGroupNCCL refuse (`RULES`, each with its source). It completes nothing before
it is waited for: outputs hold NaN until then, and an input that was written in between is an error. Operations of one
communicator run one after the other; ranks that use two communicators in different orders are told both places. An
error that is found while an operation runs is raised by its wait on every rank that waits, and by every later call.

What it does not do: run at NCCL's speed, in NCCL's dtype of intermediate sums, or on more than one stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dshard.comm import NCCL_CONTRACT
from dshard.tools.nccl_contract.contract_group import NcclContract
from dshard.tools.nccl_contract.contract_rules import RULES, Clause, refuse
from dshard.tools.nccl_contract.process_state import CURRENT, Usage
from dshard.torch_private import late, resolve_process_group

__all__ = ["BACKEND", "RULES", "Clause", "NcclContract", "Usage", "register", "usage"]

BACKEND = NCCL_CONTRACT.name
"""The name for `init_process_group`."""
_SECONDS = "DSHARD_CONTRACT_SECONDS"


def register() -> None:
    """Register the backend with torch.distributed in this process.

    Operations to which not all ranks come are errors after 30 seconds, those of DSHARD_CONTRACT_SECONDS, or the time
    limit of the process group where that is less.
    """
    if hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    late("torch.distributed._symmetric_memory")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        _LIBRARY.impl(name, _on_its_group(name), "CPU")
    batch = _in_groups(dist.batch_isend_irecv)
    dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batch


_LIBRARY = torch.library.Library("symm_mem", "IMPL")  # whose kernels end with it, so it is kept


def _on_its_group(name: str) -> Callable[..., Any]:
    """Run an operator of symmetric memory, which torch has for CUDA alone, on the process group of that name."""

    def kernel(a: Tensor, b: Any, *where: Any, return_A: bool = True) -> Any:  # torch's name
        *how, group = where
        group = resolve_process_group(group)
        if not isinstance(group, NcclContract):
            refuse("unsupported", f"{name} over {dist.get_backend(group)}", RuntimeError)
        return getattr(group, name)(a, b, *how, **({} if return_A else {"return_a": False}))

    return kernel


def usage() -> Usage:
    """Return the numbers of operations, bytes and waits of this process since its process group was made."""
    return replace(CURRENT.state.usage)


def _create(options: Any, _: object) -> NcclContract:
    limit = timedelta(seconds=float(os.environ.get(_SECONDS, "30")))
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return NcclContract(options.store, options.group_rank, ranks, options.group_id, min(limit, options.timeout))


def _in_groups(original: Callable[..., list[dist.Work]]) -> Callable[..., list[dist.Work]]:
    """Wrap torch's batch_isend_irecv, which itself starts groups only on C++ process groups."""

    @wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = (p2p_op_list[0].group if p2p_op_list else None) or dist.group.WORLD
        if not isinstance(group, NcclContract):
            return original(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        group._start_coalescing(device)
        try:
            original(p2p_op_list)
        finally:
            work = group._end_coalescing(device)
        return [] if work is None else [work]

    return batch_isend_irecv
