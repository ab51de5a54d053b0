"""`torch.compile` of what `parallelize` made, each block or the whole model: equal to one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import init_device_mesh, parallelize
from dshard.testing import RankPool


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width: int = 32, words: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MESHES: dict[str, tuple[int, ...]] = {
    "data": (4,),
    "megatron": (4,),
    "fsdp": (4,),
    "megatron-sp": (4,),
    "optimus": (2, 2),
    "atp": (2, 2),
    "fsdp x megatron": (2, 2),
}


def compiled(strategy: str, how: str) -> None:
    torch._dynamo.reset()  # which remembers sizes of other meshes
    shape = MESHES[strategy]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    model, reference, ids = Llama(), Llama(), torch.arange(48).view(8, 6) % 16
    parallelize(model, mesh, strategy, ids)
    run: Any = model
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    else:
        run = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        out, expected = run(ids), reference(ids)
        out.square().sum().backward()
        expected.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["blocks", "whole"])
@pytest.mark.parametrize("strategy", MESHES)
def test_compiled_models_are_those_of_one_device(ranks: RankPool, strategy: str, how: str) -> None:
    ranks.run(compiled, strategy, how, timeout=300.0)
