"""Losses and pairs of models as people write them: adversaries, teachers, contrast, penalties, rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.user_loops import LayOut, Perceptron, classified


def adversaries(lay_out: LayOut) -> Iterator[Any]:
    """A generator and a critic with an optimizer each, and a penalty on the critic's gradients."""
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    real, noise, mixed = torch.randn(8, 6), torch.randn(8, 4), torch.rand(8, 1)
    lay_out(generator, noise)
    lay_out(critic, real)
    makes = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    for _ in range(3):
        fake = generator(noise).detach()
        between = (mixed * real + (1 - mixed) * fake).requires_grad_()
        [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        judged = critic(fake).mean() - critic(real).mean() + 10 * penalty
        judges.zero_grad()
        judged.backward()
        judges.step()
        deceived = F.binary_cross_entropy_with_logits(critic(generator(noise)), torch.ones(8, 1))
        makes.zero_grad()
        deceived.backward()
        makes.step()
        yield judged, penalty, deceived


def distilled(lay_out: LayOut) -> Iterator[Any]:
    """A student learns a teacher's softened classes, its features, and the labels."""
    teacher, student = Perceptron(width=24).eval().requires_grad_(False), Perceptron()
    x, y = classified(8)
    lay_out(teacher, x)
    lay_out(student, x)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    for _ in range(3):
        with torch.no_grad():
            of_teacher = teacher(x)
        of_student = student(x)
        soft = F.kl_div((of_student / 2).log_softmax(-1), (of_teacher / 2).softmax(-1), reduction="batchmean") * 4
        loss = 0.5 * soft + 0.3 * F.cross_entropy(of_student, y) + 0.2 * F.mse_loss(of_student, of_teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, (of_student.argmax(1) == of_teacher.argmax(1)).double().mean()


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(6, 8), nn.EmbeddingBag(10, 8, mode="mean", padding_idx=0)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.images(x), dim=-1), F.normalize(self.texts(ids), dim=-1), self.scale.exp()


def contrasted(lay_out: LayOut) -> Iterator[Any]:
    """Each image against every text of the batch, and a queue of older texts, with momentum."""
    model, x, ids = TwoTowers(), torch.randn(8, 6), torch.randint(10, (8, 5))
    lay_out(model, x, ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    queue = F.normalize(torch.randn(4, 8), dim=-1)
    labels = torch.arange(8)
    for _ in range(3):
        images, texts, scale = model(x, ids)
        logits = scale * images @ texts.t()
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        older = torch.cat([(images * texts).sum(-1, keepdim=True), images @ queue.t()], 1) / 0.1
        loss = loss + F.cross_entropy(older, torch.zeros(8, dtype=torch.long))
        triplet = F.triplet_margin_loss(images, texts, texts.roll(1, 0))
        optimizer.zero_grad()
        (loss + triplet).backward()
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(max=3.0)
            queue = torch.cat([texts.detach(), queue])[:4]
        yield loss, triplet, (logits.argmax(1) == labels).sum()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.heads = nn.ModuleDict({"kind": nn.Linear(16, 5), "value": nn.Linear(16, 1), "box": nn.Linear(16, 4)})
        self.log_variance = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x)
        return {name: head(x) for name, head in self.heads.items()}


def several_losses(lay_out: LayOut) -> Iterator[Any]:
    """Losses of several heads with learned weights, masks, hard examples alone, and two backward passes."""
    model, (x, y) = Heads(), classified(8)
    value, boxes = torch.randn(8), torch.rand(8, 4)
    valid = torch.tensor([True, False, True, True, False, True, True, True])
    lay_out(model, x)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    for _ in range(3):
        out = model(x)
        each = F.cross_entropy(out["kind"], y, reduction="none")
        hard = each.topk(4).values.mean()
        regression = (F.huber_loss(out["value"].squeeze(-1), value, reduction="none") * valid).sum() / valid.sum()
        masked = (out["box"] - boxes).abs()[valid].mean()
        losses = torch.stack([hard, regression, masked])
        loss = (losses * torch.exp(-model.log_variance) + model.log_variance).sum()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        (0.1 * sum(head.square().mean() for head in out.values())).backward()
        optimizer.step()
        yield loss, *losses.tolist()


def rewarded(lay_out: LayOut) -> Iterator[Any]:
    """A policy gradient with clipped ratios, entropy, advantages that are normalised, and a value head."""
    model = Heads()
    states, actions = torch.randn(8, 6), torch.randint(5, (8,))
    returns = torch.randn(8).flip(0).cumsum(0).flip(0)
    lay_out(model, states)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with torch.no_grad():
        before = torch.distributions.Categorical(logits=model(states)["kind"]).log_prob(actions)
    for _ in range(3):
        out = model(states)
        policy = torch.distributions.Categorical(logits=out["kind"])
        advantage = returns - out["value"].detach().squeeze(-1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (policy.log_prob(actions) - before).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -clipped.mean() + F.mse_loss(out["value"].squeeze(-1), returns) - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, policy.entropy().mean(), ratio.max()


class Coded(nn.Module):
    """An autoencoder whose codes are the nearest entries of a book, with gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.book = nn.Linear(6, 8), nn.Linear(8, 6), nn.Embedding(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encode(x)
        codes = torch.cdist(z, self.book.weight).argmin(-1)
        quantised = self.book(codes)
        commit = F.mse_loss(quantised, z.detach()) + 0.25 * F.mse_loss(z, quantised.detach())
        return self.decode(z + (quantised - z).detach()), commit, codes


def coded(lay_out: LayOut) -> Iterator[Any]:
    """Vector quantisation: distances, nearest codes, how often each is used."""
    model, x = Coded(), torch.randn(8, 6)
    lay_out(model, x)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        rebuilt, commit, codes = model(x)
        loss = F.mse_loss(rebuilt, x) + commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts = torch.bincount(codes, minlength=12)
        share = F.one_hot(codes, 12).double().mean(0)
        yield loss, (counts > 0).sum(), torch.exp(-(share * (share + 1e-10).log()).sum())


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, -1)
        return self.decode(mean + noise * torch.exp(0.5 * log_variance)), mean, log_variance


def variational(lay_out: LayOut) -> Iterator[Any]:
    """A variational autoencoder, whose terms are by hand and by `torch.distributions`."""
    model, x, noise = Variational(), torch.rand(8, 6), torch.randn(8, 4)
    lay_out(model, x, noise)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        logits, mean, log_variance = model(x, noise)
        rebuilt = F.binary_cross_entropy(logits.sigmoid(), x, reduction="sum") / len(x)
        by_hand = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp(), -1).mean()
        posterior = torch.distributions.Normal(mean, torch.exp(0.5 * log_variance))
        prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(-1).mean()
        optimizer.zero_grad()
        (rebuilt + divergence).backward()
        optimizer.step()
        yield rebuilt, by_hand, divergence


OBJECTIVES: tuple[Callable[[LayOut], Iterator[Any]], ...] = (
    adversaries,
    distilled,
    contrasted,
    several_losses,
    rewarded,
    coded,
    variational,
)
