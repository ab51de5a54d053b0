"""Short messages between ranks beside all process groups: left in the store that the ranks met at."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from dshard.comm import transport
from dshard.comm.runtime import Group

_LIMIT = timedelta(seconds=300)


def leave(key: str, value: object) -> None:
    """Leave a value under a key, for any rank to read."""
    _store().set(key, pickle.dumps(value))


def fetch(key: str, seconds: float | None = None) -> Any:
    """The value under a key; waits until some rank has left it.

    Raises:
        RuntimeError: nobody did within the time limit.
    """
    store = _store()
    store.wait([key], _LIMIT if seconds is None else timedelta(seconds=seconds))
    return pickle.loads(store.get(key))


def peek(key: str) -> Any:
    """The value under a key, or None if nobody has left one, or the store is gone."""
    try:
        store = _store()
        return pickle.loads(store.get(key)) if store.check([key]) else None
    except (RuntimeError, OSError):
        return None


def share(x: Tensor | None, source: int, group: Group, device: torch.device) -> Tensor:
    """A number that the rank `source` has, as a double of no dim on all ranks of the group."""
    number = torch.zeros(1, dtype=torch.float64, device=device)
    if x is not None:
        number.fill_(x.detach().item())
    return transport.broadcast(number, group.ranks.index(source), group).squeeze(0)


def _store() -> Any:
    return distributed_c10d._get_default_store()
