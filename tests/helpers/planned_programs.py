"""Generated training loops around generated models, under plans that are drawn at random.

A `Program` is the parts of a model, the ways in which it calls them, and what each step of the loop does. Its plan is
drawn at random among the candidates of each call, so that any layout may win, or found by "auto" within random limits;
it may be edited, and be read from its file. Every step is compared with one device, in double precision or as a row of
`DTYPES` says: losses, gradients, parameters and buffers, and that no call is said to be unplanned without cause.

    python tests/helpers/planned_programs.py 500                 # on simulated ranks; what fails is printed
    python tests/helpers/planned_programs.py 50 --first 7000 --ranks  # on four real ones
    python tests/helpers/planned_programs.py --show 17
    python tests/helpers/planned_programs.py --shrink 17 --draw 3  # the fewest parts, steps and planned calls that fail
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from random import Random
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dshard
from dshard import DTensor, Mesh, Topology
from dshard.comm import plain
from dshard.errors import DShardError, RankError
from dshard.parallel import Auto, ModelPlan, Precision, register_experts
from dshard.parallel.model_plan import step_graph
from dshard.parallel.plan_files import plan_from
from dshard.parallel.reachable_state import ReachableState
from dshard.parallel.trace_step import record_step
from dshard.parallel.whole_plan import as_plan
from dshard.planning import call_candidates
from dshard.planning.call_candidates import CallCandidate, candidates
from dshard.planning.local_seconds import LocalSeconds
from dshard.planning.packed_values import with_packed_values
from dshard.planning.plan_step import StepPlan
from dshard.planning.step_graph import StepGraph
from dshard.planning.step_tables import Parts, Weights
from dshard.planning.step_tables import _layouts as layouts_of
from dshard.testing import RankPool, rank_pool, simulated, whole
from helpers.expert_models import OwnExperts
from helpers.generated_models import LINES, Block, distance, in_double, mesh_of
from helpers.planned_models import Adapted, Attention, Gated, Mixed

SECONDS = 90.0
"""The seconds that a program takes on ranks before it hangs."""
DTYPES: dict[str, tuple[torch.dtype, Precision | None, float]] = {
    "double": (torch.float64, None, 1e-7),
    "used single": (torch.float64, Precision(torch.float32), 1e-3),
    "reduced single": (torch.float64, Precision(reduce_dtype=torch.float32), 1e-3),
    "used half": (torch.float32, Precision(torch.bfloat16, torch.float32, torch.float32), 0.3),
    "single": (torch.float32, None, 1e-3),
    "half": (torch.bfloat16, None, 0.3),
}
"""The dtypes of parameters, their precision, and the largest difference beside what rounding explains."""
PLANS, TRIES = 8, 30
"""Plans of a program, and draws of each: what a call writes to stays where it is, which no candidate may do."""
MESHES = (*[(2,), (4,), (4,), (2, 2), (2, 2)] * 3, (3,), (3, 2), (8,), (2, 4), (2, 1, 2), (2, 2, 2))
Numbers: TypeAlias = dict[str, Tensor]


# -- a model of parts


class Normed(nn.Module):
    """Statistics that are kept in buffers."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(sizes["d"])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x.flatten(0, 1)).view_as(x)


class Counted(nn.Module):
    """Buffers that are written in place: a count, and a mean that moves."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.linear = nn.Linear(sizes["d"], sizes["d"])
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(sizes["d"]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x - self.mean)
        if self.training:
            self.count += 1
            self.mean.lerp_(y.detach().mean((0, 1)), 0.1)
        return x + y / (1 + self.count)


class Crossed(nn.Module):
    """Attention to a memory of another length."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        d, self.heads = sizes["d"], sizes["h"]
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.memory = nn.Parameter(torch.randn(3, d))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(self.memory.expand(x.shape[0], -1, -1)).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), k, v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """Torch's own attention, with a mask of which tokens are left out."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(sizes["d"], sizes["h"], batch_first=True)
        self.norm = nn.LayerNorm(sizes["d"])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        left_out = y.detach()[..., 0] > 0
        left_out[:, 0] = False
        return x + self.attention(y, y, y, key_padding_mask=left_out, need_weights=False)[0]


class Cached(nn.Module):
    """Causal attention, whose keys and values are kept for later tokens where there is a cache."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        d, self.heads = sizes["d"], sizes["h"]
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.cache: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, *own = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.cache:
            own = [torch.cat(each, 2) for each in zip(self.cache, own, strict=True)]
        mask, (k, v) = None, own
        if self.cache is not None:
            self.cache = k, v
            mask = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1])
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.o(a.transpose(1, 2).flatten(2))


