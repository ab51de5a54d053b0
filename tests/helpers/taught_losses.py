"""Programs that tutorials teach: targets, masks, noise and metrics are plain tensors, losses stand outside a model.

Each is one program on one device and on a mesh. It yields the numbers that its writer would log.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.user_loops import LayOut, classified


def dense(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, with a ReLU between any two."""
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def applied(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """The value of a loss, by whose gradients the optimiser has stepped."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def images_of_classes(lay_out: LayOut) -> Iterator[Any]:
    """Classification of images, with a meter of losses, and the class as the first and as one of three."""
    conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    model = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))
    images, labels = torch.randn(8, 3, 6, 6), torch.randint(6, (8,))
    lay_out(model, images)
    criterion, total, seen = nn.CrossEntropyLoss(), 0.0, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(3):
        scores = model(images)
        loss = criterion(scores, labels)
        with torch.no_grad():
            hits = scores.topk(3, 1, True, True)[1].t().eq(labels.view(1, -1).expand(3, -1))
            yield [hits[:k].reshape(-1).double().sum(0).mul(100 / len(labels)).item() for k in (1, 3)]
        total, seen = total + applied(optimizer, loss) * len(images), seen + len(images)
        yield total / seen


def forged_images(lay_out: LayOut) -> Iterator[Any]:
    """Two networks against each other, by one tensor of labels that is filled anew."""
    forger = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6), nn.Tanh())
    judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    real, fixed, criterion = torch.randn(8, 6), torch.randn(8, 4), nn.BCELoss()
    lay_out(forger, fixed)
    lay_out(judge, real)
    forges, judges = (torch.optim.Adam(each.parameters(), 2e-2, (0.5, 0.999)) for each in (forger, judge))
    for _ in range(3):
        judge.zero_grad()
        label = torch.full((len(real),), 1.0)
        told = judge(real).view(-1)
        criterion(told, label).backward()
        fake = forger(torch.randn(8, 4))
        label.fill_(0.0)
        on_fake = criterion(judge(fake.detach()).view(-1), label)
        on_fake.backward()
        judges.step()
        forger.zero_grad()
        label.fill_(1.0)
        fooled = criterion(judge(fake).view(-1), label)
        fooled.backward()
        forges.step()
        yield told.mean().item(), on_fake.item(), fooled.item()
    with torch.no_grad():
        yield forger(fixed).detach().cpu().mean()


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mean, self.spread, self.leave = (nn.Linear(a, b) for a, b in ((6, 8), (8, 3), (8, 3), (3, 6)))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.enter(x).relu()
        mean, log_variance = self.mean(hidden), self.spread(hidden)
        return self.leave(mean + noise * (log_variance / 2).exp()).sigmoid(), mean, log_variance


def rebuilt_with_noise(lay_out: LayOut) -> Iterator[Any]:
    """A variational autoencoder: reconstruction against the plain images, and a divergence."""
    model, images, noise = Variational(), torch.rand(8, 1, 2, 3), torch.randn(8, 3)
    lay_out(model, images.view(-1, 6), noise)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        rebuilt, mean, log_variance = model(images.view(-1, 6), noise)
        loss = F.binary_cross_entropy(rebuilt, images.view(-1, 6), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())
        yield applied(optimizer, loss) / len(images)


def images_and_texts(lay_out: LayOut) -> Iterator[Any]:
    """Two towers, whose pairs stand on a diagonal, with a temperature that belongs to neither."""
    seeing, reading = dense(6, 16, 4), dense(5, 16, 4)
    images, texts = torch.randn(8, 6), torch.randn(8, 5)
    lay_out(seeing, images)
    lay_out(reading, texts)
    temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    optimizer = torch.optim.AdamW([*seeing.parameters(), *reading.parameters(), temperature], lr=1e-2)
    for _ in range(3):
        a, b = (F.normalize(tower(x), dim=-1) for tower, x in ((seeing, images), (reading, texts)))
        similar = temperature.exp() * a @ b.t()
        pairs = torch.arange(len(images))
        loss = (F.cross_entropy(similar, pairs) + F.cross_entropy(similar.t(), pairs)) / 2
        yield applied(optimizer, loss), temperature.item()
        with torch.no_grad():
            temperature.clamp_(max=2.5)
        yield (similar.argmax(1) == pairs).double().mean().item()


def values_of_actions(lay_out: LayOut) -> Iterator[Any]:
    """Deep Q-learning: actions gathered, a target network behind, states that are final left out by a mask."""
    policy = dense(5, 16, 3)
    target = copy.deepcopy(policy)
    states, after, rewards = torch.randn(8, 5), torch.randn(8, 5), torch.randn(8)
    actions, goes_on = torch.randint(3, (8, 1)), torch.rand(8) > 0.3
    lay_out(policy, states)
    lay_out(target, states)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, amsgrad=True)
    for _ in range(3):
        said = policy(states).gather(1, actions)
        best = torch.zeros(8)
        with torch.no_grad():
            best[goes_on] = target(after[goes_on]).max(1).values
        loss = nn.SmoothL1Loss()(said, (best * 0.9 + rewards).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 0.5)
        optimizer.step()
        mixed, newest = target.state_dict(), policy.state_dict()
        for name in newest:
            mixed[name] = newest[name] * 0.1 + mixed[name] * 0.9
        target.load_state_dict(mixed)
        yield loss.item()
        with torch.no_grad():
            yield policy(states[:1]).max(1).indices.view(1, 1).item()


class Words(nn.Module):
    def __init__(self, words: int = 10, kind: Any = nn.GRU) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(words, 8), kind(8, 8), nn.Linear(8, words)

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, state = self.cell(self.embed(ids), state)
        return F.log_softmax(self.head(out).flatten(0, 1), 1), state


def carried_words(lay_out: LayOut) -> Iterator[Any]:
    """A recurrent language model whose state goes from batch to batch, stepped by hand."""
    model, text = Words(), torch.randint(10, (13, 4))
    state = torch.zeros(1, 4, 8)
    lay_out(model, text[:4], state)
    for i in range(0, 12, 4):
        model.zero_grad()
        state = state.detach()
        said, state = model(text[i : i + 4], state)
        loss = F.nll_loss(said, text[i + 1 : i + 5].view(-1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
        yield loss.item(), math.exp(loss.item()), norm


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = dense(6, 16, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x).relu()
        return {"kind": self.kind(x), "size": self.size(x)}


def two_heads(lay_out: LayOut) -> Iterator[Any]:
    """A class and a number from one body: weights of classes, a class that is ignored, a schedule by the loss."""
    model, (x, kind), size = TwoHeads(), classified(8, classes=4), torch.randn(8)
    lay_out(model, x)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]), ignore_index=3)
    for _ in range(3):
        out = model(x)
        loss = criterion(out["kind"], kind) + 0.3 * F.huber_loss(out["size"].squeeze(1), size)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        schedule.step(loss.detach())
        known = kind != 3
        right = (out["kind"].argmax(1)[known] == kind[known]).sum().item() / known.sum().item()
        yield loss.item(), right, (out["size"].squeeze(1) - size).abs().mean().item(), schedule.get_last_lr()[0]


def aligned_speech(lay_out: LayOut) -> Iterator[Any]:
    """CTC: lengths of inputs and targets are plain, and a greedy path is folded by Python."""
    model, sound, text = dense(5, 16, 6), torch.randn(9, 4, 5), torch.randint(1, 6, (4, 3))
    lay_out(model, sound)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sound_lengths, text_lengths = torch.full((4,), 9), torch.tensor([3, 2, 3, 1])
    for _ in range(3):
        said = model(sound).log_softmax(2)
        yield applied(optimizer, nn.CTCLoss(zero_infinity=True)(said, text, sound_lengths, text_lengths))
    path = said.argmax(2).t()
    yield [len(torch.unique_consecutive(row)[torch.unique_consecutive(row) != 0]) for row in path]


def segmented(lay_out: LayOut) -> Iterator[Any]:
    """Classes of pixels with some to ignore: a confusion matrix by `bincount`, intersection over union, dice."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    images, masks = torch.randn(4, 3, 5, 5), torch.randint(4, (4, 5, 5))
    masks[0, :2] = 255
    lay_out(model, images)
    optimizer, matrix = torch.optim.Adam(model.parameters(), 1e-2), torch.zeros(4, 4)
    for _ in range(3):
        out = model(images)
        loss = F.cross_entropy(out, masks, ignore_index=255)
        known = masks != 255
        one_hot = F.one_hot(masks.clamp(max=3), 4).permute(0, 3, 1, 2) * known[:, None]
        shares = out.softmax(1) * known[:, None]
        dice = 2 * (shares * one_hot).sum((0, 2, 3)) / (shares + one_hot).sum((0, 2, 3))
        yield applied(optimizer, loss + (1 - dice.mean()))
        found = out.argmax(1)
        matrix += torch.bincount(4 * masks[known] + found[known], minlength=16).reshape(4, 4)
        right = matrix.diag()
        yield (right / (matrix.sum(0) + matrix.sum(1) - right).clamp(min=1)).mean().item(), matrix.sum()


def two_views(lay_out: LayOut) -> Iterator[Any]:
    """SimCLR: two views of each row in one batch, similarities to oneself left out by `masked_fill`."""
    model, x = dense(6, 16, 5), torch.randn(4, 6)
    lay_out(model, torch.cat([x, x]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        out = model(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)]))
        similar = F.cosine_similarity(out[:, None], out[None], dim=-1)
        self_mask = torch.eye(len(out), dtype=torch.bool)
        similar.masked_fill_(self_mask, -9e15)
        pairs = self_mask.roll(len(out) // 2, 0)
        similar = similar / 0.07
        loss = (-similar[pairs] + torch.logsumexp(similar, -1)).mean()
        ranks = torch.cat([similar[pairs][:, None], similar.masked_fill(pairs, -9e15)], -1).argsort(-1, True).argmin(-1)
        yield applied(optimizer, loss), (ranks == 0).double().mean().item(), (1 + ranks.double().mean()).item()


def triplets(lay_out: LayOut) -> Iterator[Any]:
    """Metric learning: the hardest pair of each row by plain labels, and torch's loss of triplets."""
    model, (x, labels) = dense(6, 16, 4), classified(12, classes=3)
    lay_out(model, x)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    alike = labels[:, None] == labels[None]
    for _ in range(3):
        out = F.normalize(model(x), dim=1)
        far = torch.cdist(out, out)
        farthest = (far * alike).max(1).values
        nearest = (far + far.max().detach() * alike).min(1).values
        hard = F.relu(farthest - nearest + 0.3)
        loss = hard[hard > 0].mean() + nn.TripletMarginLoss(0.5)(out, out.roll(1, 0), out.flip(0))
        yield applied(optimizer, loss), (hard > 0).sum().item()


def mixed_rows(lay_out: LayOut) -> Iterator[Any]:
    """Mixup of rows by a plain permutation, then soft labels by `scatter_`, smoothed."""
    model, (x, y) = dense(6, 16, 4), classified(8, classes=4)
    lay_out(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for share in (0.7, 0.4, 0.9):
        order = torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])
        right = share * (out.argmax(1) == y).sum().item() + (1 - share) * (out.argmax(1) == y[order]).sum().item()
        soft = torch.full((8, 4), 0.1 / 3).scatter_(1, y.unsqueeze(1), 0.9)
        loss = loss + torch.mean(torch.sum(-soft * F.log_softmax(model(x), dim=-1), dim=-1))
        yield applied(optimizer, loss), right


