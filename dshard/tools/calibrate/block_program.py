"""A training step of a small transformer block, with which the host's time per distributed operator is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.core.local_work import writes
from dshard.core.observe import Decision, OperatorMode, observing
from dshard.core.signature import Args, Kwargs
from dshard.distribute import distribute_tensor
from dshard.mesh import Mesh
from dshard.placements import Replicate
from dshard.tensor import DTensor
from dshard.torch_private import OpOverload

BATCH, LENGTH, WIDTH, HEADS = 2, 4, 16, 4


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each applied to its normalised input and added to that input."""

    def __init__(
        self, width: int, heads: int = HEADS, *, head: int | None = None, bias: bool = True, causal: bool = False
    ) -> None:
        super().__init__()
        query = heads * head if head else width
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv, self.out = nn.Linear(width, 3 * query, bias), nn.Linear(query, width, bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """Tokens -> tokens, [batch, tokens, width]."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


@dataclass(slots=True)
class BlockProgram:
    """A training step of the block on replicated tensors, in phases; it runs no collective."""

    block: nn.Module
    x: DTensor
    optimizer: torch.optim.Optimizer
    loss: Tensor | None = None

    def forward(self) -> None:
        """Run the block up to the loss."""
        self.optimizer.zero_grad()
        self.loss = self.block(self.x).sum()

    def backward(self) -> None:
        """Compute all gradients."""
        assert self.loss is not None
        self.loss.backward()

    def update(self) -> None:
        """Update the weights."""
        self.optimizer.step()

    def passes(self) -> None:
        """Run forward and backward."""
        self.forward()
        self.backward()

    def step(self) -> None:
        """Run forward, backward and update."""
        self.passes()
        self.update()


def program_on(mesh: Mesh, device: str = "cpu") -> BlockProgram:
    """Build the training step on `mesh`; with device "meta" the mesh needs no processes."""
    with torch.device("meta"):  # whose values are not drawn from anybody's generator
        block = TransformerBlock(WIDTH)
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros(parameter.shape, device=device)
            module.register_parameter(name, nn.Parameter(_replicated(zeros, mesh)))
    x = _replicated(torch.zeros(BATCH, LENGTH, WIDTH, device=device), mesh)
    x.requires_grad_()
    return BlockProgram(block, x, torch.optim.Adam(block.parameters(), foreach=False))


@dataclass(frozen=True, slots=True)
class Operators:
    """Counts of distributed operators: those that return new tensors, and those that write to an operand."""

    making: int
    writing: int


def operators_of(step: Callable[[], object]) -> Operators:
    """Count the distributed operators that `step` runs."""
    counts: Counter[bool] = Counter()

    def count(decision: Decision) -> None:
        counts[writes(decision.op)] += 1

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        return func(*args, **kwargs)

    with observing(count), OperatorMode(run):
        step()
    return Operators(counts[False], counts[True])


def _replicated(x: Tensor, mesh: Mesh) -> DTensor:
    return distribute_tensor(x, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