class Around(nn.Module):
    """A module of one of the others beside the residual stream."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Chosen(nn.Module):
    """Experts of which each token takes two."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(sizes["d"], 4), OwnExperts(4, sizes["d"], sizes["f"])

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.router(x).softmax(-1).topk(2)
        tokens = x.flatten(0, 1)
        return x + self.experts(tokens, index.flatten(0, 1), weight.flatten(0, 1)).view_as(x)


class KnownExperts(OwnExperts):
    """Experts that `parallelize` runs as one operator."""


register_experts(KnownExperts, "e f d, e d f, e f d", counts=["count"])


class Routed(nn.Module):
    """Experts by dshard's own function, or by a module that it knows; some take few tokens."""

    def __init__(self, sizes: dict[str, int], capacity: int | None = None, known: bool = False) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(sizes["d"], 3, bias=False), capacity
        self.module = KnownExperts(3, sizes["d"], sizes["f"]) if known else None
        if not known:
            self.up = nn.Parameter(torch.randn(3, sizes["f"], sizes["d"]))
            self.down = nn.Parameter(torch.randn(3, sizes["d"], sizes["f"]))

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.router(x).softmax(-1).topk(2)
        if self.module is not None:
            tokens = (y.flatten(0, 1) for y in (x, index, weight))
            return x + self.module(*tokens).view_as(x)
        out = dshard.experts(dshard.mlp_experts(), x, index, weight, self.up, self.down, capacity=self.capacity)
        return x + out  # type: ignore[no-any-return]


def of_transformers(implementation: str, sizes: dict[str, int]) -> nn.Module:
    """The layer of experts of Mixtral."""
    mixtral = import_module("transformers.models.mixtral.modeling_mixtral")
    own = {"hidden_size": sizes["d"], "intermediate_size": sizes["f"], "num_local_experts": 4}
    config = mixtral.MixtralConfig(**own, experts_implementation=implementation)
    block = mixtral.MixtralSparseMoeBlock(config)
    for p in block.parameters():
        nn.init.normal_(p, std=0.5)
    return Around(block)


class Convolved(nn.Module):
    """A convolution over positions."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.conv = nn.Conv1d(sizes["d"], sizes["d"], 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT).mT.relu()


class Listed(nn.Module):
    """A list of layers, each of which skips to the last."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(sizes["d"], sizes["d"], bias=i > 0) for i in range(3))
        self.last = nn.Linear(3 * sizes["d"], sizes["d"])

    def forward(self, x: Tensor) -> Tensor:
        ys, y = [], x
        for layer in self.layers:
            y = layer(y).tanh()
            ys.append(y)
        return x + self.last(torch.cat(ys, -1))


class Frozen(nn.Module):
    """A part that is not trained, without gradients on its way, and one that is."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.teacher, self.own = nn.Linear(sizes["d"], sizes["f"]), nn.Linear(sizes["f"], sizes["d"])
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.teacher(x).relu()
        return x + self.own(y)


class Written(nn.Module):
    """Writes to what it made, and to views of it."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(sizes["d"], sizes["f"]), nn.Linear(sizes["f"], sizes["d"])

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y[..., 0] = 0
        y[:, :1].mul_(2)
        z = self.down(y.relu_())
        z += x
        return z


