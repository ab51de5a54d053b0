"""Train one model under each strategy and compare the losses with one device, or predict a step's collectives.

A strategy has a name, a mesh for any number of ranks, and a plan of `parallelize`. The images are the handwritten
digits of scikit-learn: 1,797 of 8x8 pixels, one fifth of them kept for the test.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import gcd, prod
from typing import TypeAlias
from xml.sax.saxutils import escape

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dshard import DeviceMesh, DTensor, Mesh, distribute_tensor, init_device_mesh, launch, parallelize, trace
from dshard.comm import CommEvent, listen
from dshard.errors import DShardError
from dshard.parallel.strategies import axes_of
from dshard.tools.demo.vit import HEADS, ViT, build

REST = 0  # as the size of a mesh axis: all ranks that the other axes leave over


class UnknownStrategy(DShardError, ValueError):
    """Raised for a name that no strategy of the demo has."""


@dataclass(frozen=True, slots=True)
class DemoLayout:
    """A strategy of `dshard.parallelize`, and a mesh for it.

    `mesh` gives the size of each named axis; without a mesh it is one device, with plain tensors. On fewer ranks than
    `least` the mesh is that of another row, so this one is left out unless it is asked for.
    """

    name: str
    plan: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    least: int = 1

    def on(self, ranks: int) -> Mesh | None:
        """Return the mesh over `ranks` ranks, on which axes shrink to sizes that divide them; None for one device.

        >>> str(find("data x tensor").on(8)), str(find("data x tensor").on(3)), str(find("tesseract").on(8))
        ('dp=2 tp=4', 'dp=1 tp=3', 'd=2 r=2 c=2')
        """
        if not self.mesh:
            return None
        sizes: list[int] = []
        for size in self.mesh.values():
            sizes.append(1 if size == REST else gcd(size, ranks // prod(sizes)))
        left = ranks // prod(sizes)
        sizes = [left if size == REST else fixed for size, fixed in zip(self.mesh.values(), sizes, strict=True)]
        return Mesh(tuple(sizes), tuple(self.mesh))

    def suits(self, ranks: int) -> bool:
        """Whether the strategy is worth training on `ranks` ranks: no other row has its mesh, no rank lacks a head."""
        mesh = self.on(ranks)
        if mesh is None:
            return True
        axes = zip(axes_of(self.plan, mesh), mesh.shape, strict=True)
        return self.least <= ranks and prod(size for axis, size in axes if axis.weights in ("inner", "made")) <= HEADS


def names(ranks: int | None = None) -> list[str]:
    """Return the names of all strategies, or of those worth training on `ranks` ranks, in the table's order.

    >>> sorted(set(names()) - set(names(ranks=4)))
    ['tesseract']
    """
    return [strategy.name for strategy in STRATEGIES if ranks is None or strategy.suits(ranks)]


def find(name: str) -> DemoLayout:
    """Return the strategy called `name`, in which hyphens may stand for spaces."""
    for strategy in STRATEGIES:
        if strategy.name.replace(" ", "-") == name.replace(" ", "-"):
            return strategy
    raise UnknownStrategy(f"no strategy is called {name!r}; there are {', '.join(names())}")


SINGLE = DemoLayout("single")

STRATEGIES: tuple[DemoLayout, ...] = (
    SINGLE,
    DemoLayout("data", "data", {"dp": REST}),
    DemoLayout("megatron", "megatron", {"tp": REST}),
    DemoLayout("data x tensor", "data x megatron", {"dp": 2, "tp": REST}),
    DemoLayout("summa", "optimus", {"r": 2, "c": REST}),
    DemoLayout("atp", "atp", {"d1": REST, "d2": 2}),
    DemoLayout("tesseract", "tesseract", {"d": REST, "r": 2, "c": 2}, least=8),
)


BATCH = 128
# Adam divides each gradient by its size: an epsilon well above rounding keeps rounding from becoming whole steps.
RATE, EPSILON = 5e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run; without `strategies`, all that are worth training on `ranks` ranks."""

    strategies: tuple[str, ...] = ()
    ranks: int = 4
    steps: int = 100
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"

    def chosen(self) -> list[DemoLayout]:
        """Return the strategies to train, each once, after the single device that they are compared with."""
        requested = self.strategies or names(self.ranks)
        return [find(name) for name in dict.fromkeys([SINGLE.name, *(find(name).name for name in requested)])]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run: reported after each step."""

    strategy: str
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training run as one rank saw it: the losses of whole batches, and the rank's own collectives."""

    losses: list[float]
    test_accuracy: float
    events: list[CommEvent]
    seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one strategy, with the loss of each step, and the collectives and received bytes of one rank."""

    strategy: str
    mesh: str
    final_loss: float
    max_loss_diff: float
    test_accuracy: float
    collectives_per_step: int
    bytes_per_step: int
    seconds: float
    losses: tuple[float, ...] = ()


Report = Callable[[Progress], None]


def train_all(settings: Settings, report: Report) -> list[Row]:
    """Train under each strategy in turn on all ranks; rank 0 also trains on a single device and returns the rows."""
    runs: dict[str, TrainingRun] = {}
    for strategy in settings.chosen():
        if strategy is not SINGLE or dist.get_rank() == 0:
            runs[strategy.name] = train(strategy, settings, report)
    if dist.get_rank() != 0:
        return []
    return [_row(find(name), run, runs[SINGLE.name], dist.get_world_size()) for name, run in runs.items()]


def train(strategy: DemoLayout, settings: Settings, report: Report) -> TrainingRun:
    """Train the model under `strategy`, on the same batches in the same order for every strategy."""
    training, test = load(settings.dtype)
    device, mesh = torch.device(settings.device), strategy.on(settings.ranks)
    model, on = build(settings.seed, settings.dtype).to(device), None
    if mesh is not None:
        on = init_device_mesh(device.type, mesh.shape, mesh_dim_names=mesh.names)
        parallelize(model, on, strategy.plan, example(settings.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_and_decay(settings.steps))
    losses: list[float] = []
    events: list[CommEvent] = []
    start = time.perf_counter()
    with listen(events.append):
        for batch in batches(training, BATCH, settings.steps, settings.seed):
            optimizer.zero_grad()
            loss = loss_of(model, batch.images.to(device), batch.labels.to(device), on)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            report(Progress(strategy.name, len(losses), losses[-1]))
    return TrainingRun(losses, _accuracy(model, test, device), events, time.perf_counter() - start)


def example(dtype: torch.dtype, batch: int = BATCH) -> Tensor:
    """A batch of images without data."""
    return torch.empty(batch, 8, 8, device="meta", dtype=dtype)


def loss_of(model: ViT, images: Tensor, labels: Tensor, mesh: DeviceMesh | Mesh | None) -> Tensor:
    """Return the loss of a batch of plain tensors that are equal on all ranks; `mesh` is None on one device."""
    return F.cross_entropy(
        model(images), labels if mesh is None else distribute_tensor(labels, mesh, src_data_rank=None)
    )


@torch.no_grad()
def _accuracy(model: ViT, test: Digits, device: torch.device) -> float:
    """Return the share of the test images that the model classifies correctly."""
    logits = model(test.images.to(device))
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    right = logits.argmax(-1).cpu() == test.labels
    return float(right.double().mean())


def _warm_up_and_decay(steps: int) -> Callable[[int], float]:
    """Return factors of the learning rate: linear growth over a tenth of the steps, then cosine decay."""
    return lambda step: min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _row(strategy: DemoLayout, run: TrainingRun, reference: TrainingRun, ranks: int) -> Row:
    steps = len(run.losses)
    return Row(
        strategy=strategy.name,
        mesh=str(strategy.on(ranks) or "1 device"),
        final_loss=run.losses[-1],
        max_loss_diff=max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)),
        test_accuracy=run.test_accuracy,
        collectives_per_step=round(len(run.events) / steps),
        bytes_per_step=round(sum(event.nbytes for event in run.events) / steps),
        seconds=run.seconds,
        losses=tuple(run.losses),
    )


Work: TypeAlias = Callable[[Settings, Report], list[Row]]


def run(settings: Settings, report: Report, work: Work = train_all) -> list[Row]:
    """Train under each strategy, on ranks started here or by a launcher; the reporting process returns the rows.

    `report` is called after each step there.

    Raises:
        RankError: a rank failed; the message names it.
        MissingExtra: scikit-learn is not installed.
    """
    check_installed()
    return launch.run(partial(work, settings), report, ranks=settings.ranks, device=settings.device)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A predicted training step: number of collectives, received bytes of the busiest ranks, and seconds."""

    strategy: str
    collectives: int
    nbytes: int
    seconds: float


