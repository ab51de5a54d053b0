"""Models as people write them, each trained by a loop that knows nothing of layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from helpers.user_loops import LayOut


def trained(model: nn.Module, loss_of: Callable[[], Any], steps: int = 3) -> Iterator[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        yield loss


class Language(nn.Module):
    """A small language model whose head has the weight of its embedding, with a cache of keys and values by hand."""

    def __init__(self, words: int = 12, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.heads = heads

    def forward(self, ids: Tensor, cache: dict[str, Tensor] | None = None) -> Any:
        before = cache["k"].shape[2] if cache else 0
        x = self.embed(ids) + self.places(torch.arange(before, before + ids.shape[1]))
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache.update(k=k, v=v)
        scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5
        later = torch.ones(ids.shape[1], k.shape[2], dtype=torch.bool).triu(before + 1)
        y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm(x))


def language(lay_out: LayOut) -> Iterator[Any]:
    """Next words with padding that is ignored, perplexity, then greedy words with a cache, and without."""
    model = Language()
    ids = torch.randint(12, (4, 8))
    targets = ids[:, 1:].clone()
    targets[0, 4:] = -100
    lay_out(model, ids[:, :-1])
    yield from trained(model, lambda: F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), targets, ignore_index=-100))
    with torch.no_grad():
        logits = model(ids[:, :-1])
        yield F.cross_entropy(logits.flatten(0, 1), targets.flatten()).exp()
        cache: dict[str, Tensor] = {}
        word, said = ids[:, :3], ids[:, :3]
        for _ in range(4):
            word = model(word, cache)[:, -1].argmax(-1, keepdim=True)
            said = torch.cat([said, word], 1)
            yield said.sum()
        again = ids[:, :3]
        for _ in range(4):
            again = torch.cat([again, model(again)[:, -1:].argmax(-1)], 1)
        yield (again == said).all()


def beams(lay_out: LayOut) -> Iterator[Any]:
    """A beam search by hand: `log_softmax`, `topk` over beams and words, gathered histories."""
    model, beam, words = Language(), 3, 12
    ids = torch.randint(words, (2, 4))
    lay_out(model, ids)
    yield from trained(model, lambda: F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    with torch.no_grad():
        first, words_of_beams = model(ids)[:, -1].log_softmax(-1).topk(beam, -1)
        histories = torch.cat([ids.repeat_interleave(beam, 0), words_of_beams.reshape(-1, 1)], 1)
        scores = first
        for _ in range(3):
            step = model(histories)[:, -1].log_softmax(-1).view(2, beam, words)
            scores, flat = (scores[..., None] + step).flatten(1).topk(beam, -1)
            parent, word = flat // words, flat % words
            kept = histories.view(2, beam, -1).gather(1, parent[..., None].expand(-1, -1, histories.shape[1]))
            histories = torch.cat([kept, word[..., None]], -1).flatten(0, 1)
            yield scores.sum(), histories.sum()
        yield histories.view(2, beam, -1)[:, 0].tolist() == histories[::beam].tolist()


class Recurrent(nn.Module):
    def __init__(self, kind: type[Any], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, padding_idx=0)
        self.rnn = kind(6, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        last = out.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, out.shape[2]))[:, 0]
        return self.head(last)


def recurrent(lay_out: LayOut) -> Iterator[Any]:
    """LSTM, GRU and RNN over packed sequences of several lengths."""
    lengths = torch.tensor([5, 2, 4, 3])
    ids = pad_sequence([torch.randint(1, 10, (int(n),)) for n in lengths], batch_first=True)
    y = torch.randint(4, (4,))
    for kind, options in ((nn.LSTM, {"num_layers": 2, "bidirectional": True}), (nn.GRU, {}), (nn.RNN, {})):
        model = Recurrent(kind, **options)
        lay_out(model, ids, lengths)
        yield from trained(model, lambda model=model: F.cross_entropy(model(ids, lengths), y))  # type: ignore[misc]


class Unrolled(nn.Module):
    """Cells, unrolled by hand, with states that are carried over batches."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTMCell(4, 8), nn.GRUCell(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        outs = []
        state = state or tuple(x.new_zeros(x.shape[0], 8) for _ in range(3))
        for step in x.unbind(1):
            h, c = self.lstm(step, state[:2])
            state = h, c, self.gru(h, state[2])
            outs.append(self.head(state[2]))
        return torch.stack(outs, 1), state


