"""The parts of torch's own distributed tensors that dshard uses; imported late, as torch's module is slow.

Design: docs/design/0016-a-torch-dtensor.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from dshard.torch_private import late, make_wrapper_subclass

DTensorSpec: Any = late("torch.distributed.tensor._dtensor_spec.DTensorSpec")
ShardOrderEntry: Any = late("torch.distributed.tensor._dtensor_spec.ShardOrderEntry")
TensorMeta: Any = late("torch.distributed.tensor._dtensor_spec.TensorMeta")
TorchStridedShard: Any = late("torch.distributed.tensor.placement_types._StridedShard")


class _Probe(TorchDTensor):
    """A subclass that implements every operator itself."""

    _spec: Any = None

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        return torch.ones(1, device="cpu")


def _carries_subclasses() -> bool:
    """Whether torch dispatches operators on a subclass of its class to that, not to its own dispatch.

    torch 2.11 treats every instance of its class as its own: its C++ code reads a spec that it did not make.
    """
    try:
        return bool(make_wrapper_subclass(_Probe, (1,)).neg())
    except (AttributeError, RuntimeError, TypeError):
        return False


IS_TORCHS = _carries_subclasses()
"""Whether `dshard.DTensor` can derive from torch's; otherwise it derives from `Tensor` alone."""
if TYPE_CHECKING:
    Base = TorchDTensor
else:
    Base = TorchDTensor if IS_TORCHS else Tensor


def counts_plain_as_replicated() -> bool:
    """Whether the call is within torch's `implicit_replication`."""
    allowed: bool = TorchDTensor._op_dispatcher._allow_implicit_replication
    return allowed


def with_placements_of_dshard(x: TorchDTensor) -> TorchDTensor:
    """`x` with torch's partial placements that dshard lacks, norms and masked sums, replicated."""
    if not any(type(p).__name__ in _OWN_PARTIALS for p in x.placements):
        return x
    return x.redistribute(placements=[TorchReplicate() if p.is_partial() else p for p in x.placements])


_OWN_PARTIALS = ("_NormPartial", "_MaskPartial")
"""The names of torch's partial placements with reductions of their own."""


def strided_placements(x: TorchDTensor) -> tuple[TorchPlacement, ...]:
    """The placements of `x`, with strided ones in place of an order of the mesh axes in torch's spec."""
    spec: Any = x._spec
    if spec.shard_order and not spec.is_default_device_order(spec.shard_order):
        return spec._convert_shard_order_to_StridedShard(spec.shard_order, spec.placements, x.device_mesh)  # type: ignore[no-any-return]
    return spec.placements  # type: ignore[no-any-return]
