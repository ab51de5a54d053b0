"""Programs that call more of a model than itself: its methods, its submodules, its layers one by one.

Each is one program on one device and on a mesh. It yields the numbers that its writer would log.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.taught_losses import applied, dense
from helpers.user_loops import LayOut, classified


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = dense(6, 16, 3), dense(3, 16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).tanh()

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)


def both_halves(lay_out: LayOut) -> Iterator[Any]:
    """An autoencoder whose halves are called by themselves, as methods and as modules, with plain codes as well."""
    model, x = Autoencoder(), torch.randn(8, 6)
    lay_out(model, x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        codes = model.encode(x)
        loss = F.mse_loss(model.decoder(codes), x) + 1e-2 * codes.abs().mean()
        yield applied(optimizer, loss)
        yield applied(optimizer, F.mse_loss(model.decode(model.encoder(x)), x))
    with torch.no_grad():
        between = torch.linspace(0, 1, 5)[:, None] * torch.randn(3)
        yield model.decoder(between).mean().item(), model.decode(torch.zeros(1, 3)).sum().item()
        yield model.encode(x).std(0).tolist()


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.both, self.leave = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(3, 6)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.both(self.enter(x).relu()).chunk(2, -1)

    def decode(self, z: Tensor) -> Tensor:
        return self.leave(z).sigmoid()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, log_variance = self.encode(x)
        return self.decode(mean), mean, log_variance

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encode(x)
        rebuilt = self.decode(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        return F.binary_cross_entropy(rebuilt, x, reduction="none").sum(-1).mean() + divergence

    @torch.no_grad()
    def sample(self, n: int) -> Tensor:
        return self.decode(torch.randn(n, 3))


def a_method_for_the_loss(lay_out: LayOut) -> Iterator[Any]:
    """`model.loss(x, noise)` and `model.sample(n)`; `forward` is for the example alone."""
    model, x = Variational(), torch.rand(8, 6)
    lay_out(model, x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        yield applied(optimizer, model.loss(x, torch.randn(8, 3)))
    yield model.sample(4).mean().item()


def layers_one_by_one(lay_out: LayOut) -> Iterator[Any]:
    """`for layer in model`, `model[:2](x)`, and the last layer by itself on features that were kept."""
    model, (x, y) = dense(6, 16, 16, 4), classified(8, classes=4)
    lay_out(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        hidden, norms = x, []
        for layer in model:
            hidden = layer(hidden)
            norms.append(hidden.detach().norm().item())
        yield applied(optimizer, F.cross_entropy(hidden, y)), norms
    with torch.no_grad():
        features = model[:2](x)
        kept = torch.cat([model[:-1](part) for part in x.split(4)])
    head = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    for _ in range(2):
        yield applied(head, F.cross_entropy(model[-1](kept), y)), features.mean().item()


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def features_then_classes(lay_out: LayOut) -> Iterator[Any]:
    """`model.features(x)`, then `model.classifier`; a map of what the class depends on, by gradients of features."""
    model, x, y = Pictures(), torch.randn(4, 3, 6, 6), torch.randint(4, (4,))
    lay_out(model, x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        features = model.features(x)
        loss = F.cross_entropy(model.classifier(torch.flatten(features, 1)), y)
        yield applied(optimizer, loss), features.detach().mean((0, 2, 3)).tolist()
    features = model.features(x)
    (slopes,) = torch.autograd.grad(model.classifier(features)[torch.arange(4), y].sum(), features)
    yield (slopes.mean((2, 3), keepdim=True) * features).sum(1).relu().mean().item()


def one_row(lay_out: LayOut) -> Iterator[Any]:
    """Inputs without a batch dim: one row, one image, one sentence; and one row in a batch of its own."""
    model, (x, y) = dense(6, 16, 4), classified(8, classes=4)
    lay_out(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        yield applied(optimizer, F.cross_entropy(model(x[i]), y[i])), model(x[i]).argmax().item()
        yield applied(optimizer, F.cross_entropy(model(x[i].unsqueeze(0)), y[i : i + 1]))
        with torch.no_grad():
            yield model(x[i])[y[i]].item(), model[0](x[i]).norm().item()
    picture = Pictures().features
    images = torch.randn(4, 3, 6, 6)
    lay_out(picture, images)
    yield picture(images[0]).sum().item(), picture(images).sum().item()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(self.embed(ids))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(9, 8), nn.GRU(16, 8, batch_first=True), nn.Linear(8, 9)
        self.query = nn.Linear(8, 8)

    def forward(self, word: Tensor, state: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.bmm(self.query(state.permute(1, 0, 2)), said.transpose(1, 2)).softmax(-1)
        out, state = self.gru(torch.cat((self.embed(word), torch.bmm(shares, said)), 2), state)
        return self.out(out), state


def translated(lay_out: LayOut) -> Iterator[Any]:
    """An encoder and a decoder with attention, each laid out; teacher forcing by chance; greedy words until the end."""
    encoder, decoder = Encoder(), Decoder()
    source, target = torch.randint(9, (4, 5)), torch.randint(9, (4, 4))
    lay_out(encoder, source)
    lay_out(decoder, target[:, :1], torch.zeros(1, 4, 8), torch.zeros(4, 5, 8))
    encodes, decodes = (torch.optim.Adam(each.parameters(), 1e-2) for each in (encoder, decoder))
    chance = random.Random(0)
    for _ in range(3):
        said, state = encoder(source)
        word, outs, forced = torch.zeros(4, 1, dtype=torch.long), [], chance.random() < 0.5
        for t in range(target.shape[1]):
            out, state = decoder(word, state, said)
            outs.append(out)
            word = target[:, t].unsqueeze(1) if forced else out.topk(1)[1].squeeze(-1).detach()
        loss = nn.NLLLoss()(F.log_softmax(torch.cat(outs, 1), -1).view(-1, 9), target.view(-1))
        encodes.zero_grad()
        decodes.zero_grad()
        loss.backward()
        encodes.step()
        decodes.step()
        yield loss.item()
    with torch.no_grad():
        said, state = encoder(source[:1])
        word, words = torch.zeros(1, 1, dtype=torch.long), []
        for _ in range(4):
            out, state = decoder(word, state, said)
            word = out.argmax(-1)
            words.append(word.item())
            if words[-1] == 8:
                break
        yield words


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.book = dense(6, 16, 4), dense(4, 16, 6), nn.Embedding(7, 4)

    def quantise(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        far = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.book.weight.t() + self.book.weight.pow(2).sum(1)
        codes = far.argmin(1)
        nearest = self.book(codes)
        loss = F.mse_loss(nearest, z.detach()) + 0.25 * F.mse_loss(z, nearest.detach())
        return z + (nearest - z).detach(), loss, codes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z, loss, _ = self.quantise(self.encoder(x))
        return self.decoder(z), loss


def codebook(lay_out: LayOut) -> Iterator[Any]:
    """Vector quantisation by hand around the encoder, the book looked up by plain codes, perplexity of its use."""
    model, x = Codes(), torch.randn(8, 6)
    lay_out(model, x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        z, commit, codes = model.quantise(model.encoder(x))
        yield applied(optimizer, F.mse_loss(model.decoder(z), x) / x.var() + commit)
        share = torch.zeros(8, 7).scatter_(1, codes[:, None], 1).mean(0)
        yield torch.exp(-torch.sum(share * torch.log(share + 1e-10))).item()
    with torch.no_grad():
        yield model.decoder(model.book(torch.tensor([0, 3, 6]))).mean().item()


class Flow(nn.Module):
    """Affine couplings, whose inverse is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(dense(2, 16, 4) for _ in "ab")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logdet = torch.zeros(len(x))
        for net in self.nets:
            left, right = x.chunk(2, 1)
            scale, shift = net(left).chunk(2, 1)
            x = torch.cat([right * scale.tanh().exp() + shift, left], 1)
            logdet = logdet + scale.tanh().sum(1)
        return x, logdet

    def inverse(self, z: Tensor) -> Tensor:
        for net in reversed(self.nets):
            moved, left = z.chunk(2, 1)
            scale, shift = net(left).chunk(2, 1)
            z = torch.cat([left, (moved - shift) * (-scale.tanh()).exp()], 1)
        return z

    def log_prob(self, x: Tensor) -> Tensor:
        z, logdet = self(x)
        return torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1) + logdet


