"""Generated programs that change something between steps: rehearsed, each step is that of Python alone, to the bit.

A `Program` is a small model, a plan, and changes at some of its steps: of an argument, a hook, an attribute, a
variable, an option of the optimiser, a parameter, or of the loop itself. It runs twice on each rank, by Python alone
and rehearsed, and all local values are compared after each step. `generated(seed)` draws one.

    python tests/helpers/changing_programs.py 2000              # seeds 0 ... 1999 on one rank; what differs is printed
    python tests/helpers/changing_programs.py 500 --ranks 2 --first 7000
    python tests/helpers/changing_programs.py 200 --ranks 2 --apart  # one rank makes local calls that others do not
    python tests/helpers/changing_programs.py --show 17
    python tests/helpers/changing_programs.py --shrink 17 --ranks 2  # the fewest changes that differ in the same way
"""

from __future__ import annotations

import argparse
import gc
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import DTensor
from dshard.errors import RankError
from dshard.testing import RankPool, rank_pool
from helpers.generated_models import LINES, Block, mesh_of

STEPS, SECONDS, TOLERANCE = 9, 20.0, 1e-6
"""Steps of a program, the longest it may take on each rank, and the difference where sums are ordered otherwise."""
SIZES = {"s": 4, "d": 8, "h": 2, "e": 4, "f": 10, "words": 5}
PLANS: dict[str, int] = {"data": 1, "fsdp": 1, "megatron": 1, "data x megatron": 2}
"""Plans, with the number of mesh axes."""
Held: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """`changes` are steps with the changes before them; `apart` says that one rank makes calls that others do not."""

    seed: int
    plan: str
    blocks: tuple[str, ...]
    dropout: float
    norm: bool
    changes: tuple[tuple[int, str], ...]
    apart: bool = False

    def __str__(self) -> str:
        head = f"# seed {self.seed}, {self.plan}; dropout {self.dropout}; {'batch norm' if self.norm else 'no norm'}"
        return "\n".join([head, *self.blocks, *(f"before step {step}: {name}" for step, name in self.changes)])


class Stop(Exception):
    """Raised by a forward pass on purpose."""


class Doubled(torch.autograd.Function):
    """A function of the user's, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad * 2


@dataclass
class Settings:
    """What a forward pass reads beside its arguments, at block `where`."""

    where: int = 0
    scale: Any = 1.0
    act: Callable[[Any], Any] | None = None
    flag: bool = False
    loops: int = 0
    shift: Any = None
    dropout: float = 0.0
    reads: str = ""
    writes: str = ""
    custom: bool = False
    detached: bool = False
    checkpointed: bool = False
    keeps: bool = False
    stops: bool = False
    hooked: bool = False
    apart: Random | None = None
    kept: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)


GLOBALS: dict[str, Any] = {}
"""Read by the forward pass of every model."""


class Net(nn.Module):
    """The blocks of a program, between which `settings` say what else happens."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        d, words = SIZES["d"], SIZES["words"]
        self.embed, self.head = nn.Embedding(words, d), nn.Linear(d, words)
        self.blocks = nn.ModuleList(Block(lines, SIZES) for lines in program.blocks)
        self.dropout = nn.Dropout(program.dropout)
        self.norm = nn.BatchNorm1d(d) if program.norm else None
        self.settings = Settings()

    def forward(self, ids: Tensor, scale: Any = 1.0, extra: Any = None) -> Any:
        x = self.embed(ids) * scale * GLOBALS.get("scale", 1.0)
        if extra is not None:
            x = x + extra
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.settings.checkpointed else block(x)
            if i == self.settings.where % len(self.blocks):
                x = between(x, self.settings)
            if self.settings.apart is not None:
                local_calls(x, self.settings.apart)
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.head(self.dropout(x))


