"""Random models, each trained by a random loop: one line parallelizes it, and it learns what one device learns.

A `Design` is the lines of some blocks, the sizes in them, and the loop around the model. `generated(seed)` draws one
that one device trains without an error.

    python tests/helpers/generated_models.py 500                # seeds 0 ... 499 on four ranks; what fails is printed
    python tests/helpers/generated_models.py 500 --first 7000
    python tests/helpers/generated_models.py 50 --compile blocks
    python tests/helpers/generated_models.py 50 --replay        # six steps, of which some are replayed
    python tests/helpers/generated_models.py --show 17          # the design of one seed
    python tests/helpers/generated_models.py --shrink 17        # the fewest lines that fail in the same way
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import DTensor
from dshard.comm import plain
from dshard.errors import DShardError, RankError
from dshard.replay import Replay
from dshard.testing import RankPool, rank_pool

TOLERANCE = 1e-7
ROUNDING = 1e-12
"""The relative change of all parameters that tells how far rounding may lead a loop astray."""
SECONDS = 90.0
DEVICE = os.environ.get("DSHARD_TEST_DEVICE", "cpu")
"""Where ranks have their tensors, and one device its own: "cuda" with DSHARD_TEST_BACKEND=nccl."""
MESHES: dict[str, tuple[int, ...]] = {
    "data": (4,),
    "fsdp": (4,),
    "megatron": (4,),
    "megatron-sp": (4,),
    "context": (4,),
    "ulysses": (4,),
    "data x megatron": (2, 2),
    "fsdp x megatron": (2, 2),
    "data x fsdp": (2, 2),
    "fsdp x megatron-sp": (2, 2),
    "context x megatron": (2, 2),
    "atp": (2, 2),
    "optimus": (2, 2),
    "tesseract": (1, 2, 2),
    "auto": (2, 2),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, eps=1e-3),
    "foreach": partial(torch.optim.AdamW, lr=0.02, eps=1e-3, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.02, eps=1e-3, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=0.02, eps=1e-3, amsgrad=True, foreach=False),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-2, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=1e-3),
}
# x: [b, s, d]; P(...) is a new parameter of this shape, h heads of e features, f inner features
LINES = """
x = x + F.gelu(x @ P(d, f)) @ P(f, d)
x = x + F.linear(F.relu(F.linear(F.layer_norm(x, (d,), P(d), P(d)), P(f, d), P(f))), P(d, f), P(d))
y = F.rms_norm(x, (d,), P(d)); x = x + (F.silu(y @ P(d, f)) * (y @ P(d, f))) @ P(f, d)
y = F.rms_norm(x, (d,)) @ P(d, 2 * f); x = x + F.glu(y, -1) @ P(f, d)
q, k, v = heads(F.layer_norm(x, (d,)) @ P(d, 3 * d)); x = x + joined(attend(q, k, v, is_causal=True)) @ P(d, d)
q, k, v = heads(x @ P(d, 3 * d)); x = x + joined(attend(q, k, v)) @ P(d, d) + P(d)
q, k, v = (heads(x @ P(d, d), 1)[0] for _ in "qkv"); x = x + joined(attend(q, k, v, scale=0.3)) @ P(d, d)
q, k, v = heads(x @ P(d, 3 * d)); x = x + joined((q @ k.mT / e).masked_fill(later(s), -1e9).softmax(-1) @ v) @ P(d, d)
q, k, v = heads(x @ P(d, 3 * d)); x = x + joined((q @ k.mT + P(h, s, s)).softmax(-1) @ v)
q = heads(x @ P(d, d), 1)[0]; k = (x @ P(d, e))[:, None]; x = x + joined(attend(q, k, k, enable_gqa=True)) @ P(d, d)
q, k, v = heads(x @ P(d, 3 * d)); q, k = turned(q), turned(k); x = x + joined(attend(q, k, v, is_causal=True)) @ P(d, d)
x = x + F.conv1d(x.transpose(1, 2), P(d, d, 3), P(d), padding=1).transpose(1, 2)
x = x + F.conv1d(x.mT, P(d, 1, 3), None, padding=1, groups=d).mT.tanh()
x = x + (x.transpose(1, 2) @ P(s, s)).transpose(1, 2).tanh()
x = x + F.gelu(x.mT @ P(s, f)).matmul(P(f, s)).mT
x = x + x.cumsum(1) / torch.arange(1.0, s + 1)[:, None] * P(d)
x = torch.lerp(x, x.roll(1, 1), P(d).sigmoid())
x = x * (F.relu(x.mean(1, keepdim=True) @ P(d, f)) @ P(f, d)).sigmoid()
k = (x @ P(d, e)).softmax(1); x = x + torch.einsum("bsi,bij->bsj", x @ P(d, e), torch.einsum("bsi,bsj->bij", k, x))
y = torch.einsum("bsd,edf->bsef", x, P(4, d, f)).relu(); x = x + torch.einsum("bsef,efd->bsd", y, P(4, f, d))
g, i = (x @ P(d, 4)).topk(2, -1); x = x + (g.softmax(-1)[..., None] * P(4, d)[i]).sum(-2)
x = F.group_norm(x.transpose(1, 2), 2, P(d), P(d)).transpose(1, 2) + x
x = F.batch_norm(x.flatten(0, 1), None, None, P(d), P(d), True).view_as(x) + x
a, c = x.split((d // 2, d - d // 2), -1); x = torch.cat([c.tanh(), a * P(1)], -1)
a, c = x.chunk(2, -1); x = x + torch.cat([a * P(1), c.sin()], -1)
x = x + F.pad(x[:, :-1], (0, 0, 1, 0)) * P(d)
x = x + x.flip(1) * P(d)
x = x + F.embedding(x.argmax(-1), P(d, d))
x = F.normalize(x, dim=-1) * P(d) + x
x = x / x.norm(dim=1, keepdim=True).clamp(min=1) * P(d)
x = (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + 1).sqrt() + x * P(1)
x = x + x.amax(1, keepdim=True) * P(d)
x = x + x.logsumexp(1, keepdim=True) * P(d)
x = x + x.sort(1)[0] * P(d)
x = x + x @ P(d, 2) @ P(2, d)
x = x + (x @ x.mT / d).tanh() @ x
x = x + F.interpolate(F.avg_pool1d(x.transpose(1, 2), 2, ceil_mode=True), size=s).transpose(1, 2)
x = x + F.max_pool1d(x.mT, 3, 1, 1).mT * P(d)
x = x + torch.fft.fft(x, dim=1).real * P(d)
x = torch.where(x > 0, x, x * P(d))
y = x * 1; y[:, 0] = 0; y[:, 1:] += x[:, :-1].detach(); x = y
y = x.clone(); y[..., 0].mul_(2); y.transpose(1, 2)[:, -1].add_(1); x = y * P(d)
x = x + torch.stack(list(accumulate(x.unbind(1), partial(step, P(d, d)))), 1)
x = x + x.reshape(b, s * d).view(b, d, s).mT * P(d)
x = x + (x.flatten(0, 1) @ P(d, d)).unflatten(0, (b, s))
x = x + torch.bmm(x, P(d, d).expand(b, -1, -1))
x = x + torch.addmm(P(d), x.reshape(-1, d), P(d, d)).reshape(x.shape)
x = x + F.bilinear(x, x.tanh(), P(d, d, d), P(d)) / d
x = x * (1 + P(1)) + P(s, d)
x = x + checkpoint(lambda x, a, c: F.gelu(x @ a) @ c, x, P(d, f), P(f, d), use_reentrant=False)
x = x + F.prelu(x.transpose(1, 2), P(d)).transpose(1, 2)
x = x + P(d, d).triu() .matmul(x[..., None])[..., 0]
x = x + torch.tensordot(x, P(d, d) / P(d).norm(), 1)
x = F.softmax(x.float(), -1).to(x.dtype) + x
x = x + F.local_response_norm(x.transpose(1, 2), 3).transpose(1, 2)
x = x + (P(d, d).softmax(0)[None, None] * x[..., None]).sum(-2)
x = x + torch.cdist(x, P(3, d)) @ P(3, d)
x = x.index_select(1, torch.arange(s).flip(0)) * P(d) + x
x = x + x.gather(1, x.detach().argsort(1)) * P(d)
x = x + F.unfold(x[:, None], (1, d)).mT.reshape(x.shape) * P(d)
""".strip().splitlines()
LOSSES = """
F.cross_entropy(x.transpose(1, 2), y)
F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=1, label_smoothing=0.1)
F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten())
F.mse_loss(x, F.one_hot(y, x.shape[-1]).to(x.dtype))
-x.log_softmax(-1).gather(-1, y[..., None]).mean()
F.cross_entropy(z.mean(1) @ z.mean(1).T, torch.arange(len(y)))
F.binary_cross_entropy_with_logits(x[..., 0], (y > 1).to(x.dtype))
F.kl_div(x.log_softmax(-1), F.one_hot(y, x.shape[-1]).to(x.dtype), reduction="batchmean")
x.logsumexp(-1).mean() + z.square().mean()
(F.cross_entropy(x.transpose(1, 2), y, reduction="none") * (y != 2)).sum() / (y != 2).sum().clamp(min=1)
""".strip().splitlines()
WAYS = ("plain", "plain", "accumulated", "clipped", "averaged", "penalty", "evaluated", "twice", "decayed")
Numbers: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Design:
    """A model and the loop that trains it.

    `frozen` are the numbers of the parameters that need no gradient; those of a `reordered` model have their last dim
    first in memory. `way` is what the loop does beside a step;
    `compiled` what torch.compile compiles on the ranks: "", "blocks", or the "model". A `replayed` one has more steps,
    which are replayed on the ranks.
    """

    seed: int
    strategy: str
    sizes: dict[str, int]
    blocks: tuple[str, ...]
    loss: str
    tied: bool
    optimizer: str
    way: str
    frozen: frozenset[int]
    reordered: bool = False
    compiled: str = ""
    replayed: bool = False

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        head = f"# {self.strategy} on {MESHES[self.strategy]}; {sizes}; {'tied' if self.tied else 'not tied'}"
        rest = f"{'reordered' if self.reordered else 'in order'}; compiled: {self.compiled or 'no'}"
        end = f"# {self.optimizer}, {self.way}; frozen: {sorted(self.frozen)}; {rest}"
        return "\n".join([head, *self.blocks, f"loss = {self.loss}", end])


# -- a model of lines


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def heads(h: int, x: Tensor, parts: int = 3) -> list[Tensor]:
    return [part.unflatten(-1, (h, -1)).transpose(1, 2) for part in x.chunk(parts, -1)]


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def later(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).triu(1)


def turned(x: Tensor) -> Tensor:
    """Rotary positions."""
    angles = torch.outer(torch.arange(float(x.shape[-2])), 0.3 ** torch.arange(float(x.shape[-1] // 2)))
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def step(weight: Tensor, state: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x + state @ weight)


NAMES = {
    "F": F, "torch": torch, "partial": partial, "accumulate": accumulate, "checkpoint": checkpoint,
    "attend": attend, "joined": joined, "later": later, "turned": turned, "step": step,
}  # fmt: skip


class Block(nn.Module):
    """Lines that make `x` from `x`, with a parameter for each `P(...)`."""

    def __init__(self, lines: str, sizes: dict[str, int]) -> None:
        super().__init__()
        shapes = re.findall(r"\bP\(([^()]*)\)", lines)
        self.weights = nn.ParameterList(self._made(eval(f"({shape},)", dict(sizes))) for shape in shapes)
        for number in range(len(shapes)):
            lines = re.sub(r"\bP\([^()]*\)", f"w[{number}]", lines, count=1)
        names = NAMES | sizes | {"heads": partial(heads, sizes["h"])}
        body = "\n    ".join(["def run(x, w):", "b = x.shape[0]", *lines.split("; "), "return x"])
        exec(body, names)  # a function, which torch.compile can trace
        self.run: Callable[..., Tensor] = names["run"]

    @staticmethod
    def _made(shape: Sequence[int]) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape) / max(1, shape[-1]) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, list(self.weights))


class Net(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        words, d = design.sizes["words"], design.sizes["d"]
        self.embed = nn.Embedding(words, d)
        self.blocks = nn.ModuleList(Block(lines, design.sizes) for lines in design.blocks)
        self.head = nn.Linear(d, words, bias=not design.tied)
        if design.tied:
            self.head.weight = self.embed.weight
        self.returns_features = uses_features(design.loss)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x), x if self.returns_features else None


# -- a loop


def trained(
    design: Design, lay_out: Callable[..., Any], shift: float = 0.0, before: Callable[[], object] = bool
) -> Numbers:
    """Train the model of `design`, with a call of `before` in each step; return its losses, and its last parameters."""
    torch.manual_seed(design.seed)
    model = Net(design)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + shift)
    for number, p in enumerate(model.parameters()):
        p.requires_grad_(number not in design.frozen)
        if design.reordered and p.dim() > 1:
            p.data = p.data.movedim(-1, 0).contiguous().movedim(0, -1)
    b, s, words = (design.sizes[name] for name in ("b", "s", "words"))
    batches = [(torch.randint(words, (b, s)), torch.randint(words, (b, s))) for _ in range(4)]
    lay_out(model, batches[0][0])
    optimizer = OPTIMIZERS[design.optimizer]([p for p in model.parameters() if p.requires_grad])
    numbers: Numbers = {}

    def run(*tensors: Tensor) -> dict[str, Tensor]:
        return dict(a_step(design, model, optimizer, [tensors[:2], tensors[2:]]))  # type: ignore[list-item]

    step = dshard.replay(run) if design.replayed and lay_out is not unchanged else run
    for number in range(REPLAYED_STEPS if design.replayed else 3):
        before()
        made = step(*batches[number % 3], *batches[3])
        numbers |= {f"{name} of step {number}": x for name, x in made.items()}
    if isinstance(step, Replay):
        REPLAYS.append(step)
    return numbers | {name: p.detach() for name, p in model.named_parameters()}


def unchanged(model: nn.Module, *example: Tensor) -> nn.Module:
    """The model on one device."""
    return model


REPLAYED_STEPS = 6
REPLAYS: list[Any] = []
"""The replayed steps of this process."""


def laid_out(design: Design, model: nn.Module, *example: Tensor) -> None:
    """Parallelize the model, and compile what the design says."""
    dshard.parallelize(model, mesh_of(MESHES[design.strategy]), design.strategy, *example)
    if design.compiled:
        torch.compiler.reset()  # the graphs of other designs
    for module in {"": (), "blocks": model.blocks, "model": (model,)}[design.compiled]:
        module.compile(backend="aot_eager")


def a_step(
    design: Design, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, z = model(batch[0])
        loss: Tensor = eval(design.loss, NAMES | {"x": x, "z": z, "y": batch[1]})
        return loss

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer.zero_grad(set_to_none=design.seed % 2 == 0)
    match design.way:
        case "accumulated":
            with dshard.accumulate() if design.seed % 3 else nullcontext():
                (loss_of(batches[1]) / 2).backward()
            loss = loss_of(batches[0])
            (loss / 2).backward()
        case "penalty":
            loss = loss_of(batches[0])
            grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            loss = loss + 0.1 * sum(g.square().sum() for g in grads if g is not None)
            loss.backward()
        case "twice":
            loss = loss_of(batches[0])
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
        case "decayed":
            loss = loss_of(batches[0]) + 1e-2 * sum(p.square().sum() for p in parameters)
            loss.backward()
        case _:
            loss = loss_of(batches[0])
            loss.backward()
    yield "loss", loss.detach()
    if design.way == "clipped":
        yield "norm", nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    if design.way == "evaluated":
        with torch.no_grad():
            yield "another loss", loss_of((batches[1][0][:1], batches[1][1][:1]))
            yield "accuracy", (model(batches[1][0])[0].argmax(-1) == batches[1][1]).double().mean()
    if design.way == "averaged":
        with torch.no_grad():
            for p in parameters:
                p.lerp_(p.detach().clone().sin(), 0.1)


# -- drawing


def fits(design: Design) -> bool:
    """Whether one device runs the design, to numbers that are finite and do not hang on rounding."""
    try:
        numbers = trained(design, unchanged)
    except (RuntimeError, ValueError, IndexError):
        return False
    return all(x.isfinite().all() and (not x.numel() or x.abs().max() < 1e4) for x in numbers.values())


def generated(seed: int) -> Design:
    """Generate the design of this seed."""
    random = Random(seed)
    strategy = random.choice(list(MESHES))
    while True:
        h = random.choice([1, 2, 4, 4])
        d = h * random.choice([2, 2, 4])
        sizes = {
            "b": random.choice([1, 2, 3, 4, 5, 8]), "s": random.choice([1, 2, 3, 4, 5, 8]), "d": d, "h": h, "e": d // h,
            "f": random.choice([3, 4, 8, 10, 16]), "words": random.choice([4, 5, 7]),
        }  # fmt: skip
        blocks = tuple(random.choice(LINES) for _ in range(random.choice([1, 1, 2, 2, 3, 4])))
        optimizer, way = random.choice(list(OPTIMIZERS)), random.choice(WAYS)
        frozen = frozenset(random.sample(range(12), 3)) if random.random() < 0.2 else frozenset()
        tied = random.random() < 0.3
        loss, reordered = random.choice(LOSSES), random.random() < 0.3
        design = Design(seed, strategy, sizes, blocks, loss, tied, optimizer, way, frozen, reordered)
        if in_double(fits, design):
            return design


def compiled(design: Design, what: str) -> Design:
    """The design with "blocks" or the "model" compiled, without what torch does not compile.

    It differentiates no compiled gradient again, and wants a gradient of each distributed tensor that a graph returns.
    """
    way = "plain" if what and design.way == "penalty" else design.way
    loss = LOSSES[0] if what == "model" and uses_features(design.loss) else design.loss
    return replace(design, compiled=what, way=way, loss=loss)


def replayed(design: Design) -> Design:
    """The design with replayed steps, and an optimiser that counts its steps in tensors."""
    optimizer = design.optimizer if design.optimizer in ("SGD", "RMSprop") else "fused"
    return replace(design, replayed=True, optimizer=optimizer)


def uses_features(loss: str) -> bool:
    """Whether a loss is of the features before the head."""
    return re.search(r"\bz\b", loss) is not None


def in_double(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with double precision as the default, on one device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with plain(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args)
    finally:
        torch.set_default_dtype(before)


# -- on ranks


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    """One mesh of this shape for all designs: process groups keep threads."""
    return dshard.init_device_mesh(DEVICE, shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def outcome(design: Design) -> tuple[str, str]:
    """Train the model on one device and on the ranks; return the outcome as a word, and the difference."""
    torch.set_num_threads(1)
    torch.set_default_device(DEVICE if DEVICE != "cpu" else None)
    warnings.simplefilter("ignore")
    expected = in_double(trained, design, unchanged)
    torch.set_default_dtype(torch.float64)
    try:
        # what some ranks hear, or have forgotten, changes nothing that they send
        other = design.seed % 4 if dist.get_rank() in (0, 3) else 0
        with dshard.implicit_replication(), dshard.trace() if other == 1 else nullcontext():
            actual = trained(design, partial(laid_out, design), before=dshard.clear_caches if other == 3 else bool)
        held = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in actual.items()}
    except DShardError as error:
        return "refused", f"{type(error).__name__}: {error}"
    finally:
        torch.set_default_dtype(torch.float32)
    word, text = compared(design, expected, held)
    return word, text or (f"{REPLAYS[-1]}: {REPLAYS[-1].why_not}" if design.replayed else "")


def compared(design: Design, expected: Numbers, held: Numbers) -> tuple[str, str]:
    far = {name: distance(held[name], x) for name, x in expected.items()}
    wrong = {name: each for name, each in far.items() if each > TOLERANCE}
    if wrong:  # what rounding makes of these numbers
        shifted = in_double(trained, design, unchanged, ROUNDING)
        wrong = {name: each for name, each in wrong.items() if each > 1e3 * distance(shifted[name], expected[name])}
    return ("wrong", ", ".join(f"{name} by {each:.2g}" for name, each in wrong.items())) if wrong else ("equal", "")


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, of the largest number; infinite if the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    far = float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
    return far if far == far else float("inf")


def outcome_on(pool: RankPool, design: Design) -> tuple[str, str]:
    """The outcome of a design on all ranks: the word on which they agree, and the difference on one."""
    try:
        of_ranks = pool.run(outcome, design, timeout=SECONDS)
    except RankError as error:
        return "raised", str(error)
    words = {word for word, _ in of_ranks}
    text = next((text for _, text in of_ranks if text), "")
    return (words.pop() if len(words) == 1 else "ranks differ"), text


def shrunk(pool: RankPool, design: Design, word: str) -> Design:
    """The design with fewer or simpler parts whose outcome is still `word`."""
    for i in range(len(design.blocks)):
        fewer = replace(design, blocks=design.blocks[:i] + design.blocks[i + 1 :])
        if outcome_on(pool, fewer)[0] == word:
            return shrunk(pool, fewer, word)
    for plainer in (
        replace(design, way="plain"), replace(design, tied=False), replace(design, reordered=False),
        replace(design, frozen=frozenset()),
        replace(design, optimizer="SGD"), replace(design, loss=LOSSES[0]), replace(design, loss=LOSSES[3]),
        *(replace(design, sizes=design.sizes | {name: size}) for name in "bsf" for size in (4, 8)),
    ):  # fmt: skip
        if is_plainer(plainer, design) and in_double(fits, plainer) and outcome_on(pool, plainer)[0] == word:
            return shrunk(pool, plainer, word)
    return design


def is_plainer(one: Design, other: Design) -> bool:
    """Whether a design is shorter, or has more sizes that the ranks divide."""
    divided = [sum(design.sizes[name] % 4 == 0 for name in "bsf") for design in (one, other)]
    return divided[0] > divided[1] or (divided[0] == divided[1] and len(str(one)) < len(str(other)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", type=int)
    parser.add_argument("--shrink", type=int)
    parser.add_argument("--compile", choices=["blocks", "model"], default="")
    parser.add_argument("--replay", action="store_true")
    args = parser.parse_args()
    if args.show is not None:
        print(generated(args.show))
        return
    pool, changed = rank_pool(4), replayed if args.replay else partial(compiled, what=args.compile)
    if args.shrink is not None:
        design = changed(generated(args.shrink))
        word, _ = outcome_on(pool, design)
        small = shrunk(pool, design, word)
        print(word, small, outcome_on(pool, small)[1], sep="\n")
        return
    words: Counter[str] = Counter()
    start = time.perf_counter()
    for number, seed in enumerate(range(args.first, args.first + args.count), 1):
        design = changed(generated(seed))
        word, text = outcome_on(pool, design)
        words[word] += 1
        if word == "equal" and text:
            print(f"seed {seed}: not replayed: {text}\n{design}\n", flush=True)
        if word != "equal":
            print(f"seed {seed}: {word}: {text[-1500:]}\n{design}\n", flush=True)
        if number % 10 == 0:
            print(f"{number} designs in {time.perf_counter() - start:.0f} s: {dict(words)}", flush=True)


if __name__ == "__main__":
    main()
