"""Invented measured figures, and meshes for them."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

from dshard import Topology, init_device_mesh
from dshard.comm import DeviceMesh
from dshard.tools.calibrate import rounds


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def measured(shape: tuple[int, ...], base: Topology | None) -> tuple[Topology, list[tuple[float, str]]]:
    heard: list[tuple[float, str]] = []
    with patch.object(rounds, "WINDOW", 0.005):  # long ones are for figures that are used
        topology = Topology.measure(
            mesh_of(shape),
            base=base,
            sizes=(1 << 12, 1 << 16, 1 << 18),
            seconds=0.03,
            progress=lambda done, what: heard.append((done, what)),
        )
    return topology, heard