def between(x: Any, s: Settings) -> Any:
    """What the settings say."""
    x = x * s.scale if type(s.scale) is not float or s.scale != 1 else x
    x = s.act(x) if s.act is not None else x
    x = x.tanh() if s.flag else x
    for _ in range(s.loops):
        x = x + x.sin()
    x = x + s.shift if s.shift is not None else x
    x = F.dropout(x, s.dropout) if s.dropout else x
    x = Doubled.apply(x) if s.custom else x
    x = x.detach() + x * 0.5 if s.detached else x
    if s.writes == "own":
        x = x * 1.5
        x.mul_(2)
    elif s.writes == "part":
        x = x.clone()
        x[..., 0] = 0
    if s.hooked and x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    if s.keeps:
        s.kept.append(x)
    if s.reads == "shape":
        s.seen.append(tuple(x.shape))
    elif s.reads == "item":
        s.seen.append(x.detach().square().mean().item())
    elif s.reads == "branch" and x.detach().mean().item() > 0:
        x = x.neg()
    elif s.reads == "repr":
        s.seen.append(str(x.detach().sum().full_tensor()))
    elif s.reads == "local":
        s.seen.append(x.to_local().detach().sum().item())
    if s.stops:
        raise Stop
    return x


def local_calls(x: Any, random: Random) -> None:
    """Calls that send nothing, at random, and of which nothing is used."""
    if any(placement.is_partial() for placement in x.placements):
        return  # some of these would complete it
    for _ in range(random.choice([0, 0, 1, 3])):
        random.choice([
            lambda: (x * 2).relu(), lambda: x.detach().abs().sum(), lambda: x.shape, lambda: x.transpose(0, 1),
            lambda: x.to_local().sum().item(), lambda: x + x, lambda: x.exp().mean(), lambda: x.flatten()[:1],
        ])()  # fmt: skip


# -- a program that runs


class Running:
    """A program as it runs: its model, its optimiser and its loop."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(program.seed)
        self.program, self.random = program, Random(program.seed)
        mesh = mesh_of((dist.get_world_size(),) if PLANS[program.plan] == 1 else (1, dist.get_world_size()))
        self.strided = False
        self.rows, self.tokens, self.keywords = 4, SIZES["s"], dict[str, Any]()
        self.model: Any = Net(program)
        dshard.parallelize(self.model, mesh, program.plan, *self.batch(0)[:1])
        dshard.manual_seed(program.seed)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.way, self.weight, self.autocast, self.clears, self.steps = "plain", 1.0, False, True, True
        self.hooks: list[Any] = []
        self.is_rounded = False  # by sums in another order: gradients of gradients, and of two calls of the model

    @property
    def settings(self) -> Settings:
        return self.model.settings  # type: ignore[no-any-return]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(step)
        ids = torch.randint(SIZES["words"], (2, self.rows, self.tokens), generator=rng)
        return (ids[0].t().contiguous().t(), ids[1, :1].expand(self.rows, -1)) if self.strided else (ids[0], ids[1])

    def loss(self, step: int) -> Any:
        ids, targets = self.batch(step)
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            out = self.model(ids, **self.keywords)
        loss = F.cross_entropy(out.float().transpose(1, 2), targets) * self.weight
        for kept in self.settings.kept[-1:]:
            loss = loss + kept.float().square().mean()
        return loss

    def step(self, number: int) -> Held:
        """One step; the values to compare."""
        s, parameters = self.settings, [p for p in self.model.parameters() if p.requires_grad]
        s.kept.clear()
        s.seen.clear()
        if self.clears:
            self.optimizer.zero_grad()
        self.is_rounded |= self.way in ("together", "penalty")
        out: Held = {}
        match self.way:
            case "accumulated":
                self.loss(number + 50).backward()
            case "evaluated":
                with torch.no_grad():
                    out["evaluated"] = self.loss(number + 50)
            case "inferred":
                with torch.inference_mode():
                    out["inferred"] = self.loss(number + 50)
            case "left":
                self.loss(number + 50)
            case "functional":
                weights = {name: p.detach() * 0.5 for name, p in self.model.named_parameters()}
                out["functional"] = torch.func.functional_call(self.model, weights, self.batch(number)[:1])
            case "averaged":
                average = deepcopy(self.model).eval()
                with torch.no_grad():
                    for mean, p in zip(average.parameters(), self.model.parameters(), strict=True):
                        mean.lerp_(p, 0.1)
                    out["averaged"] = average(*self.batch(number)[:1])
            case "stopped":
                s.stops = True
                try:
                    self.loss(number + 50)
                except Stop:
                    s.stops = False
                s.kept.clear()
        loss = out["loss"] = self.loss(number)
        match self.way:
            case "twice":
                loss.backward(retain_graph=True)
                loss.backward()
            case "together":
                (loss + self.loss(number + 50)).backward()
            case "gradients":
                grads = torch.autograd.grad(loss, parameters[:2], allow_unused=True)
                out |= {f"gradient {i}": grad for i, grad in enumerate(grads)}
            case "penalty":
                grads = torch.autograd.grad(loss, parameters[:3], create_graph=True, allow_unused=True)
                (loss + sum(grad.square().sum() for grad in grads if grad is not None)).backward()
            case "some":
                loss.backward(inputs=parameters[:2])
            case "weighted":
                loss.backward(torch.full_like(loss, 0.5))
            case "nothing":
                pass
            case _:
                loss.backward()
        extra = self.keywords.get("extra")
        if isinstance(extra, Tensor):
            out["extra"] = extra.grad
        out |= {f"{name}.grad": p.grad for name, p in self.model.named_parameters()}
        if self.way == "clipped":
            out["norm"] = nn.utils.clip_grad_norm_(parameters, 0.1)
        if self.steps and self.way != "gradients":
            self.optimizer.step()
        out |= {f"kept {i}": x for i, x in enumerate(s.kept)} | {f"seen {i}": x for i, x in enumerate(s.seen)}
        out |= dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return out | {"random state": torch.get_rng_state(), "dshard's": dshard.get_rng_state()}


def held(x: Any) -> Any:
    """A value to compare: of a distributed tensor its layout, and this rank's local tensor."""
    if isinstance(x, DTensor):
        return str(x.layout), tuple(x.shape), x.to_local().detach().clone(), x.requires_grad
    return x.detach().clone() if isinstance(x, Tensor) else x


