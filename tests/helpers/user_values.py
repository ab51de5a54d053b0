"""Models whose shapes depend on values: masks, `nonzero`, `unique`, experts that take the tokens routed to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.user_loops import LayOut
from helpers.user_models import trained


class Masked(nn.Module):
    """Predicts the words that were masked, and those alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.mix(self.embed(ids)).relu() + self.embed(ids).mean(1, keepdim=True)
        masked = labels != -100
        logits = self.head(x[masked])
        return F.cross_entropy(logits, labels[masked]), logits


def masked_words(lay_out: LayOut) -> Iterator[Any]:
    model, ids = Masked(), torch.randint(12, (4, 6))
    labels = torch.where(torch.rand(4, 6) < 0.4, ids, -100)
    lay_out(model, ids, labels)
    yield from trained(model, lambda: model(ids, labels)[0])
    other = torch.where(torch.rand(4, 6) < 0.2, ids, -100)
    yield model(ids, other)[0]
    with torch.no_grad():
        logits = model(ids, labels)[1]
        yield len(logits), (logits.argmax(-1) == labels[labels != -100]).sum()


class Experts(nn.Module):
    """A mixture of experts by hand: each takes the tokens that `nonzero` finds for it, and adds them back."""

    def __init__(self, experts: int = 4, width: int = 8, each: int = 2) -> None:
        super().__init__()
        self.router, self.each = nn.Linear(width, experts, bias=False), each
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        shares = self.router(tokens).softmax(-1)
        weights, chosen = shares.topk(self.each, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            if rows.numel():
                out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        used = F.one_hot(chosen, len(self.experts)).sum(1).to(shares.dtype).mean(0)
        return out.view_as(x), (used * shares.mean(0)).sum() * len(self.experts)


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.experts, self.head = (
            nn.Embedding(12, 8),
            nn.LayerNorm(8),
            Experts(),
            nn.Linear(8, 12),
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        y, balance = self.experts(self.norm(x))
        return self.head(x + y), balance


def routed(lay_out: LayOut) -> Iterator[Any]:
    model, ids = WithExperts(), torch.randint(12, (4, 6))
    lay_out(model, ids)

    def loss_of() -> Any:
        logits, balance = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance

    yield from trained(model, loss_of)


class Graph(nn.Module):
    """Messages along edges are added, averaged by degree, and pooled over the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message, self.leave = nn.Linear(5, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        x = self.enter(nodes).relu()
        source, target = edges
        sent = self.message(torch.cat([x[source], x[target]], -1)).relu()
        summed = torch.zeros_like(x).scatter_add_(0, target[:, None].expand_as(sent), sent)
        degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target)))
        x = x + summed / degree.clamp(min=1)[:, None]
        kinds, counts = torch.unique(graph, return_counts=True)
        pooled = x.new_zeros(len(kinds), x.shape[1]).index_add(0, graph, x) / counts[:, None]
        top = x.new_zeros(len(kinds), x.shape[1]).scatter_reduce(0, graph[:, None].expand_as(x), x, "amax")
        return self.leave(pooled + top)


def graphs(lay_out: LayOut) -> Iterator[Any]:
    model, nodes, edges = Graph(), torch.randn(10, 5), torch.randint(10, (2, 24))
    graph, y = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2]), torch.tensor([0, 2, 1])
    lay_out(model, nodes, edges, graph)
    yield from trained(model, lambda: F.cross_entropy(model(nodes, edges, graph), y))


class Detector(nn.Module):
    """Scores, a threshold, the boxes that are kept, and those that no better one covers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score, self.box = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).relu()
        return self.score(x).squeeze(-1), self.box(x)


def detected(lay_out: LayOut) -> Iterator[Any]:
    model, x = Detector(), torch.randn(2, 12, 6)
    wanted, boxes = (torch.rand(2, 12) < 0.4).double(), torch.rand(2, 12, 4)
    lay_out(model, x)

    def loss_of() -> Any:
        scores, found = model(x)
        positive = wanted.bool()
        each = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        hardest = each[~positive].sort(descending=True).values[:5]
        covered = torch.masked_select(found, positive[..., None]).view(-1, 4)
        return each[positive].mean() + hardest.mean() + F.l1_loss(covered, boxes[positive])

    yield from trained(model, loss_of)
    with torch.no_grad():
        scores, found = model(x)
        kept = (scores.sigmoid() > 0.4).nonzero()
        yield len(kept), kept.sum()
        for rows, values in zip(found, scores, strict=True):
            order = values.argsort(descending=True)
            rows = rows[order]
            close = torch.cdist(rows, rows) < 0.3
            first = ~(close.tril(-1).any(1))
            yield first.sum(), rows[first].sum()


class Dropped(nn.Module):
    """Tokens that score low leave after each layer, as in models that save work; the rest is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.score, self.head = nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
            scores = self.score(x).squeeze(-1)
            kept = scores.topk(x.shape[1] // 2 + 1, 1).indices.sort(1).values
            x = x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1])) * scores.gather(1, kept).sigmoid()[..., None]
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        return self.head((x * torch.where(positions % 2 == 0, 1.0, 0.5)[..., None]).mean(1))


def dropped(lay_out: LayOut) -> Iterator[Any]:
    model, x, y = Dropped(), torch.randn(6, 7, 8), torch.randint(4, (6,))
    lay_out(model, x)
    yield from trained(model, lambda: F.cross_entropy(model(x), y))


class Ragged(nn.Module):
    """Sequences of several lengths in one row, with positions and segments by `cumsum` and `searchsorted`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.q, self.v = (
            nn.Embedding(10, 8),
            nn.Embedding(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )
        self.head = nn.Linear(8, 10)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        ends = lengths.cumsum(0)
        at = torch.arange(len(ids))
        segment = torch.searchsorted(ends, at, right=True)
        position = at - (ends - lengths)[segment]
        x = self.embed(ids) + self.places(position)
        allowed = (segment[:, None] == segment) & (position[:, None] >= position)
        scores = torch.einsum("qd,kd->qk", self.q(x), x).masked_fill(~allowed, -1e9)
        x = x + torch.einsum("qk,kd->qd", scores.softmax(-1), self.v(x))
        means = torch.stack([part.mean(0) for part in x.split(lengths.tolist())])
        return self.head(x + means[segment])


def ragged(lay_out: LayOut) -> Iterator[Any]:
    model, lengths = Ragged(), torch.tensor([3, 5, 1, 4])
    ids = torch.randint(10, (int(lengths.sum()),))
    lay_out(model, ids, lengths)
    yield from trained(model, lambda: F.cross_entropy(model(ids, lengths), ids.roll(-1)))


def collected(lay_out: LayOut) -> Iterator[Any]:
    """Losses that are kept in a list, and averaged by torch and by numpy."""
    model, x, y = nn.Linear(6, 5), torch.randn(8, 6), torch.randint(5, (8,))
    lay_out(model, x)
    losses = []
    for loss in trained(model, lambda: F.cross_entropy(model(x), y)):
        losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        yield loss
    shares = [model(x).softmax(-1)[0, 0].detach(), model(x).mean().detach()]
    yield torch.tensor([*losses, *shares]).mean(), torch.as_tensor(shares).tolist()
    yield float(np.mean(shares)), np.asarray(shares).sum()
    yield torch.tensor([[share > 0, share < 0] for share in shares]).tolist()
    yield model(x).new_tensor([shares, (1.0, 2.0)]).tolist(), x.new_tensor(data=shares, dtype=torch.float32).sum()
    yield shares[0].new_tensor(data=shares, dtype=torch.float32).sum()


VALUES: tuple[Callable[[LayOut], Iterator[Any]], ...] = (
    masked_words,
    routed,
    graphs,
    detected,
    dropped,
    ragged,
    collected,
)
