"""The local work of a step: the host's seconds for an operator, and the device's for its local operators.

The device's are a roofline of the operations that torch counts and the memory that operators touch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from dshard.comm import plain
from dshard.core.observe import OperatorMode
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import for_shapes
from dshard.core.trees import tensors_in
from dshard.cost import work_seconds
from dshard.topology import Topology
from dshard.torch_private import OpOverload, disable_modes

_EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.new_empty, torch.ops.aten.empty_like}
"""Operators that reserve memory and do not touch it."""

_ATEN = torch.ops.aten
_BY_INDEX = {
    *(_ATEN.gather, _ATEN.index, _ATEN.index_select, _ATEN.embedding, _ATEN.take, _ATEN.nll_loss_forward),
    *(_ATEN.scatter_, _ATEN.scatter_add_, _ATEN.index_put_, _ATEN.index_add_, _ATEN.index_copy_),
}
"""Operators that touch only those entries of their first operand that indices name."""

_COUNTED_AS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators whose operations torch does not count, each with an operator of the same operands that torch counts."""


class LocalCall(NamedTuple):
    """A call of an operator: its tensor `operands`, and the `fresh` tensors of its result, which have new memory."""

    func: OpOverload
    args: Args
    kwargs: Kwargs
    out: object
    operands: Sequence[Tensor]
    fresh: Sequence[Tensor]

    @property
    def works(self) -> bool:
        """Whether the call makes or changes memory; views do neither."""
        return bool((self.fresh or self.func._schema.is_mutable) and self.func.overloadpacket not in _EMPTY)

    def flops(self) -> float:
        """The floating-point operations of the call, as torch counts them."""
        packet, args = self.func.overloadpacket, self.args
        count = flop_registry.get(_COUNTED_AS.get(packet, packet))
        if packet in _COUNTED_AS:
            args = _with_all_heads(args)
        return 0.0 if count is None else float(count(*args, **self.kwargs, out_val=self.out))

    def seconds(self, flops: float, topology: Topology) -> float:
        """Seconds by the roofline; without a launch where the topology has that in the host's time of an operator."""
        dtype = str((*self.fresh, *self.operands)[0].dtype).removeprefix("torch.")
        seconds = work_seconds(flops, self._nbytes(), topology, dtype)
        return seconds - topology.launch if topology.dispatch else seconds

    def _nbytes(self) -> int:
        """The bytes that are read or written; of what indices name as many entries as the largest other tensor has."""
        first, *others = (*self.operands, *self.fresh)
        entries = first.numel()
        if self.func.overloadpacket in _BY_INDEX:
            entries = min(entries, max([x.numel() for x in others], default=0))
        return entries * first.element_size() + sum([x.numel() * x.element_size() for x in others])


def strided_in(tree: object) -> list[Tensor]:
    """The tensors among the leaves that have a storage, which sparse gradients do not."""
    return [x for x in tensors_in(tree) if x.layout == torch.strided]


@plain()
@disable_modes()
def seconds_of_local_work(run: Callable[[], object], topology: Topology) -> float:
    """Seconds of the operators that `run` calls on plain tensors without data, as the timeline of a step has them."""
    calls: list[LocalCall] = []

    def called(func: Any, args: Args, kwargs: Kwargs) -> object:
        operands = strided_in((args, kwargs))
        before = {x.untyped_storage()._cdata for x in operands}
        out = func(*args, **kwargs)
        fresh = [x for x in strided_in(out) if x.untyped_storage()._cdata not in before]
        calls.append(LocalCall(func, args, kwargs, out, operands, fresh))
        return out

    with torch.no_grad(), for_shapes(), OperatorMode(called):
        run()
    return sum(call.seconds(call.flops(), topology) for call in calls if call.works)


def _with_all_heads(args: Args) -> Args:
    """The arguments of attention, tensors by their shapes, with as many heads in keys and values as in queries.

    torch 2.11 counts no attention of grouped heads.
    """
    heads = max(x.shape[1] for x in args if isinstance(x, Tensor) and x.dim() == 4)
    return tuple((len(x), heads, *x.shape[2:]) if isinstance(x, Tensor) and x.dim() == 4 else x for x in args)


def writes(op: str) -> bool:
    """Whether the operator of this name writes to its operand.

    >>> writes("aten.add_.Tensor"), writes("aten.add.Tensor"), writes("linear backward")
    (True, False, False)
    """
    return op.partition(".")[2].partition(".")[0].endswith("_")


def host_seconds(op: str, topology: Topology) -> float:
    """Measured seconds of the host for the distributed operator of this name; 0 if not measured."""
    return topology.in_place if writes(op) else topology.dispatch
