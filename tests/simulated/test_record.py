"""A step simulated without processes sends, computes and holds what the same step does on real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dshard import DeviceMesh, Mesh, parallelize, use_topology
from dshard.comm import init_device_mesh
from dshard.comm.workspace import WORKSPACE
from dshard.core.comparisons import nothing_compared
from dshard.simulate import Event, Recorded, record
from dshard.step_timeline import makespan, place_events
from dshard.testing import rank_pool
from dshard.tools.demo.train import example, find, loss_of
from dshard.tools.demo.vit import build
from dshard.topology import Measured, Topology

WAIT = 300.0  # seconds on a busy machine
NETWORK = Topology.preset("cpu")


def step_of(name: str, mesh: DeviceMesh | Mesh, device: str, network: Topology = NETWORK) -> Recorded:
    """A step of the demo's model, recorded."""
    model = build(0).to(device)
    parallelize(model, mesh, find(name).plan, example(torch.float32, batch=16))
    images, labels = torch.zeros(16, 8, 8, device=device), torch.zeros(16, dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, images, labels, mesh).backward()
        optimizer.step()

    with use_topology(network), nothing_compared():  # as between simulated ranks
        return record(step)


def on_ranks(name: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Recorded:
    """The same, on ranks that have no buffers yet."""
    WORKSPACE.clear()
    return step_of(name, init_device_mesh("cpu", shape, mesh_dim_names=names), "cpu")


QUICK = [("data x tensor", 4)]
CASES = [
    pytest.param(name, ranks, id=f"{name} {ranks}", marks=[] if (name, ranks) in QUICK else pytest.mark.thorough)
    for ranks in (4, 8)
    for name in ("data", "megatron", "data x tensor", "summa", "atp", *["tesseract"] * (ranks > 4))
]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_simulated_and_real_steps_are_the_same(name: str, ranks: int) -> None:
    mesh = find(name).on(ranks)
    assert mesh is not None
    simulated = step_of(name, replace(mesh, device_type="cpu"), "meta")
    every = rank_pool(ranks).run(on_ranks, name, mesh.shape, mesh.names, timeout=WAIT)
    first = every[0]  # whose parts are the largest where nothing divides
    assert (simulated.peak, simulated.held) == (first.peak, first.held)
    assert all(rank.peak <= first.peak for rank in every)
    assert simulated.flops == first.flops > 0
    planned, *sent = [[s.event for s in found.slots if s.event.collectives] for found in (simulated, *every)]
    for event, *real in zip(planned, *sent, strict=True):
        assert {event.name} == {found.name for found in real}
        assert event.nbytes == max(found.nbytes for found in real)
    assert simulated.nbytes > 0


def test_overlap_never_takes_longer_and_hides_no_more_than_there_is() -> None:
    work, sent = Event("a", "compute", 1.0), Event("b", "network", 2.0, waits=False)
    blocking, partly, hidden = (
        makespan(place_events([work, replace(sent, overlap=overlap)] * 3)) for overlap in (0.0, 0.25, 1.0)
    )
    assert (blocking, partly, hidden) == (9.0, 8.0, 7.0)


def test_a_collective_hides_behind_work_as_was_measured_along_its_axes() -> None:
    mesh = find("data").on(4)
    assert mesh is not None
    axis, pairs = mesh.names[0], Mesh((2, 2), ("a", "b"))
    slow = Topology.flat(1e8, 1e-7)  # on which gradients are of several buckets

    def seconds(own: float | None, others: float = 0.5) -> float:
        figures = [
            Measured(mesh, (axis,), 1e-4, 1e8, "all_to_all", overlap=own),
            Measured(pairs, ("a",), 1e-4, 1e8, "all_reduce", overlap=others),
        ]
        return step_of("data", replace(mesh, device_type="cpu"), "meta", slow.with_measured(figures)).seconds

    assert seconds(0.0) > seconds(0.5) >= seconds(1.0)
    assert seconds(1.0, others=0.0) == seconds(1.0) == seconds(None)  # which is the device's
