"""The local work of planned calls is what the executor records: of each call by each strategy, and of a whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in
from helpers.transformer_blocks import BLOCKS, TOKENS, WIDTH
from torch import Tensor, nn

from dshard import Mesh, Topology, use_topology
from dshard.comm import plain, planning
from dshard.core.local_work import seconds_of_local_work
from dshard.core.observe import Decision, observing
from dshard.core.spec import contiguous_spec
from dshard.core.trees import tensors_in
from dshard.core.wrapper import wrap
from dshard.layout import replicated
from dshard.parallel import plan_model
from dshard.parallel.trace_step import record_step
from dshard.planning.local_seconds import LocalSeconds, gradient_sum_seconds, local_seconds
from dshard.planning.step_graph import GraphCall, StepGraph
from dshard.rules.expand import Expansion, Operand, expand, sharded_anyway, sizes_of
from dshard.step_timeline import StepTimeline

MESH, WORDS = Mesh((2,), ("x",)), 64
MESHES = [
    pytest.param(MESH, id="one axis"),
    pytest.param(Mesh((2, 2), ("x", "y")), id="two", marks=pytest.mark.thorough),
]
PRESET = Topology.preset("dgx-h100")
TOPOLOGIES = {
    "kernels": PRESET,
    "host": replace(PRESET, device=replace(PRESET.device, dispatch=2e-5)),  # as measured on a CPU
}


class Language(nn.Module):
    """An embedding, a block and the loss of a head."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(WORDS, WIDTH), BLOCKS[block](), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.block(self.embed(ids))).flatten(0, 1), targets.flatten())


BATCH = tuple(torch.zeros(8, TOKENS, dtype=torch.long) for _ in range(2))


def traced(block: str) -> tuple[nn.Module, StepGraph]:
    model = Language(block)
    return model, record_step(model, BATCH, {}).graph()


def expansions(call: GraphCall, mesh: Mesh = MESH) -> Iterator[Expansion]:
    """All expansions of the rule of a call on the mesh, without axes that pass partial operands through."""
    operands = [Operand(replicated(mesh), x.shape, x.itemsize) for x in call.operands]
    sizes = sizes_of(call.rule, operands, [(x.shape, x.itemsize) for x in call.results])
    terms = (*call.rule.inputs, *call.rule.outputs)
    factors = dict.fromkeys(f for term in terms for dim in term for f in dim if f not in call.rule.unsharded)
    for rows in product([None, *factors], repeat=mesh.ndim):
        order: dict[str, tuple[int, ...]] = {}
        for axis, row in enumerate(rows):
            if row is not None:
                order[row] = (*order.get(row, ()), axis)
        expansion = expand(call.rule, operands, rows, order, sizes)
        if expansion is not None:
            yield expansion


@plain()
@planning()
def executed(call: GraphCall, expansion: Expansion, topology: Topology) -> LocalSeconds | None:
    """What the executor records of a call on operands of these layouts; None if it runs by others, or sends."""
    operands: list[Any] = []
    for x, layout in zip(call.operands, expansion.inputs, strict=True):
        local = torch.empty(layout.local_shape(x.shape, (0,) * layout.mesh.ndim), dtype=x.dtype, device="meta")
        own = wrap(local, contiguous_spec(layout, x.shape, x.dtype, local.device)).requires_grad_(x.needs_grad)
        operands.append(own.view_as(own))
    timeline, decisions = StepTimeline(topology, for_shapes=True), list[Decision]()
    with observing(decisions.append), timeline.recorded():
        out = [x for x, y in zip(tensors_in(call.run(*operands)), call.results, strict=True) if y.uses or x.shape == ()]
        forward = timeline.seconds("compute")
        if out[0].requires_grad:
            needing = [x for x in operands if x.requires_grad]
            torch.autograd.grad(out, needing, [torch.empty_like(x) for x in out], allow_unused=True)
    strategies = [each.strategy for each in decisions if each.strategy is not None]
    if timeline.seconds("network") or (strategies and strategies[0].rows != expansion.rows):
        return None
    return LocalSeconds(forward, timeline.seconds("compute") - forward)


