"""Products in panels within rehearsed modules: each step gives what it gives by Python, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard import Stream, init_device_mesh, parallelize, use_strategy
from dshard.testing import RankPool
from dshard.testing.pool import collectives_begun

ROWS, WIDTH, STEPS = 8, 16, 4
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "tesseract": ((1, 2, 2), ("d", "r", "c")),
    "optimus": ((2, 2), ("r", "c")),
    "megatron-sp": ((4,), ("tp",)),
}


OTHERS = [("tesseract", "ring"), ("optimus", "collective"), ("megatron-sp", "ring")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def steps(plan: str, stream: Stream | None, rehearsed: bool) -> tuple[list[list[Tensor]], int, list[str]]:
    """The values of each step, the collectives of the last, and why steps were not answered by the record."""
    shape, names = MESHES[plan]
    torch.manual_seed(0)
    model: Any = parallelize(
        Net(), init_device_mesh("cpu", shape, mesh_dim_names=names), plan, torch.ones(ROWS, 4, WIDTH)
    )
    values, why_not = [], []
    for i in range(STEPS):
        x = torch.randn(ROWS, 4, WIDTH, generator=torch.Generator().manual_seed(i))
        model.zero_grad()
        panels = nullcontext() if stream is None else use_strategy(panels=stream)
        before = collectives_begun().values()
        with dshard.rehearsing(rehearsed), panels:
            out = model(x)
            out.square().mean().backward()
        values.append([each.full_tensor().detach() for each in (out, *(p.grad for p in model.parameters()))])
        why_not.append(model.rehearsed.why_not)
    return values, sum(collectives_begun().values()) - sum(before), why_not


def compared(plan: str, stream: Stream) -> tuple[list[tuple[int, int]], int, int, int, list[str]]:
    """Which values differ, at which step; the collectives in bulk, in panels by Python and in panels rehearsed."""
    _, bulk, _ = steps(plan, None, False)
    eager, by_python, _ = steps(plan, stream, False)
    rehearsed, by_record, why_not = steps(plan, stream, True)
    pairs = enumerate(zip(eager, rehearsed, strict=True))
    differ = [(i, n) for i, pair in pairs for n, (x, y) in enumerate(zip(*pair, strict=True)) if not torch.equal(x, y)]
    return differ, bulk, by_python, by_record, why_not


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("plan", "transport"),
    [("tesseract", "broadcast"), *(pytest.param(*each, marks=pytest.mark.thorough) for each in OTHERS)],
)
def test_a_step_in_panels_is_that_of_python(ranks: RankPool, plan: str, transport: Any) -> None:
    for differ, bulk, by_python, by_record, why_not in ranks.run(compared, plan, Stream(2, None, transport)):
        assert not differ
        assert bulk < by_python == by_record
        assert why_not[2:] == ["", ""]
