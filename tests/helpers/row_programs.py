"""Training programs of users of DDP and FSDP2: each data rank has rows of its own, models return plain rows.

Each is one program on one device, which has all rows, and on the data ranks. It logs means over rows.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import Dataset, TensorDataset


class Job(ABC):
    """What differs between one device and a data rank."""

    @abstractmethod
    def wrap(self, model: nn.Module, *example: Tensor) -> nn.Module:
        """Parallelize the model."""

    @abstractmethod
    def own(self, x: Tensor) -> Tensor:
        """The rows of this data rank."""

    @abstractmethod
    def of_all(self, x: Tensor) -> Tensor:
        """The rows of all data ranks, one after the other; each has as many."""

    @abstractmethod
    def load(self, data: Dataset[Any], epoch: int) -> Iterator[Sequence[Tensor]]:
        """Two batches of rows, as the sampler deals them out to the data ranks; the second is smaller."""

    @abstractmethod
    def without_sync(self) -> AbstractContextManager[object]:
        """A block in which gradients are added up, and not reduced."""

    @abstractmethod
    def mean(self, value: Tensor, rows: int) -> float:
        """A mean over rows, from the mean over those of each data rank."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def classes(seed: int, n: int, *shape: int) -> Tensor:
    return torch.randint(n, shape, generator=seeded(seed))


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def image_classes(job: Job) -> Iterator[Any]:
    """A convolution with batch norm, momentum, and how often the class is among the five likeliest."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )
    x, y = job.own(normal(1, 9, 3, 8, 8)), job.own(classes(2, 10, 9))
    model = job.wrap(model, normal(1, 9, 3, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    for _ in range(3):
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        hits = scores.topk(5).indices.eq(y[:, None]).any(1).double()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss, len(x)), job.mean(hits.mean(), len(x))
    yield model


def generator_and_critic(job: Job) -> Iterator[Any]:
    """Two models that learn against each other; the gradient of one passes through the other."""
    maker = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 12), nn.Tanh())
    critic = nn.Sequential(nn.Linear(12, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    maker, critic = job.wrap(maker, normal(1, 9, 6)), job.wrap(critic, normal(2, 9, 12))
    make, judge = (torch.optim.Adam(m.parameters(), 2e-3, betas=(0.5, 0.9)) for m in (maker, critic))
    real = job.own(normal(2, 9, 12))
    ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
    for step in range(3):
        critic.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(real).view(-1), ones)
        loss.backward()
        made = maker(job.own(normal(10 + step, 9, 6)))
        fooled = F.binary_cross_entropy_with_logits(critic(made.detach()).view(-1), zeros)
        fooled.backward()
        judge.step()
        maker.zero_grad()
        wished = F.binary_cross_entropy_with_logits(critic(made).view(-1), ones)
        wished.backward()
        make.step()
        yield tuple(job.mean(each, len(real)) for each in (loss, fooled, wished))
    yield maker
    yield critic


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = nn.Linear(12, 24), nn.Linear(24, 3), nn.Linear(24, 3)
        self.decoder = perceptron(3, 24, 12)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x).relu()
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.decoder(mean + noise * (spread / 2).exp()), mean, spread


def latents(job: Job) -> Iterator[Any]:
    """A variational autoencoder with noise of the program's own; the norm of gradients is clipped."""
    x, noise = normal(1, 7, 12).sigmoid(), normal(2, 7, 3)
    model = job.wrap(Autoencoder(), x, noise)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        mine = job.own(x)
        made, mean, spread = model(mine, job.own(noise))
        kept = F.binary_cross_entropy_with_logits(made, mine, reduction="none").sum(1)
        loss = (kept - (1 + spread - mean**2 - spread.exp()).sum(1) / 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield job.mean(loss, len(mine)), float(norm)
    yield model


def two_towers(job: Job) -> Iterator[Any]:
    """Contrastive learning: the rows of each data rank against those of all."""
    texts, images = perceptron(10, 24, 6), perceptron(8, 24, 6)
    x, y = normal(1, 8, 10), normal(2, 8, 8)
    texts, images = job.wrap(texts, x), job.wrap(images, y)
    optimizer = torch.optim.AdamW([*texts.parameters(), *images.parameters()], 1e-2)
    places = job.own(torch.arange(8))
    for _ in range(3):
        a, b = F.normalize(texts(job.own(x))), F.normalize(images(job.own(y)))
        loss = (F.cross_entropy(5 * a @ job.of_all(b).T, places) + F.cross_entropy(5 * b @ job.of_all(a).T, places)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss, len(places))
    yield texts
    yield images


def values_of_actions(job: Job) -> Iterator[Any]:
    """Q-learning with a target that follows slowly, states that end, and gradients that are clipped by value."""
    state, after = normal(1, 11, 6), normal(2, 11, 6)
    values = perceptron(6, 24, 4)
    target = copy.deepcopy(values)
    values, target = job.wrap(values, state), job.wrap(target, state)
    optimizer = torch.optim.AdamW(values.parameters(), 1e-2, amsgrad=True)
    mine, later, action = job.own(state), job.own(after), job.own(classes(3, 4, 11))[:, None]
    reward, ended = job.own(normal(4, 11)), job.own(classes(5, 3, 11) == 0)
    for _ in range(3):
        with torch.no_grad():
            best = target(later).max(1).values.masked_fill(ended, 0.0)
        loss = F.smooth_l1_loss(values(mine).gather(1, action)[:, 0], reward + 0.9 * best)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_value_(values.parameters(), 0.05)
        optimizer.step()
        fast, slow = values.state_dict(), target.state_dict()
        target.load_state_dict({name: 0.1 * fast[name] + 0.9 * slow[name] for name in slow})
        yield job.mean(loss, len(mine))
    yield target


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(20, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, 20)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.cell(self.table(x), state.transpose(0, 1))
        return self.head(out), state.transpose(0, 1)


def carried_state(job: Job) -> Iterator[Any]:
    """A recurrent language model whose state goes from one piece of text to the next; plain gradient descent."""
    x, y, state = classes(1, 20, 8, 5), classes(2, 20, 8, 5), torch.zeros(8, 1, 12)
    model = job.wrap(Recurrent(), x, state)
    x, y, state = job.own(x), job.own(y), job.own(state)
    for _ in range(3):
        model.zero_grad()
        out, state = model(x, state.detach())
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.5)
        yield job.mean(loss, len(x))
    yield model


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.size = perceptron(10, 24, 12), nn.Linear(12, 5), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x).relu()
        return {"kind": self.kind(hidden), "size": self.size(hidden)}