class Dropped(nn.Module):
    """Dropout behind a layer."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(sizes["d"], sizes["d"]), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x))


PARTS: dict[str, Callable[[dict[str, int]], nn.Module]] = {
    "normed": Normed,
    "counted": Counted,
    "crossed": Crossed,
    "masked": Masked,
    "chosen": Chosen,
    "routed": Routed,
    "capped": partial(Routed, capacity=3),
    "known": partial(Routed, known=True),
    "mixtral": partial(of_transformers, "eager"),
    "mixtral batched": partial(of_transformers, "batched_mm"),
    "cached": Cached,
    "convolved": Convolved,
    "listed": Listed,
    "frozen": Frozen,
    "written": Written,
    "dropped": Dropped,
    "attention": lambda s: Around(Attention(s["d"], s["h"], s["h"])),
    "grouped": lambda s: Around(Attention(s["d"], s["h"], max(1, s["h"] // 2))),
    "gated": lambda s: Around(Gated(s["d"], s["f"])),
    "mixed": lambda s: Around(Mixed(s["d"], s["f"], 4)),
    "adapted": lambda s: Around(nn.Sequential(nn.LayerNorm(s["d"]), Adapted(s["d"], s["d"], 2))),
    "perceptron": lambda s: nn.Sequential(nn.Linear(s["d"], s["f"]), nn.GELU(), nn.Linear(s["f"], s["d"])),
}
CHECKPOINTED = ("checkpoint", "reentrant", "nested", "pair", "selective", "within")
STEADY = ("plain", "plain", "plain", "twice", *CHECKPOINTED, "skip", "detached", "hooked")
"""The ways of a part that are alike in each step."""
CHANGING = ("times", "flag", "data", "exit", "training", "adapter", "no_grad", "late hook", "late checkpoint")
"""The ways that differ between steps, of which a plan cannot know."""


TWICE = ("evaluated", "accumulated", "accumulated locally", "left", "twice", "together", "generated")
LOOPS = ("plain", "plain", "plain", "plain", *TWICE, "clipped", "reloaded", "recomputed")
"""What a step does beside one forward and backward pass."""
PRICES = ("drawn",) * 6 + ("saved",) * 2 + ("auto", "edited")
"""How the plan is made."""


@dataclass(frozen=True)
class Step:
    """What a step of the loop does; `number` counts them from the one that is planned, which is step 0."""

    number: int = 0
    rows: int = 4
    way: str = "plain"
    training: bool = True
    odd: bool = False

    def __str__(self) -> str:
        return f"{self.way}, {self.rows} rows{', odd' * self.odd}{', not training' * (not self.training)}"


@dataclass(frozen=True)
class Program:
    """`parts` and the `ways` of calling them, the steps, and how its plan is drawn."""

    seed: int
    mesh: tuple[int, ...]
    sizes: tuple[tuple[str, int], ...]
    parts: tuple[str, ...]
    ways: tuple[str, ...]
    steps: tuple[Step, ...]
    tied: bool
    loss: str
    prices: str
    dtype: str = "double"
    draw: int = 0
    by_cost: frozenset[int] = frozenset()

    def __str__(self) -> str:
        head = f"# seed {self.seed} on {self.mesh}, {dict(self.sizes)}; {'tied; ' * self.tied}{self.loss}; {self.dtype}"
        parts = [f"{way:10} {part}" for way, part in zip(self.ways, self.parts, strict=True)]
        head += f"; {self.prices} {self.draw}, by cost {sorted(self.by_cost)}"
        return "\n".join([head, *parts, *(f"step {step.number}: {step}" for step in self.steps)])

    @property
    def is_steady(self) -> bool:
        """Whether each forward pass makes the calls that were planned."""
        alike = [step.training and step.way not in ("generated", "recomputed") for step in self.steps]
        return not set(self.ways) & set(CHANGING) and all(alike)

    @property
    def draws(self) -> bool:
        """Whether it draws numbers, as simulated ranks and one device do otherwise, or has a precision."""
        return "dropped" in self.parts or self.precision is not None

    @property
    def precision(self) -> Precision | None:
        """The dtypes in which weights are used and gradients reduced."""
        return DTYPES[self.dtype][1]

    @property
    def tolerance(self) -> float:
        """The largest difference beside what rounding explains."""
        return DTYPES[self.dtype][2]


class Net(nn.Module):
    """The parts of a program between an embedding and a head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        sizes = dict(program.sizes)
        self.embed = nn.Embedding(sizes["words"], sizes["d"])
        self.blocks = nn.ModuleList(
            PARTS[part](sizes) if part in PARTS else Block(part, sizes) for part in program.parts
        )
        self.head = nn.Linear(sizes["d"], sizes["words"], bias=not program.tied)
        if program.tied:
            self.head.weight = self.embed.weight
        self.ways, self.step, self.in_model = program.ways, Step(), program.loss == "inside"

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        x, kept = self.embed(ids), []
        for i, way in enumerate(self.ways):
            if way == "skip":
                kept.append(x)
            out = self.called(way, i, x)
            if out is None:
                break
            x = out
        for each in kept:
            x = x + each
        if self.in_model and targets is not None:
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), x
        return self.head(x), x

    def called(self, way: str, i: int, x: Tensor) -> Any:
        """What a part makes of `x`; None at an early exit."""
        block, odd = self.blocks[i], self.step.odd
        match way:
            case "twice":
                return block(block(x))
            case "checkpoint":
                return checkpoint(block, x, use_reentrant=False)
            case "reentrant":
                return checkpoint(block, x, use_reentrant=True)
            case "nested":
                inner = lambda y: checkpoint(block, y, use_reentrant=False).sin()  # noqa: E731
                return checkpoint(lambda y: inner(y) + y, x, use_reentrant=False)
            case "pair":
                return checkpoint(lambda y: block(self.blocks[0](y)), x, use_reentrant=False)
            case "selective":
                return checkpoint(block, x, use_reentrant=False, context_fn=SELECTIVE)
            case "within":
                return checkpoint(lambda y: block(y).sin() + y.mean(), x, use_reentrant=True)
            case "detached":
                return block(x.detach()) + x
            case "times":
                for _ in range(1 + self.step.number % 3):
                    x = block(x)
                return x
            case "flag":
                return x.cos() + x if odd else block(x)
            case "data":
                return block(x).cos() if self.step.number and x.detach().mean().item() > 0 else block(x)
            case "exit":
                return None if odd else block(x)
            case "training":
                return block(x) if self.training else x
            case "no_grad":
                with torch.no_grad() if odd else nullcontext():
                    y = block(x)
                return x + y
            case "late checkpoint":
                return checkpoint(block, x, use_reentrant=False) if odd else block(x)
            case _:
                return block(x)