def penalised_critic(lay_out: LayOut) -> Iterator[Any]:
    """WGAN: several steps of a critic for one of a generator, a penalty at points between, `grad_outputs` plain."""
    generator, critic = dense(4, 16, 6), dense(6, 16, 1)
    real = torch.randn(8, 6)
    lay_out(generator, torch.randn(8, 4))
    lay_out(critic, real)
    makes, judges = (torch.optim.Adam(each.parameters(), 1e-2, (0.0, 0.9)) for each in (generator, critic))
    for step in range(3):
        fake = generator(torch.randn(8, 4))
        share = torch.rand(8, 1).expand(8, 6)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_(True)
        judged = critic(between)
        (slope,) = torch.autograd.grad(
            outputs=judged, inputs=between, grad_outputs=torch.ones(judged.size()), create_graph=True, retain_graph=True
        )
        penalty = ((slope.view(8, -1).norm(2, dim=1) - 1) ** 2).mean() * 10
        yield applied(judges, critic(fake.detach()).mean() - critic(real).mean() + penalty), penalty.item()
        if step % 2 == 0:
            yield applied(makes, -critic(generator(torch.randn(8, 4))).mean())


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).tanh()
        return self.actor(x), self.critic(x).squeeze(-1)


def clipped_policy(lay_out: LayOut) -> Iterator[Any]:
    """PPO: advantages by a loop backwards over plain rewards and the critic's values, minibatches by plain indices."""
    model, states = ActorCritic(), torch.randn(8, 4)
    lay_out(model, states)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    actions, rewards, done = torch.randint(3, (8,)), torch.randn(8), (torch.rand(8) > 0.8).double()
    with torch.no_grad():
        logits, values = model(states)
        before = torch.distributions.Categorical(logits=logits).log_prob(actions)
        advantages, last, following = torch.zeros(8), torch.zeros(()), torch.zeros(())
        for t in reversed(range(8)):
            delta = rewards[t] + 0.99 * following * (1 - done[t]) - values[t]
            advantages[t] = last = delta + 0.95 * 0.99 * (1 - done[t]) * last
            following = values[t]
        returns = advantages + values
    for _ in range(2):
        for rows in torch.randperm(8).split(4):
            logits, value = model(states[rows])
            policy = torch.distributions.Categorical(logits=logits)
            ratio = (policy.log_prob(actions[rows]) - before[rows]).exp()
            gain = advantages[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            loss = torch.max(-gain * ratio, -gain * torch.clamp(ratio, 0.8, 1.2)).mean()
            loss = loss + 0.5 * ((value - returns[rows]) ** 2).mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield loss.item(), ((ratio - 1).abs() > 0.2).double().mean().item()


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.enter, self.leave = nn.Embedding(10, 16), nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.leave(F.silu(self.enter(x) + self.time(t)))


def predicted_noise(lay_out: LayOut) -> Iterator[Any]:
    """A diffusion model: a plain schedule indexed by plain times, an average of the weights, and sampling by both."""
    model, x = Denoiser(), torch.randn(8, 6)
    average = copy.deepcopy(model)
    lay_out(model, x, torch.zeros(8, dtype=torch.long))
    lay_out(average, x, torch.zeros(8, dtype=torch.long))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    betas = torch.linspace(1e-4, 0.3, 10)
    kept = torch.cumprod(1 - betas, 0)
    for _ in range(3):
        t, noise = torch.randint(0, 10, (8,)), torch.randn_like(x)
        noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
        weights = (kept / (1 - kept)).clamp(max=5)[t]
        yield applied(optimizer, (weights[:, None] * (model(noisy, t) - noise) ** 2).mean())
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.data = slow.data * 0.9 + 0.1 * fast.data
    with torch.no_grad():
        made = torch.randn(4, 6)
        for step in reversed(range(10)):
            said = average(made, torch.full((4,), step, dtype=torch.long))
            made = (made - betas[step] / (1 - kept[step]).sqrt() * said) / (1 - betas[step]).sqrt()
            if step:
                made = made + betas[step].sqrt() * torch.randn(4, 6)
        yield made.clamp(-1, 1).mean().item()


def letters(lay_out: LayOut) -> Iterator[Any]:
    """A network of letters over an LSTM, which then writes one letter after the other from a plain first one."""
    model, text = Words(kind=nn.LSTM), torch.randint(10, (7, 4))
    nothing = torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)
    lay_out(model, text[:-1], nothing)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        said, _ = model(text[:-1], nothing)
        yield applied(optimizer, F.nll_loss(said, text[1:].reshape(-1)))
    model.eval()
    with torch.no_grad():
        word, state, written = torch.tensor([[3]]), (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)), [3]
        for _ in range(5):
            said, state = model(word, state)
            best, second = said[-1].div(0.8).exp().topk(2)[1]
            written.append(best.item() if best.item() != written[-1] else second.item())
            word.fill_(written[-1])
        yield written


