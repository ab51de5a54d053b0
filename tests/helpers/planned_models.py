"""Models whose steps are planned as a whole, small enough to be run, and the bytes that their plans receive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.cost import copy_seconds
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.placements import Replicate, Shard
from dshard.planning.local_seconds import executed
from dshard.planning.plan_step import StepPlan
from dshard.planning.step_graph import StepGraph, Value
from dshard.redistribute import Plan, plan
from dshard.redistribute.layout_state import load_of
from dshard.topology import Topology


class Attention(nn.Module):
    """Attention whose heads share those of keys and values in groups, with rotated positions if there are groups."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, own = heads, key_heads, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, key_heads * own, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(2048.0), 100.0 ** -torch.arange(0, 1, 2 / own))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        """Each pair of features turned by an angle that grows with its position."""
        n, (a, b) = x.shape[2], x.chunk(2, -1)
        return x * self.cos[:n].to(x.dtype) + torch.cat((-b, a), -1) * self.sin[:n].to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        if self.heads != self.key_heads:
            q, k = self.rotated(q), self.rotated(k)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        out: Tensor = self.o(a.transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    """Two projections, of which one is the gate of the other, and one back."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Mixed(nn.Module):
    """Experts that all see each token, each with the weight that its router gives it."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        hidden = F.silu(torch.einsum("bsd,edf->bsef", x, self.up)) * weights[..., None]
        return torch.einsum("bsef,efd->bsd", hidden, self.down)


class Adapted(nn.Module):
    """A layer that is not trained, and an adapter of few features beside it."""

    def __init__(self, width: int, inner: int, few: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, inner, bias=False)
        self.a, self.b = nn.Linear(width, few, bias=False), nn.Linear(few, inner, bias=False)
        self.base.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


class Block(nn.Module):
    """Attention and another module, each behind a norm and beside the residual stream."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.n1, self.n2, self.attention, self.inner = norm(), norm(), attention, inner

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        out: Tensor = x + self.inner(self.n2(x))
        return out


class Language(nn.Module):
    """A language model of such blocks, which returns its loss."""

    def __init__(self, vocabulary: int, width: int, norm: Callable[[], nn.Module], blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(vocabulary, width), nn.ModuleList(blocks)
        self.norm, self.head = norm(), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


def _inner(family: str, width: int) -> nn.Module:
    match family:
        case "gpt" | "tied":
            return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        case "llama":
            return Gated(width, 3 * width)
        case "mixture":
            return Mixed(width, 2 * width, 4)
        case _:
            return nn.Sequential(Adapted(width, 4 * width, 4), nn.GELU(), Adapted(4 * width, width, 4))


FAMILIES = ("gpt", "llama", "mixture", "adapted")


def language_model(family: str, width: int = 16, vocabulary: int = 24, heads: int = 8, layers: int = 2) -> nn.Module:
    """A model of this family, in double precision; "tied" is a GPT whose head has the weight of its embedding."""
    torch.manual_seed(0)
    key_heads = heads // 2 if family == "llama" else heads

    def norm() -> nn.Module:
        return nn.RMSNorm(width) if family == "llama" else nn.LayerNorm(width)

    blocks: list[nn.Module] = [
        Block(norm, Attention(width, heads, key_heads), _inner(family, width)) for _ in range(layers)
    ]
    model = Language(vocabulary, width, norm, blocks)
    if family == "tied":
        model.head.weight = model.embedding.weight
    if family == "adapted":
        for name, p in model.named_parameters():
            p.requires_grad_(".a." in name or ".b." in name)
    return model.double()


def batch(rows: int, length: int = 8, vocabulary: int = 24) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow them."""
    tokens = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(rows))
    return tokens, tokens.roll(-1, 1)


class PlannedMove(NamedTuple):
    """A tensor that a call reads, or its gradient, as a plan moves it in one direction of a step."""

    value: Value
    call: int
    direction: str
    src: Layout
    dst: Layout

    def steps(self, topology: Topology) -> Plan:
        """The steps in which it moves."""
        return plan(self.src, self.dst, self.value.shape, self.value.itemsize, topology)


def planned_moves(graph: StepGraph, chosen: StepPlan) -> Iterator[PlannedMove]:
    """What a plan moves. Parameters are moved again in the backward pass, unless they are kept."""
    for value in graph.values:
        for call, i in value.uses:
            own = chosen.calls[call]
            used, gradient = own.inputs[i], own.gradients[i]
            match value.kind:
                case "made":
                    assert value.producer is not None
                    at = chosen.calls[value.producer.call].outputs[value.producer.position]
                    wanted = chosen.calls[value.producer.call].cotangent(value.producer.position)
                case "parameter":
                    at = wanted = chosen.parameters[value.number]
                case _:
                    continue
            is_gathered = any(
                isinstance(a, Shard) and b == Replicate() for a, b in zip(at.placements, used.placements, strict=True)
            )
            moves = [("forward", at, used), ("backward", gradient, wanted)][: 1 + value.needs_grad]
            if value.kind == "parameter" and value.name not in graph.kept and (is_gathered or value.needs_grad):
                moves.append(("backward", at, used))
            yield from (PlannedMove(value, call, *move) for move in moves if move[1] != move[2])


def planned_bytes(graph: StepGraph, chosen: StepPlan, topology: Topology) -> Counter[tuple[str, str]]:
    """The bytes that a plan says the busiest rank receives to move tensors, by the call that reads each and direction.

    Calls may send something by themselves.
    """
    received: Counter[tuple[str, str]] = Counter()
    names = [f"{call.module}:{call.name}" for call in graph.calls]
    for move in planned_moves(graph, chosen):
        received[names[move.call], move.direction] += move.steps(topology).busiest() * move.value.itemsize
    for call, own in zip(graph.calls, chosen.calls, strict=True):
        if own.exchanges:
            sent = executed(call, own.inputs, topology).received
            for direction, nbytes in zip(("forward", "backward"), sent, strict=True):
                received[names[call.number], direction] += nbytes
    return +received


def planned_copies(graph: StepGraph, chosen: StepPlan, topology: Topology) -> float:
    """The seconds in which moves of what calls make, not of parameters, copy in memory."""
    return sum(
        copy_seconds(load_of(*stage).copied * move.value.itemsize, topology)
        for move in planned_moves(graph, chosen)
        if move.value.kind == "made"
        for stage in move.steps(topology).shaped_stages()
    )


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    """A mesh of this shape."""
    return Mesh(shape, ("x", "y", "z")[: len(shape)])


def as_meta(model: nn.Module, args: Any) -> tuple[nn.Module, Any]:
    """The model and the batch without data."""
    return model.to("meta"), tuple(x.to("meta") for x in args)