def saves(context: Any, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """The policy of a checkpoint that keeps what matmuls make."""
    is_kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, saves)


class LowRank(nn.Module):
    """A part, and an adapter of few features beside it."""

    def __init__(self, base: nn.Module, d: int) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(d, 2, bias=False), nn.Linear(2, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


# -- a loop


def trained(
    program: Program, lay_out: Callable[[Net, Any], object], shift: float = 0.0
) -> Iterator[tuple[str, Tensor | None]]:
    """Train the model of a program, and yield what is to be compared."""
    with plain(), torch.no_grad():
        torch.manual_seed(program.seed)
        model: Any = Net(program).to(DTYPES[program.dtype][0])
        for p in model.parameters():
            p.mul_(1 + shift)
    for block, way in zip(model.blocks, program.ways, strict=True):
        if way == "hooked":
            hook(block)
    lay_out(model, batch(program, Step()))
    dshard.manual_seed(program.seed)
    optimizer = adam(model)
    for number, step in enumerate(program.steps):
        if number == 1:
            for i, way in enumerate(program.ways):
                if way == "adapter":
                    with plain():
                        torch.manual_seed(i)
                        model.blocks[i] = LowRank(model.blocks[i], dict(program.sizes)["d"])
                    optimizer = adam(model)
                elif way == "late hook":
                    hook(model.blocks[i])
        model.step = step
        model.train(step.training)
        for name, value in a_step(program, model, optimizer, step):
            yield f"{name} of step {number}", value
    yield from model.named_parameters()
    yield from model.named_buffers()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-3)