# -- changes


Change: TypeAlias = Callable[[Running, Random], object]
CHANGES: dict[str, Change] = {}


def change(make: Change) -> Change:
    CHANGES[make.__name__.replace("_", " ")] = make
    return make


def some_numbers(random: Random) -> Any:
    return random.choice([1, 1.0, True, 2, 2.0, 0.5, -0.0, 0.0, -1, 1 + 1e-7])


ACTS: list[Any] = [None, F.gelu, F.relu, F.silu, torch.tanh, partial(F.gelu, approximate="tanh"), lambda x: x * 0.7]


@change
def scale(run: Running, random: Random) -> None:
    run.settings.scale = some_numbers(random)


@change
def a_scale_that_is_a_tensor(run: Running, random: Random) -> None:
    run.settings.scale = torch.tensor(random.choice([0.5, 2.0]))


@change
def activation(run: Running, random: Random) -> None:
    run.settings.act = random.choice(ACTS)


@change
def a_branch(run: Running, random: Random) -> None:
    run.settings.flag = not run.settings.flag


@change
def a_loop(run: Running, random: Random) -> None:
    run.settings.loops = random.randrange(4)


@change
def a_plain_tensor(run: Running, random: Random) -> None:
    shift = run.settings.shift
    if isinstance(shift, Tensor) and random.random() < 0.5:
        shift.add_(1)  # the same object
    else:
        run.settings.shift = random.choice([0.25, torch.full((SIZES["d"],), random.random()), None])


@change
def dropout(run: Running, random: Random) -> None:
    run.settings.dropout = random.choice([0.0, 0.1, 0.5])


@change
def dropout_of_a_module(run: Running, random: Random) -> None:
    run.model.dropout.p = random.choice([0.0, 0.2, 0.5])


