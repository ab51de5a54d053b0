"""The one door to torch.distributed: plans run here, and every collective is told to whoever listens."""

from dshard.comm.agree import checked_shape, global_shape, same_replicas, same_topology
from dshard.comm.debug import compare_draws
from dshard.comm.events import Event, listen
from dshard.comm.run import run, runner
from dshard.comm.runtime import (
    FORGET,
    DeviceMesh,
    LocalTensor,
    Runtime,
    bind,
    device_mesh_of,
    init_device_mesh,
    ranks_per_host,
    runtime_of,
    simulated_ranks,
)
from dshard.comm.simulate import each, plain, stack, unstack
from dshard.comm.spread import cut, device_of, local_of, spread

__all__ = [
    "FORGET",
    "DeviceMesh",
    "Event",
    "LocalTensor",
    "Runtime",
    "bind",
    "checked_shape",
    "compare_draws",
    "cut",
    "device_mesh_of",
    "device_of",
    "each",
    "global_shape",
    "init_device_mesh",
    "listen",
    "local_of",
    "plain",
    "ranks_per_host",
    "run",
    "runner",
    "runtime_of",
    "same_replicas",
    "same_topology",
    "simulated_ranks",
    "spread",
    "stack",
    "unstack",
]