def hook(block: nn.Module) -> None:
    """Register a hook before a part and one behind it, which change what goes through."""
    block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
    block.register_forward_hook(lambda module, args, out: out.tanh())
    block.register_full_backward_hook(lambda module, into, of: None)


def batch(program: Program, step: Step) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step."""
    sizes, draws = dict(program.sizes), torch.Generator().manual_seed(97 * program.seed + step.number)
    with plain():
        ids, targets = torch.randint(sizes["words"], (2, step.rows, sizes["s"]), generator=draws)
        return ids, targets if program.loss == "inside" else targets.flatten()


def a_step(
    program: Program, model: Any, optimizer: torch.optim.Optimizer, step: Step
) -> Iterator[tuple[str, Tensor | None]]:
    def loss_of(step: Step) -> Tensor:
        ids, targets = batch(program, step)
        if program.loss == "inside":
            return model(ids, targets)[0]  # type: ignore[no-any-return]
        x, z = checkpoint(model, ids, use_reentrant=False) if step.way == "recomputed" else model(ids)
        loss = F.cross_entropy(x.flatten(0, 1), targets)
        if program.loss == "two":
            with plain():
                other = ids * 0.1
            loss = loss + 0.1 * z.square().mean() + F.mse_loss(x[..., 0], other)
        return loss

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer.zero_grad(set_to_none=step.number % 2 == 0)
    if step.way == "evaluated":
        with torch.no_grad():
            yield "another loss", loss_of(replace(step, number=step.number + 50, rows=3))
    if step.way == "accumulated":
        loss_of(replace(step, number=step.number + 50)).backward()
    if step.way == "accumulated locally":
        with dshard.accumulate():
            loss_of(replace(step, number=step.number + 50)).backward()
            loss_of(replace(step, number=step.number + 70)).backward()
    if step.way == "generated":
        yield from generated_tokens(model, batch(program, step)[0])
        model.train(step.training)
    if step.way == "reloaded":
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
    if step.way == "left":
        loss_of(replace(step, number=step.number + 50))
    loss = loss_of(step)
    if step.way == "twice":
        loss.backward(retain_graph=True)
    if step.way == "together":
        loss = loss + loss_of(replace(step, number=step.number + 50))
    loss.backward()
    yield "loss", loss.detach()
    if step.way == "clipped":
        yield "norm", nn.utils.clip_grad_norm_(parameters, 0.1)
    for name, p in model.named_parameters():
        yield f"gradient {name}", p.grad
    optimizer.step()


@torch.no_grad()
def generated_tokens(model: Any, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Some tokens that follow, one by one with a growing cache."""
    model.eval()
    cached = [block for block in model.blocks if isinstance(block, Cached)]
    for block in cached:
        block.cache = ()
    for i in range(3):
        logits = model(ids)[0][:, -1:]
        ids = logits.argmax(-1)
        yield f"logits {i}", logits
    for block in cached:
        block.cache = None


def held(numbers: Iterator[tuple[str, Any]]) -> Numbers:
    """The values as plain tensors, copied."""

    def whole_of(x: Any) -> Any:
        x = x.detach()
        if isinstance(x, DTensor):
            return whole(x if not any(p.is_partial() for p in x.placements) else x.redistribute(placements=_whole(x)))
        with plain():
            return dshard.comm.of_first_rank(x).clone()

    return {name: whole_of(x) for name, x in numbers if x is not None}


def _whole(x: DTensor) -> list[Any]:
    return [dshard.Replicate()] * len(x.placements)


# -- plans drawn at random


