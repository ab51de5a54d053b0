"""The one door to torch.distributed: plans run here, and every collective is told to whoever listens."""

from dshard.comm.agree import (
    checked_shape,
    gather_objects,
    global_shape,
    group_rank,
    same_replicas,
    same_topology,
    shape_exchange,
    share,
)
from dshard.comm.alarm import tell_failure
from dshard.comm.debug import compare_draws
from dshard.comm.events import Event, listen
from dshard.comm.functional import outside_graphs, traced
from dshard.comm.later import Awaited, Later, Start, starter
from dshard.comm.legs import Flight, Leg, Program, Request, begin, finish, flat, legs_of, passing, same_memory
from dshard.comm.mail import fetch, leave, peek
from dshard.comm.parts import split_graph
from dshard.comm.perform import drive, perform, rehearse
from dshard.comm.reshard import Resharding, begin_reshard, crossing_event, reshard
from dshard.comm.run import collectives_of, run, runner, swap
from dshard.comm.runtime import (
    FORGET,
    DeviceMesh,
    LocalTensor,
    Runtime,
    bind,
    current_mesh,
    device_mesh_of,
    group_of,
    init_device_mesh,
    planning,
    ranks_per_host,
    runtime_of,
    simulated_ranks,
)
from dshard.comm.simulate import each, plain, stack, unstack
from dshard.comm.spread import cut, device_of, local_of, scatters, spread
from dshard.comm.transfer import Local
from dshard.comm.turns import take_turns
from dshard.comm.workspace import WORKSPACE, Session, Workspace

__all__ = [
    "FORGET",
    "WORKSPACE",
    "Awaited",
    "DeviceMesh",
    "Event",
    "Flight",
    "Later",
    "Leg",
    "Local",
    "LocalTensor",
    "Program",
    "Request",
    "Resharding",
    "Runtime",
    "Session",
    "Start",
    "Workspace",
    "begin",
    "begin_reshard",
    "bind",
    "checked_shape",
    "collectives_of",
    "compare_draws",
    "crossing_event",
    "current_mesh",
    "cut",
    "device_mesh_of",
    "device_of",
    "drive",
    "each",
    "fetch",
    "finish",
    "flat",
    "gather_objects",
    "global_shape",
    "group_of",
    "group_rank",
    "init_device_mesh",
    "leave",
    "legs_of",
    "listen",
    "local_of",
    "outside_graphs",
    "passing",
    "peek",
    "perform",
    "plain",
    "planning",
    "ranks_per_host",
    "rehearse",
    "reshard",
    "run",
    "runner",
    "runtime_of",
    "same_memory",
    "same_replicas",
    "same_topology",
    "scatters",
    "shape_exchange",
    "share",
    "simulated_ranks",
    "split_graph",
    "spread",
    "stack",
    "starter",
    "swap",
    "take_turns",
    "tell_failure",
    "traced",
    "unstack",
]
