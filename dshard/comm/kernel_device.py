"""The type of device by whose kernels operators run: under a contract of kernels, another than the tensors'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_EMULATED: dict[str, str] = {}


def kernel_device(device: torch.device) -> str:
    """The type of device by whose kernels, and with whose conventions, operators on tensors of `device` run."""
    kind = device.type
    return _EMULATED.get(kind, kind)


@contextmanager
def emulated_kernels(device: str, kernels: str) -> Iterator[None]:
    """Within the block operators on tensors of one type of `device` run by the `kernels` of another."""
    before = dict(_EMULATED)
    _EMULATED[device] = kernels
    try:
        yield
    finally:
        _EMULATED.clear()
        _EMULATED.update(before)
