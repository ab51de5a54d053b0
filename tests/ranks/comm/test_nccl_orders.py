"""Messages between meshes under NCCL's contract: all ranks begin them in one order, pipelines by themselves."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.default_cases import one_in
from helpers.pipeline_models import LOSS, Where, errors, staged
from torch.distributed.device_mesh import DeviceMesh

from dshard.comm import begin_reshard, bind
from dshard.errors import RankError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.pipeline import Pipeline
from dshard.placements import Replicate, Shard
from dshard.reshard import plan_reshard
from dshard.testing import RankPool, nccl_contract, rank_pool
from dshard.topology import Topology

pytestmark = pytest.mark.ranks
STAGES = (Where((3,), (1,), "replicated"), Where((2, 0, 1), (3,), "data"))
FOUR = tuple(Where((rank,), (1,), "replicated") for rank in range(4))
SRC, DST = Mesh((2,), ("x",), (0, 1)), Mesh((2,), ("x",), (2, 3))


def piped(wheres: tuple[Where, ...], schedule: str) -> float:
    """The largest error of two steps of a U, whose values skip stages."""
    pipeline = Pipeline(staged("u", wheres), n_microbatches=3, schedule=schedule, loss=LOSS["u"])
    return max(*errors(pipeline, "u"), *errors(pipeline, "u"))


@pytest.mark.parametrize("wheres", one_in(2, [FOUR, STAGES]))
def test_stages_of_a_pipeline_begin_their_messages_in_one_order(wheres: tuple[Where, ...]) -> None:
    assert max(rank_pool(4, nccl_contract.BACKEND).run(piped, wheres, "eager-1f1b")) < 1e-12


@functools.cache
def meshes() -> tuple[DeviceMesh, ...]:
    made = tuple(DeviceMesh("cpu", list(mesh.ranks), mesh_dim_names=mesh.names) for mesh in (SRC, DST))
    assert tuple(map(bind, made)) == (SRC, DST)
    return made


def in_flight(order_there: tuple[int, ...]) -> list[bool]:
    """Two tensors in flight between the same ranks, which the destination begins in the order given."""
    meshes()
    src, dst = Layout(SRC, (Shard(0),)), Layout(DST, (Replicate(),))
    plan = plan_reshard(src, dst, (5, 3), 8, Topology.flat(1e9))
    rank, values = torch.distributed.get_rank(), [torch.arange(15.0).double().view(5, 3) + i for i in range(2)]
    order = (0, 1) if rank in SRC.ranks else order_there
    flights = {
        i: begin_reshard(plan, values[i].tensor_split([3])[rank] if rank in SRC.ranks else values[i][:0], tag=i)
        for i in order
    }
    received = [flights[i].finish() for i in (1, 0)][::-1]
    return [out is None or out.equal(value) for out, value in zip(received, values, strict=True)]


def test_plans_of_several_tags_are_in_flight_at_once() -> None:
    assert rank_pool(4, nccl_contract.BACKEND).run(in_flight, (0, 1)) == [[True, True]] * 4


@pytest.mark.thorough  # its processes cannot be used again
def test_plans_of_two_tags_begun_in_two_orders_are_an_error_that_names_both() -> None:
    with RankPool(4, nccl_contract.BACKEND) as pool:
        pool.run(in_flight, (0, 1))  # makes the process groups
        with pytest.raises(RankError, match=r"had begun group of messages at .*, on group .* before it, and rank"):
            pool.run(in_flight, (1, 0))