def enlarged(lay_out: LayOut) -> Iterator[Any]:
    """Super-resolution by a pixel shuffle, judged in decibels against the plain large images."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    large = torch.rand(4, 1, 8, 8)
    small = F.avg_pool2d(large, 2)
    lay_out(model, small)
    optimizer, criterion = torch.optim.Adam(model.parameters(), 1e-2), nn.MSELoss()
    for _ in range(3):
        out = model(small)
        loss = criterion(out, large) + 0.1 * F.l1_loss(out.diff(dim=-1), large.diff(dim=-1))
        yield applied(optimizer, loss)
        with torch.no_grad():
            error = criterion(model(small).clamp(0.0, 1.0), large)
            yield 10 * math.log10(1 / error.item()), (10 * torch.log10(1 / error)).item()


def painted(lay_out: LayOut) -> Iterator[Any]:
    """Neural style: an image is the parameter, layers are run one by one, Gram matrices are compared."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    content, style = torch.rand(1, 3, 6, 6), torch.rand(1, 3, 6, 6)
    lay_out(model, content)
    model.eval().requires_grad_(False)

    def gram(x: Any) -> Any:
        n, c, h, w = x.size()
        features = x.view(n * c, h * w)
        return torch.mm(features, features.t()).div(n * c * h * w)

    wanted, grams = model(content).detach(), gram(model[0](style)).detach()
    image = content.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([image], max_iter=4)

    def closure() -> Any:
        with torch.no_grad():
            image.clamp_(0, 1)
        optimizer.zero_grad()
        loss = F.mse_loss(model(image), wanted) + 10 * F.mse_loss(gram(model[0](image)), grams)
        loss.backward()
        return loss

    for _ in range(2):
        yield optimizer.step(closure).item()
    yield image.detach().mean().item()


