"""Losses of sharded classes, and norms of sharded features, cost in a plan what the executor records of them.

The sizes are those of a step: the few operators that pack numbers for a message, and unpack them, are no part of a
price, and take 5 us each on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor, nn

from dshard import Layout, Mesh, Topology, use_topology
from dshard.comm import plain, planning
from dshard.core.observe import Decision, observing
from dshard.core.spec import contiguous_spec
from dshard.core.trees import tensors_in
from dshard.core.wrapper import wrap
from dshard.layout import replicated
from dshard.ops.small_reductions import SMALL_REDUCTIONS
from dshard.parallel.trace_step import record_step
from dshard.planning.local_seconds import local_seconds
from dshard.planning.step_graph import GraphCall
from dshard.rules.expand import Expansion, Operand, Order, expand, sharded_anyway, sizes_of
from dshard.step_timeline import StepTimeline

MESH = Mesh((2, 2), ("a", "b"))
ROWS, WIDTH = 65535, 128003
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "smoothed": lambda x, target: F.cross_entropy(x, target, label_smoothing=0.1, ignore_index=0),
    "rms_norm": lambda x, _: F.rms_norm(x, (WIDTH,)),
    "layer_norm": lambda x, _: F.layer_norm(x, (WIDTH,)),
}
WAYS = {"rows": ("rows", "rows"), "width": ("width", "width"), "both": ("rows", "width")}
"""What each mesh axis shards."""


class Alone(nn.Module):
    """A function of a parameter."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(ROWS, WIDTH, dtype=dtype, device="meta"))
        self.function = FUNCTIONS[name]

    def forward(self, target: Tensor) -> Tensor:
        return self.function(self.x, target)


def call_of(name: str, dtype: torch.dtype) -> GraphCall:
    """The call of the function in a traced step."""
    (call,) = record_step(Alone(name, dtype), (torch.zeros(ROWS, dtype=torch.int64),), {}).graph().calls
    return call


def expansion_of(call: GraphCall, way: tuple[str, ...]) -> tuple[Expansion, str]:
    """The layouts in which mesh axes shard rows or width, and the alternative to the call's rule that has them."""
    (rows,), (width,) = call.rule.inputs[0]
    factors = {"rows": rows, "width": width}
    names = [factors[each] for each in way]
    order: Order = {name: tuple(axis for axis, each in enumerate(names) if each == name) for name in names}
    if "width" not in way:
        operands = [Operand(replicated(MESH), x.shape, x.itemsize) for x in call.operands]
        sizes = sizes_of(call.rule, operands, [(x.shape, x.itemsize) for x in call.results])
        expansion = expand(call.rule, operands, tuple(names), order, sizes)
        assert expansion is not None
        return expansion, ""
    rule = dict(call.alternatives)[SMALL_REDUCTIONS]
    inputs, outputs = sharded_anyway(rule, order, MESH)
    return Expansion(inputs, outputs, (), tuple(names), order), SMALL_REDUCTIONS


def first_of(decisions: list[Decision]) -> Iterator[Decision]:
    """Yield the decisions of the call itself: those that are made while an alternative runs repeat its own."""
    for decision in decisions:
        yield decision
        if decision.is_repeated:
            return


@plain()
@planning()
def executed(call: GraphCall, layouts: tuple[Layout, ...], topology: Topology) -> tuple[float, float, float, float]:
    """Seconds of the local work of both passes, and of the forward pass's collectives: recorded, and as decided."""
    operands: list[Any] = []
    for x, layout in zip(call.operands, layouts, strict=True):
        local = torch.empty(layout.local_shape(x.shape, (0,) * layout.mesh.ndim), dtype=x.dtype, device="meta")
        own = wrap(local, contiguous_spec(layout, x.shape, x.dtype, local.device)).requires_grad_(x.needs_grad)
        operands.append(own.view_as(own))
    with use_topology(topology):
        call.run(*operands)  # what is inferred once is not recorded
        timeline, decisions = StepTimeline(topology, for_shapes=True), list[Decision]()
        with observing(decisions.append), timeline.recorded():
            out = tensors_in(call.run(*operands))[:1]
            forward, sent = timeline.seconds("compute"), timeline.seconds("network")
            decided = sum(each.seconds for decision in first_of(decisions) for each in decision.collectives())
            needing = [x for x in operands if x.requires_grad]
            torch.autograd.grad(out, needing, [torch.empty_like(x) for x in out], allow_unused=True)
    return forward, timeline.seconds("compute") - forward, sent, decided


@pytest.mark.parametrize(
    ("dtype", "preset"), one_way_each([torch.float32, torch.bfloat16], ["dgx-h100", "cpu"]), ids=str
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_prices_are_what_the_executor_records(name: str, way: str, dtype: torch.dtype, preset: str) -> None:
    topology, call = Topology.preset(preset), call_of(name, dtype)
    expansion, alternative = expansion_of(call, WAYS[way])
    forward, backward, sent, decided = executed(call, expansion.inputs, topology)
    with use_topology(topology):
        priced = local_seconds(call, expansion, topology, alternative)
    assert priced.forward == pytest.approx(forward, rel=0.02)
    assert priced.backward == pytest.approx(backward, rel=0.02)
    assert decided == pytest.approx(sent, rel=0.02)
    assert sent > 0 or "width" not in WAYS[way]
