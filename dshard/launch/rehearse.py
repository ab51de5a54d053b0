"""Rehearsal of a step: all ranks run the local work concurrently, and the collectives are priced."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from dshard.core.context import use_topology
from dshard.launch.group import Send, run_ranks
from dshard.launch.processes import share_cores
from dshard.simulate import record
from dshard.topology import Topology
from dshard.torch_private import late


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A step whose local work was measured.

    Attributes:
        local: Seconds of local work on each rank, with dispatch and autograd: the median of its steps.
        network: Seconds of the collectives of the first rank, one after the other, as the topology prices them.
        nbytes: Bytes that the first rank would receive.
    """

    local: tuple[float, ...]
    network: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a step: the local work of the slowest rank plus the network, without overlap."""
        return max(self.local) + self.network


def rehearse(
    make: Callable[..., Callable[[], object]], *args: object, ranks: int, topology: Topology, steps: int = 9
) -> Rehearsed:
    """Predict the seconds of a step by running it on all ranks without a network.

    `make(*args)` is called on each of `ranks` processes of this host, and returns the step. It is pickled, so it is a
    function of a module. It runs with a process group that sends nothing (torch's "fake" backend), creates meshes on
    it, and distributes a model. The computation of the step is real, and so is the sharing of cores and memory by the
    ranks; received tensors are uninitialised, so values, and errors that depend on them, mean nothing. Strategies are
    chosen on the `topology`, which also prices the collectives; measure it with `Topology.measure`.

    Raises:
        RankError: `make` or the step failed on a rank.
    """
    job = partial(_rehearse, make, args, topology, ranks, steps)
    measurements = run_ranks(job, ranks, patience=600.0)
    _, network, nbytes = measurements[0]
    return Rehearsed(tuple(local for local, _, _ in measurements), network, nbytes)


def _rehearse(
    make: Callable[..., Callable[[], object]],
    args: tuple[object, ...],
    topology: Topology,
    ranks: int,
    steps: int,
    rank: int,
    meet: str,
    send: Send,
) -> tuple[float, float, int]:
    """Seconds of local work and of the network, and bytes received, of one rank."""
    share_cores()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    late("torch.testing._internal.distributed.fake_pg")  # its import registers the backend
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    with use_topology(topology):
        step = make(*args)
        recorded = record(step)
        _meet_all(meet, ranks)
        times = [_seconds(step) for _ in range(steps + 1)]
    events = [slot.event for slot in recorded.slots]
    network = sum(event.seconds for event in events if event.queue == "network")
    return statistics.median(times[1:]), network, recorded.nbytes


def _meet_all(meet: str, ranks: int) -> None:
    """Wait until all ranks have made this call."""
    store = FileStore(urlsplit(meet).path, ranks)
    store.add("here", 1)
    while store.add("here", 0) < ranks:
        time.sleep(0.01)


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