@change
def training(run: Running, random: Random) -> None:
    run.model.train(not run.model.training)


@change
def training_of_a_part(run: Running, random: Random) -> None:
    part = run.model.dropout if run.model.norm is None or random.random() < 0.5 else run.model.norm
    part.train(not part.training)


@change
def rows(run: Running, random: Random) -> None:
    run.rows = random.choice([1, 2, 3, 4, 5, 8])


@change
def strides_of_the_batch(run: Running, random: Random) -> None:
    run.strided = not run.strided


@change
def an_argument(run: Running, random: Random) -> None:
    run.keywords = random.choice([{}, {"scale": some_numbers(random)}, {"scale": torch.tensor(2.0)}, {"extra": None}])


@change
def an_input_that_needs_a_gradient(run: Running, random: Random) -> None:
    mesh = run.model.head.weight.device_mesh
    extra = torch.full((SIZES["d"],), random.random())
    laid: Any = dshard.distribute_tensor(extra, mesh, [dshard.Replicate()] * mesh.ndim)
    run.keywords = {"extra": laid.requires_grad_(random.random() < 0.8)}


@change
def a_global(run: Running, random: Random) -> None:
    GLOBALS["scale"] = some_numbers(random)


@change
def another_place(run: Running, random: Random) -> None:
    run.settings.where += 1


@change
def a_forward_hook(run: Running, random: Random) -> None:
    factor = random.choice([None, 2.0, 0.5])
    block = random.choice(list(run.model.blocks))
    run.hooks.append(block.register_forward_hook(lambda module, args, out: None if factor is None else out * factor))


@change
def a_hook_before(run: Running, random: Random) -> None:
    block = random.choice(list(run.model.blocks))
    run.hooks.append(block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)))


@change
def a_hook_of_the_model(run: Running, random: Random) -> None:
    run.hooks.append(run.model.register_forward_hook(lambda module, args, out: out * 1.25))


@change
def a_backward_hook(run: Running, random: Random) -> None:
    block, seen = random.choice(list(run.model.blocks)), run.settings.seen
    run.hooks.append(block.register_full_backward_hook(lambda module, into, of: seen.append(len(into))))


@change
def a_hook_of_a_parameter(run: Running, random: Random) -> None:
    p = random.choice([p for p in run.model.parameters() if p.requires_grad] or [None])
    if p is not None:
        run.hooks.append(p.register_hook(lambda grad: grad * 2))


@change
def a_hook_after_accumulation(run: Running, random: Random) -> None:
    p = random.choice([p for p in run.model.parameters() if p.requires_grad] or [None])
    if p is not None:
        run.hooks.append(p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)))


@change
def a_hook_less(run: Running, random: Random) -> None:
    if run.hooks:
        run.hooks.pop(random.randrange(len(run.hooks))).remove()


@change
def a_hook_of_a_value(run: Running, random: Random) -> None:
    run.settings.hooked = not run.settings.hooked


@change
def a_hook_before_with_keywords(run: Running, random: Random) -> None:
    def scaled(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "scale": 0.5}

    run.hooks.append(run.model.register_forward_pre_hook(scaled, with_kwargs=True))


@change
def a_hook_before_the_backward_pass(run: Running, random: Random) -> None:
    run.hooks.append(run.model.head.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,)))


@change
def parameters_written(run: Running, random: Random) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.9)


@change
def data_of_a_parameter(run: Running, random: Random) -> None:
    p = random.choice(list(run.model.parameters()))
    p.data = p.data.clone() * 1.1


@change
def a_parameter_replaced(run: Running, random: Random) -> None:
    head = run.model.head
    head.weight = nn.Parameter(head.weight.detach() * 0.9)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)


@change
def frozen(run: Running, random: Random) -> None:
    p = random.choice(list(run.model.parameters()))
    p.requires_grad_(not p.requires_grad)


@change
def frozen_but_for_the_head(run: Running, random: Random) -> None:
    run.model.requires_grad_(not run.model.embed.weight.requires_grad)
    run.model.head.requires_grad_(True)