def taught_by_teacher(lay_out: LayOut) -> Iterator[Any]:
    """Distillation from a plain teacher that each rank has: softened targets, and features that are projected."""
    teacher, student, (x, y) = dense(6, 16, 4).eval(), dense(6, 8, 4), classified(8, classes=4)
    lay_out(student, x)
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)
    for _ in range(3):
        with torch.no_grad():
            said = teacher(x)
        out = student(x)
        soft = F.softmax(said / 2, dim=-1)
        distil = torch.sum(soft * (soft.log() - F.log_softmax(out / 2, dim=-1))) / out.size(0) * 4
        distil = distil + F.kl_div(
            F.log_softmax(out, -1), F.log_softmax(said, -1), log_target=True, reduction="batchmean"
        )
        alike = nn.CosineEmbeddingLoss()(out, said, torch.ones(len(x)))
        yield applied(optimizer, 0.25 * distil + 0.5 * F.cross_entropy(out, y) + 0.1 * alike)


def preferred(lay_out: LayOut) -> Iterator[Any]:
    """DPO: log-probabilities of chosen and rejected words, gathered and masked, beside those of a plain reference."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 10))
    reference, ids = copy.deepcopy(model), torch.randint(10, (8, 6))
    mask = (torch.arange(6) >= 2).expand(8, 6) & (torch.rand(8, 6) > 0.2)
    lay_out(model, ids)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(reference.parameters()) * 0.9, reference.parameters())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def log_probs(logits: Any) -> Any:
        words = torch.gather(logits[:, :-1].log_softmax(-1), 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
        return (words * mask[:, 1:]).sum(-1)

    with torch.no_grad():
        before = log_probs(reference(ids))
    for _ in range(3):
        gain = 0.1 * (log_probs(model(ids)) - before)
        chosen, rejected = gain.chunk(2)
        yield applied(optimizer, -F.logsigmoid(chosen - rejected).mean()), (chosen > rejected).double().mean().item()


def weighted_rows(lay_out: LayOut) -> Iterator[Any]:
    """Rows of a loader with weights; `torch.where` by a plain condition; sums into a plain `out=`."""
    model, (x, y) = dense(6, 16, 3), classified(12, classes=3)
    weights = torch.rand(12) + 0.5
    loader = DataLoader(TensorDataset(x, y, weights), batch_size=4, shuffle=False)
    lay_out(model, x[:4])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for xs, ys, ws in loader:
        out = model(xs)
        each = F.cross_entropy(out, ys, reduction="none")
        each = torch.where(ys == 0, 2 * each, each)
        focal = (1 - torch.exp(-each)) ** 2 * each
        yield applied(optimizer, (focal * ws).sum() / ws.sum())
        with torch.no_grad():
            summed = torch.empty(4)
            torch.sum(out.softmax(-1) * torch.tensor([0.0, 1.0, 2.0]), dim=1, out=summed)
            yield summed.sum().item()


def few_shots(lay_out: LayOut) -> Iterator[Any]:
    """Prototypes: means of rows by class through a plain index, distances, and cosines with plain directions."""
    model, x, y = dense(6, 16, 4), torch.randn(12, 6), torch.arange(3).repeat(4)
    lay_out(model, x)
    optimizer, directions = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4)
    for _ in range(3):
        out = model(x)
        shown, asked = out[:6], out[6:]
        centres = torch.stack([shown[y[:6] == c].mean(0) for c in range(3)])
        summed = torch.zeros(3, 4).index_add_(0, y[:6], shown)
        logits = -torch.cdist(asked, centres) - torch.cdist(asked, summed / 2)
        pulled = 1 - F.cosine_similarity(out, directions[y]).mean()
        yield applied(optimizer, F.cross_entropy(logits, y[6:]) + pulled), (logits.argmax(1) == y[6:]).sum().item()
        yield out.detach()[torch.tensor([3, 0, 3])].sum().item()


def some_words(lay_out: LayOut) -> Iterator[Any]:
    """Losses of some words, by a plain mask as factor and as index; perplexity and accuracy."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 10))
    ids, y = torch.randint(10, (4, 6)), torch.randint(10, (4, 6))
    mask = torch.rand(4, 6) > 0.3
    lay_out(model, ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        out = model(ids)
        each = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
        loss = (each * mask).sum() / mask.sum() + 0.01 * out[y > 5].pow(2).mean()
        yield applied(optimizer, loss), each[mask].mean().exp().item()
        yield (out.argmax(-1) == y).double().mean().item(), ((out.argmax(-1) == y) & mask).sum().item()


def evaluated(lay_out: LayOut) -> Iterator[Any]:
    """Evaluation over batches of two sizes: sums of losses, joined predictions, a confusion matrix by Python."""
    model, (x, y) = dense(6, 16, 3), classified(10, classes=3)
    lay_out(model, x[:4])
    model.eval()
    total, right, found = 0.0, 0, []
    with torch.no_grad():
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            out = model(xs)
            total += F.cross_entropy(out, ys, reduction="sum").item()
            guess = out.argmax(dim=1, keepdim=True)
            right += guess.eq(ys.view_as(guess)).sum().item()
            found.append(guess.flatten().cpu())
    yield total / len(x), 100.0 * right / len(x)
    matrix = torch.zeros(3, 3, dtype=torch.int64)
    for wanted, guess in zip(y.view(-1), torch.cat(found).view(-1), strict=True):
        matrix[wanted.long(), guess.long()] += 1
    yield matrix.diag().sum() / matrix.sum(), [int(n) for n in matrix.flatten()]
    correct = {str(label): 0 for label in range(3)}
    for wanted, guess in zip(y, torch.cat(found), strict=True):
        correct[str(int(wanted))] += int(wanted == guess)
    yield list(correct.values())


def searched_rate(lay_out: LayOut) -> Iterator[Any]:
    """A learning-rate finder: the rate grows until a smoothed loss does, and the first weights come back."""
    model, (x, y) = dense(6, 16, 3), classified(8, classes=3)
    lay_out(model, x)
    first = copy.deepcopy(model.state_dict())
    optimizer, smooth, best = torch.optim.SGD(model.parameters(), lr=1e-3), 0.0, float("inf")
    for i in range(1, 7):
        loss = F.cross_entropy(model(x), y)
        smooth = 0.9 * smooth + 0.1 * loss.item()
        corrected = smooth / (1 - 0.9**i)
        if torch.isnan(loss) or corrected > 4 * best:
            break
        best = min(best, corrected)
        applied(optimizer, loss)
        optimizer.param_groups[0]["lr"] *= 3
        yield corrected, math.log10(optimizer.param_groups[0]["lr"])
    model.load_state_dict(first)
    yield F.cross_entropy(model(x), y).item()


def fitted_by_closures(lay_out: LayOut) -> Iterator[Any]:
    """A regression by LBFGS whose closure has the plain targets and an L1 penalty; residuals, their deviation."""
    model, x = dense(2, 8, 1), torch.rand(12, 2)
    target = torch.sin(3 * x[:, :1]) + x[:, 1:] ** 2
    lay_out(model, x)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target) + 1e-4 * sum(p.abs().sum() for p in model.parameters())
        loss.backward()
        return loss

    for _ in range(3):
        yield optimizer.step(closure).item()
    with torch.no_grad():
        residuals = target - model(x)
        yield residuals.std().item(), (1 - residuals.square().sum() / (target - target.mean()).square().sum()).item()


