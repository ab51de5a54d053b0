"""What a rank holds, on real ranks: on the way of a redistribution, counted from the storages alive after each
operator; at the peak of a training step, counted by torch's allocator.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.held_memory import Held
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dshard import Mesh
from dshard.comm import DeviceMesh, Transfer, bind, run, steps_of, transport
from dshard.comm.collective import Collective
from dshard.core.context import planning_context
from dshard.mesh import Coordinate
from dshard.placements import REDUCE_OPS
from dshard.redistribute import Plan, plan
from dshard.testing import RankPool, Redistribution, distribute, redistributions, shapes, whole_numbers
from dshard.topology import BYTES, Topology

MESHES = (
    Mesh((4,), ("tp",)),
    Mesh((2, 2), ("dp", "tp")),
    Mesh((2, 1, 2), ("pp", "dp", "tp")),
    Mesh((4,), ("x",), (3, 1, 0, 2)),
)
DTYPE = torch.float64
BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")


@cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's mesh of the same ranks; every rank of the world must come here."""
    made = DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape), mesh_dim_names=mesh.names)
    assert bind(made) == mesh
    return made


def message(found: Plan, at: Coordinate) -> int:
    """The largest message: all that the rank gives to one collective, or gets of it."""
    steps = [step for step in steps_of(found, None, at, DTYPE, "gloo") if isinstance(step, Transfer)]
    sizes = [
        max(sum(c.send) * copies(c), sum(c.recv), step.elements + c.send[c.index % len(c.send)])
        for step in steps
        for c in [step.collective]
    ]
    return max(sizes, default=0)


def copies(collective: Collective) -> int:
    """What is gathered goes to each rank."""
    return len(collective.ranks) if collective.kind == "all_gather" else 1


def above_the_limit(batch: list[Redistribution], few_bytes: int) -> list[str]:
    """The lean plans that hold more than they may on this rank, beside what they were given."""
    wrong, kept = [], transport._FEW_BYTES
    transport._FEW_BYTES = few_bytes
    try:
        for src, dst, shape in batch:
            device_mesh(src.mesh)
            at = src.mesh.coordinate(dist.get_rank())
            x = distribute(whole_numbers(shape, DTYPE), src)._local_tensor
            topologies: list[Topology] = [planning_context().topology_of(src.mesh), BYTES]
            for topology in topologies:
                found = plan(src, dst, shape, DTYPE.itemsize, topology)
                end = max(src.local_numel(shape), dst.local_numel(shape))
                copied = len(src.mesh.ranks) * end if few_bytes else 0  # few are given as a copy for each rank
                limit = (end + copied + message(found, at)) * DTYPE.itemsize
                with Held(x, limit=limit) as held:
                    run(found, x)
                if held.most > limit:
                    wrong.append(f"{found}\nof {shape}, rank at {at}: held {held.most} bytes of at most {limit}")
    finally:
        transport._FEW_BYTES = kept
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("few_bytes", [0, 2**18])
@settings(max_examples=max(1, settings().max_examples // 12), phases=[Phase.generate])
@given(st.data())
def test_a_lean_plan_holds_the_larger_end_and_one_message(
    ranks: RankPool, cases_run: Counter[str], few_bytes: int, data: st.DataObject
) -> None:
    cases = redistributions(st.sampled_from(MESHES), shapes(max_size=9), partial=REDUCE_OPS)  # type: ignore[arg-type]
    batch = data.draw(st.lists(cases, min_size=20, max_size=20))
    cases_run["lean plans whose memory was counted"] += len(batch)

    assert ranks.run(above_the_limit, batch, few_bytes) == [[]] * 4


SMALL, WIDE = (8, 32, 64, 4, 256, 128), (8, 64, 256, 8, 1024, 512)


def peaks_of_one_of_four(size: tuple[int, ...]) -> dict[str, int]:
    """The most bytes given out at once in a step of a small GPT on a rank whose peers are not there, and on its own."""
    sys.path.insert(0, BENCHMARKS)
    from gpt import Size  # noqa: PLC0415  # found beside the benchmarks
    from training import local_step, ours, peak_of, training_step  # noqa: PLC0415

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4)
    mesh = ours.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    steps = {"dshard": training_step(ours, Size(*size), mesh, 1), "local": local_step(Size(*size), 1)}
    for step in steps.values():
        step()
    return {name: peak_of(step) for name, step in steps.items()}


@pytest.mark.ranks
def test_a_training_step_holds_no_more_than_that_of_the_local_parts() -> None:
    with RankPool(1) as pool:
        (peaks,) = pool.run(peaks_of_one_of_four, SMALL)

    assert peaks["dshard"] <= peaks["local"]


def peaks_of_both(size: tuple[int, ...]) -> dict[str, int]:
    """The same of this library and torch's, of many steps on real ranks."""
    sys.path.insert(0, BENCHMARKS)
    from gpt import Size  # noqa: PLC0415
    from training import peaks_of, training_steps  # noqa: PLC0415

    steps = training_steps(Size(*size))
    for step in steps.values():
        step()
    return peaks_of(steps)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("size", [SMALL, WIDE], ids=["small", "wide"])
def test_a_training_step_holds_no_more_than_that_of_torchs_dtensor(ranks: RankPool, size: tuple[int, ...]) -> None:
    """Of models of several buckets: gradients of a single one are packed all at once, beside its buffer."""
    for peaks in ranks.run(peaks_of_both, size, timeout=300.0):
        assert peaks["dshard"] <= peaks["torch"]
