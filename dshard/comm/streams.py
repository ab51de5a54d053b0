"""Streams of a GPU: the current one, and waits of one stream for another.

Collectives run on a stream of their process group, which follows the stream that is current at their begin; the stream
that is current at a wait follows theirs. These functions are for tensors from several streams, such as gradients in a
backward pass, which runs each operator on the stream of its forward pass.

Design: docs/design/0018-streams.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from dshard.mesh import Mesh

Stream: TypeAlias = torch.Stream
CURRENT: dict[str, Callable[[torch.device], Stream]] = {"cuda": torch.cuda.current_stream}
"""Functions that return the current stream, by type of device; other devices have no streams."""


def current_stream(device: torch.device) -> Stream | None:
    """The current stream of a device; None for a device without streams."""
    find = CURRENT.get(device.type)
    return None if find is None else find(device)


def follow(stream: Stream | None, tensors: Iterable[Tensor]) -> None:
    """Let the current stream follow `stream`, from which it uses these tensors.

    Their memory is then not reused before the current stream, too, is done with it: the caching allocator knows only
    the stream on which it was allocated.
    """
    if stream is None:
        return
    for x in tensors:
        now = current_stream(x.device)
        if now is not None and now != stream:
            now.wait_stream(stream)
            x.record_stream(now)


def is_captured(mesh: Mesh) -> bool:
    """Whether the current stream of a device of the mesh is captured in a graph, within which nothing may wait."""
    # A mesh may be one to plan for, on a machine without GPUs: there torch raises where CUDA was built in.
    is_used = mesh.device_type == "cuda" and torch.cuda.is_initialized()
    return is_used and torch.cuda.is_current_stream_capturing()