def unrolled(lay_out: LayOut) -> Iterator[Any]:
    model, x = Unrolled(), torch.randn(4, 5, 4)
    lay_out(model, x)
    state: Any = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        out, state = model(x, state and tuple(t.detach() for t in state))
        loss = F.smooth_l1_loss(out.cumsum(1), torch.ones(4, 5, 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, state[0].norm()


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=2), norm(8)
        self.deep, self.point = nn.Conv2d(8, 8, 3, stride=2, groups=8, padding=1), nn.Conv2d(8, 12, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.max_pool2d(x + F.relu(self.norm2(self.conv(x))), 2)
        return self.head(F.adaptive_avg_pool2d(F.silu(self.point(self.deep(x))), 1).flatten(1))


def convolutions(lay_out: LayOut) -> Iterator[Any]:
    """Convolutions with batch norm, whose running statistics are evaluated, and group norm, in `channels_last`."""
    images, y = torch.randn(6, 3, 8, 8), torch.randint(5, (6,))
    for norm in (nn.BatchNorm2d, lambda channels: nn.GroupNorm(2, channels)):
        model: Any = Residual(norm)
        model = model.to(memory_format=torch.channels_last)
        lay_out(model, images)
        yield from trained(model, lambda model=model: F.cross_entropy(model(images), y))  # type: ignore[misc]
        model.eval()
        with torch.no_grad():
            yield (model(images).softmax(1) * F.one_hot(y, 5)).sum()


class Denoiser(nn.Module):
    """A U-Net of two levels with embeddings of the time step, attention in the middle, and skipped connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.enter, self.down = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm, self.attention = nn.GroupNorm(4, 2 * width), nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.merge, self.leave = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        waves = torch.exp(torch.arange(4) * -1.0)
        angles = steps[:, None] * waves
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        first = F.silu(self.enter(x) + time[:, :, None, None])
        low = self.norm(self.down(first))
        tokens = low.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        low = tokens.transpose(1, 2).reshape(low.shape)
        high = F.interpolate(low, scale_factor=2.0, mode="nearest")[:, : first.shape[1]] + self.up(low)
        return self.leave(F.silu(self.merge(torch.cat([first, high], 1))))


def diffusion(lay_out: LayOut) -> Iterator[Any]:
    """Noise is predicted at random steps, then taken away step by step."""
    model, images, noise = Denoiser(), torch.randn(4, 2, 8, 8), torch.randn(4, 2, 8, 8)
    steps, kept = torch.randint(10, (4,)), torch.linspace(0.99, 0.1, 10).cumprod(0)
    lay_out(model, images, steps)
    share = kept[steps][:, None, None, None]
    noisy = share.sqrt() * images + (1 - share).sqrt() * noise
    yield from trained(model, lambda: F.mse_loss(model(noisy, steps), noise))
    with torch.no_grad():
        x = noise
        for step in (9, 5, 1):
            guess = model(x, torch.full((4,), step))
            x = ((x - (1 - kept[step]).sqrt() * guess) / kept[step].sqrt()).clamp(-3, 3)
        yield x.square().mean()


class Reparametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(6, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.third = parametrizations.orthogonal(nn.Linear(8, 8))
        self.fourth = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x).tanh()).tanh()).tanh())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def reparametrized(lay_out: LayOut) -> Iterator[Any]:
    """Weights that are computed: by norms, orthogonal, symmetric, pruned."""
    model, (x, y) = Reparametrized(), (torch.randn(8, 6), torch.randint(5, (8,)))
    lay_out(model, x)
    yield from trained(model, lambda: F.cross_entropy(model(x), y))
    plain: Any = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5))
    parametrize.register_parametrization(plain[0], "weight", Symmetric())
    prune.l1_unstructured(plain[2], "weight", amount=0.5)
    lay_out(plain, x)
    yield from trained(plain, lambda: F.cross_entropy(plain(x), y))
    yield plain[0].weight.T.sub(plain[0].weight).abs().max()
    yield nn.utils.parameters_to_vector(plain.parameters()).norm()


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapted(lay_out: LayOut) -> Iterator[Any]:
    """Adapters of low rank by hand, put into a model that is frozen, and merged."""
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    for i in (0, 2, 4):
        model[i] = LowRank(model[i])
    x, y = torch.randn(8, 6), torch.randint(5, (8,))
    lay_out(model, x)
    adapters = nn.ModuleList(model[i] for i in (0, 2, 4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    with torch.no_grad():
        for adapter in adapters:
            adapter.base.weight += adapter.up @ adapter.down
            adapter.up.zero_()
        yield F.cross_entropy(model(x), y)


MODELS: tuple[Callable[[LayOut], Iterator[Any]], ...] = (
    language,
    beams,
    recurrent,
    unrolled,
    convolutions,
    diffusion,
    reparametrized,
    adapted,
)
