"""Run plans on process groups: the one package that talks to torch.distributed.

A plan is run in these stages, each in a file:

- `program_steps`: the plan, or a panel of it, as the steps of one rank. Some are local, the others transfers, with the
  `pieces` of the local tensors that they send and receive, and a `collective` as a value.
- `drive`: the steps as a generator, which begins collectives and waits for them later, in buffers of a `workspace`.
- `world`: where local tensors live, and so where programs run: on processes, in a graph, for all ranks in one process
  (`run_in_step`), or without data; `rank_tensors`: what callers ask of them. `run`: plans, exchanges and programs,
  wherever their tensors live.
- `joined`: several plans of one collective each, as one collective.
- `transport`: launches a collective by one of the primitives in `collectives`, and tells listeners (`events`).
- `backends`: what each backend can do, the one table that all of these ask.
- `peer_failure`: waits for a collective, unless another rank has failed or is in deadlock; `graph_collectives`: the
  same for collectives of compiled graphs, and graphs split for pipelines; `traced_collectives`: those that torch
  traces; `told_waits`: long waits.

`runtime` binds meshes to `process_groups`. `reshard` runs plans between meshes, in sends and receives, with the
buffers of a rank. `agreement` exchanges shapes and values, `scatter_shards` distributes global tensors,
`stored_chunks` describes them to checkpoints; `rank_checks` compares programs in debug mode, `even_parts` assumed local
shapes. Ranks leave `store_messages` for each other; `recorded_calls` tells a recording of a step what is no operator.
All of these use `scoped` values, `streams` of a GPU, and the line of `user_code`.
"""

from dshard.comm.agreement import (
    COLLECTIVES_OF_TORCH,
    NOTED_ROWS,
    WAITED_FOR,
    MeshesOfRows,
    begin_rows,
    checked_shape,
    even_shape,
    gather_objects,
    gather_rows,
    global_shape,
    group_of_hosts,
    group_rank,
    ranks_in,
    ranks_of_group,
    same_replicas,
    same_topology,
    shape_exchange,
    share,
    text_of_first,
    with_waits,
)
from dshard.comm.backends import EMULATED, HALF, NCCL_CONTRACT, check_reduced, kernel_device, sum_dtype
from dshard.comm.collective import Collective
from dshard.comm.collectives import Factor
from dshard.comm.drive import Program, Request, begin, program_of, redistributed, request_alone, same_memory
from dshard.comm.events import MOVES, CommEvent, listen, measuring
from dshard.comm.graph_collectives import split_graph, wait_in_graphs_as_in_eager
from dshard.comm.joined import Lane, joined, joined_received, lane_of
from dshard.comm.peer_failure import (
    is_from_peer,
    is_published,
    leave_word,
    mark_raised_by_all,
    publish_failure,
    watch_backward,
)
from dshard.comm.pieces import JoinedViews
from dshard.comm.program_steps import Steps, Transfer, flat_exchange, send_receive, steps_of
from dshard.comm.rank_checks import are_alike, checksum, compare_calls, compare_draws, compare_replicas, digest
from dshard.comm.rank_checks import enabled as comparing
from dshard.comm.rank_tensors import (
    are_mixed,
    are_simulated,
    by_rank,
    has_data,
    has_only_shape,
    is_absent,
    is_alike_on_simulated,
    is_any_meta,
    is_own,
    mapped,
    neutral_state,
    of_first_rank,
    of_rank,
    on_all_ranks,
    on_each,
    plain,
    stack,
    with_form,
)
from dshard.comm.recorded_calls import (
    DRAW,
    ENDS,
    RECORDERS,
    numbers_of,
    recorded,
    recorder,
    recording_calls,
)
from dshard.comm.reshard import Resharding, begin_reshard, crossing_event, reshard
from dshard.comm.run import collectives_of, run, run_number, run_program, runner, swap
from dshard.comm.runtime import (
    FORGET,
    DeviceMesh,
    LocalTensor,
    Runtime,
    as_mesh,
    bind,
    break_off,
    check_world,
    current_mesh,
    device_mesh_of,
    group_of,
    group_with_data,
    init_device_mesh,
    is_first_rank,
    is_outside,
    on_one_host,
    own_coordinate,
    planned_backend,
    planning,
    ranks_of_root,
    ranks_per_host,
    runtime_of,
    simulated_ranks,
    taking_part,
)
from dshard.comm.scatter_shards import (
    device_of,
    device_of_result,
    local_of,
    local_part,
    local_shard,
    on_device_of,
    scatter_shards,
    scatters,
)
from dshard.comm.scoped import Changes, Scoped, ScopedState
from dshard.comm.store_messages import fetch, peek, put
from dshard.comm.streams import Stream, current_stream, follow, is_captured
from dshard.comm.told_waits import read_number, tell_waits
from dshard.comm.traced_collectives import (
    begin_backward,
    depending_on,
    is_any_traced,
    keep_moves,
    outside_graphs,
    traced,
    with_results_apart,
)
from dshard.comm.user_code import user_frame, user_line, warn_here, warn_user
from dshard.comm.workspace import Session
from dshard.comm.world import Moving, Once, run_without_data
