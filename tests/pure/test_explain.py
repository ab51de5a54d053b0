"""explain: every choice is shown with its price and why it was taken, on a mesh that need not exist."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.explain_cases import planned, row_parallel

from dshard import (
    Layout,
    LayoutError,
    Mesh,
    Replicate,
    ShapeError,
    Shard,
    Topology,
    TopologyError,
    distribute_tensor,
    explain,
    use_topology,
)
from dshard.explain import explain_matmul
from dshard.rules.communication_bounds import matmul_lower_bound
from dshard.tables import short_line
from dshard.topology import BYTES


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

        ops = [operator.op for operator in report.operators]
        assert ops == ["linear", "gelu", "aten.gelu.default", "aten.sum.default", "number"], (
            "gelu completes partial operands first"
        )

    def test_a_redistribution_that_was_asked_for_says_so(self):
        x = planned(64, 32, placements=[Shard(0), Shard(1)])

        report = explain(x.redistribute, placements=[Shard(0), Replicate()])

        assert report.operators[0].why == "asked for"
        assert report.chosen.steps == ("all_gather  tp  S(1) -> R",)

    def test_it_can_be_read_by_people_and_by_machines(self):
        report = explain(F.linear, *row_parallel())

        assert "chosen: dp:_0 tp:k, the cheapest of 17; dp:_0 tp:_0 would take" in str(report)
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


class TestTopology:
    """The topology is always named, and how it came to be used."""

    def test_the_default_of_the_device_type(self):
        (found,) = explain(F.linear, *row_parallel()).operators

        assert (found.topology, found.topology_why) == ("flat-cpu", "the default for cpu ranks")
        assert str(found).splitlines()[1] == "  topology flat-cpu: n x rank (2 GB/s); the default for cpu ranks"

    def test_another_device_type_has_its_default_topology(self):
        mesh = Mesh((4, 2), ("dp", "tp"), device_type="cuda")
        x = distribute_tensor(torch.empty(8, 8, device="meta"), mesh, [Shard(0), Replicate()])

        (found,) = explain(torch.sigmoid, x).operators

        assert (found.topology, found.topology_why) == ("flat-cuda", "the default for cuda ranks")

    def test_one_that_was_chosen(self):
        with use_topology(Topology.preset("dgx-a100")):
            (found,) = explain(F.linear, *row_parallel()).operators

        assert (found.topology, found.topology_why) == ("dgx-a100", "as use_topology says")
        assert found.data()["network"] == "dgx-a100: 8 x gpu (300 GB/s)"

    def test_one_that_is_chosen_for_a_part(self):
        """What counts is the topology in use at the call, not at the end."""

        def step(x, w):
            with use_topology(Topology.preset("dgx-a100")):
                y = F.linear(x, w)
            return y + 1

        report = explain(step, *row_parallel())

        assert [operator.topology for operator in report.operators] == ["dgx-a100", "flat-cpu"]


class TestPlaces:
    def test_each_operator_has_its_line(self):
        def step(x, w):
            y = F.linear(x, w)
            return y + 1

        report = explain(step, *row_parallel())

        lines = [operator.line for operator in report.operators]
        first = step.__code__.co_firstlineno
        assert lines == [f"{__file__}:{first + 1}", f"{__file__}:{first + 2}"]
        assert str(report).startswith(f"linear   _0 k, n k -> _0 n   at {short_line(lines[0])}")

    def test_nothing_distributed_is_said(self):
        assert str(explain(torch.ones, 3)) == "no operator on distributed tensors was called"


SIZES = (96, 40, 24)
NODES = Topology.preset("dgx-a100", nodes=2)
CUBE = Mesh((4, 2, 2), ("x", "y", "z"))


class TestProduct:
    def test_every_loop_and_storage_of_every_axis_is_a_candidate(self):
        found = explain_matmul(*SIZES, CUBE, NODES)

        assert len({c.name for c in found.candidates}) == len(found.candidates) == found.considered == 10**3
        assert [c.seconds for c in found.candidates] == sorted(c.seconds for c in found.candidates)
        assert found.chosen is found.candidates[0]

    @pytest.mark.parametrize("p", [4, 8])
    def test_bytes_are_those_of_the_closed_form(self, p):
        """V = mk/(Pm Pk) (1 - 1/GA) + kn/(Pk Pn) (1 - 1/GB) + mn/(Pm Pn) ((1 - 1/GC) + 2/GC (1 - 1/H))."""
        mesh, (m, k, n) = Mesh((p, 2), ("x", "y")), (64, 128, 256)
        found = explain_matmul(m, k, n, mesh, BYTES, dtype=torch.float32)

        for candidate in found.candidates:
            loops = [word.partition(":")[2] for word in candidate.name.split() if ":" in word]
            split = dict.fromkeys("mnk", 1)
            gathered, reduced = {"A": 1, "B": 1, "C": 1}, 1
            for loop, size in zip(loops, mesh.shape, strict=True):
                split[loop[0]] *= size
                if "[" in loop:  # what is left partial is charged as if it were reduced to parts
                    gathered[loop[2]] *= size
                elif loop == "k":
                    reduced *= size
            a = m * k / split["m"] / split["k"] * (1 - 1 / gathered["A"])
            b = k * n / split["k"] / split["n"] * (1 - 1 / gathered["B"])
            c = (m * n / split["m"] / split["n"]) * (1 - 1 / gathered["C"] + 2 / gathered["C"] * (1 - 1 / reduced))
            assert candidate.bytes_moved == 4 * (a + b + c), candidate.name

    def test_one_copy_is_held_against_the_lower_bound(self):
        every = explain_matmul(*SIZES, CUBE, NODES)
        once = explain_matmul(*SIZES, CUBE, NODES, one_copy=True)

        assert {c.name for c in once.candidates} == {c.name for c in every.candidates if c.one_copy}
        assert once.considered == 6**3, "m, n or k, each with two ways to store the tensor that moves"
        assert min(c.bound_ratio for c in once.candidates) >= 1
        assert min(c.bound_ratio for c in every.candidates) == 0
        assert f"of those that store each tensor once {once.chosen.name} is the cheapest" in every.why
        bound = 2 * matmul_lower_bound(*SIZES, CUBE.size)
        assert all(c.bytes_moved / c.bound_ratio == pytest.approx(bound) for c in once.candidates)

    def test_given_layouts_are_what_the_product_of_tensors_considers(self):
        mesh = Mesh((4, 2), ("dp", "tp"))
        a, b = Layout(mesh, (Shard(0), Shard(1))), Layout(mesh, (Replicate(), Shard(0)))
        x, w = (distribute_tensor(torch.empty(64, 64, device="meta"), mesh, layout.placements) for layout in (a, b))

        found = explain_matmul(64, 64, 64, mesh, a=a, b=b, dtype=torch.float32)
        (run,) = explain(torch.matmul, x, w).operators

        assert found.candidates == run.candidates
        assert found.chosen == run.chosen
        assert found.topology_why == "the default for cpu ranks"

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"a": Layout(CUBE, (Replicate(),) * 3)}, LayoutError, "only the layout of a is given: give both"),
            ({"m": 0}, ShapeError, "a product of 0 x 40 by 40 x 24: all sizes must be above zero"),
            ({"topology": Topology.preset("dgx-a100")}, TopologyError, "has rank 15, but the topology 'dgx-a100'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, change, error, message):
        arguments = dict(zip("mkn", SIZES, strict=True)) | {"mesh": CUBE, "topology": NODES} | change

        with pytest.raises(error, match=message):
            explain_matmul(**arguments)

    def test_the_top_keeps_the_chosen_and_counts_the_rest(self):
        found = explain_matmul(*SIZES, CUBE, NODES)
        other = replace(found, chosen=found.candidates[500])

        assert len(found.top(3).candidates) == 3
        assert other.top(3).candidates[-1] is other.chosen
        assert "996 dearer candidates are not shown" in str(other.top(3))

    def test_4096_ranks_are_priced_without_a_process(self):
        found = explain_matmul(65536, 8192, 28672, Mesh((16, 16, 16)), Topology.preset("dgx-h100", nodes=512))

        assert found.considered == 1000
        assert found.chosen.compute_seconds == min(c.compute_seconds for c in found.candidates if not c.bytes_moved)