def two_heads(job: Job) -> Iterator[Any]:
    """Two losses of one trunk, rows by torch's sampler, every second microbatch without a reduction, a plateau."""
    data = TensorDataset(normal(1, 22, 10), classes(2, 5, 22), normal(3, 22))
    model = job.wrap(TwoHeads(), normal(1, 8, 10))
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def loss_of(x: Tensor, kind: Tensor, size: Tensor) -> Tensor:
        out = model(x)
        loss = F.cross_entropy(out["kind"], kind) + F.huber_loss(out["size"][:, 0], size)
        (loss / 2).backward()
        logged.append(job.mean(loss, len(x)))
        return loss

    for epoch in range(2):
        logged: list[float] = []
        first, second = job.load(data, epoch)
        with job.without_sync():
            loss_of(*first)
        loss_of(*second)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        plateau.step(sum(logged))
        yield (*logged, optimizer.param_groups[0]["lr"])
    yield model


def transcripts(job: Job) -> Iterator[Any]:
    """Speech with a loss over all alignments, texts of different lengths."""
    model = perceptron(8, 24, 6)
    x, y, sizes = normal(1, 6, 10, 8), 1 + classes(2, 5, 6, 3), 1 + classes(3, 3, 6)
    model = job.wrap(model, x)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x, y, sizes = job.own(x), job.own(y), job.own(sizes)
    for _ in range(3):
        scores = model(x).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, y, torch.full((len(x),), 10), sizes, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss, len(x))
    yield model


PROGRAMS: dict[str, Callable[[Job], Iterator[Any]]] = {
    program.__name__: program
    for program in (
        *(image_classes, generator_and_critic, latents, two_towers),
        *(values_of_actions, carried_state, two_heads, transcripts),
    )
}