def predict(
    strategy: DemoLayout, ranks: int, batch: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Predicted:
    """Predict a training step of `strategy`, which has a mesh, on meta tensors and without processes."""
    mesh = strategy.on(ranks)
    assert mesh is not None
    mesh = replace(mesh, device_type=device)
    model, images = build(0, dtype).to("meta"), example(dtype, batch)
    parallelize(model, mesh, strategy.plan, images)
    with trace() as sent:
        loss_of(model, images, torch.empty(batch, dtype=torch.long, device="meta"), mesh).backward()
        torch.optim.AdamW(model.parameters()).step()
    return Predicted(strategy.name, len(sent.events), sent.nbytes, sum(event.seconds for event in sent.events))


def rank(ranks: int, batch: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Predicted]:
    """Predict all strategies worth training on `ranks` ranks, the least communication time first."""
    predictions = [predict(find(name), ranks, batch, device, dtype) for name in names(ranks) if name != SINGLE.name]
    return sorted(predictions, key=lambda predicted: predicted.seconds)


SPLIT_SEED = 0
TEST_PART = 5  # one image in five, of each digit
MEAN, DEVIATION = 4.9, 6.0  # of the pixels, which are 0 to 16


class MissingExtra(DShardError, ImportError):
    """Raised if a package that only the demo needs is not installed."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images, their pixels standardised, and the digit that each shows."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Digits:
        """Return the images at `indices`, in that order."""
        return Digits(self.images[indices], self.labels[indices])


def check_installed() -> None:
    """Check that the package with the images is installed.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    if find_spec("sklearn") is None:
        raise MissingExtra('the demo trains on the digits of scikit-learn: pip install "dshard[demo]"')


def load(dtype: torch.dtype = torch.float32) -> tuple[Digits, Digits]:
    """Return the training images and test images, equal on every rank and in every run."""
    check_installed()
    raw = import_module("sklearn.datasets").load_digits()  # a second that no other command has to wait
    pixels = (torch.from_numpy(raw.images) - MEAN) / DEVIATION
    digits = Digits(pixels.to(dtype), torch.from_numpy(raw.target).long())
    train, test = _split(digits.labels)
    return digits.take(train), digits.take(test)


def batches(data: Digits, size: int, steps: int, seed: int) -> Iterator[Digits]:
    """Yield `steps` batches of `size` images; each pass visits every image once, in a new order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(data), generator=generator)])
        yield data.take(order[:size])
        order = order[size:]


def _split(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices for training and test, with the same share of each digit in both."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    train, test = [], []
    for digit in labels.unique():
        members = (labels == digit).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        n_test = len(members) // TEST_PART
        test.append(members[:n_test])
        train.append(members[n_test:])
    return torch.cat(train), torch.cat(test)


WIDTH, HEIGHT, MARGIN, LINE = 720, 400, 48, 18
COLOURS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def draw(rows: Sequence[Row]) -> str:
    """Draw a curve for each row, later ones thinner and dashed, so that coinciding curves all remain visible.

    >>> draw([Row("single", "1 device", 0.5, 0.0, 1.0, 0, 0, 1.0, (2.0, 1.0, 0.5))]).count("<polyline")
    1
    """
    steps = max((len(row.losses) for row in rows), default=0)
    top = max((loss for row in rows for loss in row.losses), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(steps, top),
    ]
    for i, row in enumerate(rows):
        colour = COLOURS[i % len(COLOURS)]
        thin = 6 - 5 * i / max(1, len(rows) - 1)
        style = f'fill="none" stroke="{colour}" stroke-width="{thin:.1f}"' + (' stroke-dasharray="8 6"' if i else "")
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in _points(row.losses, steps, top))
        y = MARGIN + i * LINE
        legend = f"{row.strategy} ({row.mesh}), {row.test_accuracy:.1%} right"
        parts += [
            f'<polyline points="{points}" {style}/>',
            f'<line x1="{WIDTH - 330}" x2="{WIDTH - 300}" y1="{y}" y2="{y}" {style}/>',
            f'<text x="{WIDTH - 292}" y="{y + 4}">{escape(legend)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _points(losses: Sequence[float], steps: int, top: float) -> list[tuple[float, float]]:
    across, up = (WIDTH - 2 * MARGIN) / max(1, steps - 1), (HEIGHT - 2 * MARGIN) / top
    return [(MARGIN + i * across, HEIGHT - MARGIN - loss * up) for i, loss in enumerate(losses)]


def _axes(steps: int, top: float) -> list[str]:
    left, right, low, high = MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN, MARGIN
    return [
        f'<path d="M{left} {high}V{low}H{right}" fill="none" stroke="#888888"/>',
        f'<text x="{left - 8}" y="{high + 4}" text-anchor="end">{top:.2f}</text>',
        f'<text x="{left - 8}" y="{low + 4}" text-anchor="end">0</text>',
        f'<text x="{left}" y="{high - 14}">loss</text>',
        f'<text x="{right}" y="{low + 18}" text-anchor="end">step {steps}</text>',
    ]