@change
def a_module_replaced(run: Running, random: Random) -> None:
    """By one of plain parameters, which count as replicated."""
    run.model.head = nn.Linear(SIZES["d"], SIZES["words"])
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)


@change
def an_adapter(run: Running, random: Random) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.a = base.requires_grad_(False), nn.Linear(SIZES["d"], 2, bias=False)
            self.b = nn.Linear(2, SIZES["words"], bias=False)

        def forward(self, x: Tensor) -> Any:
            return self.base(x) + self.b(self.a(x))

    run.model.head = Adapted(run.model.head)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)


@change
def a_parametrization(run: Running, random: Random) -> None:
    head = run.model.head
    if parametrize.is_parametrized(head):
        parametrize.remove_parametrizations(head, "weight", leave_parametrized=random.random() < 0.5)
    elif isinstance(head, nn.Linear):
        weight_norm(head)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)


@change
def tied(run: Running, random: Random) -> None:
    run.model.head.weight = run.model.embed.weight


@change
def learning_rate(run: Running, random: Random) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = random.choice([0.01, 0.1, 0.2])


@change
def weight_decay(run: Running, random: Random) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = random.choice([0, 0.1])


@change
def states_of_the_optimiser(run: Running, random: Random) -> None:
    run.optimizer.load_state_dict(deepcopy(run.optimizer.state_dict()))


@change
def another_optimiser(run: Running, random: Random) -> None:
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01, foreach=random.choice([None, True, False]))


@change
def loaded(run: Running, random: Random) -> None:
    run.model.load_state_dict(deepcopy(run.model.state_dict()))


@change
def loaded_by_assignment(run: Running, random: Random) -> None:
    state = {name: x.detach().clone() for name, x in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)


@change
def copied(run: Running, random: Random) -> None:
    run.settings.kept.clear()
    run.model = deepcopy(run.model)
    run.hooks.clear()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)


@change
def a_block_more(run: Running, random: Random) -> None:
    run.model.blocks.append(run.model.blocks[0])


@change
def blocks_in_another_order(run: Running, random: Random) -> None:
    for i, block in enumerate(reversed(list(run.model.blocks))):
        run.model.blocks[i] = block


@change
def a_method_replaced(run: Running, random: Random) -> None:
    block = random.choice(list(run.model.blocks))
    run_block = block.run
    block.forward = lambda x: run_block(x, list(block.weights)) * 1.5


@change
def an_intermediate_kept(run: Running, random: Random) -> None:
    run.settings.keeps = not run.settings.keeps


@change
def a_value_read(run: Running, random: Random) -> None:
    run.settings.reads = random.choice(["", "shape", "item", "branch", "repr", "local"])


@change
def a_write(run: Running, random: Random) -> None:
    run.settings.writes = random.choice(["", "own", "part"])


@change
def a_function_of_the_user(run: Running, random: Random) -> None:
    run.settings.custom = not run.settings.custom


@change
def detached(run: Running, random: Random) -> None:
    run.settings.detached = not run.settings.detached


@change
def checkpoints(run: Running, random: Random) -> None:
    run.settings.checkpointed = not run.settings.checkpointed


@change
def anomalies_detected(run: Running, random: Random) -> None:
    torch.autograd.set_detect_anomaly(not torch.is_anomaly_enabled())


@change
def deterministic_algorithms(run: Running, random: Random) -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


@change
def autocast(run: Running, random: Random) -> None:
    run.autocast = not run.autocast


WAYS = (
    "plain", "accumulated", "evaluated", "inferred", "left", "stopped", "twice", "together", "gradients", "penalty",
    "some", "weighted", "nothing", "clipped", "functional", "averaged",
)  # fmt: skip


@change
def the_loop(run: Running, random: Random) -> None:
    run.way = random.choice(WAYS)


@change
def an_exception(run: Running, random: Random) -> None:
    run.way = "stopped"


@change
def the_weight_of_the_loss(run: Running, random: Random) -> None:
    run.weight = some_numbers(random)


