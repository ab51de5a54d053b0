"""With DSHARD_DEBUG=1 the ranks compare plans before they run them: a divergence is an error everywhere, not a hang."""

from __future__ import annotations

import os
from collections import defaultdict

import torch

from dshard.comm import transport
from dshard.comm.runtime import Runtime
from dshard.comm.spread import device_of
from dshard.errors import MeshError
from dshard.redistribute import Plan

WIDTH = 512
"""Bytes of a plan's text that the ranks show each other."""


def enabled() -> bool:
    """Whether plans are compared."""
    return os.environ.get("DSHARD_DEBUG", "0") not in ("", "0")


def compare(plan: Plan, runtime: Runtime) -> None:
    """Go on only if every rank of the mesh is about to run the same plan.

    Raises:
        MeshError: on every rank, naming who is about to run what.
    """
    text = f"{tuple(plan.shape)} {plan}".encode()[:WIDTH].ljust(WIDTH)
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device_of(plan.src.mesh))
    group = runtime.group(plan.src.mesh.names)
    rows = transport.all_gather(mine, [WIDTH] * len(group.ranks), group).view(-1, WIDTH).cpu()
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, row in zip(group.ranks, rows, strict=True):
        found[bytes(row.tolist()).decode(errors="replace").strip()].append(rank)
    if len(found) > 1:
        listed = "; ".join(f"ranks {ranks} run {text}" for text, ranks in found.items())
        raise MeshError(f"the ranks are about to run different plans, so their programs have diverged: {listed}")
