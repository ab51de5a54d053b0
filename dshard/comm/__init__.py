"""Run plans on process groups: the one package that talks to torch.distributed. Listeners hear of each collective."""

from dshard.comm.agreement import (
    checked_shape,
    gather_objects,
    global_shape,
    group_rank,
    same_replicas,
    same_topology,
    shape_exchange,
    share,
)
from dshard.comm.async_local import AsyncLocal, LazyLocal, Start, async_start
from dshard.comm.async_ops import (
    CollectiveOp,
    InFlight,
    Program,
    Request,
    begin,
    collective_ops_of,
    finish,
    flat,
    same_memory,
    send_receive,
)
from dshard.comm.async_run import advance, run_program, run_without_data
from dshard.comm.cpu_scheduling import share_cores
from dshard.comm.events import Event, listen
from dshard.comm.graph_split import split_graph
from dshard.comm.peer_failure import (
    is_heard,
    is_told,
    leave_word,
    mark_raised_by_all,
    publish_failure,
    watch_backward,
)
from dshard.comm.rank_checks import compare_calls, compare_draws
from dshard.comm.rank_checks import enabled as comparing
from dshard.comm.reshard import Resharding, begin_reshard, crossing_event, reshard
from dshard.comm.run import collectives_of, run, run_number, runner, swap
from dshard.comm.runtime import (
    FORGET,
    DeviceMesh,
    LocalTensor,
    Runtime,
    bind,
    break_off,
    current_mesh,
    device_mesh_of,
    group_of,
    init_device_mesh,
    planning,
    ranks_per_host,
    runtime_of,
    simulated_ranks,
)
from dshard.comm.scatter_shards import device_of, local_of, local_shard, scatter_shards, scatters
from dshard.comm.scoped import Scoped
from dshard.comm.simulated import each, plain, stack, unstack
from dshard.comm.store_messages import fetch, peek, put
from dshard.comm.traced_collectives import outside_graphs, traced
from dshard.comm.transfer import Local
from dshard.comm.user_code import user_line
from dshard.comm.workspace import WORKSPACE, Session, Workspace

__all__ = [
    "FORGET",
    "WORKSPACE",
    "AsyncLocal",
    "CollectiveOp",
    "DeviceMesh",
    "Event",
    "InFlight",
    "LazyLocal",
    "Local",
    "LocalTensor",
    "Program",
    "Request",
    "Resharding",
    "Runtime",
    "Scoped",
    "Session",
    "Start",
    "Workspace",
    "advance",
    "async_start",
    "begin",
    "begin_reshard",
    "bind",
    "break_off",
    "checked_shape",
    "collective_ops_of",
    "collectives_of",
    "compare_calls",
    "compare_draws",
    "comparing",
    "crossing_event",
    "current_mesh",
    "device_mesh_of",
    "device_of",
    "each",
    "fetch",
    "finish",
    "flat",
    "gather_objects",
    "global_shape",
    "group_of",
    "group_rank",
    "init_device_mesh",
    "is_heard",
    "is_told",
    "leave_word",
    "listen",
    "local_of",
    "local_shard",
    "mark_raised_by_all",
    "outside_graphs",
    "peek",
    "plain",
    "planning",
    "publish_failure",
    "put",
    "ranks_per_host",
    "reshard",
    "run",
    "run_number",
    "run_program",
    "run_without_data",
    "runner",
    "runtime_of",
    "same_memory",
    "same_replicas",
    "same_topology",
    "scatter_shards",
    "scatters",
    "send_receive",
    "shape_exchange",
    "share",
    "share_cores",
    "simulated_ranks",
    "split_graph",
    "stack",
    "swap",
    "traced",
    "unstack",
    "user_line",
    "watch_backward",
]