def random_plan(program: Program, model: nn.Module, example: Any) -> ModelPlan:
    """The plan of a program: a candidate of each call, or what "auto" finds within limits."""
    mesh = Mesh(program.mesh, ("x", "y", "z")[: len(program.mesh)])
    random = Random(f"{program.seed} {program.draw}")
    args = example if program.loss == "inside" else example[:1]
    topology = TOPOLOGIES[random.choice([*TOPOLOGIES])]
    if program.prices in ("auto", "edited"):
        words = ["batch", "sequence", "features", *["parameters"] * (program.prices == "auto")]
        forbid = {a: random.sample(words, 2) for a in mesh.names} if random.random() < 0.7 else {}
        with dshard.use_topology(topology):
            plan = dshard.plan_model(model, mesh, Auto(seconds=0.2, forbid=forbid), *args, precision=program.precision)
            return edited(plan, model, random) if program.prices == "edited" else plan
    key = replace(program, draw=0, by_cost=frozenset())
    if key not in TRACED:
        TRACED.clear()
        reached = ReachableState(model, args, {})
        graph = step_graph(record_step(model, args, {}, reached), model, args, {}, reached, program.precision)
        if graph is None:
            raise Undrawn
        TRACED[key] = with_packed_values(graph), {}
    graph, known = TRACED[key]
    with unpriced():
        drawn = (random_choice(graph, known, mesh, topology, random) for _ in range(TRIES))
        chosen = next(filter(None, drawn), None)
    if chosen is None:
        raise Undrawn
    plan = replace(as_plan(graph, chosen, mesh), ndim=2, precision=program.precision)
    plan = replace(plan, calls=tuple([c.by_cost() if i in program.by_cost else c for i, c in enumerate(plan.calls)]))
    return reloaded(plan) if program.prices == "saved" else plan


def edited(plan: ModelPlan, model: nn.Module, random: Random) -> ModelPlan:
    """A plan with a pin of one of its parameters."""
    name = random.choice([*plan.parameters])
    dims = [dshard.Replicate(), *map(dshard.Shard, range(model.get_parameter(name).dim()))]
    return reloaded(plan.edit({name: [random.choice(dims) for _ in plan.mesh.shape]}))


def reloaded(plan: ModelPlan) -> ModelPlan:
    """A plan as its file has it."""
    again = plan_from(json.loads(json.dumps(plan.data())), plan.mesh)
    assert again.data() == plan.data(), "a file has another plan"
    return again


TRACED: dict[Program, tuple[StepGraph, dict[Any, Any]]] = {}
"""The step of the last program, and the candidates of its calls."""
EXPECTED: dict[Program, Numbers] = {}
"""What one device makes of the last program."""


@contextmanager
def unpriced() -> Iterator[None]:
    """Within the block local work of candidates has no price, which takes most of the time."""
    before = call_candidates.local_seconds
    call_candidates.local_seconds = lambda *args: LocalSeconds(0.0, 0.0)  # type: ignore[assignment]
    try:
        yield
    finally:
        call_candidates.local_seconds = before


def random_choice(
    graph: StepGraph, known: dict[Any, Any], mesh: Mesh, topology: Topology, random: Random
) -> StepPlan | None:
    """A candidate for each call, drawn at random, often among those that read their operands where these are made."""
    chosen: list[CallCandidate] = []
    stays = random.choice([0.0, 0.5, 0.9])
    for call in graph.calls:
        key = call.signature, tuple(value.kind == "made" for value in call.operands)
        if key not in known:
            known[key] = candidates(call, mesh, topology)
        own = known[key]
        ends = [x.producer for x in call.operands]
        made = [None if end is None else chosen[end.call].outputs[end.position] for end in ends]
        if call.writes and made[0] is not None:
            own = [each for each in own if each.inputs[0] == made[0]]
            if not own:
                return None
        if random.random() < stays:
            scores = [sum(a == b for a, b in zip(each.inputs, made, strict=True)) for each in own]
            own = [each for each, score in zip(own, scores, strict=True) if score == max(scores)]
        chosen.append(random.choice(own))
    parameters = {}
    for value in graph.parameters():
        used = [chosen[use.call].inputs[use.position] for use in value.uses]
        layouts = layouts_of(value, mesh, used if len(value.uses) == 1 else (), ())
        parameters[value.number] = random.choice([random.choice(used), random.choice(layouts)])
        if parameters[value.number] not in layouts:
            parameters[value.number] = random.choice(layouts)
    return StepPlan(tuple(chosen), parameters, Weights(), Parts(), 0.0, 0, 0)


class Undrawn(Exception):
    """No candidate writes to a tensor where that is."""


