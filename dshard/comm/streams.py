"""Streams of a GPU: which one is current, and letting it follow another.

Collectives run on a stream of their process group, which follows the stream that is current at their begin; the stream
that is current at a wait follows theirs. What is here is for tensors that come from several streams, as gradients in a
backward pass, which runs each operator on the stream of its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor

Stream: TypeAlias = torch.Stream
_CURRENT: dict[str, Callable[[torch.device], Stream]] = {"cuda": torch.cuda.current_stream}
"""The current stream of a device, by its type; the others have none."""


def current_stream(device: torch.device) -> Stream | None:
    """The stream on which a device runs what is launched now; None for a device without streams."""
    find = _CURRENT.get(device.type)
    return None if find is None else find(device)


def follow(stream: Stream | None, tensors: Iterable[Tensor]) -> None:
    """Let the current stream follow `stream`, from which it uses these tensors.

    Their memory is then not used again before the current stream, too, is done with them: the caching allocator knows
    only the stream on which it was allocated.
    """
    if stream is None:
        return
    for x in tensors:
        now = current_stream(x.device)
        if now is not None and now != stream:
            now.wait_stream(stream)
            x.record_stream(now)