@change
def gradients_that_stay(run: Running, random: Random) -> None:
    run.clears = not run.clears


@change
def no_steps(run: Running, random: Random) -> None:
    run.steps = not run.steps


@change
def seeds(run: Running, random: Random) -> None:
    torch.manual_seed(7)
    dshard.manual_seed(7)


@change
def garbage(run: Running, random: Random) -> None:
    gc.collect()


# -- comparing


def generated(seed: int, apart: bool = False) -> Program:
    """Generate the program of this seed."""
    random = Random(seed)
    blocks = tuple(random.choice(LINES) for _ in range(random.choice([1, 1, 2, 3])))
    names = random.choices(list(CHANGES), k=random.choice([0, 1]) if apart else random.choice([1, 1, 2, 3, 5]))
    changes = tuple(sorted((random.randrange(1, STEPS), name) for name in names))
    dropout, norm = random.choice([0.0, 0.0, 0.2]), random.random() < 0.2
    return Program(seed, random.choice(list(PLANS)), blocks, dropout, norm, changes, apart)


def steps_of(program: Program, rehearsed: bool) -> Iterator[tuple[Held, float, str]]:
    """The values of each step, by how much they may differ, and what the rehearsal says."""
    GLOBALS.clear()
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    with dshard.rehearsing(rehearsed), dshard.implicit_replication():
        run = Running(program)
        changing = Random(program.seed)
        for number in range(STEPS):
            for at, name in program.changes:
                if at == number:
                    CHANGES[name](run, changing)
            if program.apart and rehearsed and number >= 2 and dist.get_rank() == program.seed % dist.get_world_size():
                run.settings.apart = Random(number)
            try:
                found = {name: held(x) for name, x in run.step(number).items()}
            except Exception as error:
                run.settings.stops = False
                found = {
                    "error": f"{type(error).__name__}: {str(error)[:200]}",
                    "trace": traceback.format_exc(limit=-4),
                }
            yield found, run.is_rounded * TOLERANCE, f"{run.model.rehearsed!r} {run.model.rehearsed.why_not}"