@pytest.mark.parametrize("block", one_in(2, ["llama", "gpt"]))
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_seconds_of_a_call_are_those_that_the_executor_records(block: str, topology: str, mesh: Mesh) -> None:
    compared: dict[str, int] = {}
    for call in {call.signature: call for call in traced(block)[1].calls}.values():
        for expansion in expansions(call, mesh):
            expected = executed(call, expansion, TOPOLOGIES[topology])
            if expected is not None:
                own = local_seconds(call, expansion, TOPOLOGIES[topology])
                assert own[:2] == pytest.approx(expected[:2], rel=0.02, abs=1e-12), (call.name, expansion.rows)
                compared[call.name] = compared.get(call.name, 0) + 1
    few = {"cross_entropy", "rms_norm"}
    assert all(n > 1 for name, n in compared.items() if name not in few)
    assert {"linear", "embedding", "scaled_dot_product_attention", "add"} <= compared.keys()


@pytest.mark.parametrize("block", BLOCKS)
def test_seconds_of_all_calls_are_those_of_the_step(block: str) -> None:
    mesh = Mesh((1,), ("x",))
    whole = replicated(mesh)
    model, graph = traced(block)
    with use_topology(PRESET):
        plan = plan_model(model, mesh, {}, *BATCH)

    calls = [
        local_seconds(
            call, Expansion((whole,) * len(call.operands), (whole,) * len(call.results), (), (None,), {}), PRESET
        )
        for call in graph.calls
    ]
    total = sum(call.both for call in calls) + sum(gradient_sum_seconds(x, whole, PRESET) for x in graph.values)
    assert plan.cost is not None
    assert total == pytest.approx(plan.cost.work, rel=0.02)


@pytest.mark.parametrize("block", BLOCKS)
def test_alternatives_have_seconds_of_their_own(block: str) -> None:
    names = set()
    for call in traced(block)[1].calls:
        for name, rule in call.alternatives:
            row = "h" if name == "heads of queries" else min(call.rule.unsharded - rule.unsharded)
            inputs, outputs = sharded_anyway(rule, {row: (0,)}, MESH)
            expansion = Expansion(inputs, outputs, (), (row,), {row: (0,)})
            seconds = local_seconds(call, expansion, PRESET, name)
            assert min(seconds[:2]) > 0
            names.add((call.name.removeprefix("native_"), name))
    norm = "rms_norm" if block == "llama" else "layer_norm"
    assert {("cross_entropy", "small reductions"), (norm, "small reductions")} <= names
    assert ("scaled_dot_product_attention", "split keys") in names


def test_work_that_is_sharded_takes_its_share_of_the_seconds() -> None:
    (linear,) = (
        record_step(nn.Linear(4096, 4096, bias=False), (torch.empty(4096, 4096, device="meta"),), {}).graph().calls
    )
    mesh = Mesh((2, 2), ("x", "y"))
    by_rows = {each.rows: local_seconds(linear, each, PRESET).forward for each in expansions(linear, mesh)}
    work = {rows: seconds - PRESET.launch for rows, seconds in by_rows.items()}

    assert work["n", None] == pytest.approx(work[None, None] / 2, rel=0.02)
    assert work["n", "k"] == pytest.approx(work[None, None] / 4, rel=0.02)


@pytest.mark.parametrize(
    "run",
    [
        lambda rows, table: nn.functional.embedding(rows, table),
        lambda rows, table: table[rows],
        lambda rows, table: table.index_select(0, rows),
        lambda rows, table: table.gather(0, rows[:, None]),
        lambda rows, table: table.index_put_((rows,), torch.empty(8, device="meta")),
        lambda rows, table: table.index_add_(0, rows, torch.empty(len(rows), 8, device="meta")),
        lambda rows, table: table.scatter_add_(0, rows[:, None], torch.empty(len(rows), 1, device="meta")),
    ],
)
def test_rows_named_by_indices_take_no_time_for_the_rest_of_a_table(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    rows = torch.empty(1000, dtype=torch.long, device="meta")
    small, large = (torch.empty(n * 1000, 8, device="meta") for n in (1, 100))

    seconds = [seconds_of_local_work(partial(run, rows, table), PRESET) for table in (small, large)]

    assert seconds[0] == seconds[1] > PRESET.launch
