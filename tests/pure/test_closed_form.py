"""The closed form of a block sends and computes what the recorded program of the same block does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import Mesh, parallelize, use_topology
from dshard.simulate import Model, Recorded, Setup, form_of, record
from dshard.simulate.block import BlockCosts
from dshard.simulate.training_step import parts_of
from dshard.topology import BYTES

MODEL = Model(layers=1, hidden=32, heads=8, sequence=8)
BATCH = 16


class Block(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        width, biased = model.hidden, model.biased
        self.heads = model.heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=biased), nn.LayerNorm(width, bias=biased)
        self.qkv, self.out = nn.Linear(width, model.qkv, biased), nn.Linear(width, width, biased)
        self.up, self.down = nn.Linear(width, model.width, biased), nn.Linear(model.width, width, biased)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@cache
def recorded(setup: Setup, model: Model) -> Recorded:
    """A forward and a backward pass of so many blocks, as `parallelize` lays them out."""
    mesh = Mesh(setup.mesh.shape[1:], setup.mesh.names[1:])
    with use_topology(BYTES), torch.device("meta"):
        x = torch.empty(BATCH, model.sequence, model.hidden)
        blocks = nn.Sequential(*(Block(model) for _ in range(model.layers)))
        blocks = parallelize(blocks, mesh, setup.strategy, x)

        def step() -> None:
            out = blocks(x)
            torch.autograd.backward([out], [torch.empty_like(out)])
            blocks.zero_grad()

        return record(step, BYTES)


def closed(setup: Setup, model: Model) -> tuple[int, float]:
    """Bytes and operations of one block."""
    parts = parts_of(BlockCosts(model, setup, BYTES, "float32", 4), BATCH)
    events = (*parts.forward, *parts.backward, *parts.sums)
    return sum(event.nbytes for event in events), sum(event.flops for event in events)


def case(name: str, *tensor: int, quick: bool = False, **changes: object) -> object:
    setup = Setup(form_of(name), tensor, **changes)  # type: ignore[arg-type]
    return pytest.param(setup, id=str(setup), marks=[] if quick else pytest.mark.thorough)


SETUPS = [
    case("data", data=4),
    case("data", data=4, sharded="all"),
    case("megatron", 4),
    case("megatron", 2, data=2),
    case("megatron", 2, data=2, sharded="all"),
    case("megatron-sp", 4),
    case("megatron-sp", 2, data=2),
    case("megatron-sp", 2, data=2, sharded="all"),
    case("optimus", 2, 2),
    case("optimus", 2, 2, data=2, quick=True),
    case("tesseract", 2, 2, 2),
    case("atp", 2, 2),
    case("atp", 2, 4),
    case("atp", 2, 2, data=2),
    case("fsdp", 4),
]


@pytest.mark.parametrize("biases", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("setup", SETUPS)
def test_a_block_sends_and_computes_what_is_recorded(setup: Setup, biases: bool) -> None:
    """A block in the middle: what a program of three has beyond one of two, biases and norms with it."""
    model = replace(MODEL, biases=biases)
    two, three = (recorded(setup, replace(model, layers=layers)) for layers in (2, 3))

    assert (three.nbytes - two.nbytes, three.flops - two.flops) == closed(setup, model)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["optimus", "tesseract", "atp"])
def test_weights_shared_out_within_a_grid_are_priced_by_another_order(name: str) -> None:
    """Not equal: a replica's share is the last split of the rows here, and the first of those of a laid out model."""
    shape = (2, 2, 2) if name == "tesseract" else (2, 2)
    setup = Setup(form_of(name), shape, data=2, sharded="all")
    two, three = (recorded(setup, replace(MODEL, layers=layers)) for layers in (2, 3))
    nbytes, flops = closed(setup, MODEL)

    assert three.flops - two.flops == flops
    assert nbytes == pytest.approx(three.nbytes - two.nbytes, rel=0.2)
