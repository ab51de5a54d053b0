"""explain, trace and strict: every choice is shown with its price, every collective with its operator and line."""

from __future__ import annotations

import json
import os
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dshard import (
    DeviceMesh,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Replicate,
    Shard,
    Topology,
    cache_info,
    distribute_tensor,
    explain,
    init_device_mesh,
    strict,
    trace,
    use_topology,
)
from dshard.ops.matmul.bound import matmul_lower_bound
from dshard.testing import distribute, simulated

MESH = Mesh((4, 2), ("dp", "tp"))


def planned(*shape: int, placements):
    return distribute_tensor(torch.empty(shape, device="meta"), MESH, placements)


def row_parallel():
    return planned(64, 32, placements=[Shard(0), Shard(1)]), planned(16, 32, placements=[Replicate(), Shard(1)])


class TestExplain:
    def test_the_chosen_is_the_cheapest_candidate(self):
        report = explain(F.linear, *row_parallel())

        assert report.chosen.seconds == min(candidate.seconds for candidate in report.candidates)
        assert report.chosen.name == "dp:_0 tp:k"
        assert report.chosen.steps == ("reduce_scatter  tp  P(sum) -> S(0)",)

    def test_bytes_are_those_of_the_plans(self):
        chosen = explain(F.linear, *row_parallel()).chosen

        assert chosen.bytes_moved == (64 // 4) * 16 * 4 // 2, "a reduce_scatter over two ranks of the local output"

    def test_every_operator_of_a_function_is_explained(self):
        report = explain(lambda x, w: F.gelu(F.linear(x, w)).sum(), *row_parallel())

        assert [operator.op for operator in report.operators] == ["linear", "aten.gelu.default", "aten.sum.default"]

    def test_a_redistribution_that_was_asked_for_says_so(self):
        x = planned(64, 32, placements=[Shard(0), Shard(1)])

        report = explain(x.redistribute, placements=[Shard(0), Replicate()])

        assert report.operators[0].why == "asked for"
        assert report.chosen.steps == ("all_gather  tp  S(1) -> R",)

    def test_it_can_be_read_by_people_and_by_machines(self):
        report = explain(F.linear, *row_parallel())

        assert "chosen: dp:_0 tp:k, the cheapest; " in str(report)
        assert json.loads(report.to_json())[0]["chosen"]["name"] == report.chosen.name

    def test_the_topology_decides(self):
        """One slow axis: a topology on which the choice flips, and back, with nothing remembered across."""
        x = planned(256, 256, placements=[Shard(0), Replicate()])
        w = planned(256, 256, placements=[Shard(1), Replicate()])
        on_memory = Topology.flat(1e15, 0.0)

        with use_topology(on_memory):
            fast = explain(torch.mm, x, w).chosen
        with use_topology(Topology.flat(1e3, 0.0)):
            slow = explain(torch.mm, x, w).chosen

        assert fast.seconds < slow.seconds
        assert fast.compute_seconds == slow.compute_seconds

    def test_a_batch_is_no_product_with_a_bound(self):
        assert explain(F.gelu, row_parallel()[0]).chosen.bound_ratio is None


@pytest.mark.parametrize(
    ("m", "k", "n", "p", "mebi"),
    # from the bound's three cases for an MLP's first product: 1-D, 2-D and 3-D
    [
        (65536, 4096, 16384, 4, 48.0),
        (65536, 4096, 16384, 16, 44.0),
        (65536, 4096, 16384, 64, 27.0),
        (4096, 4096, 16384, 8, 12.24),
    ],
)
def test_the_lower_bound_of_a_product(m, k, n, p, mebi):
    assert matmul_lower_bound(m, k, n, p) / 2**20 == pytest.approx(mebi, abs=0.005)


class TestTrace:
    def test_events_name_operator_axis_bytes_and_line(self):
        with simulated(MESH), trace() as found:
            x = distribute(torch.randn(8, 6), Layout(MESH, (Shard(0), Shard(1))))
            w = distribute(torch.randn(4, 6), Layout(MESH, (Replicate(), Shard(1))))
            F.gelu(F.linear(x, w))

        (event,) = found.events
        assert (event.op, event.collective, event.axis) == ("aten.gelu.default", "all_reduce", "tp")
        assert event.nbytes == 2 * 4 * 4
        assert event.line.startswith(__file__)
        assert found.operators == ["linear", "aten.gelu.default"]

    def test_totals_by_axis_and_formats(self):
        with simulated(MESH), trace() as found:
            x = distribute(torch.randn(8, 8), Layout(MESH, (Partial(), Shard(1))))
            x.redistribute(placements=[Replicate(), Replicate()])

        by_axis = found.by("axis")
        assert sum(nbytes for _, nbytes in by_axis.values()) == found.nbytes == json.loads(found.to_json())["nbytes"]
        assert "total" in found.summary()
        assert len(json.loads(found.to_chrome())["traceEvents"]) == len(found.events) > 0


class TestStrict:
    def test_an_implicit_redistribution_names_operator_layouts_and_line(self):
        with simulated(MESH), strict():
            x = distribute(torch.randn(8, 8), Layout(MESH, (Partial(), Shard(1))))
            with pytest.raises(
                LayoutError,
                match=r"aten.relu.default at .*test_explain.py:\d+ would redistribute \[dp:P\(sum\) tp:S\(1\)\] -> ",
            ):
                x.relu()

    def test_what_is_asked_for_is_allowed(self):
        with simulated(MESH), strict():
            x = distribute(torch.randn(8, 8), Layout(MESH, (Partial(), Shard(1))))

            assert x.redistribute(placements=[Replicate(), Shard(1)]).relu().placements == (Replicate(), Shard(1))


def test_what_was_decided_is_remembered():
    with simulated(MESH):
        x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Shard(1))))
        x.tanh()
        before = cache_info()["executors"]
        x.tanh()

    assert cache_info()["executors"] == before > 0


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


def diverge() -> str:
    """Rank 1 asks for another layout than the others."""
    os.environ["DSHARD_DEBUG"] = "1"
    try:
        x = distribute_tensor(torch.ones(4, 8), mesh(), [Shard(0)], src_data_rank=None)
        x.redistribute(placements=[Shard(1) if dist.get_rank() == 1 else Replicate()])
    except Exception as error:
        return str(error)
    finally:
        del os.environ["DSHARD_DEBUG"]
    return ""


@pytest.mark.ranks
def test_in_debug_mode_ranks_that_diverge_are_told_so(ranks):
    told = ranks.run(diverge)

    assert len(set(told)) == 1
    assert "their programs have diverged: ranks [0, 2, 3] run" in told[0]
    assert "ranks [1] run" in told[0]