TOPOLOGIES = {"cpu": Topology.preset("cpu"), "dgx-h100": Topology.preset("dgx-h100")}


# -- comparing


def outcome(program: Program) -> tuple[str, str]:
    """The outcome of a program on simulated ranks as a word, and what differs."""
    return in_double(_outcome, program, None)  # type: ignore[no-any-return]


def outcome_of_rank(program: Program) -> tuple[str, str]:
    """The outcome of a program on this rank of four."""
    torch.set_num_threads(1)
    return in_double(_outcome, program, mesh_of(program.mesh))  # type: ignore[no-any-return]


def outcome_on(pool: RankPool, program: Program) -> tuple[str, str]:
    """The outcome of a program on four real ranks, which a hang fails."""
    program = program if prod(program.mesh) == 4 else replace(program, mesh=(2, 2))
    try:
        of_ranks = pool.run(outcome_of_rank, program, timeout=SECONDS)
    except RankError as error:
        return "raised", str(error)
    return next((each for each in of_ranks if each[0] != "equal"), of_ranks[0])


def expected_of(program: Program, shift: float = 0.0) -> Numbers:
    if program.draws:  # as ranks draw
        mesh = Mesh((1,), ("x",))
        with simulated(mesh):
            own = program.precision
            as_data = lambda model, example: dshard.parallelize(model, mesh, "data", *example[:1], precision=own)  # noqa: E731
            return held(trained(program, as_data, shift))
    return held(trained(program, lambda model, example: None, shift))


def _outcome(program: Program, ranks: Any) -> tuple[str, str]:
    """The outcome on a mesh of processes, or on simulated ranks."""
    warnings.simplefilter("ignore")
    key = replace(program, draw=0, by_cost=frozenset())
    try:
        if key not in EXPECTED:
            EXPECTED.clear()
            EXPECTED[key] = expected_of(program)
    except (RuntimeError, ValueError, IndexError) as error:
        return "refused by torch", str(error)
    torch.manual_seed(program.seed)
    try:
        plan = random_plan(program, Net(program).to(DTYPES[program.dtype][0]), batch(program, Step()))
    except (DShardError, Undrawn) as error:
        return "not planned", f"{type(error).__name__}: {error}"
    mesh = plan.mesh if ranks is None else ranks

    def lay_out(model: nn.Module, example: Any) -> None:
        dshard.parallelize(model, mesh, plan)

    with warnings.catch_warnings(record=True) as noted, nullcontext() if ranks is not None else simulated(plan.mesh):
        warnings.simplefilter("always")
        try:
            actual = held(trained(program, lay_out))
        except Exception as error:
            return "raised", f"{type(error).__name__}: {error} {traceback.format_exc(limit=-6)}"
    wrong = different(program, EXPECTED[key], actual)
    said = [str(each.message) for each in noted if "was planned to" in str(each.message)]
    if wrong:
        return "wrong", wrong
    return ("warned", said[0]) if said and program.is_steady else ("equal", "")


def different(program: Program, expected: Numbers, actual: Numbers) -> str:
    if expected.keys() != actual.keys():
        return f"has {sorted(expected.keys() ^ actual.keys())} in one alone"
    if not all(x.isfinite().all() for x in expected.values()):
        return ""
    other = [f"{name} is {actual[name].dtype}" for name, x in expected.items() if actual[name].dtype != x.dtype]
    if other:
        return ", ".join(other)
    far = {name: distance(actual[name], x) for name, x in expected.items()}
    wrong = {name: each for name, each in far.items() if each > program.tolerance}
    if wrong:
        shifted = expected_of(program, 1e-5 * program.tolerance)
        wrong = {name: each for name, each in wrong.items() if each > 1e3 * distance(shifted[name], expected[name])}
    return ", ".join(f"{name} by {each:.2g}" for name, each in wrong.items())


# -- drawing


