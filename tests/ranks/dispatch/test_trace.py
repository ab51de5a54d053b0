"""trace and strict: every collective with its operator, module and line; implicit redistributions are errors."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import (
    DeviceMesh,
    DTensor,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Replicate,
    Shard,
    Topology,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    strict,
    trace,
    use_strategy,
    use_topology,
)
from dshard.caches import clear_caches
from dshard.comm.user_code import user_line
from dshard.dispatch.operator import _WARNED
from dshard.testing import distribute, simulated
from dshard.trace import Trace

MESH = Mesh((4, 2), ("dp", "tp"))


class Block(nn.Module):
    """Three products of one input, a sum, a product: row-parallel, so each needs an all_reduce."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x).relu() for layer in (self.q, self.k, self.v)]
        return self.out(parts[0] + parts[1] + parts[2]).relu()


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


LAYERS = {f"Net.blocks.{i}.{name}" for i in range(2) for name in ("q", "k", "v", "out")}


def split_contraction(name: str, module: nn.Module, mesh: object) -> None:
    """Weights [out, in] split over the input features on the last axis."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(1)]
        module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))


def traced_step(mesh: object, x: DTensor) -> Trace:
    net = Net()
    distribute_module(net, mesh, split_contraction)
    with use_strategy(matmul="row"), trace() as found:
        net(x).backward()
    return found


class TestTrace:
    def test_events_name_operator_axis_bytes_and_line(self):
        with simulated(MESH), trace() as found:
            x = distribute(torch.randn(8, 6), Layout(MESH, (Shard(0), Shard(1))))
            w = distribute(torch.randn(4, 6), Layout(MESH, (Replicate(), Shard(1))))
            F.gelu(F.linear(x, w))

        (event,) = found.events
        assert (event.op, event.collective, event.axis) == ("gelu", "all_reduce", "tp")
        assert event.nbytes == 2 * 4 * 4
        assert event.line.startswith(__file__)
        assert found.operators == ["linear", "gelu", "aten.gelu.default"]

    def test_totals_by_any_field(self):
        with simulated(MESH), trace() as found:
            x = distribute(torch.randn(8, 8), Layout(MESH, (Partial(), Shard(1))))
            x.redistribute(placements=[Replicate(), Replicate()])

        assert len(found.by("axis")) == 2
        for name in ("axis", "op", "collective", "module", "line"):
            assert sum(nbytes for _, nbytes in found.by(name).values()) == found.nbytes
        assert json.loads(found.to_json())["nbytes"] == found.nbytes > 0

    def test_the_summary_has_a_row_for_each_line_and_a_total(self):
        with simulated(MESH), trace() as found:
            x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Shard(1))))
            for _ in range(3):
                x.redistribute(placements=[Replicate(), Shard(1)])

        heading, _, row, total = found.summary().splitlines()
        assert heading.split() == [
            *("operator", "collective", "axis", "count", "received"),
            *("predicted", "ms", "line"),
        ], "columns without any entry are left out"
        assert row.split()[:5] == ["redistribute", "all_gather", "dp", "3", "288"]
        assert total.split()[:4] == ["total", "3", "288", "B"]

    def test_predictions_are_those_of_the_topology_in_use(self):
        def seconds(topology: Topology) -> float:
            with simulated(MESH), use_topology(topology), trace() as found:
                x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Shard(1))))
                x.redistribute(placements=[Replicate(), Shard(1)])
            return found.events[0].seconds

        assert seconds(Topology.flat(1e6)) == pytest.approx(8 * seconds(Topology.flat(8e6)))


class TestLines:
    def test_a_thread_without_lines_of_its_own_has_that_of_the_main_thread(self):
        """So it is where autograd runs backward on a GPU."""
        with ThreadPoolExecutor(1) as threads:
            line = threads.submit(user_line).result()

        assert line.startswith(f"{__file__}:")

    def test_a_package_is_no_part_of_dshard_or_torch_by_its_name(self, tmp_path):
        for folder in ("dshard_models", "torch"):
            (tmp_path / folder).mkdir()
            file = tmp_path / folder / "step.py"
            names = {"user_line": user_line}
            exec(compile("found = user_line()", str(file), "exec"), names)
            assert names["found"] == f"{file}:1"


class TestModules:
    def test_each_collective_names_its_module_forward_and_backward(self):
        with simulated(MESH):
            x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Replicate())))
            found = traced_step(MESH, x)

        assert {event.module for event in found.events if event.op == "linear"} == LAYERS
        backward = [event.module for event in found.events if event.op == "linear backward"]
        assert sorted(backward) == sorted(LAYERS - {f"Net.blocks.0.{name}" for name in "qkv"}), "x needs no gradient"
        assert "module" in found.summary().splitlines()[0]

    def test_gradients_that_are_reduced_together_belong_to_their_modules(self):
        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.factor = nn.Parameter(distribute(torch.ones(8), Layout(MESH, (Replicate(), Replicate()))))

            def forward(self, x: Tensor) -> Tensor:
                return x * self.factor

        with simulated(MESH), trace() as found:
            x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Replicate())))
            nn.Sequential(Scale(), Scale())(x).sum().backward()

        number, event = found.events
        assert (number.op, number.asked, number.module) == ("number", True, "")
        assert (event.op, event.axis, event.module) == ("gradients of 2 leaves", "dp", "Sequential")
        assert event.members == (("Sequential.1", 48), ("Sequential.0", 48))

    def test_a_module_that_raises_is_left(self):
        class Broken(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise ValueError("broken")

        with simulated(MESH), trace() as found:
            x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Shard(1))))
            with pytest.raises(ValueError, match="broken"):
                Broken()(x)
            x.redistribute(placements=[Replicate(), Shard(1)])

        assert [event.module for event in found.events] == [""]

    def test_nothing_is_hooked_after_the_trace(self):
        before = dict(torch.nn.modules.module._global_forward_pre_hooks)
        with trace():
            assert len(torch.nn.modules.module._global_forward_pre_hooks) == len(before) + 1

        assert dict(torch.nn.modules.module._global_forward_pre_hooks) == before
        assert not torch.nn.modules.module._global_forward_hooks


class TestChrome:
    def test_it_is_a_trace_event_file(self):
        with simulated(MESH):
            x = distribute(torch.randn(8, 8), Layout(MESH, (Shard(0), Replicate())))
            found = traced_step(MESH, x)

        rows = json.loads(found.to_chrome())["traceEvents"]
        slices = [row for row in rows if row["ph"] == "X"]
        names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
        assert len(slices) == len(found.events)
        assert all(isinstance(row["pid"], int) and isinstance(row["tid"], int) and row["name"] for row in rows)
        assert all(row["ts"] >= 0 and row["dur"] >= 0 for row in slices)
        assert [row["ts"] for row in slices] == sorted(row["ts"] for row in slices)
        assert [names[row["tid"]] for row in slices] == [f"axis {event.axis}" for event in found.events]
        for row, event in zip(slices, found.events, strict=True):
            assert row["args"] == {
                "bytes": event.nbytes,
                "predicted us": event.seconds * 1e6,
                "module": event.module,
                "line": event.line,
            }


class TestStrict:
    def test_an_implicit_redistribution_names_operator_layouts_and_line(self):
        with simulated(MESH), strict():
            x = distribute(torch.randn(8, 8), Layout(MESH, (Partial(), Shard(1))))
            with pytest.raises(
                LayoutError,
                match=r"relu at .*test_trace.py:\d+ would redistribute \[dp:P\(sum\) tp:S\(1\)\] -> ",
            ):
                x.relu()

    def test_a_product_names_its_operand_and_the_line_within_the_module(self):
        net = nn.Linear(6, 4, bias=False)
        with simulated(MESH), strict():
            net.weight = nn.Parameter(distribute(torch.randn(4, 6), Layout(MESH, (Replicate(), Shard(1)))))
            x = distribute(torch.randn(8, 6), Layout(MESH, (Shard(1), Shard(0))))
            here = int(user_line().rpartition(":")[2])
            with pytest.raises(LayoutError) as caught:
                net(x)

        text = str(caught.value)
        assert text.startswith(f"linear at {__file__}:{here + 2} would redistribute [")
        assert text.endswith("which strict() forbids: redistribute the operands yourself, or lay them out alike")

    def test_nothing_is_sent_before_the_error(self):
        with simulated(MESH), trace() as found, strict():
            x = distribute(torch.randn(8, 8), Layout(MESH, (Partial(), Shard(1))))
            with pytest.raises(LayoutError):
                x.relu()

        assert found.events == []

    def test_what_is_asked_for_is_allowed(self):
        with simulated(MESH), strict():
            x = distribute(torch.randn(8, 8), Layout(MESH, (Partial(), Shard(1))))

            assert x.redistribute(placements=[Replicate(), Shard(1)]).relu().placements == (Replicate(), Shard(1))


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def step_on_ranks() -> set[str]:
    x = distribute_tensor(torch.randn(8, 8), mesh(), [Shard(0), Replicate()], src_data_rank=None)
    found = traced_step(mesh(), x)
    return {event.module for event in found.events if event.op.startswith("linear")}


def measured() -> tuple[Trace, dict[str, object], Trace]:
    x = distribute_tensor(torch.randn(64, 64), mesh(), [Shard(0), Shard(1)], src_data_rank=None)
    with trace(measure=True) as found:
        x.full_tensor()
        distribute_tensor(torch.randn(64, 64), mesh(), [Shard(0), Shard(1)])
        DTensor.from_local(torch.ones(2, 2), mesh(), [Shard(0), Replicate()], run_check=True)
    with trace() as plain:
        x.full_tensor()
    return found, json.loads(found.to_chrome()), plain


def warned(action: Literal["always", "error"]) -> tuple[bool, list[bool], list[str]]:
    """Whether a call of an operator without a rule raised here, where warnings point at it, and what was sent."""
    _WARNED.clear()
    clear_caches()
    x = distribute_tensor(torch.ones(4, 4), mesh(), [Shard(0), Replicate()])
    raised, here = False, 0
    with warnings.catch_warnings(record=True) as told, trace() as found:
        warnings.simplefilter(action)
        try:
            here = int(user_line().rpartition(":")[2]) + 1
            torch.histogram(x, 2)
            torch.histogram(x, 2)
        except UserWarning:
            raised = True
    return raised, [(w.filename, w.lineno) == (__file__, here) for w in told], [e.collective for e in found.events]


@pytest.mark.ranks
class TestOnRanks:
    def test_modules_are_named(self, ranks):
        assert ranks.run(step_on_ranks) == [LAYERS] * 4

    def test_seconds_are_measured_on_request(self, ranks):
        for rank, (found, chrome, plain) in enumerate(ranks.run(measured)):
            assert {event.collective for event in found.events} >= {"all_gather", "scatter", "broadcast"}
            assert all(event.measured is not None and event.measured > 0 for event in found.events)
            assert all(event.seconds > 0 for event in found.events), "predictions stand beside"
            assert "measured ms" in found.summary().splitlines()[0]
            slices = [row for row in chrome["traceEvents"] if row["ph"] == "X"]
            assert [row["dur"] for row in slices] == [row["args"]["measured us"] for row in slices]
            assert {row["pid"] for row in chrome["traceEvents"]} == {found.rank} == {rank}
            assert [event.measured for event in plain.events] == [None] * len(plain.events) != []

    def test_an_operator_without_a_rule_warns_on_one_rank_at_the_line_of_the_program(self, ranks):
        raised, told, sent = zip(*ranks.run(warned, "always"), strict=True)

        assert raised == (False,) * 4
        assert told == ([True], [], [], [])
        assert sent == (["all_gather"] * 2,) * 4

    def test_a_warning_that_is_an_error_is_one_on_all_ranks_before_anything_is_sent(self, ranks):
        assert ranks.run(warned, "error") == [(True, [], [])] * 4
