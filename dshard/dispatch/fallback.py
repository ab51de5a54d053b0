"""The fallback for an operator without a rule: operands are replicated, and every rank computes the full result."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard.comm import device_of, device_of_result, of_first_rank, ranks_of_group, same_replicas, warn_user
from dshard.core.call import views_first, writes_first
from dshard.core.checks import with_meta_form
from dshard.core.context import planning_context
from dshard.core.executable import Executable, Values, positions_of
from dshard.core.moves import redistribute_local, replica_broadcasts, sending, write_local
from dshard.core.observe import OBSERVERS, Decision, observed
from dshard.core.operands import common_mesh, operand_of, plan_to, spec_like
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec, spec_of
from dshard.core.torch_wrappers import refuse_collective, refuse_shared_ranks
from dshard.core.trees import replace_tensors, tensors_in
from dshard.core.view_sync import CopiedView, register_view
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import LayoutError
from dshard.layout import Layout, replicated
from dshard.ops.custom import check
from dshard.ops.random import is_random, seeded_op
from dshard.torch_private import OpOverload


def replicate(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator without a rule on replicated operands, on every rank, as planned for this call alone."""
    executable = replicated_executable(func, args, kwargs)
    return observed(executable.decision, executable, (args, kwargs)) if OBSERVERS else executable(args, kwargs)


def replicated_executable(func: OpOverload, args: Args, kwargs: Kwargs) -> Executable:
    """The executable of an operator without a rule: replicated operands, the full result on every rank.

    Warns once for each operator, on one rank. The executable of a random operator serves one call.
    """
    random, tensors = is_random(func), tensors_in((args, kwargs))
    mesh = common_mesh(func, tensors)
    if func.namespace == "c10d":
        if func is torch.ops.c10d.allreduce_.default:
            refuse_collective("all_reduce", ranks_of_group(args), spec_like(tensors[0], mesh).layout)
        refuse_shared_ranks(f"{func}, as DistributedDataParallel calls it,", ranks_of_group(args), mesh)
    if func not in _WARNED and not random:
        warn_user(f"{func} has no rule: its operands are gathered and every rank computes all of it", mesh)
        _WARNED.add(func)
    layout = replicated(mesh)
    check(func, args, kwargs)
    specs = [spec_like(t, mesh) for t in tensors]
    topology, why = planning_context().topology_of(mesh), "no rule: every rank computes all of it"
    plans = tuple([plan_to(spec, layout, topology) for spec in specs])
    decision = Decision(str(func), tuple(map(operand_of, specs)), topology, plans=plans, why=why)
    local_op = seeded_op(func, mesh, device_of(mesh), kwargs) if random else with_meta_form(func)
    return Executable(decision, lambda at: local_op, (), positions_of(args, kwargs), partial(_finish, func, layout))


def _finish(func: OpOverload, layout: Layout, result: object, args: Values, local: Values) -> Any:
    """Write back operands that the operator wrote to, and wrap the results as replicated."""
    _refuse_sparse(func, result)
    if func in UNREPEATABLE:
        result = replace_tensors(result, lambda leaf: _first_rank_result(func, leaf, layout))
    for operand, argument, written in zip(args, func._schema.arguments, local, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(operand, Wrapper):
            there = redistribute_local(written, operand._spec.with_layout(layout), operand._spec.layout, func)
            write_local(operand._local_tensor, there)
    if writes_first(func):
        return args[0]
    out = replace_tensors(result, lambda leaf: wrap(leaf, _replicated_spec(leaf, layout)))
    if views_first(func) and isinstance(args[0], Wrapper):
        register_view(out, CopiedView(args[0], local[0], args[0]._spec.with_layout(layout)))
    return out


def _refuse_sparse(func: OpOverload, result: object) -> None:
    kinds = {t.layout for t in tensors_in(result)} - {torch.strided}
    if kinds:
        raise LayoutError(
            f"{func} gives a tensor of layout {kinds.pop()}: a distributed tensor is strided; "
            "call it on x.full_tensor(), or on the local parts"
        )


def _replicated_spec(local: Tensor, layout: Layout) -> Spec:
    of_one_rank = of_first_rank(local)
    device = device_of_result(of_one_rank, layout.mesh)
    return spec_of(layout, tuple(of_one_rank.shape), of_one_rank.stride(), of_one_rank.dtype, device)


def _first_rank_result(func: OpOverload, local: Tensor, layout: Layout) -> Tensor:
    """The result of the first rank of each mesh axis, broadcast to all ranks, for an operator whose runs differ."""
    if not OBSERVERS:
        return same_replicas(local, layout)
    spec = _replicated_spec(local, layout)
    return observed(sending(str(func), [spec], replica_broadcasts(spec)), same_replicas, (local, layout))  # type: ignore[no-any-return]


UNREPEATABLE = frozenset({torch.ops.aten.linalg_lstsq.default})
"""Operators whose results differ in the last bits from call to call: all ranks take the first rank's."""

_WARNED: set[OpOverload] = set()