def generated(seed: int) -> Program:
    """Generate the program of this seed."""
    random = Random(seed)
    h = random.choice([1, 2, 4, 4])
    d = h * random.choice([2, 2, 4])
    sizes = {
        "s": random.choice([1, 2, 3, 4, 5, 8]), "d": d, "h": h, "e": d // h,
        "f": random.choice([3, 4, 8, 10]), "words": random.choice([4, 5, 7]),
    }  # fmt: skip
    count = random.choice([1, 1, 1, 2, 2, 3])
    parts = [random.choice([*PARTS] if random.random() < 0.6 else LINES) for _ in range(count)]
    ways = [random.choice(STEADY if random.random() < 0.6 else CHANGING) for _ in range(count)]
    refused = ["twice"] * ("selective" in ways) + ["generated"] * (not PARTS.keys() >= {*parts})
    steps = [
        Step(
            i,
            random.choice([4, 4, 4, 2, 3, 1, 8]),
            random.choice([way for way in LOOPS if way not in refused]),
            random.random() < 0.85,
            random.random() < 0.4,
        )
        for i in range(random.choice([3, 3, 4]))
    ]
    prices, dtype = random.choice(PRICES), random.choice([*DTYPES] if random.random() < 0.3 else ["double"])
    tied, loss = random.random() < 0.3, random.choice(["inside", "outside", "outside", "two"])
    mesh = random.choice(MESHES)
    return Program(seed, mesh, tuple(sizes.items()), tuple(parts), tuple(ways), tuple(steps), tied, loss, prices, dtype)


def simpler(program: Program) -> Iterator[Program]:
    """Programs with fewer or simpler parts and steps."""
    parts, ways, steps = program.parts, program.ways, program.steps
    for i in range(len(parts)):
        if len(parts) > 1:
            yield replace(program, parts=parts[:i] + parts[i + 1 :], ways=ways[:i] + ways[i + 1 :])
        if ways[i] != "plain":
            yield replace(program, ways=(*ways[:i], "plain", *ways[i + 1 :]))
    for i, step in enumerate(steps):
        if len(steps) > 1:
            yield replace(program, steps=steps[:i] + steps[i + 1 :])
        for plainer in (replace(step, way="plain"), replace(step, way="plain", rows=4, training=True, odd=False)):
            if step != plainer:
                yield replace(program, steps=(*steps[:i], plainer, *steps[i + 1 :]))
    fewer = {
        "tied": False,
        "loss": "outside",
        "dtype": "double",
        "prices": "drawn",
        "mesh": (4,) if len(program.mesh) > 1 else (2,),
    }
    for name, value in fewer.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})


def shrunk(program: Program, run: Callable[[Program], tuple[str, str]]) -> Program:
    """The program with fewer parts, and fewer calls that are not left to their cost, whose outcome is the same."""
    word = run(program)[0]
    for plainer in simpler(program):
        for draw in (program.draw, *range(4)):
            other = replace(plainer, draw=draw)
            if run(other)[0] == word:
                return shrunk(other, run)
    for i in range(60):
        other = replace(program, by_cost=program.by_cost | {i})
        if i not in program.by_cost and run(other)[0] == word:
            program = other
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", action="store_true", help="on four real ranks")
    parser.add_argument("--draw", type=int, default=0)
    parser.add_argument("--show", type=int)
    parser.add_argument("--shrink", type=int)
    args = parser.parse_args()
    if args.show is not None:
        print(replace(generated(args.show), draw=args.draw))
        return
    run: Callable[[Program], tuple[str, str]] = partial(outcome_on, rank_pool(4)) if args.ranks else outcome
    if args.shrink is not None:
        small = shrunk(replace(generated(args.shrink), draw=args.draw), run)
        print(small, *run(small), sep="\n")
        return
    words, start = Counter[str](), time.process_time()
    for number in range(args.count):
        program = replace(generated(args.first + number // PLANS), draw=number % PLANS)
        word, text = run(program)
        words[word] += 1
        if word not in ("equal", "refused by torch"):
            print(f"{word}: {text[:1500]}\n{program}\n", flush=True)
        if number % 40 == 39:
            print(f"{number + 1} programs, {time.process_time() - start:.0f} s: {dict(words)}", flush=True)


if __name__ == "__main__":
    main()
