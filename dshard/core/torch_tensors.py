"""Distributed tensors of torch's own class, or of another library's that derives from it, as dshard's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

from dshard.comm import as_mesh
from dshard.core.signature import Args, Kwargs
from dshard.core.torch_placements import check_blocks_of_torch
from dshard.core.trees import replace_leaves
from dshard.core.wrapper import Wrapper
from dshard.layout import layout_of
from dshard.torch_dtensor import TorchDTensor, strided_placements, with_placements_of_dshard


def is_torchs(x: object) -> TypeGuard[TorchDTensor]:
    """Whether `x` is a distributed tensor of torch's own class, or of another library's that derives from it."""
    return isinstance(x, TorchDTensor) and not isinstance(x, Wrapper)


def from_torch(x: TorchDTensor) -> Any:
    """torch's distributed tensor `x` as a dshard tensor of the same memory. Differentiable.

    Raises:
        LayoutError: strided placements that no order of the mesh axes makes, or uneven parts of blocks.
    """
    x = with_placements_of_dshard(x)
    placements = strided_placements(x)
    check_blocks_of_torch(layout_of(as_mesh(x.device_mesh), placements, x.ndim), tuple(x.shape))
    return Wrapper.public.from_local(x.to_local(), x.device_mesh, placements, shape=x.shape, stride=x.stride())


def are_torchs(kinds: Iterable[type]) -> bool:
    """Whether there is a class among `kinds` of distributed tensors of torch's."""
    return True in [issubclass(kind, TorchDTensor) and not issubclass(kind, Wrapper) for kind in kinds]


def from_torchs(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments, with torch's distributed tensors as dshard's."""
    return replace_leaves((args, kwargs), lambda leaf: from_torch(leaf) if is_torchs(leaf) else leaf)  # type: ignore[no-any-return]
