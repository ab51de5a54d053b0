"""A transformer block traced under a strategy, without data: what a rank computes and receives in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dshard import Mesh, parallelize, use_topology
from dshard.simulate import Event, record
from dshard.tools.calibrate.block_program import TransformerBlock
from dshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a block: features, heads of `head` features each, and tokens of a sequence."""

    hidden: int
    heads: int
    tokens: int
    head: int

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Features in and out of the four linear layers."""
        query, hidden = self.heads * self.head, self.hidden
        return (hidden, 3 * query), (query, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)

    def block(self, *, bias: bool = False) -> TransformerBlock:
        """A block of these sizes, on the default device."""
        return TransformerBlock(self.hidden, self.heads, head=self.head, bias=bias)


def passes_of(
    sizes: Sizes, batch: int, mesh: Mesh, strategy: str, topology: Topology, dtype: torch.dtype, *, bias: bool = False
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward pass, and both passes, of the second of two blocks, whose input is as the first leaves it."""
    with use_topology(topology), torch.device("meta"):
        x = torch.empty(batch, sizes.tokens, sizes.hidden, dtype=dtype)
        blocks = nn.Sequential(*(sizes.block(bias=bias).to(dtype) for _ in range(2)))
        blocks = parallelize(blocks, mesh, strategy, x)
        given = blocks[0](x).detach().requires_grad_()

    def forward() -> torch.Tensor:
        return blocks[1](given)  # type: ignore[no-any-return]

    def both() -> None:
        out = forward()
        torch.autograd.backward([out], [torch.empty_like(out)])

    return forward, both


def events_of(step: Callable[[], object], topology: Topology) -> tuple[Event, ...]:
    """The events of a step on a topology."""
    with use_topology(topology):
        return tuple(slot.event for slot in record(step, topology).slots)


def gathered_again(forward: Sequence[Event]) -> list[Event]:
    """The gathers of activations that the papers' backward passes repeat; dshard's keep what they made."""
    return [event for event in forward if event.name == "all_gather" and event.axes in (("c",), ("tp",))]