def physics(lay_out: LayOut) -> Iterator[Any]:
    """An equation as a loss: derivatives by plain points that ask for gradients, and plain values at the border."""
    model, points = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)), torch.linspace(0, 1, 8)[:, None]
    lay_out(model, points)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        t = points.clone().requires_grad_(True)
        u = model(t)
        (slope,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
        (bend,) = torch.autograd.grad(slope, t, torch.ones_like(slope), create_graph=True)
        inner = (bend + 4 * u - torch.sin(t)).pow(2).mean()
        border = (model(torch.zeros(1, 1)) - 1.0).pow(2).squeeze()
        yield applied(optimizer, inner + border), border.item()


def in_arrays(lay_out: LayOut) -> Iterator[Any]:
    """Predictions that go to numpy, batch by batch, and are judged there."""
    model, (x, y) = dense(6, 16, 3), classified(10, classes=3)
    lay_out(model, x[:4])
    with torch.no_grad():
        found = [model(part).softmax(-1).cpu().numpy() for part in x.split(4)]
    shares = np.concatenate(found)
    yield float((shares.argmax(-1) == y.numpy()).mean()), float(shares.std()), [float(row.max()) for row in shares]
    yield np.asarray(model(x).detach()).shape[0], float(np.array(model(x).argmax(1).tolist()).sum())


LOSSES: tuple[Callable[[LayOut], Iterator[Any]], ...] = (
    images_of_classes,
    forged_images,
    rebuilt_with_noise,
    images_and_texts,
    values_of_actions,
    carried_words,
    two_heads,
    aligned_speech,
    segmented,
    two_views,
    triplets,
    mixed_rows,
    penalised_critic,
    clipped_policy,
    predicted_noise,
    letters,
    enlarged,
    painted,
    taught_by_teacher,
    preferred,
    weighted_rows,
    few_shots,
    some_words,
    evaluated,
    searched_rate,
    fitted_by_closures,
    physics,
)