def flowing(lay_out: LayOut) -> Iterator[Any]:
    """A normalising flow: `model.log_prob(x)`, which calls the model, and `model.inverse(z)` of plain noise."""
    model, x = Flow(), torch.randn(8, 4)
    lay_out(model, x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        yield applied(optimizer, -model.log_prob(x).mean())
    with torch.no_grad():
        yield model.inverse(torch.randn(8, 4)).mean().item()
        yield torch.allclose(model.inverse(model(x)[0]), x)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = dense(4, 16, 1), dense(4, 16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)

    def value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def act(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy = torch.distributions.Categorical(logits=self.actor(x))
        return policy.log_prob(action), policy.entropy(), self.critic(x)


def acting(lay_out: LayOut) -> Iterator[Any]:
    """An agent by its methods: values of one state and of many, policies of both, rewards that are discounted."""
    agent, states, rewards = Agent(), torch.randn(6, 4), torch.randn(6)
    lay_out(agent, states)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    for _ in range(3):
        saved, returns, total = [], [], torch.zeros(())
        for state in states:
            log_prob, _, value = agent.act(state, torch.tensor(1))
            saved.append((log_prob, value))
        for reward in rewards.flip(0):
            total = reward + 0.9 * total
            returns.insert(0, total)
        wanted = torch.stack(returns)
        wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-8)
        policy = [-log_prob * (goal - value.item()) for (log_prob, value), goal in zip(saved, wanted, strict=True)]
        values = [F.smooth_l1_loss(value, goal[None]) for (_, value), goal in zip(saved, wanted, strict=True)]
        yield applied(optimizer, torch.stack(policy).sum() + torch.stack(values).sum())
        log_probs, entropy, value = agent.act(states, torch.tensor([0, 1, 2, 0, 1, 2]))
        yield applied(optimizer, (value.squeeze(1) - wanted).pow(2).mean() - (log_probs * wanted).mean())
        yield entropy.mean().item(), agent.value(states[:1]).item()


class Stepped(nn.Module):
    """A module that has its own steps of training and validation, as frameworks teach."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = dense(6, 16, 4), nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return self.criterion(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        out = self.net(x)
        return {"loss": self.criterion(out, y), "right": (out.argmax(1) == y).sum()}


def steps_of_its_own(lay_out: LayOut) -> Iterator[Any]:
    """`model.training_step(batch)` and `model.validation_step(batch)`, whose results are averaged."""
    model, train, valid = Stepped(), classified(8, classes=4), classified(6, classes=4)
    lay_out(model, train[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        yield applied(optimizer, model.training_step(train))
        with torch.no_grad():
            outs = [model.validation_step((x, y)) for x, y in zip(valid[0].split(4), valid[1].split(4), strict=True)]
        yield torch.stack([out["loss"] for out in outs]).mean().item(), sum(out["right"].item() for out in outs) / 6


METHODS: tuple[Callable[[LayOut], Iterator[Any]], ...] = (
    both_halves,
    a_method_for_the_loss,
    layers_one_by_one,
    features_then_classes,
    one_row,
    translated,
    codebook,
    flowing,
    acting,
    steps_of_its_own,
)
