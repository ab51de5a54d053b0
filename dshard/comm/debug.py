"""With DSHARD_DEBUG=1 the ranks compare plans and draws before they run them: to diverge is an error, not a hang."""

from __future__ import annotations

import os
from collections import defaultdict

import torch

from dshard.comm import transport
from dshard.comm.runtime import Group, Runtime, runtime_of, simulated_ranks
from dshard.comm.spread import device_of
from dshard.errors import MeshError
from dshard.mesh import Mesh
from dshard.redistribute import Plan

WIDTH = 512
"""Bytes of a text that the ranks show each other."""


def enabled() -> bool:
    """Whether plans are compared."""
    return os.environ.get("DSHARD_DEBUG", "0") not in ("", "0")


def compare(plan: Plan, runtime: Runtime) -> None:
    """Go on only if every rank of the mesh is about to run the same plan.

    Raises:
        MeshError: on every rank, naming who is about to run what.
    """
    compare_on(f"{tuple(plan.shape)} {plan}", runtime.group(runtime.mesh.names), device_of(runtime.mesh))


def compare_on(text: str, group: Group, device: torch.device) -> None:
    """Go on only if every rank of the group is about to run the same plan, which `text` describes.

    Raises:
        MeshError: on every rank, naming who is about to run what.
    """
    found = _told(text, group, device)
    if len(found) > 1:
        listed = "; ".join(f"ranks {ranks} run {text}" for text, ranks in found.items())
        raise MeshError(f"the ranks are about to run different plans, so their programs have diverged: {listed}")


def compare_draws(text: str, mesh: Mesh) -> None:
    """In the debug mode, go on only if every rank of the mesh is about to draw the same random numbers.

    Raises:
        MeshError: on every rank, naming who is about to draw what.
    """
    runtime = runtime_of(mesh) if enabled() and simulated_ranks() is None else None
    if runtime is None or runtime.coordinate is None:
        return
    found = _told(text, runtime.group(mesh.names), device_of(mesh))
    if len(found) > 1:
        listed = "; ".join(f"ranks {ranks} make {text}" for text, ranks in found.items())
        raise MeshError(
            "the ranks are about to draw different random numbers, so their seeds or their programs have diverged: "
            f"{listed}; call dshard.manual_seed with one seed on all of them"
        )


def _told(text: str, group: Group, device: torch.device) -> dict[str, list[int]]:
    """What the ranks of the group tell each other, and who says it."""
    row = text.encode()[:WIDTH].ljust(WIDTH)
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    rows = transport.all_gather(mine, [WIDTH] * len(group.ranks), group).view(-1, WIDTH).cpu()
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, said in zip(group.ranks, rows, strict=True):
        found[bytes(said.tolist()).decode(errors="replace").strip()].append(rank)
    return found