def differences(program: Program) -> tuple[list[str], int, int]:
    """How rehearsed steps differ from those by Python alone, the calls of the model, and those that were answered."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    expected = [found for found, _, _ in steps_of(program, False)]
    said = ""
    for number, (found, tolerance, said) in enumerate(steps_of(program, True)):
        wrong = list(_unequal(expected[number], found, tolerance))
        if wrong:
            return [f"step {number}: {'; '.join(wrong[:4])} [{said}]"], 0, 0
    counts = said.split(": ")[1].split(" calls")[0].split(" of ")
    return [], int(counts[1]), int(counts[0])


def _unequal(expected: Held, found: Held, tolerance: float) -> Iterator[str]:
    if "error" in expected and "error" in found:
        if expected["error"].partition(":")[0] != found["error"].partition(":")[0]:
            yield f"raises {found['error']}, not {expected['error']}\n{found['trace']}"
        return
    if "error" in found:
        yield f"raises {found['error']}\n{found['trace']}"
        return
    if expected.keys() != found.keys():
        yield f"has {sorted(expected.keys() ^ found.keys())} in one alone, {expected.get('error', '')}"
        return
    for name, x in expected.items():
        text = _unequal_values(x, found[name], tolerance)
        if text:
            yield f"{name} {text}"


def _unequal_values(x: Any, y: Any, tolerance: float) -> str:
    if isinstance(x, tuple) and isinstance(y, tuple) and len(x) == len(y):
        return next(filter(None, (_unequal_values(a, b, tolerance) for a, b in zip(x, y, strict=True))), "")
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.dtype != y.dtype or x.shape != y.shape:
            return f"is {y.dtype} {tuple(y.shape)}, not {x.dtype} {tuple(x.shape)}"
        if x.equal(y) or (x.is_floating_point() and torch.equal(x.nan_to_num(), y.nan_to_num())):
            return ""
        far = float((x.double() - y.double()).abs().max() / x.double().abs().max().clamp(min=1))
        return "" if far <= tolerance else f"is off by {far:.2g}"
    if isinstance(x, float) and isinstance(y, float) and tolerance:
        return "" if abs(x - y) <= tolerance * max(1.0, abs(x)) else f"is {y!r}, not {x!r}"
    return "" if type(x) is type(y) and (x == y or x != x) else f"is {y!r}, not {x!r}"


def differences_of(programs: list[Program]) -> list[tuple[list[str], int, int]]:
    """The differences of several programs, on this rank."""
    return [differences(program) for program in programs]


def outcome_on(pool: RankPool, program: Program) -> tuple[str, int, int]:
    """The first difference of a program on any rank, or what went wrong; calls, and those that were answered."""
    try:
        of_ranks = pool.run(differences_of, [program], timeout=SECONDS)
    except RankError as error:
        return f"raised: {error}", 0, 0
    texts = [f"rank {rank}: {text}" for rank, [(found, _, _)] in enumerate(of_ranks) for text in found]
    return (texts[0] if texts else ""), *of_ranks[0][0][1:]


def outcomes_on(pool: RankPool, programs: list[Program]) -> list[tuple[str, int, int]]:
    """The outcomes of several programs: at once if nothing differs, else one by one."""
    try:
        of_ranks = pool.run(differences_of, programs, timeout=SECONDS * len(programs))
    except RankError:
        return [outcome_on(pool, program) for program in programs]
    outcomes = []
    for each in zip(*of_ranks, strict=True):
        texts = [f"rank {rank}: {text}" for rank, (found, _, _) in enumerate(each) for text in found]
        outcomes.append(((texts[0] if texts else ""), *each[0][1:]))
    return outcomes


def kind_of(text: str) -> str:
    """The kind of a difference: an error by its class, wrong values, or values that are rounded otherwise."""
    error = re.search(r"raises (\w+)|(\w+): [^\n]* (?:hangs|raised)", text)
    far = [float(each) for each in re.findall(r"is off by ([\d.e+-]+)", text)]
    if error:
        return error.group()
    return "rounded" if far and max(far) < TOLERANCE else "wrong" if text else ""


def shrunk(pool: RankPool, program: Program) -> Program:
    """The program with fewer parts that differs in the same way."""
    kind, changes, blocks = kind_of(outcome_on(pool, program)[0]), program.changes, program.blocks
    plainer = [replace(program, changes=changes[:i] + changes[i + 1 :]) for i in range(len(changes))]
    plainer += [replace(program, blocks=blocks[:i] + blocks[i + 1 :]) for i in range(len(blocks))]
    plainer += [replace(program, **each) for each in ({"dropout": 0.0}, {"norm": False}, {"plan": "data"})]
    plainer += [replace(program, blocks=(LINES[0],))]
    for each in plainer:
        if each != program and each.blocks and kind_of(outcome_on(pool, each)[0]) == kind:
            return shrunk(pool, each)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--show", type=int)
    parser.add_argument("--shrink", type=int)
    args = parser.parse_args()
    if args.show is not None:
        print(generated(args.show, args.apart))
        return
    pool = rank_pool(args.ranks)
    if args.shrink is not None:
        small = shrunk(pool, generated(args.shrink, args.apart))
        print(small, outcome_on(pool, small)[0], sep="\n")
        return
    words, start = Counter[str](), time.perf_counter()
    for first in range(args.first, args.first + args.count, 20):
        programs = [generated(seed, args.apart) for seed in range(first, min(first + 20, args.first + args.count))]
        for program, (text, calls, answered) in zip(programs, outcomes_on(pool, programs), strict=True):
            words += Counter({"equal": not text, "different": bool(text), "calls": calls, "answered": answered})
            if text:
                print(f"{program}\n{text[-2500:]}\n", flush=True)
        print(f"{time.perf_counter() - start:.0f} s, to seed {first + 20}: {dict(words)}", flush=True)


if __name__ == "__main__":
    main()
